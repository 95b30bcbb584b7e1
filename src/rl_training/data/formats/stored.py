"""What every written format stores: the columns of the steps, and how the data was made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from rl_training.data.formats.recording import Recording, RecordingInfo, require_finite
from rl_training.data.leaves.columns import NEXT_OBSERVATIONS, OBSERVATIONS, leaf_key
from rl_training.types import ActionKind, Json

Arrays = dict[str, np.ndarray]

PROVENANCE = "provenance"
"""Name of the entry in a file"""
MAX_BYTES = 100_000
TYPES: dict[str, type[np.generic]] = {"discrete": np.int64, "binary": np.bool_}
"""The types in which leaves are written that are stored otherwise"""
TEXTS = ("command", "source", "source_sha256", "version")
LONGEST = 500
ACTION_TYPES: dict[ActionKind, type[np.generic]] = {
    "continuous": np.float32,
    "discrete": np.int64,
    "multi_discrete": np.int64,
    "multi_binary": np.bool_,
}


def stored_types(info: RecordingInfo) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
    """Return the shape of one step and the type of each column, with the names of D4RL's layout."""
    action_type = ACTION_TYPES[info.action_kind]
    leaves = info.observation.leaves
    obs, next_obs = (
        {leaf_key(key, x.name): (x.shape, TYPES.get(x.kind, x.dtype.type)) for x in leaves}
        for key in (OBSERVATIONS, NEXT_OBSERVATIONS)
    )
    return {
        **obs,
        "actions": ((1 if info.action_kind == "discrete" else info.action_dim,), action_type),
        "rewards": ((), np.float32),
        **next_obs,
        "terminals": ((), np.bool_),
        "timeouts": ((), np.bool_),
    }


def stored_steps(recording: Recording) -> Iterator[Arrays]:
    """Yield the columns of the kept steps in chunks; actions are in the environment's units."""
    info, types = recording.info, stored_types(recording.info)
    for steps in recording.chunks():
        require_finite(steps, info)
        columns = {
            **_leaves(steps.obs, OBSERVATIONS, info),
            "actions": _environment_actions(steps.action, info),
            "rewards": steps.reward,
            **_leaves(steps.next_obs, NEXT_OBSERVATIONS, info),
            "terminals": steps.terminated,
            "timeouts": steps.ended & ~steps.terminated,
        }
        kept = slice(None) if steps.kept is None else steps.kept
        yield {
            key: columns[key][kept].astype(dtype, copy=False) for key, (_, dtype) in types.items()
        }


def _leaves(rows: np.ndarray, key: str, info: RecordingInfo) -> Arrays:
    """The arrays of the leaves of observations, by the names under which they are stored."""
    if info.given_observation is None:
        return {key: rows}
    leaves = info.given_observation.unpack(rows)
    return {leaf_key(key, name): values for name, values in leaves.items()}


def _environment_actions(actions: np.ndarray, info: RecordingInfo) -> np.ndarray:
    if not info.actions_scaled or info.action_low is None or info.action_high is None:
        return actions
    low, high = info.action_low.astype(np.float64), info.action_high.astype(np.float64)
    return (1.0 - actions) * (0.5 * low) + (1.0 + actions) * (0.5 * high)


def provenance_of(value: Any) -> Json | None:
    """Return what a file says about its origin; None if there is nothing that can be shown.

    `value` is an object, or JSON text. Only short values of known names are kept.
    """
    if isinstance(value, str | bytes):
        try:
            value = json.loads(value) if len(value) <= MAX_BYTES else None
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, dict):
        return None
    found: Json = {key: value[key][:LONGEST] for key in TEXTS if isinstance(value.get(key), str)}
    if type(value.get("source_episodes")) is int:
        found["source_episodes"] = value["source_episodes"]
    options = value.get("options")
    if isinstance(options, dict):
        found["options"] = {str(key)[:LONGEST]: repr(options[key])[:LONGEST] for key in options}
    return found or None
