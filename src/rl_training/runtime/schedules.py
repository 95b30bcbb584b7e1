"""When things are due: cadences and update counts that hold for any number of environments."""

from __future__ import annotations

from dataclasses import dataclass

from rl_training.algorithms.hyperparameters import MixedHyperparameters, OnlineHyperparameters
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


@dataclass(frozen=True)
class UpdateSchedule:
    """How many updates go with how many steps. By default a step is an update, as offline."""

    learning_starts: int = 0
    train_frequency: int = 1
    updates_per_block: int = 1

    @classmethod
    def of(cls, config: TrainConfig) -> UpdateSchedule:
        chosen = config.hyperparameters
        if config.resolved_regime == "offline" or not isinstance(chosen, OnlineHyperparameters):
            return cls()
        return cls(
            learning_starts(config), chosen.train_frequency, chosen.gradient_updates_per_step
        )

    def blocks_due(self, global_step: int) -> int:
        """Blocks of updates that should have been made by `global_step` steps."""
        return max(0, global_step - self.learning_starts) // self.train_frequency


def learning_starts(config: TrainConfig) -> int:
    """Environment steps before the first update of a run that collects its own experience."""
    chosen = config.hyperparameters
    assert isinstance(chosen, OnlineHyperparameters)
    assert chosen.learning_starts != "auto", "resolved for the run"
    return chosen.learning_starts


def pretraining_updates(config: TrainConfig) -> int:
    """Updates on recorded data alone that come before the first step."""
    hyperparameters = config.algo_kwargs
    if config.resolved_regime != "mixed" or not isinstance(hyperparameters, MixedHyperparameters):
        return 0
    return hyperparameters.offline_pretrain_updates


def steps_at_once(config: TrainConfig) -> int:
    """How far the step counter advances at a time."""
    return 1 if config.resolved_regime == "offline" else config.num_envs


def planned_updates(config: TrainConfig) -> int:
    """Gradient steps that a run makes from start to end: the horizon of its schedules."""
    rounds = -(-config.total_timesteps // steps_at_once(config))
    schedule = UpdateSchedule.of(config)
    updates = schedule.blocks_due(rounds * steps_at_once(config)) * schedule.updates_per_block
    updates += pretraining_updates(config)
    return updates if config.max_updates is None else min(updates, config.max_updates)
