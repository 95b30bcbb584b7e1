"""The spaces in the metadata of Minari datasets: read without trust, and written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_training.data.leaves.description import (
    MAX_DEPTH,
    MAX_LEAVES,
    LeafChoice,
    LeafDescription,
    checked_spec,
)
from rl_training.errors import ConfigError, DataError, one_line
from rl_training.observations import ObservationLeaf, ObservationSpec, box_leaf
from rl_training.types import Json
from rl_training.validation import validate

TUPLE_KEY = "_index_{}"
"""Name of the group or array of an item of a tuple"""
_NUMBER = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")


@dataclass(frozen=True)
class MinariLeaf:
    """A leaf of an observation, and where its array is in the group of an episode."""

    leaf: ObservationLeaf
    path: str


@dataclass(frozen=True)
class _Part:
    """A part of a space that is neither a dictionary nor a tuple."""

    name: str
    path: str
    space: Json


def read_leaves(metadata: Json, name: str, choice: LeafChoice) -> list[MinariLeaf]:
    """Return the chosen leaves of a dataset's observations; raise `DataError` if it cannot be."""
    try:
        space = json.loads(metadata["observation_space"])
        parts = {part.name: part for part in _parts(space, "", "observations", 0)}
        if len(parts) > MAX_LEAVES:
            raise ValueError(f"more than {MAX_LEAVES:,} leaves")
        chosen = choice.select(list(parts), name)
        leaves = [MinariLeaf(_leaf(parts[key], list(parts)), parts[key].path) for key in chosen]
        checked_spec(tuple(each.leaf for each in leaves))
        return leaves
    except KeyError as error:
        raise DataError(f"{name}: its metadata has no {error}") from None
    except _Unsupported as error:
        raise DataError(f"{name}: {error}") from None
    except (TypeError, ValueError, RecursionError, OverflowError, ConfigError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{name}: observation_space in its metadata cannot be read "
            f"({one_line(str(error), 200)})"
        ) from None


class _Unsupported(Exception):
    """A leaf that is not supported was chosen."""


def _parts(space: Any, name: str, path: str, depth: int) -> Iterator[_Part]:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    kind = space["type"]
    if kind not in ("Dict", "Tuple"):
        yield _Part(name, path, space)
        return
    inner = space["subspaces"]
    if kind == "Tuple" and isinstance(inner, list):
        named = {str(index): part for index, part in enumerate(inner)}
    else:
        named = dict(inner)
    if not named:
        raise ValueError(f"a {kind} without parts")
    for key, part in named.items():
        if "/" in key or key in ("", "."):
            raise ValueError(f"the key {key!r:.80}; keys with '/' are not supported")
        stored = key if kind == "Dict" else TUPLE_KEY.format(key)
        yield from _parts(part, f"{name}/{key}" if name else key, f"{path}/{stored}", depth + 1)


def _leaf(part: _Part, names: list[str]) -> ObservationLeaf:
    space, kind = part.space, part.space["type"]
    values: Json = {"name": part.name, "choices": [], "starts": []}
    if kind == "Box":
        if not _NUMBER.fullmatch(str(space["dtype"])):
            raise ValueError(f"the type {space['dtype']!r:.80}")
        shape = tuple(space["shape"])
        leaf = box_leaf(part.name, np.dtype(space["dtype"]), shape)
        values |= {"kind": leaf.kind, "shape": list(shape), "number_type": leaf.number_type}
    elif kind == "Discrete":
        values |= {"kind": "discrete", "shape": []}
        values |= {"choices": [space["n"]], "starts": [space.get("start", 0)]}
    elif kind == "MultiDiscrete":
        choices = np.asarray(space["nvec"])
        starts = np.asarray(space.get("start", np.zeros_like(choices)))
        values |= {"kind": "discrete", "shape": list(choices.shape)}
        values |= {"choices": choices.ravel().tolist(), "starts": starts.ravel().tolist()}
    elif kind == "MultiBinary":
        shape = space["n"]
        values |= {"kind": "binary", "shape": shape if isinstance(shape, list) else [shape]}
    else:
        raise _Unsupported(_advice(part.name, str(kind), names))
    return validate(LeafDescription, values).leaf()


def _advice(name: str, kind: str, names: list[str]) -> str:
    what = f"{name!r} of the observation" if name else "the observation space"
    others = [other for other in names if other != name]
    advice = f"; select the others with observation_keys: [{', '.join(others)}]" if others else ""
    return one_line(f"{what} is {kind}, which is not supported{advice}", 500)


def read_actions(metadata: Json, name: str) -> Json:
    """Parse the action space in Minari's metadata: size, and bounds if there are any.

    `shape` is that of a stored action; `given_shape` is `RecordingInfo.action_shape`.
    """
    found = _read_actions(metadata, name)
    is_flat = found["kind"] == "discrete" or len(found["shape"]) == 1
    return {**found, "given_shape": None if is_flat else found["shape"]}


