"""Leaves of observations that are stored as one array each, read as rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rl_training.data.leaves.description import MAX_DEPTH, MAX_LEAVES, LeafChoice, checked_spec
from rl_training.errors import DataError
from rl_training.observations import ObservationLeaf, ObservationSpec, box_leaf

OBSERVATIONS, NEXT_OBSERVATIONS = "observations", "next_observations"
STORED_KINDS = {"numbers": "fiub", "image": "u", "discrete": "iu", "binary": "biu"}
"""Kinds of NumPy types that each kind of leaf may be stored as"""


class Column(Protocol):
    """An array that is read sequentially."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def read(self, first: int, last: int) -> np.ndarray:
        """Return rows `first:last`; `first` is 0, the last call's `last`, or one less than it."""
        ...


Openers = Mapping[str, Callable[[], Column]]
"""The arrays of a file by name, not opened yet"""


class LeafColumns:
    """The leaves of observations, one array each, as one column of rows."""

    def __init__(self, spec: ObservationSpec, columns: Mapping[str, Column], name: str) -> None:
        """`columns` are the arrays of the leaves by their names, `(steps, *shape)`."""
        self._spec, self._columns, self._name = spec, columns, name
        lengths = {len(column.shape) and column.shape[0] for column in columns.values()}
        if len(lengths) > 1:
            raise DataError(f"{name}: its arrays have different numbers of steps")
        for leaf in spec.leaves:
            _check_stored(leaf, columns[leaf.name], leaf_key(name, leaf.name))
        self.shape: tuple[int, ...] = (lengths.pop(), spec.size)
        self.dtype: np.dtype[np.generic] = np.dtype(np.float32)

    def read(self, first: int, last: int) -> np.ndarray:
        leaves = {key: column.read(first, last) for key, column in self._columns.items()}
        return pack_leaves(self._spec, leaves, self._name, first)


def pack_leaves(
    spec: ObservationSpec, leaves: Mapping[str, np.ndarray], name: str, first_row: int = 0
) -> np.ndarray:
    """Return the rows of leaves from a file; raise `DataError` for a value that cannot be one."""
    for leaf in spec.leaves:
        if leaf.kind in ("discrete", "binary") or leaf.holds_integers:
            require_possible(leaf, leaves[leaf.name], leaf_key(name, leaf.name), first_row)
        elif leaf.dtype == np.float16:
            _require_halves(leaves[leaf.name], leaf_key(name, leaf.name), first_row)
    return spec.pack(leaves)


def _require_halves(values: np.ndarray, name: str, first_row: int) -> None:
    """Raise a `DataError` that names the first number that would become infinite as float16."""
    if values.dtype == np.float16:
        return
    with np.errstate(over="ignore"):
        lost = np.isfinite(values) & ~np.isfinite(values.astype(np.float16))
    if lost.any():
        row, *place = np.argwhere(lost)[0].tolist()
        value = values[(row, *place)]
        where = ", ".join(map(str, (first_row + row, *place)))
        largest = np.finfo(np.float16).max
        raise DataError(
            f"{name}[{where}] is {value}; it must be from {-largest:g} to {largest:g} (float16)"
        )


def require_possible(leaf: ObservationLeaf, values: np.ndarray, name: str, first_row: int) -> None:
    """Raise a `DataError` that names the first value of a leaf that is not possible."""
    possible = leaf.in_range(values)
    if possible.all():
        return
    flat = ~possible.reshape(len(values), leaf.numbers)
    row, component = map(int, np.argwhere(flat)[0])
    place = ", ".join(map(str, (first_row + row, *np.unravel_index(component, leaf.shape))))
    value = values.reshape(len(values), leaf.numbers)[row, component]
    raise DataError(f"{name}[{place}] is {value}{_allowed(leaf, component)}")


def _allowed(leaf: ObservationLeaf, component: int) -> str:
    if leaf.holds_integers:
        limits = np.iinfo(leaf.dtype)
        return f"; it must be a whole number from {limits.min} to {limits.max} ({leaf.dtype})"
    if leaf.kind == "numbers":
        return ", not a finite number"
    if leaf.kind == "binary":
        return "; it must be 0 or 1"
    low = leaf.starts[component]
    return f"; it must be between {low} and {low + leaf.choices[component] - 1}"


def leaf_key(key: str, name: str) -> str:
    """The name of the array that holds a leaf."""
    return f"{key}/{name}" if name else key


