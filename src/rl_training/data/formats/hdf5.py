"""Read HDF5 files in D4RL's layout, in chunks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.data.formats.columns import BOUNDS, CHOICES, OTHERS, ColumnRecording
from rl_training.data.formats.recording import CHUNK_ROWS
from rl_training.data.formats.stored import PROVENANCE, provenance_of
from rl_training.data.leaves.columns import NEXT_OBSERVATIONS, OBSERVATIONS, Column
from rl_training.data.leaves.description import (
    ALL_LEAVES,
    DESCRIPTION,
    MAX_DEPTH,
    MAX_DESCRIPTION_BYTES,
    MAX_LEAVES,
    LeafChoice,
    read_description,
)
from rl_training.errors import DataError, one_line
from rl_training.observations import ObservationSpec
from rl_training.validation import user_path

CACHE_BYTES = 2**18
"""Size of HDF5's chunk cache for each array. A chunk that fits is read in one operation; an
uncompressed chunk that does not fit is read row by row. Chunk sizes that h5py chooses fit."""
BLOCK_BYTES = 2**24
"""Most bytes of an array to read at a time, unless one of its chunks is larger"""
SMALL_BYTES, MOST_COMPRESSION = 2**20, 4096
"""Larger arrays of leaves may claim at most this many times the bytes that are stored for them"""


def open_hdf5(
    path: str | Path, *, max_episode_steps: int | None = None, leaves: LeafChoice = ALL_LEAVES
) -> ColumnRecording:
    """Open an HDF5 file with D4RL's arrays as a recording."""
    path = user_path(path)
    file = open_file(path)
    with hdf5_errors(path):
        arrays: dict[str, Callable[[], Column]] = {}
        for key in map(str, file):
            if key in OTHERS:
                arrays[key] = partial(_column, file, key, str(path))
            elif key in (OBSERVATIONS, NEXT_OBSERVATIONS):
                for array in array_names(file, key, str(path)):
                    arrays[array] = partial(_column, file, array, str(path))
        bounds = None
        if all(key in file.attrs for key in BOUNDS):
            bounds = (np.asarray(file.attrs["action_low"]), np.asarray(file.attrs["action_high"]))
        return ColumnRecording(
            arrays,
            str(path),
            "hdf5",
            leaves=leaves,
            described=_read_leaves(file, str(path)),
            max_episode_steps=max_episode_steps,
            action_bounds=bounds,
            choices=np.asarray(file.attrs[CHOICES]) if CHOICES in file.attrs else None,
            provenance=provenance_of(file.attrs.get(PROVENANCE)),
        )


def array_names(file: Any, key: str, name: str, depth: int = 0) -> list[str]:
    """Return the names of the arrays in a group and its groups, or of the array itself."""
    import h5py

    check_in_file(file, key, name)
    if depth > MAX_DEPTH:
        raise DataError(f"{name}: {key:.100} has more than {MAX_DEPTH} levels of groups")
    found = file[key]
    if not isinstance(found, h5py.Group):
        return [key]
    names: list[str] = []
    for inner in found:
        names += array_names(file, f"{key}/{inner}", name, depth + 1)
        if len(names) > MAX_LEAVES:
            raise DataError(f"{name}: {key:.100} has more than {MAX_LEAVES:,} arrays")
    return names


def _column(file: Any, key: str, name: str) -> Hdf5Column:
    return Hdf5Column(numbers_at(file, key, name), f"{name}: {key}")


def _read_leaves(file: Any, name: str) -> ObservationSpec | None:
    """Read what the file says about its observations; None if it says nothing."""
    import h5py

    if DESCRIPTION not in file:
        return None
    check_in_file(file, DESCRIPTION, name)
    found = file[DESCRIPTION]
    is_text = (
        isinstance(found, h5py.Dataset)
        and found.shape == ()
        and found.dtype.kind == "S"
        and found.dtype.itemsize <= MAX_DESCRIPTION_BYTES
        and not (found.external or found.is_virtual)
    )
    return read_description(bytes(found[()]) if is_text else b"", name)


class Hdf5Column:
    """An array of the file, read in complete HDF5 chunks, so that each is decompressed once."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset, name
        self.shape: tuple[int, ...] = dataset.shape
        self.dtype: np.dtype[np.generic] = dataset.dtype
        stored_rows = dataset.chunks[0] if dataset.chunks else 1
        wanted = min(CHUNK_ROWS, max(1, BLOCK_BYTES * self.shape[0] // max(1, dataset.nbytes)))
        self._block = stored_rows * -(-wanted // stored_rows)
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


def array_at(group: Any, key: str, name: str) -> Any:
    """Return an array that is stored in this file; raise a `DataError` otherwise."""
    import h5py

    check_in_file(group, key, name)
    found = group[key]
    if not isinstance(found, h5py.Dataset):
        raise DataError(f"{name}: {key} is a group of arrays; it must be an array")
    if found.external or found.is_virtual:
        raise DataError(f"{name}: {key} refers to other files; external data is not read")
    return found


def require_numbers(array: Any, key: str, name: str) -> None:
    if array.shape is None or array.dtype.kind not in "fiub":
        raise DataError(f"{name}: {key} has type {array.dtype}; it must be numeric")


def numbers_at(group: Any, key: str, name: str) -> Any:
    """Return a numeric array that is stored in this file; raise a `DataError` otherwise."""
    found = array_at(group, key, name)
    require_numbers(found, key, name)
    return found


def require_stored(array: Any, name: str) -> None:
    """Raise a `DataError` if a small file claims a huge array, which would be all memory."""
    claimed, stored = array.nbytes, array.id.get_storage_size()
    if claimed > max(SMALL_BYTES, MOST_COMPRESSION * stored):
        raise DataError(f"{name} claims {claimed:,} bytes, but {stored:,} are stored")


def check_in_file(group: Any, key: str, name: str) -> None:
    """Raise a `DataError` for a soft or external link, which may refer to another file.

    Every group on the way is checked: a link to a group could leave the file as well.
    """
    import h5py

    parts = key.split("/")
    for length in range(1, len(parts) + 1):
        link = group.get("/".join(parts[:length]), getlink=True)
        if link is None:
            found = one_line(", ".join(map(str, group)), 500)
            raise DataError(f"{name}: {key} missing; found {found}")
        if not isinstance(link, h5py.HardLink):
            raise DataError(f"{name}: {key} is a link; only data stored in the file itself is read")


@contextmanager
def hdf5_errors(name: str | Path) -> Iterator[None]:
    """Convert the errors that h5py raises for a damaged file to `DataError`."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, OverflowError, MemoryError) as error:
        raise DataError(f"{name}: cannot be read as HDF5 ({error})") from None
