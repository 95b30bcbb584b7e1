"""Relabel the episodes of training environments when they end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl_training.data.hindsight.episodes import UnfinishedEpisodes
from rl_training.data.hindsight.relabelling import Hindsight
from rl_training.data.n_step import Transitions
from rl_training.errors import EnvironmentRuntimeError
from rl_training.types import SpaceInfo


class EpisodeRelabeller:
    """Returns the relabelled transitions of the episodes of all seeds when they end.

    The choice of goals depends only on the seed and on how many episodes it has ended, so that a
    seed gets the same goals in any population, and after it is resumed.
    """

    def __init__(
        self, hindsight: Hindsight, seeds: Sequence[int], num_envs: int, spaces: SpaceInfo
    ) -> None:
        """`seeds` are those of the random streams that choose the goals, one for each seed."""
        self._hindsight, self._seeds, self._num_envs = hindsight, list(seeds), num_envs
        self._unfinished = UnfinishedEpisodes(len(seeds) * num_envs, spaces)
        self._ended = [0] * len(seeds)

    def add(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        next_obs: np.ndarray,
        active: np.ndarray | None = None,
    ) -> tuple[list[tuple[int, Transitions]], dict[int, EnvironmentRuntimeError]]:
        """Add a step of every environment, or of the active ones.

        Returns the relabelled transitions of the episodes that ended, with the index of their
        environment, and the errors by seed.
        """
        found: list[tuple[int, Transitions]] = []
        errors: dict[int, EnvironmentRuntimeError] = {}
        ended = self._unfinished.add(obs, action, reward, terminated, truncated, next_obs, active)
        for index, episode in ended.items():
            seed_index = index // self._num_envs
            chooser = self._seeds[seed_index], self._ended[seed_index]
            self._ended[seed_index] += 1
            try:
                found.append((index, self._hindsight.transitions(episode, chooser)))
            except EnvironmentRuntimeError as error:
                errors[seed_index] = error
        return found, errors

    def drop(self, lost: np.ndarray) -> None:
        """Forget the episodes of environments that lost them, `(n,)` bool."""
        self._unfinished.drop(lost)

    def state_dict(self, seed_index: int) -> dict[str, np.ndarray]:
        """The unfinished episodes of a seed, and how many have ended."""
        unfinished = self._unfinished.state_dict(self._environments_of(seed_index))
        return {"ended": np.array(self._ended[seed_index]), **unfinished}

    def load_state_dict(
        self, state: Mapping[str, np.ndarray], seed_index: int, *, restarts: bool
    ) -> None:
        """Restore a seed; with `restarts`, its environments do not continue their episodes."""
        self._ended[seed_index] = int(state["ended"])
        if not restarts:
            self._unfinished.load_state_dict(state, self._environments_of(seed_index))

    def _environments_of(self, seed_index: int) -> slice:
        return slice(seed_index * self._num_envs, (seed_index + 1) * self._num_envs)
