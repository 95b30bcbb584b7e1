"""Fingerprints of recorded data: do two loaded datasets have the same rows?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_training.types import Json

_NAMES = {
    "source": "source",
    "rows": "rows",
    "episodes": "episodes",
    "obs_dim": "numbers in an observation",
    "observation": "observations",
    "action_dim": "numbers in an action",
    "reward_sum": "sum of rewards",
    "obs_sum": "sum of observations",
    "action_sum": "sum of actions",
    "options": "options",
}


class Hasher:
    """Hash of rows that does not depend on how they are split into chunks."""

    def __init__(self) -> None:
        self._rows, self._ends = hashlib.sha256(), hashlib.sha256()

    def add(self, rows: np.ndarray, ended: np.ndarray) -> None:
        self._rows.update(np.ascontiguousarray(rows).data)
        self._ends.update(np.ascontiguousarray(ended).data)

    def digest(self) -> str:
        return hashlib.sha256(self._rows.digest() + self._ends.digest()).hexdigest()


def combined_fingerprint(parts: Sequence[Json]) -> Json:
    """Fingerprint of a dataset with several parts."""
    text = "\n".join(f"{part['sha256']} {part['options']}" for part in parts)
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "parts": list(parts)}


def subset_fingerprint(complete: Json, episodes: np.ndarray, rows: int) -> Json:
    """Fingerprint of the episodes of a dataset with these indices."""
    text = f"{complete['sha256']} {episodes.tolist()}"
    sums = dict.fromkeys(("reward_sum", "obs_sum", "action_sum"))  # unknown
    chosen = {"rows": rows, "episodes": len(episodes), **sums}
    return {**complete, **chosen, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def fingerprint_difference(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """Describe what differs between two fingerprints; None if the data is the same."""
    if saved.get("sha256") == present.get("sha256"):
        return None
    before, now = saved.get("parts") or [], present.get("parts") or []
    if len(before) != len(now):
        return f"number of datasets {len(before)}, now {len(now)}"
    differences = []
    for index, (old, new) in enumerate(zip(before, now, strict=True)):
        which = f"dataset {index + 1}: " if len(now) > 1 else ""
        changed = [
            f"{which}{name} {old.get(key)}, now {new.get(key)}"
            for key, name in _NAMES.items()
            if old.get(key) != new.get(key)
        ]
        if not changed and old.get("sha256") != new.get("sha256"):
            changed = [f"{which}values of some of the {new.get('rows')} rows"]
        differences += changed
    return "; ".join(differences) or "contents"
