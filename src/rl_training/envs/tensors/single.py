"""One world of a tensor environment as a Gymnasium environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rl_training.envs.spaces import describe_observations
from rl_training.envs.tensors.contract import TensorEnvironment
from rl_training.errors import warn_user


class SingleWorld(gym.Env[Any, Any]):
    """Steps a tensor environment of one world; for all that needs a single environment."""

    def __init__(
        self, worlds: TensorEnvironment, *, shared: bool = False, ends_broken: bool = False
    ) -> None:
        """Show the first of several worlds if they are `shared` with a run, and leave them open.

        A step in which the world breaks gives NaN, or, if `ends_broken`, ends the episode there.
        """
        self.worlds, self._is_shared, self._ends_broken = worlds, shared, ends_broken
        self.observation_space, self.action_space = worlds.observation_space, worlds.action_space
        self._observation = describe_observations(worlds.observation_space)
        self._last: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = int(self.np_random.integers(2**62)) if seed is None else seed
        self._last = self._first_of(self.worlds.reset([chosen]))
        return self._last, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        one = torch.as_tensor(np.asarray(action), device=self.worlds.device)
        step = self.worlds.step(one.expand(self.worlds.num_envs, *one.shape))
        if bool(step.broken[0]):
            if not self._ends_broken:
                unknown = self._first_of(torch.full_like(step.obs, torch.nan))
                return unknown, np.nan, False, True, {}
            warn_user(
                "a world broke in an evaluation: its numbers were not finite, and its episode ends "
                "before this step"
            )
            return self._last, 0.0, False, True, {}
        obs = self._last = self._first_of(step.final_obs)
        return obs, float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), {}

    def _first_of(self, rows: Tensor) -> Any:
        """The observation of the first world, as its space describes it."""
        found: dict[str, Any] = {}
        for leaf in self._observation.leaves:
            part = rows[0, self._observation.columns(leaf.name)].reshape(leaf.shape).cpu().numpy()
            if not leaf.path:
                return part
            inner = found
            for key in leaf.path[:-1]:
                inner = inner.setdefault(key, {})
            inner[leaf.path[-1]] = part
        return found

    def close(self) -> None:
        if not self._is_shared:
            self.worlds.close()
