"""Keep the steps of episodes until they end: which goals were reached is known only then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rl_training.types import SpaceInfo

FIRST_ROOM = 64
"""Steps of an episode that there is room for at first; the room doubles when it is full"""


class Episode(NamedTuple):
    """The steps of one episode in one environment, in order."""

    obs: np.ndarray
    """`(steps, obs_dim)`"""
    action: np.ndarray
    """`(steps, ...)`"""
    reward: np.ndarray
    """`(steps,)`"""
    terminated: np.ndarray
    """`(steps,)` bool"""
    next_obs: np.ndarray
    """`(steps, obs_dim)`"""


class UnfinishedEpisodes:
    """The steps so far of the current episode of each environment."""

    def __init__(self, num_envs: int, spaces: SpaceInfo) -> None:
        self._observation = spaces.observation
        self._lengths = np.zeros(num_envs, np.int64)
        action_shape = () if spaces.action_kind == "discrete" else (spaces.action_dim,)
        action_type = np.dtype(np.float32 if spaces.is_continuous else np.int64)
        self._steps = {
            "obs": np.zeros((num_envs, FIRST_ROOM, spaces.obs_dim), np.float32),
            "action": np.zeros((num_envs, FIRST_ROOM, *action_shape), action_type),
            "reward": np.zeros((num_envs, FIRST_ROOM), np.float32),
        }

    def add(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        next_obs: np.ndarray,
        active: np.ndarray | None = None,
    ) -> dict[int, Episode]:
        """Add a step of every environment, or of the active ones; return the ended episodes.

        They are given by the index of their environment, in order.
        """
        chosen = np.arange(len(self._lengths)) if active is None else np.flatnonzero(active)
        values = {"obs": obs, "action": action, "reward": reward}
        self._make_room(int(self._lengths[chosen].max(initial=0)) + 1)
        for name, value in values.items():
            self._steps[name][chosen, self._lengths[chosen]] = value[chosen]
        self._lengths[chosen] += 1
        ended = chosen[(terminated | truncated)[chosen]]
        found = {
            int(index): self._episode(int(index), bool(terminated[index]), next_obs[index])
            for index in ended
        }
        self._lengths[ended] = 0
        return found

    @property
    def lengths(self) -> np.ndarray:
        """The number of steps so far of each environment's episode."""
        return self._lengths

    def drop(self, lost: np.ndarray) -> None:
        """Forget the episodes of environments that lost them, `(num_envs,)` bool."""
        self._lengths[lost] = 0

    def state_dict(self, chosen: slice) -> dict[str, np.ndarray]:
        """The steps of the chosen environments, one environment after another."""
        lengths = self._lengths[chosen]
        is_step = np.arange(self._room) < lengths[:, None]
        steps = {name: values[chosen][is_step] for name, values in self._steps.items()}
        return {"lengths": lengths.copy(), **steps}

    def load_state_dict(self, state: Mapping[str, np.ndarray], chosen: slice) -> None:
        """Restore what `state_dict` returned; raises `ValueError` if it cannot be that."""
        lengths = np.asarray(state["lengths"], np.int64)
        if lengths.shape != self._lengths[chosen].shape or (lengths < 0).any():
            raise ValueError("the lengths of unfinished episodes do not fit the environments")
        self._lengths[chosen] = 0
        saved = {name: np.asarray(state[name]) for name in self._steps}
        self._check(saved, int(lengths.sum()))
        self._make_room(int(lengths.max(initial=0)))
        is_step = np.arange(self._room) < lengths[:, None]
        for name, values in saved.items():
            self._steps[name][chosen][is_step] = values
        self._lengths[chosen] = lengths

    def _check(self, saved: Mapping[str, np.ndarray], steps: int) -> None:
        for name, values in saved.items():
            expected = (steps, *self._steps[name].shape[2:])
            if values.shape != expected or values.dtype != self._steps[name].dtype:
                raise ValueError(f"the {name} of unfinished episodes is not of shape {expected}")
        problem = self._observation.problem_in(saved["obs"])
        if problem is not None:
            raise ValueError(f"the obs of unfinished episodes {problem}")
        if not all(np.isfinite(saved[name]).all() for name in ("action", "reward")):
            raise ValueError("unfinished episodes contain numbers that are not finite")

    @property
    def _room(self) -> int:
        return int(self._steps["reward"].shape[1])

    def _make_room(self, steps: int) -> None:
        """Make room for episodes of this many steps."""
        if steps <= self._room:
            return
        more = max(2 * self._room, steps) - self._room
        for name, values in self._steps.items():
            added = np.zeros((len(values), more, *values.shape[2:]), values.dtype)
            self._steps[name] = np.concatenate([values, added], axis=1)

    def _episode(self, index: int, is_terminated: bool, last_obs: np.ndarray) -> Episode:
        length = self._lengths[index]
        obs, action, reward = (
            self._steps[name][index, :length].copy() for name in ("obs", "action", "reward")
        )
        terminated = np.zeros(length, np.bool_)
        terminated[-1] = is_terminated
        next_obs = np.concatenate([obs[1:], last_obs[None]])
        return Episode(obs, action, reward, terminated, next_obs)
