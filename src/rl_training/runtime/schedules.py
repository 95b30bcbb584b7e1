"""When things are due: cadences and update counts that hold for any number of environments."""

from __future__ import annotations

from dataclasses import dataclass

from rl_training.algorithms.hyperparameters import Hyperparameters, OnlineHyperparameters
from rl_training.config import TrainConfig


@dataclass
class Cadence:
    """Something due every `interval` steps, however unevenly the step counter advances."""

    interval: int
    last: int = 0

    def crossed(self, step: int) -> bool:
        """Whether a multiple of the interval was passed since the last time; 0 is never."""
        if self.interval == 0 or step // self.interval == self.last // self.interval:
            return False
        self.last = step
        return True


def blocks_due(hyperparameters: Hyperparameters, global_step: int) -> int:
    """Blocks of updates that should have been made by `global_step` environment steps."""
    if not isinstance(hyperparameters, OnlineHyperparameters):
        return global_step
    past = global_step - hyperparameters.learning_starts
    return max(0, past) // hyperparameters.train_frequency


def updates_per_block(hyperparameters: Hyperparameters) -> int:
    if isinstance(hyperparameters, OnlineHyperparameters):
        return hyperparameters.gradient_updates_per_step
    return 1


def planned_updates(config: TrainConfig) -> int:
    """Gradient steps that a run makes from start to end: the horizon of its schedules."""
    hyperparameters = config.algo_kwargs
    rounds = -(-config.total_timesteps // config.num_envs)
    updates = blocks_due(hyperparameters, rounds * config.num_envs)
    updates *= updates_per_block(hyperparameters)
    return updates if config.max_updates is None else min(updates, config.max_updates)
