"""NumPy archives, read in pieces: an archive's arrays need never be in memory whole."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy_format

from rl_training.data.formats.columns import BOUNDS, COLUMNS, REQUIRED, Column, ColumnRecording
from rl_training.errors import DataError

MAX_HEADER_BYTES = 10_000
MAX_BOUND_BYTES = 1_000_000
HEADER_READERS = {
    (1, 0): npy_format.read_array_header_1_0,
    (2, 0): npy_format.read_array_header_2_0,
    # Differs from 2.0 in the encoding of field names alone, and arrays of numbers have no fields.
    (3, 0): npy_format.read_array_header_2_0,
}


def open_npz(path: str | Path, *, max_episode_steps: int | None = None) -> ColumnRecording:
    """The steps in a `.npz` file with D4RL's arrays; nothing in it is ever unpickled."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with _npz_errors(path):
        archive = zipfile.ZipFile(path)
        entries = {name.removesuffix(".npy"): name for name in archive.namelist()}
        missing = [key for key in REQUIRED if key not in entries]
        if missing:
            there = ", ".join(sorted(entries)[:20]) or "nothing"
            raise DataError(f"{path}: {' and '.join(missing)} missing; it holds {there}")
        columns: dict[str, Column] = {
            key: EntryColumn(archive, entries[key], f"{path}: {key}")
            for key in COLUMNS
            if key in entries
        }
        bounds = None
        if all(key in entries for key in BOUNDS):
            low, high = (_read_bound(archive, entries[key], f"{path}: {key}") for key in BOUNDS)
            bounds = (low, high)
        return ColumnRecording(
            columns, str(path), "npz", max_episode_steps=max_episode_steps, action_bounds=bounds
        )


class EntryColumn:
    """An array of the archive, decompressed as it is read."""

    def __init__(self, archive: zipfile.ZipFile, entry: str, name: str) -> None:
        self._archive, self._entry, self._name = archive, entry, name
        self._file: IO[bytes] | None = None
        self._position = 0
        self._last_row = np.empty(0)
        with _npz_errors(name), archive.open(entry) as file:
            self.shape, self._by_columns, self.dtype, self._start = _read_header(file, name)
        stored = archive.getinfo(entry).file_size - self._start
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        if stored != size:
            raise DataError(f"{name} has {stored} bytes for shape {self.shape}: it is damaged")
        self._row_shape = self.shape[1:]
        self._row_bytes = size // self.shape[0] if self.shape and self.shape[0] else 0
        self._whole: np.ndarray | None = None

    def read(self, first: int, last: int) -> np.ndarray:
        with _npz_errors(self._name):
            if self._by_columns:  # as it lies in the file, a step's numbers are far apart
                return self._read_whole()[first:last]
            if first == 0 or self._file is None:
                self._rewind()
            if first == self._position - 1:
                before = self._last_row
                return np.concatenate([before, self._take(last - self._position)])
            assert first == self._position
            return self._take(last - first)

    def _rewind(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._open_data()
        self._position = 0

    def _open_data(self) -> IO[bytes]:
        """The entry, just after its header, which is read: a seek may turn off the checksum."""
        file = self._archive.open(self._entry)
        file.read(self._start)
        return file

    def _take(self, rows: int) -> np.ndarray:
        assert self._file is not None
        data = self._file.read(rows * self._row_bytes)
        if len(data) != rows * self._row_bytes:
            raise DataError(f"{self._name} ends after row {self._position}: it is damaged")
        taken = np.frombuffer(data, self.dtype).reshape(rows, *self._row_shape)
        self._position += rows
        if rows:
            self._last_row = taken[-1:]
        return taken

    def _read_whole(self) -> np.ndarray:
        if self._whole is None:
            with self._open_data() as file:
                data = np.frombuffer(file.read(), self.dtype)
            self._whole = data.reshape(self.shape[::-1]).T
        return self._whole


def _read_header(
    file: IO[bytes], name: str
) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
    """Shape, whether columns come first, type, and where the data starts."""
    # NumPy reads as many bytes as the header says it has, up to 4 GiB: give it no more than these.
    head = io.BytesIO(file.read(MAX_HEADER_BYTES))
    try:
        version = npy_format.read_magic(head)
        if version not in HEADER_READERS:
            raise ValueError(f"unknown version {version}")
        shape, by_columns, dtype = HEADER_READERS[version](head, max_header_size=MAX_HEADER_BYTES)
    except Exception as error:  # NumPy does not say all that a damaged header can raise
        raise DataError(
            f"{name} is not a NumPy array or has a header that cannot be read ({error!s:.100})"
        ) from None
    if dtype.kind not in "fiub":
        kind = "Python objects" if dtype.hasobject else f"{dtype!s:.40}"
        raise DataError(f"{name} holds {kind}, not numbers")
    if any(length < 0 for length in shape):
        raise DataError(f"{name} has shape {shape!r:.80}: it is damaged")
    return shape, by_columns and len(shape) > 1, dtype, head.tell()


def _read_bound(archive: zipfile.ZipFile, entry: str, name: str) -> np.ndarray:
    if archive.getinfo(entry).file_size > MAX_BOUND_BYTES:
        raise DataError(f"{name} is too large for an action's bounds")
    column = EntryColumn(archive, entry, name)
    if len(column.shape) != 1:
        raise DataError(f"{name} has shape {column.shape}; it must be (action components,)")
    return column.read(0, column.shape[0])


@contextmanager
def _npz_errors(name: str | Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, EOFError, struct.error) as error:
        raise DataError(f"{name}: cannot be read as a NumPy archive ({error})") from None
    except (NotImplementedError, RuntimeError) as error:  # a compression or encryption unknown here
        raise DataError(f"{name}: cannot be read as a NumPy archive ({error})") from None
    except Exception as error:
        if type(error).__module__ in ("zlib", "lzma"):
            raise DataError(f"{name}: is damaged ({error})") from None
        raise
