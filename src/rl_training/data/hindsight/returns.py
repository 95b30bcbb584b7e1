"""Give collected transitions the return of their episode, which is known when it ends."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rl_training.data.episodes import episode_values
from rl_training.data.hindsight.episodes import Episode, UnfinishedEpisodes
from rl_training.data.n_step import Transitions
from rl_training.types import ReturnAfterTruncation, SpaceInfo

MOST_STEPS = 10_000
"""Steps after which an episode's transitions are stored although it goes on. Their returns are
those of an episode that is truncated there"""


class EpisodesWithReturns:
    """Turns the steps of environments into transitions with returns, episode by episode.

    It has the interface of `NStepAccumulator`, but the transitions of an episode come all at once,
    when it ends. Those of an episode that never ends are not learned from, except that an episode
    is divided every `MOST_STEPS` steps.
    """

    def __init__(
        self,
        n_step: int,
        gamma: float,
        num_envs: int,
        spaces: SpaceInfo,
        after_truncation: ReturnAfterTruncation,
    ) -> None:
        self.n_step, self.gamma = n_step, gamma
        self._after_truncation = after_truncation
        self._unfinished = UnfinishedEpisodes(num_envs, spaces)

    def add(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        next_obs: np.ndarray,
        active: np.ndarray | None = None,
    ) -> tuple[Transitions, np.ndarray]:
        """Add one step of every environment, or of the active ones.

        Returns the transitions of the episodes that ended, and their environment indices.
        """
        divided = self._unfinished.lengths + 1 >= MOST_STEPS
        ended = self._unfinished.add(
            obs, action, reward, terminated, truncated | divided, next_obs, active
        )
        found = [self._transitions(episode) for episode in ended.values()]
        if not found:
            none = Transitions(*(part[:0] for part in (obs, action, reward, reward, next_obs)))
            return none._replace(returns=reward[:0]), np.arange(0)
        lengths = [len(rows.reward) for rows in found]
        return Transitions.joined(found), np.repeat(list(ended), lengths)

    def _transitions(self, episode: Episode) -> Transitions:
        """Return the transitions of an episode, in order.

        As in `NStepAccumulator`, they span fewer than `n_step` steps at the end of the episode.
        """
        length = len(episode.reward)
        first = np.arange(length)
        last = np.minimum(first + self.n_step, length) - 1
        reward = np.zeros(length, np.float32)
        for step in range(self.n_step):
            rows = first[first + step < length]
            reward[rows] += np.float32(self.gamma**step) * episode.reward[rows + step]
        powers = (self.gamma ** (last - first + 1)).astype(np.float32)
        discount = powers * ~episode.terminated[last]
        returns = self._returns(episode)
        return Transitions(
            episode.obs, episode.action, reward, discount, episode.next_obs[last], returns
        )

    def _returns(self, episode: Episode) -> np.ndarray:
        ends, is_truncated = np.array([len(episode.reward)]), ~episode.terminated[-1:]
        return episode_values(
            episode.reward, ends, is_truncated, self.gamma, self._after_truncation
        )

    def drop(self, lost: np.ndarray) -> None:
        """Forget the episodes of environments that lost them, `(num_envs,)` bool."""
        self._unfinished.drop(lost)

    def state_dict(self, chosen: slice) -> dict[str, np.ndarray]:
        """The unfinished episodes of the chosen environments."""
        return self._unfinished.state_dict(chosen)

    def load_state_dict(self, state: Mapping[str, np.ndarray], chosen: slice) -> None:
        """Restore what `state_dict` returned; raises `ValueError` if it cannot be that."""
        self._unfinished.load_state_dict(state, chosen)
