"""One world of a tensor environment as a Gymnasium environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rl_training.envs.tensors.contract import TensorEnvironment


class SingleWorld(gym.Env[np.ndarray, Any]):
    """Steps a tensor environment of one world; for all that needs a single environment."""

    def __init__(self, worlds: TensorEnvironment, *, shared: bool = False) -> None:
        """Show the first of several worlds if they are `shared` with a run, and leave them open."""
        self.worlds, self._is_shared = worlds, shared
        self.observation_space, self.action_space = worlds.observation_space, worlds.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = int(self.np_random.integers(2**62)) if seed is None else seed
        return self.worlds.reset([chosen])[0].cpu().numpy(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        one = torch.as_tensor(np.asarray(action), device=self.worlds.device)
        step = self.worlds.step(one.expand(self.worlds.num_envs, *one.shape))
        if bool(step.broken[0]):
            return np.full(step.obs.shape[1:], np.nan, np.float32), np.nan, False, True, {}
        obs = step.final_obs[0].cpu().numpy()
        return obs, float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), {}

    def close(self) -> None:
        if not self._is_shared:
            self.worlds.close()
