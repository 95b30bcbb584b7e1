"""What an observation consists of, and how it is stored as one row of 32-bit words.

An environment's observation may be an array, a number, or a nested dictionary or tuple of them. Its
parts are called leaves. Everything between the environment and the networks (workers, replay
buffers, datasets, checkpoints, batches) moves observations as rows of float32, `(..., size)`:

- Numbers of a Box keep a type of at most four bytes (`NumberType`), such as the uint8 of an Atari
  game's RAM, of which four are one word of the row. Those of all other types are float32.
- Images stay uint8: the leaves of a Box of uint8 with two to four axes.
- Discrete values are int32, and binary ones are bytes.

Networks get numbers as float32, whatever the type in which they are stored, so that learning does
not depend on it. Where a saved policy has other types than its environment's space, as those of
versions that stored all numbers as float32, the policy's types are used (`number_types`).

Only the words of leaves of float32 are floats. The others are the bits of their own type, which
may look like NaN, so nothing computes with a row except `ObservationSpec.leaves_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

LeafKind = Literal["numbers", "image", "discrete", "binary"]

NumberType = Literal["float32", "float16", "int32", "int16", "uint16", "int8", "uint8"]
"""A type in which numbers are stored"""
NUMBER_TYPES: tuple[NumberType, ...] = get_args(NumberType)
NumberTypes = Mapping[str, NumberType]
"""The types in which leaves of numbers are stored, by name; float32 where a name is missing"""
ALL_FLOAT32: NumberTypes = {}

WORD_BYTES = 4
MAX_WORDS = 10**7
"""Most words of a row"""
MAX_AXES = 30
"""Most axes of a leaf: batches have more, and files of recorded data at most 32 altogether"""
STORED_AS: dict[str, str] = {
    "image": "uint8",
    "discrete": "int32",
    "binary": "uint8",
}
"""The type in which the leaves of each kind are stored, except numbers"""


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
    number_type: NumberType = "float32"
    """If numbers: the type in which they are stored"""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type in which the leaf is stored. Networks get numbers as float32."""
        return np.dtype(self.number_type if self.kind == "numbers" else STORED_AS[self.kind])

    @property
    def is_float32(self) -> bool:
        """Whether its words are floats."""
        return self.kind == "numbers" and self.number_type == "float32"

    @property
    def holds_integers(self) -> bool:
        """Whether it is numbers that are stored as integers."""
        return self.kind == "numbers" and self.dtype.kind in "iu"

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

    @property
    def noun(self) -> str:
        """What the leaf is, in a word: the type of numbers that are not float32, else the kind."""
        return self.kind if self.kind != "numbers" or self.is_float32 else self.dtype.name

    def in_range(self, values: np.ndarray) -> np.ndarray:
        """Whether each number, in the order of `choices`, is one of the possible ones."""
        if self.holds_integers:
            if values.dtype == self.dtype:
                return np.ones(1, np.bool_)
            limits, is_float = np.iinfo(self.dtype), values.dtype.kind == "f"
            if is_float:  # small ones do not have the limits
                values = values.astype(np.float64)
            possible = (values >= limits.min) & (values <= limits.max)
            return np.asarray(possible & (np.floor(values) == values) if is_float else possible)
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

    def values_in(self, words: np.ndarray) -> np.ndarray:
        """Return the leaf `(n, *shape)` that its words `(n, words)` hold."""
        if not self.is_float32:
            words = np.ascontiguousarray(words).view(self.dtype)[:, : self.numbers]
        return words.reshape(len(words), *self.shape)

    def tensor_in(self, words: Tensor) -> Tensor:
        """Return what networks get of the leaf, `(..., *shape)`, from its words `(..., words)`."""
        if not self.is_float32:
            import torch

            from rl_training.internals import reinterpreted

            is_uint16 = self.dtype == np.uint16  # of which PyTorch has few operations
            name = "int16" if is_uint16 else self.dtype.name
            stored = reinterpreted(words, getattr(torch, name))
            values = stored[..., : self.numbers]
            words = self.as_given(values.int() & 0xFFFF if is_uint16 else values)
        return words.reshape(*words.shape[:-1], *self.shape)

    def as_given(self, values: Tensor) -> Tensor:
        """Return values of the leaf in the type in which networks get them."""
        import torch

        is_given = values.dtype in (torch.float32, torch.float64) or self.kind != "numbers"
        return values if is_given else values.to(torch.get_default_dtype())


