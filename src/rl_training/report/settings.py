"""Settings of runs: what differs from the packaged configs, and between groups."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.algorithms.spec import list_algorithm_summaries
from rl_training.config_files import load_config, packaged_configs
from rl_training.errors import UserError
from rl_training.experiment.settings import NOT_LEARNING
from rl_training.report.numbers import text
from rl_training.types import Json

MAX_VALUE, MAX_KEY = 80, 60
MOST_SETTINGS = 100
"""Most settings that are shown for a group, or between groups"""
SHOWN_ELSEWHERE = ("algo", "env_id")


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are compared, with hyper-parameters beside the others."""
    values = {key: value for key, value in config.items() if key not in NOT_LEARNING}
    inner = values.pop("algo_kwargs", None)
    return {**values, **inner} if isinstance(inner, Mapping) else values


def is_offline(config: Mapping[str, Any]) -> bool:
    """Return whether runs with these settings learn from recorded data alone.

    Their steps are updates.
    """
    regime = config.get("regime")
    return (
        _first_regimes().get(str(config.get("algo"))) if regime is None else regime
    ) == "offline"


@functools.cache
def _first_regimes() -> dict[str, str]:
    """The regime of each algorithm that is used if the settings name none."""
    return {summary.name: summary.regimes[0] for summary in list_algorithm_summaries()}


def changes_json(config: Mapping[str, Any]) -> Json:
    """Return the packaged config that is nearest to a run's settings, and what differs from it.

    Those of the same environment come first, then the one with the fewest differences.
    """
    settings = flat(config)
    candidates = [
        (values.get("env_id") != settings.get("env_id"), len(differing), name, differing)
        for name, values in _packaged(str(settings.get("algo"))).items()
        for differing in [_differing(values, settings)]
    ]
    if not candidates:
        return {"default": None, "changes": []}
    *_, name, differing = min(candidates)
    return {"default": name, "changes": differing[:MOST_SETTINGS]}


def differences_json(configs: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the settings in which groups differ that have them, with the value of every group."""
    settings = [flat(config) for config in configs]
    rows = []
    for key in dict.fromkeys(key for values in settings for key in values):
        shown = [_shown(values[key]) if key in values else None for values in settings]
        if key not in SHOWN_ELSEWHERE and len({value for value in shown if value is not None}) > 1:
            rows.append({"key": text(key, MAX_KEY), "values": shown})
    return rows[:MOST_SETTINGS]


def _differing(packaged: Mapping[str, Any], settings: Mapping[str, Any]) -> list[list[str]]:
    """Return key, packaged value and own value; keys that an older version lacked do not differ."""
    return [
        [text(key, MAX_KEY), _shown(packaged[key]), _shown(value)]
        for key, value in settings.items()
        if key in packaged and key not in SHOWN_ELSEWHERE and _shown(packaged[key]) != _shown(value)
    ]


@functools.cache
def _packaged(algorithm: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name in packaged_configs():
        if name.startswith(f"{algorithm}/"):
            try:
                found[name] = flat(load_config(name).to_mapping())
            except UserError:  # an environment or package that is missing here
                continue
    return found


def _shown(value: Any) -> str:
    return text(json.dumps(value, default=repr, ensure_ascii=False), MAX_VALUE)
