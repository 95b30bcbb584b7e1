"""The common implementation of the trainers, such as `train_sac`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_training.callbacks import Callback, as_callbacks
from rl_training.config import ConfigSource
from rl_training.config_files import load_config
from rl_training.errors import ConfigError
from rl_training.reporting.progress import with_progress
from rl_training.training.run import start_run
from rl_training.types import TrainResult


def train_algorithm(
    name: str,
    config: ConfigSource,
    callbacks: Sequence[Callback] | None,
    progress: bool | None = None,
) -> TrainResult:
    """Train the algorithm `name` with one seed. A mapping does not need the key `algo`."""
    resolved = load_config({"algo": name, **config} if isinstance(config, Mapping) else config)
    if resolved.algo != name:
        raise ConfigError(f"algo = {resolved.algo!r}: this trainer is for {name!r}")
    if resolved.seeds is not None:
        raise ConfigError("seeds: a trainer supports one seed; use rl_training.train for several")
    return start_run(resolved, callbacks=with_progress(as_callbacks(callbacks), progress))
