"""What the leaves of recorded observations are: described in files, chosen by users, compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from rl_training.errors import ConfigError, DataError, one_line
from rl_training.observations import (
    MAX_AXES,
    MAX_WORDS,
    WORD_BYTES,
    LeafKind,
    NumberType,
    ObservationLeaf,
    ObservationSpec,
    select_names,
)
from rl_training.validation import StrictModel, suggestion, validate

DESCRIPTION = "observation_leaves"
"""Name of the entry of a file that says what its observations consist of"""
MAX_DESCRIPTION_BYTES = 2**22
MAX_LEAVES = 10**4
MAX_DEPTH = 50
"""Most levels of dictionaries and tuples"""
SHOWN_NAMES = 20

_KINDS = {"numbers": "numbers", "image": "an image", "discrete": "discrete", "binary": "binary"}


class LeafDescription(StrictModel):
    """A leaf of an observation, in `policy.json` and in files of recorded data."""

    name: Annotated[str, Field(max_length=1000)]
    kind: LeafKind
    shape: Annotated[
        list[Annotated[int, Field(ge=1, le=WORD_BYTES * MAX_WORDS)]], Field(max_length=MAX_AXES)
    ]
    choices: Annotated[list[Annotated[int, Field(ge=1, le=2**31)]], Field(max_length=10**6)]
    starts: Annotated[list[Annotated[int, Field(ge=-(2**31), lt=2**31)]], Field(max_length=10**6)]
    number_type: NumberType = "float32"
    """Only written if it is another one, as earlier versions do not know it"""

    @model_serializer(mode="wrap")
    def _without_float32(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        if self.number_type == "float32":
            del values["number_type"]
        return values

    def leaf(self) -> ObservationLeaf:
        leaf = ObservationLeaf(
            self.name,
            self.kind,
            tuple(self.shape),
            tuple(self.choices),
            tuple(self.starts),
            self.number_type,
        )
        if self.kind != "numbers" and self.number_type != "float32":
            raise ValueError(f"the {leaf.label} has a number_type, but is {self.kind}")
        expected = leaf.numbers if self.kind == "discrete" else 0
        if len(self.choices) != expected or len(self.starts) != expected:
            raise ValueError(f"the {leaf.label} must have {expected} choices and starts")
        if any(start + n > 2**31 for start, n in zip(self.starts, self.choices, strict=True)):
            raise ValueError(f"the {leaf.label} has values that are too large for int32")
        return leaf


class _Description(StrictModel):
    leaves: Annotated[list[LeafDescription], Field(min_length=1, max_length=MAX_LEAVES)]

    def spec(self) -> ObservationSpec:
        return checked_spec(tuple(leaf.leaf() for leaf in self.leaves))


def checked_spec(leaves: tuple[ObservationLeaf, ...]) -> ObservationSpec:
    """Return the description of these leaves; raise `ValueError` if they cannot be one row."""
    names = {leaf.name for leaf in leaves}
    if len(names) < len(leaves) or ("" in names and len(leaves) > 1):
        raise ValueError("the leaves do not have different names")
    spec = ObservationSpec(leaves)
    if spec.size > MAX_WORDS:
        raise ValueError(f"an observation has {4 * spec.size:,} bytes, which is too many")
    return spec


def write_description(spec: ObservationSpec) -> str:
    """Return the text that `read_description` reads."""
    return json.dumps(spec.to_json())


def read_description(text: str | bytes, name: str) -> ObservationSpec:
    """Read what a file says about its observations; raise `DataError` if it cannot be right."""
    try:
        if len(text) > MAX_DESCRIPTION_BYTES:
            raise ValueError("it is too long")
        return leaves_from(json.loads(text))
    except (ValueError, RecursionError, ConfigError) as error:
        raise DataError(f"{name}: {DESCRIPTION} is damaged ({one_line(str(error), 200)})") from None


def leaves_from(values: Any) -> ObservationSpec:
    """Check descriptions of leaves as JSON values; raises `ValueError` or `ConfigError`."""
    return validate(_Description, {"leaves": values}).spec()


@dataclass(frozen=True)
class LeafChoice:
    """Which leaves of recorded observations are read, and what they are if the data is silent."""

    keys: Sequence[str] | None = None
    """The `observation_keys` of a config; None: all leaves"""
    expected: ObservationSpec | None = None
    """The environment's observations: data without a description is read as those, if it can"""

    def select(self, names: Sequence[str], source: str) -> list[str]:
        """Return the chosen ones of these names; raise `DataError` if one does not exist."""
        try:
            return select_names(names, self.keys)
        except KeyError as missing:
            (key,) = missing.args
            raise DataError(
                f"{source}: observation_keys: the data has no observation {key!r}"
                f"{suggestion(key, names)} (it has {_listed(names)})"
            ) from None

    def expected_leaf(self, name: str) -> ObservationLeaf | None:
        leaves = () if self.expected is None else self.expected.leaves
        return next((leaf for leaf in leaves if leaf.name == name), None)


ALL_LEAVES = LeafChoice()


def difference(data: ObservationSpec, other: ObservationSpec, owner: str) -> str | None:
    """Say which leaves of the data are not those of `owner`; None if all are the same.

    The order of the leaves may differ, and the types in which numbers are stored.
    """
    ours, theirs = ({leaf.name: leaf for leaf in spec.leaves} for spec in (data, other))
    missing = [name for name in theirs if name not in ours]
    added = [name for name in ours if name not in theirs]
    if missing:
        return (
            f"has no {_named(missing[0])}, which {owner} has; its observations are "
            f"{_shown(data)}, {owner}'s are {_shown(other)}"
        )
    if added:
        return (
            f"has the {_named(added[0])}, which {owner} does not have; to leave it out, set "
            f"observation_keys: [{one_line(', '.join(theirs), 200)}]"
        )
    for name, leaf in ours.items():
        if replace(leaf, number_type="float32") != replace(theirs[name], number_type="float32"):
            return f"the {leaf.label} is {_leaf(leaf)}, {owner}'s is {_leaf(theirs[name])}"
    return None


def _leaf(leaf: ObservationLeaf) -> str:
    text = f"{_KINDS[leaf.kind]} of shape {leaf.shape}"
    if leaf.kind != "discrete":
        return text
    ranges = [(start, start + n - 1) for start, n in zip(leaf.starts, leaf.choices, strict=True)]
    return f"{text} with values {', '.join(f'{a} to {b}' for a, b in ranges[:8])}"


def _named(name: str) -> str:
    return f"observation {name!r}" if name else "observation that is one array without a name"


def _shown(spec: ObservationSpec) -> str:
    return one_line(spec.describe(), 300)


def _listed(names: Sequence[str]) -> str:
    if list(names) == [""]:
        return "one array without a name"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return one_line(", ".join(map(repr, names[:SHOWN_NAMES])), 500) + more
