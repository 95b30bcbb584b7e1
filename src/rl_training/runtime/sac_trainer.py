"""SAC's trainer."""

from __future__ import annotations

from collections.abc import Sequence

from rl_training.callbacks import Callback
from rl_training.config_files import ConfigSource
from rl_training.runtime.trainer import train_algorithm
from rl_training.types import TrainResult


def train_sac(config: ConfigSource, *, callbacks: Sequence[Callback] | None = None) -> TrainResult:
    """Train SAC from a `TrainConfig`, a mapping, a path or a packaged name."""
    return train_algorithm("sac", config, callbacks)
