"""The books kept of each environment's current episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EpisodeEnd:
    """An episode that ended in this step."""

    env_index: int
    episode_return: float
    length: int


class EpisodeBooks:
    """Return, length and number of every environment's episode, and the seed it starts from.

    There are `num_envs` environments to each of `seeds`; an episode's seed is made of its group's
    seed, the environment's index within the group and the episode's number.
    """

    def __init__(self, seeds: Sequence[int], num_envs: int) -> None:
        self._seeds, self._num_envs = seeds, num_envs
        total = len(seeds) * num_envs
        self.returns = np.zeros(total, dtype=np.float64)
        self.lengths = np.zeros(total, dtype=np.int64)
        self.numbers = np.zeros(total, dtype=np.int64)
        self._everyone = np.ones(total, dtype=np.int64)

    def seed(self, index: int, episodes_ahead: int = 0) -> int:
        """The seed of an environment's current episode, or of a later one."""
        group, within = divmod(index, self._num_envs)
        episode = int(self.numbers[index]) + episodes_ahead
        sequence = np.random.SeedSequence(self._seeds[group], spawn_key=(within, episode))
        return int(sequence.generate_state(1)[0])

    def record(self, reward: np.ndarray, acted: np.ndarray | None) -> None:
        """Enter a step of all environments, or of those in the mask `acted`."""
        # Not in place: for a few numbers, NumPy takes four times as long to look for overlaps.
        self.returns = self.returns + reward
        self.lengths = self.lengths + (self._everyone if acted is None else acted)

    def restart(self, index: int) -> None:
        """The current episode begins (again)."""
        self.returns[index] = 0.0
        self.lengths[index] = 0

    def end(self, index: int) -> EpisodeEnd:
        """Close an episode's books and open those of the next."""
        end = EpisodeEnd(index, float(self.returns[index]), int(self.lengths[index]))
        self.restart(index)
        self.numbers[index] += 1
        return end
