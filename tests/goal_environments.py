"""Small environments with goals, in the interface of Gymnasium-Robotics' `GoalEnv`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor


class PointGoal(gym.Env[Any, Any]):
    """A point in a square that must come near a random goal; -1 for each step away from it.

    With `discrete`, the actions are steps in four directions. With `episodic`, an episode ends at
    the goal.
    """

    def __init__(
        self,
        *,
        length: int = 25,
        near: float = 0.1,
        stride: float = 0.15,
        discrete: bool = False,
        episodic: bool = False,
    ) -> None:
        self.length, self.near, self.stride, self.episodic = length, near, stride, episodic
        square = spaces.Box(-1.0, 1.0, (2,), np.float64)
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict(dict.fromkeys(names, square))
        self.action_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (2,), np.float32)
        if discrete:
            self.action_space = spaces.Discrete(4, start=1)
        self.position = self.goal = np.zeros(2)
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        self.time = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if isinstance(self.action_space, spaces.Discrete):
            angle = np.pi / 2 * (int(action) - 1)
            action = np.array([np.cos(angle), np.sin(angle)])
        self.time += 1
        self.position = np.clip(self.position + self.stride * np.asarray(action), -1, 1)
        reward = float(self.compute_reward(self.position, self.goal, {}))
        terminated = bool(self.compute_terminated(self.position, self.goal, {}))
        info = {"is_success": reward == 0}
        return self._observe(), reward, terminated, self.time >= self.length, info

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
        return -(np.linalg.norm(achieved - desired, axis=-1) > self.near).astype(np.float64)

    def compute_terminated(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
        """For a single goal only, as in the mazes of Gymnasium-Robotics."""
        return self.episodic and bool(np.linalg.norm(achieved - desired) <= self.near)

    def _observe(self) -> dict[str, np.ndarray]:
        return {
            "observation": self.position.copy(),
            "achieved_goal": self.position.copy(),
            "desired_goal": self.goal.copy(),
        }


class TorchPointGoal(PointGoal):
    """The same task with rewards by PyTorch alone, which are computed when rows are sampled."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("compute_reward", "compute_terminated"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if isinstance(self.action_space, spaces.Discrete):
            angle = np.pi / 2 * (int(action) - 1)
            action = np.array([np.cos(angle), np.sin(angle)])
        self.time += 1
        self.position = np.clip(self.position + self.stride * np.asarray(action), -1, 1)
        achieved, desired = (torch.from_numpy(goal).float() for goal in (self.position, self.goal))
        reward = self.compute_reward_torch(achieved, desired).item()
        terminated = self.compute_terminated_torch(achieved, desired).item()
        info = {"is_success": reward == 0}
        return self._observe(), reward, terminated, self.time >= self.length, info

    def compute_reward_torch(self, achieved: Tensor, desired: Tensor) -> Tensor:
        return -self._is_far(achieved, desired).float()

    def compute_terminated_torch(self, achieved: Tensor, desired: Tensor) -> Tensor:
        return ~self._is_far(achieved, desired) & self.episodic

    def _is_far(self, achieved: Tensor, desired: Tensor) -> Tensor:
        return torch.linalg.vector_norm(achieved - desired, dim=-1) > self.near