@dataclass(frozen=True)
class ObservationSpec:
    """The leaves of an observation, in the order in which a row has them."""

    leaves: tuple[ObservationLeaf, ...]
    offsets: tuple[int, ...] = field(init=False)
    """The word at which each leaf starts"""
    size: int = field(init=False)
    """Number of words of a row"""

    def __post_init__(self) -> None:
        # Not `np.cumsum`: numbers from files may be too large for int64.
        ends = list(accumulate(leaf.words for leaf in self.leaves))
        object.__setattr__(self, "offsets", (0, *ends[:-1]))
        object.__setattr__(self, "size", ends[-1])

    @classmethod
    def vector(cls, size: int) -> ObservationSpec:
        """Observations that are one vector of numbers."""
        return cls((ObservationLeaf("", "numbers", (size,)),))

    @property
    def is_vector(self) -> bool:
        """Whether an observation is one vector of float32, so that a row is the observation."""
        first = self.leaves[0]
        return not first.name and first.is_float32 and len(first.shape) == 1

    @cached_property
    def is_numeric(self) -> bool:
        """Whether all leaves are numbers."""
        return all(leaf.kind == "numbers" for leaf in self.leaves)

    @cached_property
    def is_float32(self) -> bool:
        """Whether all leaves are numbers that are stored as float32: all words are floats."""
        return all(leaf.is_float32 for leaf in self.leaves)

    @property
    def number_types(self) -> NumberTypes:
        """The types in which the leaves of numbers are stored."""
        return {leaf.name: leaf.number_type for leaf in self.leaves if leaf.kind == "numbers"}

    @property
    def narrowest_float(self) -> str:
        """The type with the smallest largest number in which numbers are stored."""
        return "float16" if "float16" in self.number_types.values() else "float32"

    def stored_as(self, types: NumberTypes) -> ObservationSpec:
        """The same leaves, with their numbers stored in these types."""
        return ObservationSpec(
            tuple(
                replace(leaf, number_type=types.get(leaf.name, "float32"))
                if leaf.kind == "numbers"
                else leaf
                for leaf in self.leaves
            )
        )

    def has_leaves_of(self, other: ObservationSpec) -> bool:
        """Whether the leaves are the same, whatever the types in which numbers are stored."""
        return self.stored_as(ALL_FLOAT32) == other.stored_as(ALL_FLOAT32)

    @cached_property
    def number_columns(self) -> np.ndarray:
        """The words of a row that are floats, in order."""
        parts = [
            np.arange(start, start + leaf.words)
            for leaf, start in zip(self.leaves, self.offsets, strict=True)
            if leaf.is_float32
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
        """Return the leaves of rows `(..., size)` by name, `(..., *shape)`, as networks get them.

        Numbers are float32, images and binary values uint8, discrete values int32. They are views,
        except of numbers that are stored in another type.
        """
        return {
            leaf.name: leaf.tensor_in(rows[..., start : start + leaf.words])
            for leaf, start in zip(self.leaves, self.offsets, strict=True)
        }

    def numbers_of(self, rows: Tensor) -> Tensor:
        """Return all numbers of rows `(..., size)` as float32, `(..., numbers)`.

        All leaves must be numbers.
        """
        import torch

        if self.is_float32:
            return rows
        lead = rows.shape[:-1]
        parts = [values.reshape(*lead, -1) for values in self.leaves_of(rows).values()]
        return torch.cat(parts, dim=-1)

    def arrays_of(self, rows: np.ndarray) -> Any:
        """Return rows `(n, size)` as an array, or as a dictionary of the leaves' arrays by name."""
        if self.is_vector:
            return rows
        leaves = self.unpack(rows.copy())
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
        if leaf.is_float32:
            with np.errstate(over="ignore"):  # values out of range become infinite
                words[...] = value.reshape(words.shape)
            return
        if value.dtype.kind == "f" and leaf.kind != "numbers":
            raise ValueError(f"its {leaf.label} has type {value.dtype}, not {leaf.dtype}")
        if leaf.holds_integers and not leaf.in_range(value).all():
            limits = np.iinfo(leaf.dtype)
            raise ValueError(
                f"its {leaf.label} must be whole numbers from {limits.min} to {limits.max}, "
                f"because it is stored as {leaf.dtype} (a space of float32 has other numbers): "
                + _shown(value)
            )
        if leaf.kind != "numbers" and not leaf.in_range(value).all():
            raise ValueError(f"its {leaf.label} is out of range: {_shown(value)}")
        stored = words.view(leaf.dtype)
        with np.errstate(over="ignore"):
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
        return {
            leaf.name: leaf.values_in(rows[:, start : start + leaf.words])
            for leaf, start in zip(self.leaves, self.offsets, strict=True)
        }

    def select(self, names: Sequence[str]) -> ObservationSpec:
        """The leaves of these names, in this order; raises `KeyError`."""
        return ObservationSpec(tuple(map(self.leaf, names)))

    def words_of(self, names: Sequence[str]) -> np.ndarray:
        """The words of a row that belong to the leaves of these names, in this order."""
        return np.concatenate([np.r_[self.columns(name)] for name in names])

    def floats_in(self, rows: np.ndarray) -> np.ndarray:
        """Return all numbers of rows `(n, size)` that may be infinite or NaN, `(n, ...)`."""
        if self.is_float32:
            return rows
        floats = rows[:, self.number_columns]
        if not self._halves:
            return floats
        halves = [leaf.values_in(rows[:, self.columns(leaf.name)]) for leaf in self._halves]
        return np.concatenate([floats, *(each.reshape(len(rows), -1) for each in halves)], axis=1)

    @cached_property
    def _halves(self) -> list[ObservationLeaf]:
        return [leaf for leaf in self.leaves if leaf.dtype == np.float16]

    def are_finite(self, rows: np.ndarray) -> bool:
        """Whether all numbers of rows `(n, size)` are finite; the other leaves always are."""
        values = self.floats_in(rows)
        return b"\0" not in np.isfinite(values).tobytes()  # for small arrays faster than `.all()`

    def problem_in(self, rows: np.ndarray) -> str | None:
        """Say why rows `(n, size)` from a file cannot be observations; None if they can."""
        if not self.are_finite(rows):
            return "contains numbers that are not finite"
        for leaf, start in zip(self.leaves, self.offsets, strict=True):
            if leaf.kind not in ("discrete", "binary"):
                continue
            if not leaf.in_range(leaf.values_in(rows[:, start : start + leaf.words])).all():
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
            | ({} if leaf.number_type == "float32" else {"number_type": leaf.number_type})
            for leaf in self.leaves
        ]

    def describe(self) -> str:
        """A short text for messages, such as `image (84, 84, 3), position (3,)`."""
        return ", ".join(f"{leaf.name or leaf.noun} {leaf.shape}" for leaf in self.leaves)


def box_kind(dtype: np.dtype[Any], shape: tuple[int, ...]) -> LeafKind:
    """The kind of a leaf whose space is a Box."""
    return "image" if dtype == np.uint8 and len(shape) in (2, 3, 4) else "numbers"


def box_leaf(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> ObservationLeaf:
    """The leaf whose space is a Box."""
    kind = box_kind(dtype, shape)
    if kind != "numbers":
        return ObservationLeaf(name, kind, shape)
    return ObservationLeaf(name, kind, shape, number_type=number_type_of(dtype))


def number_type_of(dtype: np.dtype[Any]) -> NumberType:
    """The type in which numbers are stored that have this type."""
    return next((known for known in NUMBER_TYPES if known == dtype.name), "float32")


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


def _shown(value: np.ndarray) -> str:
    """The beginning of an array, in one line."""
    return f"{' '.join(repr(value).split()):.200}"
