"""Environments of this process, stepped one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.types import Json


class SequentialVector:
    """As much of `gymnasium.vector.VectorEnv` as is used here, without autoreset.

    Gymnasium's own `SyncVectorEnv` copies observations twice and merges infos, which for one small
    environment takes longer than its step.
    """

    def __init__(self, makers: Sequence[Callable[[], gym.Env[Any, Any]]]) -> None:
        self.envs = [make() for make in makers]
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        shape = self.single_observation_space.shape or ()
        self._obs = np.zeros((len(self.envs), *shape), self.single_observation_space.dtype)

    def reset(
        self, *, seed: Sequence[int | None], options: Json | None = None
    ) -> tuple[np.ndarray, Json]:
        """Reset all, or those in `options["reset_mask"]`."""
        chosen = range(len(self.envs))
        if options is not None:
            chosen = np.flatnonzero(options["reset_mask"])  # type: ignore[assignment]
        infos: Json = {}
        for index in chosen:
            self._obs[index], info = self.envs[index].reset(seed=seed[index])
            self._merge(infos, index, info)
        return self._obs, infos

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Json]:
        """Observations (a buffer that the next call overwrites), rewards, flags and infos."""
        number = len(self.envs)
        rewards = np.empty(number)
        terminated, truncated = np.empty(number, np.bool_), np.empty(number, np.bool_)
        infos: Json = {}
        for index, env in enumerate(self.envs):
            obs, reward, terminated[index], truncated[index], info = env.step(actions[index])
            self._obs[index], rewards[index] = obs, float(reward)
            self._merge(infos, index, info)
        return self._obs, rewards, terminated, truncated, infos

    def call(self, name: str) -> tuple[Any, ...]:
        return tuple(getattr(env, name)() for env in self.envs)

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        for env, value in zip(self.envs, values, strict=True):
            setattr(env, name, value)

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _merge(self, infos: Json, index: int, info: Json) -> None:
        for key, value in info.items():
            infos.setdefault(key, [None] * len(self.envs))[index] = value
            infos.setdefault(f"_{key}", np.zeros(len(self.envs), np.bool_))[index] = True