def leaf_names(keys: Sequence[str]) -> list[str]:
    """Return the names of the leaves that arrays of these names hold, in a fixed order."""
    if OBSERVATIONS in keys:
        return [""]
    prefix = f"{OBSERVATIONS}/"
    found = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    if len(found) > MAX_LEAVES:
        raise ValueError(f"more than {MAX_LEAVES:,} arrays of observations")
    return sorted(found, key=lambda name: name.split("/"))


def open_observations(
    arrays: Openers, name: str, choice: LeafChoice, described: ObservationSpec | None
) -> tuple[dict[str, Column], ObservationSpec | None]:
    """Open the arrays of observations, and of next observations if there are any.

    `described` is what the file says about them. Returns a column for each, and the leaves of their
    rows, or None if they are vectors of float32.
    """
    names = leaf_names(list(arrays)) if described is None else [x.name for x in described.leaves]
    chosen = choice.select(names, name)
    columns = {key: _open(arrays, OBSERVATIONS, key, name) for key in chosen}
    following: dict[str, Column] = {}
    if any(key.split("/")[0] == NEXT_OBSERVATIONS for key in arrays):
        following = {key: _open(arrays, NEXT_OBSERVATIONS, key, name) for key in chosen}
    if described is None:
        spec = _inferred_spec(columns, following, name, choice)
    else:
        spec = described.select(chosen)
    both = {OBSERVATIONS: columns, NEXT_OBSERVATIONS: following}
    if spec is None:
        return {key: found[""] for key, found in both.items() if found}, None
    return {
        key: LeafColumns(spec, found, f"{name}: {key}") for key, found in both.items() if found
    }, spec


def _open(arrays: Openers, key: str, leaf: str, name: str) -> Column:
    stored = leaf_key(key, leaf)
    if stored not in arrays:
        raise DataError(f"{name}: {stored} missing")
    column = arrays[stored]()
    if column.dtype.kind not in "fiub":
        raise DataError(f"{name}: {stored} has type {column.dtype}; it must be numeric")
    return column


def _inferred_spec(
    columns: Mapping[str, Column], following: Mapping[str, Column], name: str, choice: LeafChoice
) -> ObservationSpec | None:
    """Describe arrays by their shapes and types; None if they are one vector of float32."""
    leaves = []
    for key, column in columns.items():
        if not column.shape or 0 in column.shape[1:]:
            raise DataError(
                f"{name}: {leaf_key(OBSERVATIONS, key)} has shape {column.shape}; it must be "
                "(steps, ...), with at least one number for each step"
            )
        leaf = _inferred_leaf(key, column, choice.expected_leaf(key))
        if leaf.kind == "numbers" and following.get(key, column).dtype != column.dtype:
            leaf = replace(leaf, number_type="float32")
        leaves.append(leaf)
    try:
        spec = checked_spec(tuple(leaves))
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
    return None if spec.is_vector else spec


def _inferred_leaf(name: str, column: Column, expected: ObservationLeaf | None) -> ObservationLeaf:
    shape, dtype = column.shape[1:], column.dtype
    if (
        expected is not None
        and expected.shape == shape
        and expected.kind in ("discrete", "binary")
        and dtype.kind in STORED_KINDS[expected.kind]
    ):
        return expected
    if name and dtype.kind == "b":
        return ObservationLeaf(name, "binary", shape)
    return box_leaf(name, dtype, shape)


def _check_stored(leaf: ObservationLeaf, column: Column, name: str) -> None:
    if column.shape[1:] != leaf.shape:
        expected = ", ".join(map(str, ("steps", *leaf.shape)))
        raise DataError(f"{name} has shape {column.shape}; it must be ({expected})")
    if column.dtype.kind not in STORED_KINDS[leaf.kind] or (
        leaf.kind == "image" and column.dtype != np.uint8
    ):
        raise DataError(
            f"{name} has type {column.dtype}; {leaf.kind} observations must be stored as "
            f"{'uint8' if leaf.kind == 'image' else 'integers'}"
        )


def flat_arrays(value: Any, key: str, name: str, depth: int = 0) -> dict[str, np.ndarray]:
    """Return the arrays in nested dictionaries and tuples by name, such as observations/camera."""
    if depth > MAX_DEPTH:
        raise DataError(f"{name}: {key:.100} has more than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        parts = {str(part): inner for part, inner in value.items()}
    elif isinstance(value, tuple):
        parts = {str(index): inner for index, inner in enumerate(value)}
    else:
        return {key: np.asarray(value)}
    found: dict[str, np.ndarray] = {}
    for part, inner in parts.items():
        if not part or "/" in part:
            raise DataError(f"{name}: {key} has the key {part!r}; keys must have no '/'")
        found |= flat_arrays(inner, f"{key}/{part}", name, depth + 1)
    return found
