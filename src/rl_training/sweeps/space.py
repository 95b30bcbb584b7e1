"""What a sweep varies: ranges to search, or lists that form a grid."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_training.errors import ConfigError
from rl_training.validation import parse_count, short, suggestion

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Params = dict[str, Any]
"""Values of the parameters of a trial, by config key such as `algo_kwargs.tau`"""
KINDS = ("log", "uniform", "int", "log_int", "choice")
_NEEDS_STEP = ("uniform", "int")
INSIDE = 0.381966
"""Where an example of a range is, between 0 and 1: rarely at a round number"""
MAX_CHOICES = 1_000
MAX_GRID = 100_000
"""Most points of a grid"""


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, both included."""

    kind: str
    low: float
    high: float
    step: float | None = None

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.kind in ("int", "log_int"):
            return IntDistribution(
                int(self.low), int(self.high), log=self.kind == "log_int", step=int(self.step or 1)
            )
        return FloatDistribution(self.low, self.high, log=self.kind == "log", step=self.step)

    def to_value(self, parameter: Any) -> Any:
        return parameter

    def examples(self) -> list[Any]:
        """The bounds and a number between them, of the type that Optuna suggests."""
        if self.kind in ("int", "log_int"):
            return [int(self.low), int(self.high)]
        between = self.low + (INSIDE * (self.high - self.low) if self.step is None else self.step)
        return [self.low, self.high, float(between)]

    def to_json(self) -> dict[str, Any]:
        bounds = {self.kind: [self.low, self.high]}
        return bounds if self.step is None else {**bounds, "step": self.step}


@dataclass(frozen=True)
class Choice:
    """One of several values of any type. Optuna knows them by their labels."""

    values: tuple[Any, ...]

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.labels)

    @property
    def labels(self) -> list[Any]:
        """The values themselves if they are of one simple type, or else their JSON.

        1, 1.0 and true are different settings, but equal to Optuna.
        """
        kinds = {type(value) for value in self.values}
        if len(kinds) == 1 and kinds <= {bool, int, float, str}:
            return list(self.values)
        return [json.dumps(value) for value in self.values]

    def to_value(self, parameter: Any) -> Any:
        return self.values[self.labels.index(parameter)]

    def examples(self) -> list[Any]:
        return list(self.values)

    def to_json(self) -> dict[str, Any]:
        return {"choice": list(self.values)}


Dimension = Range | Choice


class Space:
    """The parameters of a sweep."""

    def __init__(self, dimensions: Mapping[str, Dimension]) -> None:
        self.dimensions = dict(dimensions)

    def distributions(self) -> dict[str, BaseDistribution]:
        return {key: each.distribution() for key, each in self.dimensions.items()}

    def to_values(self, parameters: Mapping[str, Any]) -> Params:
        """Return the settings that Optuna's parameters stand for."""
        return {key: each.to_value(parameters[key]) for key, each in self.dimensions.items()}

    def grid(self) -> list[dict[str, Any]]:
        """All combinations of choices, as Optuna's parameters; the last key varies fastest."""
        choices = [each for each in self.dimensions.values() if isinstance(each, Choice)]
        combinations = itertools.product(*(each.labels for each in choices))
        return [dict(zip(self.dimensions, point, strict=True)) for point in combinations]

    def grid_size(self) -> int:
        return math.prod(
            len(each.values) for each in self.dimensions.values() if isinstance(each, Choice)
        )


def read_search(values: Mapping[str, Any]) -> Space:
    """Read the section `search` of a sweep file."""
    return Space({key: _dimension(f"search.{key}", given) for key, given in values.items()})


def read_grid(values: Mapping[str, Any]) -> Space:
    """Read the section `grid` of a sweep file."""
    space = Space({key: _choice(f"grid.{key}", given) for key, given in values.items()})
    if space.grid_size() > MAX_GRID:
        raise ConfigError(
            f"grid: has {space.grid_size():,} combinations; use at most {MAX_GRID:,}, or search"
        )
    return space


def _dimension(name: str, given: Any) -> Dimension:
    if isinstance(given, list):
        return _choice(name, given)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{name} = {short(given)}: must be a range such as {{log: [1e-4, 1e-2]}} or "
            "{choice: [1, 2, 4]}"
        )
    kinds = [key for key in given if key != "step"]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        wrong = next((key for key in kinds if key not in KINDS), None)
        hint = "" if wrong is None else suggestion(str(wrong), KINDS)
        raise ConfigError(
            f"{name} = {short(dict(given))}: must have exactly one of {', '.join(KINDS)}{hint}"
        )
    if kinds[0] == "choice":
        if "step" in given:
            raise ConfigError(f"{name}.step: a choice has no step")
        return _choice(f"{name}.choice", given["choice"])
    return _range(name, kinds[0], given)


def _range(name: str, kind: str, given: Mapping[str, Any]) -> Range:
    bounds = given[kind]
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise ConfigError(f"{name}.{kind} = {short(bounds)}: must be [lowest, highest]")
    low, high = (_number(f"{name}.{kind}", bound) for bound in bounds)
    whole = kind in ("int", "log_int")
    if whole and not (float(low).is_integer() and float(high).is_integer()):
        raise ConfigError(f"{name}.{kind} = {short(bounds)}: must be integers")
    if low >= high:
        raise ConfigError(
            f"{name}.{kind} = {short(bounds)}: is empty; the first bound must be the smaller one"
        )
    if kind in ("log", "log_int") and low <= 0:
        raise ConfigError(f"{name}.{kind} = {short(bounds)}: bounds must be positive")
    return Range(kind, low, high, _step(name, kind, given, high - low))


def _step(name: str, kind: str, given: Mapping[str, Any], width: float) -> float | None:
    if "step" not in given:
        return None
    step = _number(f"{name}.step", given["step"])
    if kind not in _NEEDS_STEP:
        raise ConfigError(f"{name}.step: only {' and '.join(_NEEDS_STEP)} have a step")
    if not 0 < step <= width or (kind == "int" and not float(step).is_integer()):
        raise ConfigError(f"{name}.step = {short(step)}: must be positive and fit into the range")
    return step


def _number(name: str, value: Any) -> float:
    if isinstance(value, str) and (count := parse_count(value)) is not None:
        return count
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ConfigError(f"{name} = {short(value)}: must be a finite number")
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer with hundreds of digits
        return False


def _choice(name: str, given: Any) -> Choice:
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{name} = {short(given)}: must be a non-empty list of values")
    if len(given) > MAX_CHOICES:
        raise ConfigError(f"{name}: has {len(given):,} values; use at most {MAX_CHOICES:,}")
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} = {short(given)}: has a value that JSON cannot store") from None
    values = tuple(with_counts(value) for value in given)
    labels = Choice(values).labels
    if len(set(labels)) < len(labels):
        raise ConfigError(f"{name} = {short(given)}: repeats a value")
    return Choice(values)


def with_counts(value: Any) -> Any:
    """Replace text such as `200k` by the number; other values stay."""
    has_unit = isinstance(value, str) and value[-1:].lower() in ("k", "m", "b")
    count = parse_count(value) if has_unit else None
    return value if count is None else count