def _read_actions(metadata: Json, name: str) -> Json:
    try:
        space = json.loads(metadata["action_space"])
        if space["type"] == "Discrete":
            start = int(space["start"])
            return {"kind": "discrete", "size": int(space["n"]), "start": start, "shape": ()}
        if space["type"] in ("MultiDiscrete", "MultiBinary"):
            return _choices(space)
        if space["type"] != "Box":
            shape = f" of shape {space['shape']}" if "shape" in space else ""
            raise DataError(
                f"{name}: the action space is {space['type']}{shape}; only Box, Discrete, "
                "MultiDiscrete and MultiBinary are supported"
            )
        sizes = tuple(map(int, space["shape"]))
        low, high = (np.asarray(space[end], np.float32) for end in ("low", "high"))
        if low.shape != sizes or high.shape != sizes:
            raise ValueError(f"bounds of shape {low.shape}")
    except KeyError as error:
        raise DataError(f"{name}: its metadata has no {error}") from None
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name}: action_space in its metadata cannot be read ({error})") from None
    bounds = {"low": low.reshape(-1), "high": high.reshape(-1)}
    return {"kind": "continuous", "size": low.size, "shape": sizes, **bounds}


def _choices(space: Json) -> Json:
    """Parse a space of several choices or switches."""
    if space["type"] == "MultiBinary":
        shape = tuple(np.atleast_1d(np.asarray(space["n"], np.int64)).tolist())
        low, high, kind = np.zeros(shape), np.ones(shape), "multi_binary"
    else:
        sizes = np.asarray(space["nvec"], np.int64)
        low = np.broadcast_to(np.asarray(space.get("start", 0), np.int64), sizes.shape)
        high, kind, shape = low + sizes - 1, "multi_discrete", sizes.shape
    bounds = {"low": low.reshape(-1), "high": high.reshape(-1)}
    found = {end: bound.astype(np.float32) for end, bound in bounds.items()}
    return {"kind": kind, "size": low.size, "shape": shape, **found}


def minari_leaves(observation: ObservationSpec) -> list[MinariLeaf]:
    """Return where the leaves of observations are written in the group of an episode."""
    return [MinariLeaf(leaf, _path(observation, leaf)) for leaf in observation.leaves]


def _path(observation: ObservationSpec, leaf: ObservationLeaf) -> str:
    node: Any = _tree(observation)
    parts = ["observations"]
    for key in leaf.path:
        parts.append(TUPLE_KEY.format(key) if _is_tuple(node) else key)
        node = node[key]
    return "/".join(parts)


def minari_space(observation: ObservationSpec) -> Json:
    """Describe observations as Minari does."""
    tree = _tree(observation)
    return _space(tree)


def _tree(observation: ObservationSpec) -> Any:
    """The leaves in nested dictionaries; the leaf itself if there is no dictionary."""
    tree: Any = {}
    for leaf in observation.leaves:
        if not leaf.path:
            return leaf
        node = tree
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = leaf
    return tree


def _is_tuple(node: Any) -> bool:
    """Whether a node was a tuple: a leaf knows only the number of its place in it."""
    return list(node) == [str(index) for index in range(len(node))]


def _space(node: Any) -> Json:
    if isinstance(node, ObservationLeaf):
        return _leaf_space(node)
    if _is_tuple(node):
        return {"type": "Tuple", "subspaces": [_space(inner) for inner in node.values()]}
    return {"type": "Dict", "subspaces": {key: _space(inner) for key, inner in node.items()}}


def _leaf_space(leaf: ObservationLeaf) -> Json:
    if leaf.kind == "binary":
        return {"type": "MultiBinary", "n": list(leaf.shape)}
    if leaf.kind == "discrete" and not leaf.shape:
        (n,), (start,) = leaf.choices, leaf.starts
        return {"type": "Discrete", "dtype": "int64", "start": start, "n": n}
    if leaf.kind == "discrete":
        nvec, starts = (
            np.reshape(each, leaf.shape).tolist() for each in (leaf.choices, leaf.starts)
        )
        return {"type": "MultiDiscrete", "dtype": "int64", "nvec": nvec, "start": starts}
    low, high = -np.inf, np.inf
    if leaf.dtype.kind in "iu":
        low, high = np.iinfo(leaf.dtype).min, np.iinfo(leaf.dtype).max
    return {
        "type": "Box",
        "dtype": leaf.dtype.name,
        "shape": list(leaf.shape),
        "low": np.full(leaf.shape, low).tolist(),
        "high": np.full(leaf.shape, high).tolist(),
    }
