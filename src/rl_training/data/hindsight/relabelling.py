"""Hindsight experience replay (1707.01495): learn from goals that an episode happened to reach.

Each transition of an episode is repeated with other desired goals, which the same episode reached.
Its reward, and where the environment says so its termination, are those for the new goal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from rl_training.data.hindsight.episodes import Episode
from rl_training.data.n_step import Transitions
from rl_training.errors import EnvironmentRuntimeError

Strategy = Literal["future", "final", "episode"]


class Goals(Protocol):
    """What relabelling needs to know about an environment with goals."""

    @property
    def achieved(self) -> slice:
        """The words of an observation row that are the achieved goal."""
        ...

    @property
    def desired(self) -> slice:
        """The words of an observation row that are the desired goal."""
        ...

    def rewards(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        """The rewards `(n,)`, float32, of steps that lead to `achieved`, `(n, words)`."""
        ...

    def terminations(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray | None:
        """Whether such steps end the episode, `(n,)` bool; None if only the episode itself says."""
        ...


class Relabelled(NamedTuple):
    """Transitions with new goals; the steps they refer to are those of one episode."""

    first: np.ndarray
    """`(n,)`: the step at which each transition starts"""
    last: np.ndarray
    """`(n,)`: the last step whose reward it includes; the same step unless `n_step` is larger"""
    goal: np.ndarray
    """`(n, words)`"""
    reward: np.ndarray
    discount: np.ndarray


@dataclass(frozen=True)
class Hindsight:
    """How the transitions of an episode are relabelled.

    A transition over several steps (`n_step`) has the rewards of all its steps for the new goal.
    """

    goals: Goals
    strategy: Strategy
    per_transition: int
    gamma: float
    n_step: int = 1
    transform: Callable[[np.ndarray], np.ndarray] | None = None
    """Applied to the rewards of the environment"""

    def relabel(self, episode: Episode, seed: tuple[int, int]) -> Relabelled:
        """Give each transition `per_transition` new goals, chosen at random from `seed`.

        Goals are those achieved after a step of the same episode: with `future`, that step is the
        transition's own or a later one, with `final` the last one, and with `episode` any one.
        """
        length = len(episode.terminated)
        first = np.repeat(np.arange(length), self.per_transition)
        reached = episode.next_obs[:, self.goals.achieved]
        goal = reached[self._goal_steps(first, length, seed)]
        last, reward, discount = self._returns(episode, reached, first, goal)
        return Relabelled(first, last, goal, reward, discount)

    def transitions(self, episode: Episode, seed: tuple[int, int]) -> Transitions:
        """Return the relabelled transitions of an episode as rows for a replay buffer."""
        new = self.relabel(episode, seed)
        obs, next_obs = episode.obs[new.first], episode.next_obs[new.last]
        obs[:, self.goals.desired] = next_obs[:, self.goals.desired] = new.goal
        return Transitions(obs, episode.action[new.first], new.reward, new.discount, next_obs)

    def _goal_steps(self, first: np.ndarray, length: int, seed: tuple[int, int]) -> np.ndarray:
        if self.strategy == "final":
            return np.full_like(first, length - 1)
        # Raw numbers, because NumPy may change how it derives other ones from them.
        bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(len(first))
        earliest = first if self.strategy == "future" else np.zeros_like(first)
        choices = (length - earliest).astype(np.uint64)
        return earliest + (bits % choices).astype(np.int64)

    def _returns(
        self, episode: Episode, reached: np.ndarray, first: np.ndarray, goal: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The last step, the sum of rewards and the discount of each transition."""
        last = first.copy()
        reward, discount = (np.zeros(len(first), np.float32) for _ in range(2))
        alive = np.ones(len(first), np.bool_)
        for step in range(self.n_step):
            rows = np.flatnonzero(alive & (first + step < len(reached)))
            if not len(rows):
                break
            last[rows] = first[rows] + step
            achieved, desired = reached[last[rows]], goal[rows]
            reward[rows] += np.float32(self.gamma**step) * self._rewards(achieved, desired)
            ended = self.goals.terminations(achieved, desired)
            if ended is None:
                ended = episode.terminated[last[rows]]
            discount[rows] = np.float32(self.gamma ** (step + 1)) * ~ended
            alive[rows] = ~ended
        if not np.isfinite(reward).all():
            raise EnvironmentRuntimeError(
                "a reward for another goal is not finite in float32, after scaling and n-step "
                "summation"
            )
        return last, reward, discount

    def _rewards(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):  # checked by the caller
            rewards = self.goals.rewards(achieved, desired)
            return rewards if self.transform is None else self.transform(rewards)
