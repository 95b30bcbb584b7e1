"""What an observation consists of, and how it is stored as one row of 32-bit words.

An environment's observation may be an array, a number, or a nested dictionary or tuple of them. Its
parts are called leaves. Everything between the environment and the networks (workers, replay
buffers, datasets, checkpoints, batches) moves observations as rows of float32, `(..., size)`:

- Numbers are float32, also those of a Box of float64 or of integers.
- Images stay uint8: the leaves of a Box of uint8 with two to four axes. Four of their bytes are one
  word of the row.
- Discrete values are int32, and binary ones are bytes.

A Box of uint8 with one axis, such as the RAM of an Atari game, is numbers, and takes four times the
memory of its bytes. As numbers it can be normalized, it is a row without being unpacked, and
networks, exported policies and the checkpoints of all versions have it as float32.

Only the words of leaves of numbers are floats. The others are the bits of their own type, which
may look like NaN, so nothing computes with a row except `ObservationSpec.leaves_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

LeafKind = Literal["numbers", "image", "discrete", "binary"]

WORD_BYTES = 4
STORED_AS: dict[str, str] = {
    "numbers": "float32",
    "image": "uint8",
    "discrete": "int32",
    "binary": "uint8",
}
"""The type in which the leaves of each kind are stored"""


@dataclass(frozen=True)
class ObservationLeaf:
    """One array of an observation."""

    name: str
    """Its keys in nested dictionaries and tuples, joined by "/"; "" if there is a single array"""
    kind: LeafKind
    shape: tuple[int, ...]
    choices: tuple[int, ...] = ()
    """If discrete: the number of values of each component, in the order of the flattened leaf"""
    starts: tuple[int, ...] = ()
    """If discrete: the smallest value of each component"""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type in which the leaf is stored, and in which networks get it."""
        return np.dtype(STORED_AS[self.kind])

    @property
    def numbers(self) -> int:
        """How many numbers the leaf has."""
        return math.prod(self.shape)

    @property
    def words(self) -> int:
        """How many words of a row the leaf takes."""
        return -(-self.numbers * self.dtype.itemsize // WORD_BYTES)

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.name.split("/")) if self.name else ()

    @property
    def label(self) -> str:
        """The leaf in messages."""
        return f"observation {self.name!r}" if self.name else "observation"

    def in_range(self, values: np.ndarray) -> np.ndarray:
        """Whether each number, in the order of `choices`, is one of the possible ones."""
        if self.kind == "numbers":
            return np.asarray(np.isfinite(values))
        if self.kind == "image":
            is_byte = values.dtype == np.uint8  # always in range
            return np.ones(1, np.bool_) if is_byte else (values >= 0) & (values <= 255)
        if self.kind == "binary":
            return np.asarray((values == 0) | (values == 1))
        flat = values.reshape(*values.shape[: values.ndim - len(self.shape)], self.numbers)
        low = np.asarray(self.starts)
        return np.asarray((flat >= low) & (flat < low + np.asarray(self.choices)))


