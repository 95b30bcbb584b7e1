"""The description of an algorithm, and the lookup of algorithms by name.

A built-in algorithm is a module of this package that has the algorithm's name and defines `SPEC`.
Other algorithms are registered by `register_algorithm` or through the entry-point group
`rl_training.algorithms`.

A `SPEC` has the algorithm's class and so needs PyTorch. An `AlgorithmSummary` has its texts alone;
those of the built-in algorithms are in a generated file.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from rl_training.errors import ConfigError
from rl_training.types import ACTION_KINDS, ActionKind, Regime, SpaceInfo
from rl_training.validation import short, suggestion

if TYPE_CHECKING:
    from rl_training.algorithms.base import Algorithm
    from rl_training.algorithms.hyperparameters import Hyperparameters

ENTRY_POINT_GROUP = "rl_training.algorithms"


@dataclass(frozen=True)
class AlgorithmSummary:
    """Name and description of an algorithm."""

    name: str
    title: str
    reference: str
    actions: tuple[ActionKind, ...]
    regimes: tuple[Regime, ...]
    use_when: str = ""

    @property
    def action_kind(self) -> str:
        return action_kinds(self.actions)


@dataclass(frozen=True)
class AlgorithmSpec:
    """Name, description and implementation of an algorithm."""

    name: str
    title: str
    reference: str
    algorithm: type[Algorithm]
    regimes: tuple[Regime, ...] = ("online",)
    """How the algorithm can be trained; the first regime is the default"""
    actions: tuple[ActionKind, ...] = ("continuous",)
    """The kinds of actions that the algorithm supports; the first is named in examples"""
    normalizes_observations: bool = False
    """Whether observations are normalized by default"""
    uses_next_actions: bool = False
    """Whether batches have a `next_action`. Only recorded data of continuous actions has one"""
    use_when: str = ""
    """For which problems to choose this algorithm, in a few words"""

    def __post_init__(self) -> None:
        fits_data = self.regimes == ("offline",) and self.actions == ("continuous",)
        if self.uses_next_actions and not fits_data:
            raise ValueError(
                f"{self.name}: uses_next_actions needs continuous actions and regimes=('offline',),"
                " because a replay buffer does not store next actions"
            )

    @property
    def hyperparameters_type(self) -> type[Hyperparameters]:
        return self.algorithm.hyperparameters_type

    @property
    def action_kind(self) -> str:
        """The supported kinds of actions, separated by commas."""
        return action_kinds(self.actions)

    @property
    def summary(self) -> AlgorithmSummary:
        return AlgorithmSummary(
            self.name, self.title, self.reference, self.actions, self.regimes, self.use_when
        )

    def fits(self, spaces: SpaceInfo) -> bool:
        """Return whether the algorithm supports these spaces."""
        return spaces.action_kind in self.actions


def action_kinds(kinds: tuple[ActionKind, ...], separator: str = ", ") -> str:
    """Name kinds of actions; `any` stands for all of them."""
    return "any" if set(kinds) == set(ACTION_KINDS) else separator.join(kinds)


_registered: dict[str, AlgorithmSpec] = {}


def register_algorithm(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Register an algorithm; raise `ConfigError` if another one has its name."""
    known = _registered.get(spec.name) or _built_in(spec.name)
    if known is not None and known.algorithm is not spec.algorithm:
        raise ConfigError(f"algorithm name {spec.name!r} is already used by {known.title}")
    _registered[spec.name] = spec
    return spec


def get_algorithm_spec(name: str) -> AlgorithmSpec:
    """Return the algorithm of that name, or raise a `ConfigError` that lists all names."""
    spec = _registered.get(name) or _built_in(name) or _from_entry_points().get(name)
    if spec is None:
        known = [known.name for known in list_algorithm_specs()]
        hint = suggestion(name, known)
        raise ConfigError(
            f"algo = {short(name)}: unknown algorithm{hint or ''} (known: {', '.join(known)})"
        )
    return spec


def list_algorithm_specs() -> list[AlgorithmSpec]:
    """Return all algorithms, sorted by name."""
    built_in = {spec.name: spec for spec in list_built_in_specs()}
    specs = {**_from_entry_points(), **built_in, **_registered}
    return sorted(specs.values(), key=lambda spec: spec.name)


def unknown_setting_hint(name: str, known: Iterable[str]) -> str:
    """Name the algorithms that have a setting, or the known name closest to it, or all names."""
    specs = list_algorithm_specs()
    having = [spec.name for spec in specs if name in spec.hyperparameters_type.model_fields]
    if having:
        return f"; it is a setting of {', '.join(having)}"
    names = sorted(known)
    return suggestion(name, names) or f"; allowed: {', '.join(names)}"


def list_algorithm_summaries() -> list[AlgorithmSummary]:
    """Describe all algorithms, sorted by name; import PyTorch only for those of other packages."""
    others = {**_from_entry_points(), **_registered}
    summaries = {name: spec.summary for name, spec in others.items()}
    summaries.update((summary.name, summary) for summary in _built_in_summaries())
    return sorted(summaries.values(), key=lambda summary: summary.name)


def _built_in_summaries() -> list[AlgorithmSummary]:
    file = resources.files("rl_training") / "assets" / "algorithms.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    return [
        AlgorithmSummary(
            **{**entry, "actions": tuple(entry["actions"]), "regimes": tuple(entry["regimes"])}
        )
        for entry in entries
    ]


def list_built_in_specs() -> list[AlgorithmSpec]:
    """Return the algorithms of this package, sorted by name."""
    package = importlib.import_module("rl_training.algorithms")
    found = (_built_in(module.name) for module in pkgutil.iter_modules(package.__path__))
    return sorted((spec for spec in found if spec is not None), key=lambda spec: spec.name)


@functools.cache
def _built_in(name: str) -> AlgorithmSpec | None:
    module_name = f"rl_training.algorithms.{name}"
    if not name.isidentifier() or importlib.util.find_spec(module_name) is None:
        return None
    spec = getattr(importlib.import_module(module_name), "SPEC", None)
    return spec if isinstance(spec, AlgorithmSpec) else None


def _from_entry_points() -> dict[str, AlgorithmSpec]:
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {spec.name: spec for spec in (point.load() for point in points)}
