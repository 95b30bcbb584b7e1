"""Settings of runs: which of them are learned with, and in which of them runs differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.errors import one_line
from rl_training.experiment.overview import shown_text

NOT_LEARNING = frozenset(
    {
        *("seed", "seeds", "run_name", "output_dir"),
        *("vectorization", "env_workers", "env_worker_cpus", "ray_address"),
        *("env_timeout", "env_restarts", "num_threads"),
        *("device", "compile", "float32_precision", "overlap"),
        *("eval_interval", "eval_episodes", "video_interval", "health"),
        *("checkpoint_interval", "checkpoint_replay", "replay_device", "replay_frame_stack"),
        *("log_interval", "trackers", "tracker_project"),
    }
)
"""Settings in which the runs of one group may differ: how a run is executed, watched and saved"""
MOST_SETTINGS, MAX_VALUE = 3, 24
"""Most settings that a label names, and the longest value in it"""
_ABSENT = object()


def comparable_settings(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return settings by dotted name; those that older versions lack get their defaults."""
    flat = _flat(configs)
    if all(values.keys() == flat[0].keys() for values in flat):
        return flat
    return _flat([_with_defaults(config) for config in configs])


def _with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    from rl_training.config import TrainConfig  # imports PyTorch

    try:
        complete = TrainConfig.from_saved(dict(config)).to_mapping()
    except (AttributeError, KeyError, TypeError, ValueError):  # not an algorithm of this package
        return config
    return {key: value for key, value in complete.items() if key not in NOT_LEARNING}


def _flat(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put the settings of sections beside the others, if all runs have the section."""
    keys = {key for config in configs for key in config}
    sections = {
        key for key in keys if all(isinstance(config.get(key), Mapping) for config in configs)
    }
    flat = []
    for config in configs:
        values = {key: value for key, value in config.items() if key not in sections}
        for section in sections:
            prefix = "" if section == "algo_kwargs" else f"{section}."
            values |= {f"{prefix}{key}": value for key, value in config[section].items()}
        flat.append(values)
    return flat


def group_labels(algorithm: str, settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name groups of one algorithm by the settings that differ between them."""
    if len(settings) == 1:
        return [algorithm]
    differing = differing_settings(settings)
    texts = []
    for values in settings:
        words = [
            f"{shown_text(key)}={short_value(values[key]) if key in values else 'absent'}"
            for key in differing[:MOST_SETTINGS]
        ]
        more = len(differing) - len(words)
        texts.append(", ".join(words) + (f" and {more} more" if more else ""))
    repeated = Counter(texts)
    return [
        f"{algorithm} ({text}{f', #{number}' if repeated[text] > 1 else ''})"
        for number, text in enumerate(texts, 1)
    ]


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings that are not the same everywhere."""
    keys = sorted({key for values in settings for key in values})
    return [
        key
        for key in keys
        if any(each.get(key, _ABSENT) != settings[0].get(key, _ABSENT) for each in settings)
    ]


def short_value(value: Any) -> str:
    """Write the value of a setting in a few characters."""
    if isinstance(value, Mapping):  # a section, such as `dataset`
        value = value.get("id") or value.get("path") or dict(value)
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return one_line(text, MAX_VALUE)
