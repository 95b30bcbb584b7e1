"""Read HDF5 files in D4RL's layout, in chunks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.data.formats.columns import (
    BOUNDS,
    COLUMNS,
    Column,
    ColumnRecording,
    require_columns,
)
from rl_training.data.formats.recording import CHUNK_ROWS
from rl_training.data.formats.stored import PROVENANCE, provenance_of
from rl_training.errors import DataError
from rl_training.validation import user_path

CACHE_BYTES = 2**18
"""Size of HDF5's chunk cache for each array. A chunk that fits is read in one operation; an
uncompressed chunk that does not fit is read row by row. Chunk sizes that h5py chooses fit."""


def open_hdf5(path: str | Path, *, max_episode_steps: int | None = None) -> ColumnRecording:
    """Open an HDF5 file with D4RL's arrays as a recording."""
    path = user_path(path)
    file = open_file(path)
    with hdf5_errors(path):
        present = [str(key) for key in file]
        require_columns(present, str(path))
        columns: dict[str, Column] = {
            key: Hdf5Column(numbers_at(file, key, str(path)), f"{path}: {key}")
            for key in COLUMNS
            if key in present
        }
        bounds = None
        if all(key in file.attrs for key in BOUNDS):
            bounds = (np.asarray(file.attrs["action_low"]), np.asarray(file.attrs["action_high"]))
        return ColumnRecording(
            columns,
            str(path),
            "hdf5",
            max_episode_steps=max_episode_steps,
            action_bounds=bounds,
            provenance=provenance_of(file.attrs.get(PROVENANCE)),
        )


class Hdf5Column:
    """An array of the file, read in complete HDF5 chunks, so that each is decompressed once."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset, name
        self.shape: tuple[int, ...] = dataset.shape
        self.dtype: np.dtype[np.generic] = dataset.dtype
        stored_rows = dataset.chunks[0] if dataset.chunks else 1
        self._block = stored_rows * -(-CHUNK_ROWS // stored_rows)
        self._first = self._last = 0
        self._rows = np.empty((0, *self.shape[1:]), self.dtype)

    def read(self, first: int, last: int) -> np.ndarray:
        if not self._first <= first <= self._last:
            self._first = self._last = first
            self._rows = self._rows[:0]
        parts = [self._rows[first - self._first :]]
        with hdf5_errors(self._name):
            while self._last < last:
                until = min(self._last - self._last % self._block + self._block, self.shape[0])
                parts.append(self._dataset[self._last : until])
                self._last = until
        self._rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
        self._first = first
        return self._rows[: last - first]


def open_file(path: Path) -> Any:
    """Open an HDF5 file for reading; it is closed when it is no longer referenced."""
    require_h5py(str(path))
    import h5py

    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with hdf5_errors(path):
        return h5py.File(path, "r", rdcc_nbytes=CACHE_BYTES)


def require_h5py(what: str) -> None:
    """Raise a `DataError` that says what to install if h5py is missing."""
    if importlib.util.find_spec("h5py") is None:
        raise DataError(f'{what}: needs h5py; run `pip install "rl-training[offline]"`')


def numbers_at(group: Any, key: str, name: str) -> Any:
    """Return a numeric array that is stored in this file; raise a `DataError` otherwise."""
    import h5py

    check_in_file(group, key, name)
    found = group[key]
    if not isinstance(found, h5py.Dataset):
        raise DataError(
            f"{name}: {key} is a group of arrays; only flat vectors of numbers are supported"
        )
    if found.external or found.is_virtual:
        raise DataError(f"{name}: {key} refers to other files; external data is not read")
    if found.shape is None or found.dtype.kind not in "fiub":
        raise DataError(f"{name}: {key} has type {found.dtype}; it must be numeric")
    return found


def check_in_file(group: Any, key: str, name: str) -> None:
    """Raise a `DataError` for a soft or external link, which may refer to another file."""
    import h5py

    link = group.get(key, getlink=True)
    if link is None:
        raise DataError(f"{name}: {key} missing; found {', '.join(map(str, group))}")
    if not isinstance(link, h5py.HardLink):
        raise DataError(f"{name}: {key} is a link; only data stored in the file itself is read")


@contextmanager
def hdf5_errors(name: str | Path) -> Iterator[None]:
    """Convert the errors that h5py raises for a damaged file to `DataError`."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, OverflowError, MemoryError) as error:
        raise DataError(f"{name}: cannot be read as HDF5 ({error})") from None
