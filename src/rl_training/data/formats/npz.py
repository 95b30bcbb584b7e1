"""Read NumPy archives in chunks, without loading complete arrays into memory."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy_format

from rl_training.data.formats.columns import BOUNDS, CHOICES, ColumnRecording
from rl_training.data.formats.stored import MAX_BYTES, PROVENANCE, provenance_of
from rl_training.data.leaves.description import (
    ALL_LEAVES,
    DESCRIPTION,
    MAX_DESCRIPTION_BYTES,
    LeafChoice,
    read_description,
)
from rl_training.errors import DataError
from rl_training.observations import ObservationSpec
from rl_training.types import Json
from rl_training.validation import user_path

MAX_HEADER_BYTES = 10_000
MAX_BOUND_BYTES = 1_000_000
HEADER_READERS = {
    (1, 0): npy_format.read_array_header_1_0,
    (2, 0): npy_format.read_array_header_2_0,
    # Differs from 2.0 only in the encoding of field names, which numeric arrays do not have.
    (3, 0): npy_format.read_array_header_2_0,
}


def open_npz(
    path: str | Path, *, max_episode_steps: int | None = None, leaves: LeafChoice = ALL_LEAVES
) -> ColumnRecording:
    """Open a `.npz` file with D4RL's arrays as a recording; nothing is unpickled."""
    path = user_path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with _npz_errors(path):
        archive = zipfile.ZipFile(path)
        entries = {name.removesuffix(".npy"): name for name in archive.namelist()}
        arrays = {
            key: partial(EntryColumn, archive, entry, f"{path}: {key}")
            for key, entry in entries.items()
        }
        bounds = None
        if all(key in entries for key in BOUNDS):
            low, high = (_read_bound(archive, entries[key], f"{path}: {key}") for key in BOUNDS)
            bounds = (low, high)
        return ColumnRecording(
            arrays,
            str(path),
            "npz",
            leaves=leaves,
            described=_read_leaves(archive, entries.get(DESCRIPTION), str(path)),
            max_episode_steps=max_episode_steps,
            action_bounds=bounds,
            choices=_read_choices(archive, entries.get(CHOICES), str(path)),
            provenance=_read_provenance(archive, entries.get(PROVENANCE)),
        )


class EntryColumn:
    """An array of the archive, decompressed while it is read."""

    def __init__(self, archive: zipfile.ZipFile, entry: str, name: str) -> None:
        self._archive, self._entry, self._name = archive, entry, name
        self._file: IO[bytes] | None = None
        self._position = 0
        self._last_row = np.empty(0)
        with _npz_errors(name), archive.open(entry) as file:
            self.shape, self._column_major, self.dtype, self._start = _read_header(file, name)
        stored = archive.getinfo(entry).file_size - self._start
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        if stored != size:
            raise DataError(f"{name} is damaged: it has {stored} bytes for shape {self.shape}")
        self._row_shape = self.shape[1:]
        self._row_bytes = size // self.shape[0] if self.shape and self.shape[0] else 0
        self._all_rows: np.ndarray | None = None

    def read(self, first: int, last: int) -> np.ndarray:
        with _npz_errors(self._name):
            if self._column_major:  # the values of a step are not contiguous in the file
                return self.read_all()[first:last]
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
        """Open the entry and read past its header; seeking could disable the checksum."""
        file = self._archive.open(self._entry)
        file.read(self._start)
        return file

    def _take(self, rows: int) -> np.ndarray:
        assert self._file is not None
        data = self._file.read(rows * self._row_bytes)
        if len(data) != rows * self._row_bytes:
            raise DataError(f"{self._name} is damaged: it ends after row {self._position}")
        taken = np.frombuffer(data, self.dtype).reshape(rows, *self._row_shape)
        self._position += rows
        if rows:
            self._last_row = taken[-1:]
        return taken

    def read_all(self) -> np.ndarray:
        """Return the entire array, which stays in memory."""
        if self._all_rows is None:
            with self._open_data() as file:
                data = np.frombuffer(file.read(), self.dtype)
            self._all_rows = data.reshape(self.shape, order="F" if self._column_major else "C")
        return self._all_rows


def _read_header(
    file: IO[bytes], name: str
) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
    """Return shape, whether the order is column-major, type, and offset of the data."""
    # A damaged header can make NumPy read up to 4 GiB, so limit what it can read.
    head = io.BytesIO(file.read(MAX_HEADER_BYTES))
    try:
        version = npy_format.read_magic(head)
        if version not in HEADER_READERS:
            raise ValueError(f"unknown version {version}")
        shape, column_major, dtype = HEADER_READERS[version](head, max_header_size=MAX_HEADER_BYTES)
    except Exception as error:  # NumPy does not document what a damaged header raises
        raise DataError(
            f"{name} is not a NumPy array or has a header that cannot be read ({error!s:.100})"
        ) from None
    if dtype.kind not in "fiub":
        kind = "Python objects" if dtype.hasobject else f"{dtype!s:.40}"
        raise DataError(f"{name} has type {kind}; it must be numeric")
    if any(length < 0 for length in shape):
        raise DataError(f"{name} is damaged: it has shape {shape!r:.80}")
    return shape, column_major and len(shape) > 1, dtype, head.tell()


def _read_bound(archive: zipfile.ZipFile, entry: str, name: str) -> np.ndarray:
    if archive.getinfo(entry).file_size > MAX_BOUND_BYTES:
        raise DataError(f"{name} is too large for action bounds")
    return EntryColumn(archive, entry, name).read_all()


def _read_choices(archive: zipfile.ZipFile, entry: str | None, name: str) -> np.ndarray | None:
    return None if entry is None else _read_bound(archive, entry, f"{name}: {CHOICES}")


def _read_provenance(archive: zipfile.ZipFile, entry: str | None) -> Json | None:
    """Read the text that says how the file was made; None if there is none that can be read."""
    text = None if entry is None else _read_text(archive, entry, MAX_BYTES)
    return None if text is None else provenance_of(text)


def _read_leaves(archive: zipfile.ZipFile, entry: str | None, name: str) -> ObservationSpec | None:
    """Read what the file says about its observations; None if it says nothing."""
    if entry is None:
        return None
    text = _read_text(archive, entry, MAX_DESCRIPTION_BYTES)
    return read_description("" if text is None else text, name)


def _read_text(archive: zipfile.ZipFile, entry: str, limit: int) -> str | None:
    """Read a text of at most `limit` characters; None if it is longer or cannot be read."""
    if archive.getinfo(entry).file_size > 4 * limit:  # four bytes for each character
        return None
    try:
        # Without a limit on the header, NumPy would parse a long one.
        text = npy_format.read_array(
            io.BytesIO(archive.read(entry)), allow_pickle=False, max_header_size=MAX_HEADER_BYTES
        )
    except Exception:  # NumPy does not document what a damaged array raises
        return None
    return str(text) if text.dtype.kind == "U" and text.shape == () else None


@contextmanager
def _npz_errors(name: str | Path) -> Iterator[None]:
    """Convert the errors that a damaged archive raises to `DataError`."""
    try:
        yield
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, EOFError, struct.error) as error:
        raise DataError(f"{name}: cannot be read as a NumPy archive ({error})") from None
    except (NotImplementedError, RuntimeError) as error:  # unsupported compression or encryption
        raise DataError(f"{name}: cannot be read as a NumPy archive ({error})") from None
    except Exception as error:
        if type(error).__module__ in ("zlib", "lzma"):
            raise DataError(f"{name}: is damaged ({error})") from None
        raise
