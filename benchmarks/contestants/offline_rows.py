"""Recorded steps with the sizes of HalfCheetah, the same for every contestant."""

from __future__ import annotations

import numpy as np

OBS, ACTION, EPISODE = 17, 6, 1_000


def offline_rows(rows: int) -> dict[str, np.ndarray]:
    """Random numbers in the layout of D4RL, in episodes that are truncated, not terminated."""
    stream = np.random.default_rng(0)
    timeouts = np.zeros(rows, dtype=bool)
    timeouts[EPISODE - 1 :: EPISODE] = True
    return {
        "observations": stream.standard_normal((rows, OBS), dtype=np.float32),
        "actions": np.tanh(stream.standard_normal((rows, ACTION), dtype=np.float32)),
        "rewards": stream.standard_normal(rows, dtype=np.float32),
        "terminals": np.zeros(rows, dtype=bool),
        "timeouts": timeouts,
        "action_low": np.full(ACTION, -1.0, dtype=np.float32),
        "action_high": np.full(ACTION, 1.0, dtype=np.float32),
    }