@dataclass(frozen=True)
class ObservationSpec:
    """The leaves of an observation, in the order in which a row has them."""

    leaves: tuple[ObservationLeaf, ...]
    offsets: tuple[int, ...] = field(init=False)
    """The word at which each leaf starts"""
    size: int = field(init=False)
    """Number of words of a row"""

    def __post_init__(self) -> None:
        ends = np.cumsum([leaf.words for leaf in self.leaves]).tolist()
        object.__setattr__(self, "offsets", (0, *ends[:-1]))
        object.__setattr__(self, "size", ends[-1])

    @classmethod
    def vector(cls, size: int) -> ObservationSpec:
        """Observations that are one vector of numbers."""
        return cls((ObservationLeaf("", "numbers", (size,)),))

    @property
    def is_vector(self) -> bool:
        """Whether an observation is one vector of numbers, so that a row is the observation."""
        first = self.leaves[0]
        return not first.name and first.kind == "numbers" and len(first.shape) == 1

    @cached_property
    def is_numeric(self) -> bool:
        """Whether all leaves are numbers, so that all words of a row are floats."""
        return all(leaf.kind == "numbers" for leaf in self.leaves)

    @cached_property
    def number_columns(self) -> np.ndarray:
        """The words of a row that are floats, in order."""
        parts = [
            np.arange(start, start + leaf.words)
            for leaf, start in zip(self.leaves, self.offsets, strict=True)
            if leaf.kind == "numbers"
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def leaf(self, name: str) -> ObservationLeaf:
        """The leaf of this name; raises `KeyError`."""
        for leaf in self.leaves:
            if leaf.name == name:
                return leaf
        raise KeyError(name)

    def columns(self, name: str) -> slice:
        """The words of a row that belong to the leaf of this name."""
        start = self.offsets[self.leaves.index(self.leaf(name))]
        return slice(start, start + self.leaf(name).words)

    def leaves_of(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the leaves of rows `(..., size)` by name, `(..., *shape)`, as views.

        Numbers are float32, images and binary values uint8, discrete values int32.
        """
        import torch

        from rl_training.internals import reinterpreted

        found = {}
        for leaf, start in zip(self.leaves, self.offsets, strict=True):
            words = rows[..., start : start + leaf.words]
            if leaf.kind != "numbers":
                stored = reinterpreted(words, getattr(torch, leaf.dtype.name))
                words = stored[..., : leaf.numbers]
            found[leaf.name] = words.reshape(*rows.shape[:-1], *leaf.shape)
        return found

    def arrays_of(self, rows: np.ndarray) -> Any:
        """Return rows `(n, size)` as an array, or as a dictionary of the leaves' arrays by name."""
        import torch

        if self.is_vector:
            return rows
        leaves = {name: leaf.numpy() for name, leaf in self.leaves_of(torch.tensor(rows)).items()}
        return leaves.get("", leaves)

    def smallest_rows(self, number: int) -> np.ndarray:
        """Return rows of a possible observation: zeros, and the first value of discrete leaves."""
        rows = np.zeros((number, self.size), np.float32)
        for leaf, start in zip(self.leaves, self.offsets, strict=True):
            if leaf.kind == "discrete":
                rows[:, start : start + leaf.words] = np.array(leaf.starts, np.int32).view("f4")
        return rows

    def write(self, observation: Any, row: np.ndarray) -> None:
        """Write one observation of the environment to a row `(size,)` of float32.

        Raises `ValueError` if it does not fit.
        """
        for leaf, start in zip(self.leaves, self.offsets, strict=True):
            value = _value_at(observation, leaf)
            found = np.asarray(value)
            if found.shape != leaf.shape:
                raise ValueError(f"its {leaf.label} has shape {found.shape}, not {leaf.shape}")
            self._write_leaf(leaf, found, row[start : start + leaf.words])

    def rows_of(
        self, observations: Any, needed: Sequence[ObservationLeaf] | None = None
    ) -> tuple[np.ndarray, bool]:
        """Return the rows of one observation or of a batch, and whether it was a batch.

        A batch has one leading axis in every leaf. Only the `needed` leaves are read, by default
        all; see `pack_some` for the others. Raises `ValueError` if it does not fit.
        """
        chosen = self.leaves if needed is None else needed
        values = {leaf: np.asarray(_value_at(observations, leaf)) for leaf in chosen}
        first, value = next(iter(values.items()))
        is_batch = value.ndim == len(first.shape) + 1
        number = len(value) if is_batch else 1
        for leaf, value in values.items():
            expected = (number, *leaf.shape) if is_batch else leaf.shape
            if value.shape != expected:
                raise ValueError(f"the {leaf.label} has shape {value.shape}, not {expected}")
        rows = self.pack_some(
            {leaf.name: value.reshape(number, *leaf.shape) for leaf, value in values.items()}
        )
        return rows, is_batch

    @staticmethod
    def _write_leaf(leaf: ObservationLeaf, value: np.ndarray, words: np.ndarray) -> None:
        """Write a leaf, or a batch of it, to its words `(..., leaf.words)`."""
        if value.dtype.kind not in "biuf":
            raise ValueError(f"its {leaf.label} is not numeric: {value!r:.200}")
        if leaf.kind == "numbers":
            with np.errstate(over="ignore"):  # values out of range become infinite
                words[...] = value.reshape(words.shape)
            return
        if value.dtype.kind == "f":
            raise ValueError(f"its {leaf.label} has type {value.dtype}, not {leaf.dtype}")
        if not leaf.in_range(value).all():
            raise ValueError(f"its {leaf.label} is out of range: {value!r:.200}")
        stored = words.view(leaf.dtype)
        stored[..., : leaf.numbers] = value.reshape(*words.shape[:-1], leaf.numbers)

    def pack(self, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows `(n, size)` of all leaves by name, `(n, *shape)`.

        Raises `ValueError` if a value does not fit.
        """
        return self._pack(leaves, self.leaves)

    def pack_some(self, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
        """Same as `pack`, with the values of `smallest_rows` for leaves that are not given."""
        return self._pack(leaves, [leaf for leaf in self.leaves if leaf.name in leaves])

    def _pack(
        self, leaves: Mapping[str, np.ndarray], written: Sequence[ObservationLeaf]
    ) -> np.ndarray:
        rows = self.smallest_rows(len(leaves[written[0].name]))
        for leaf in written:
            self._write_leaf(leaf, leaves[leaf.name], rows[:, self.columns(leaf.name)])
        return rows

    def unpack(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the leaves of rows `(n, size)` by name, `(n, *shape)`: the inverse of `pack`."""
        found = {}
        for leaf, start in zip(self.leaves, self.offsets, strict=True):
            words = rows[:, start : start + leaf.words]
            if leaf.kind != "numbers":
                words = np.ascontiguousarray(words).view(leaf.dtype)[:, : leaf.numbers]
            found[leaf.name] = words.reshape(len(rows), *leaf.shape)
        return found

    def select(self, names: Sequence[str]) -> ObservationSpec:
        """The leaves of these names, in this order; raises `KeyError`."""
        return ObservationSpec(tuple(map(self.leaf, names)))

    def words_of(self, names: Sequence[str]) -> np.ndarray:
        """The words of a row that belong to the leaves of these names, in this order."""
        return np.concatenate([np.r_[self.columns(name)] for name in names])

    def are_finite(self, rows: np.ndarray) -> bool:
        """Whether all numbers of rows `(n, size)` are finite; the other leaves always are."""
        values = rows if self.is_numeric else rows[..., self.number_columns]
        return b"\0" not in np.isfinite(values).tobytes()  # for small arrays faster than `.all()`

    def problem_in(self, rows: np.ndarray) -> str | None:
        """Say why rows `(n, size)` from a file cannot be observations; None if they can."""
        if not self.are_finite(rows):
            return "contains numbers that are not finite"
        for leaf, start in zip(self.leaves, self.offsets, strict=True):
            if leaf.kind in ("discrete", "binary"):
                words = np.ascontiguousarray(rows[:, start : start + leaf.words])
                values = words.view(leaf.dtype)[:, : leaf.numbers]
                if not leaf.in_range(values.reshape(len(rows), *leaf.shape)).all():
                    return f"contains values of the {leaf.label} that are not possible"
        return None

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "name": leaf.name,
                "kind": leaf.kind,
                "shape": list(leaf.shape),
                "choices": list(leaf.choices),
                "starts": list(leaf.starts),
            }
            for leaf in self.leaves
        ]

    def describe(self) -> str:
        """A short text for messages, such as `image (84, 84, 3), position (3,)`."""
        return ", ".join(f"{leaf.name or leaf.kind} {leaf.shape}" for leaf in self.leaves)


def box_kind(dtype: np.dtype[Any], shape: tuple[int, ...]) -> LeafKind:
    """The kind of a leaf whose space is a Box."""
    return "image" if dtype == np.uint8 and len(shape) in (2, 3, 4) else "numbers"


def select_names(names: Sequence[str], keys: Sequence[str] | None) -> list[str]:
    """Return the names of leaves that `keys` select, in their order; None selects all.

    A key is the name of a leaf, such as "camera/left", or of a dictionary or tuple with all its
    leaves. Raises `KeyError` with the first key that selects nothing.
    """
    if keys is None:
        return list(names)
    for key in keys:
        if not any(_is_within(name, key) for name in names):
            raise KeyError(key)
    return [name for name in names if any(_is_within(name, key) for key in keys)]


def _is_within(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}/")


def _value_at(observation: Any, leaf: ObservationLeaf) -> Any:
    """Return the part of an observation that is this leaf."""
    value = observation
    for key in leaf.path:
        if isinstance(value, Mapping):
            if key not in value:
                raise ValueError(f"it has no {leaf.label}")
            value = value[key]
        elif isinstance(value, Sequence) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise ValueError(f"it has no {leaf.label}")
    return value
