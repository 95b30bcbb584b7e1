"""The files of a policy on the Hub. Needs no PyTorch, so that a pull is fast."""

from __future__ import annotations

from rl_training.checkpoints.format import (
    MANIFEST,
    MAX_JSON_BYTES,
    MAX_TENSOR_BYTES,
    MODEL,
    POLICY,
)
from rl_training.config_files import MAX_BYTES
from rl_training.types import Json

CARD, CONFIG, RESULTS, VIDEO = "README.md", "config.yaml", "results.json", "replay.mp4"
LIMITS = {
    MANIFEST: 2**16,
    POLICY: MAX_JSON_BYTES,
    MODEL: MAX_TENSOR_BYTES,
    CONFIG: MAX_BYTES,
    RESULTS: MAX_JSON_BYTES,
    CARD: 2**20,
    VIDEO: 256 * 2**20,
}
"""The largest size of each file in bytes; the manifest comes first"""
REQUIRED = (MANIFEST, POLICY, MODEL)
"""The files without which there is no policy"""


def readable_size(size: int) -> str:
    """Return a number of bytes as people read it."""
    value = float(size)
    for unit in ("B", "kB", "MB"):
        if value < 1_000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1_000
    return f"{value:.1f} GB"


def observation_size(policy: Json) -> int | None:
    """Return how many numbers an observation of a policy has; None if it is not one vector.

    `policy` is the content of its `policy.json`, which may be damaged.
    """
    size, leaves = policy.get("obs_dim"), policy.get("observation")
    match leaves:
        case [{"name": "", "kind": "numbers", "shape": [only]}]:
            size = only
        case [*_]:
            return None
    return size if type(size) is int and size > 0 else None
