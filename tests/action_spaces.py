"""Environments with actions of every kind."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space

from rl_training.types import ActionKind, SpaceInfo

LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([3.0, 0.5], np.float32)

SPACES: dict[ActionKind, Space[Any]] = {
    "continuous": Box(LOW, HIGH, dtype=np.float32),
    "discrete": Discrete(3, start=5),
    "multi_discrete": MultiDiscrete([3, 2], start=[1, -1]),
    "multi_binary": MultiBinary(3),
}

INFOS: dict[ActionKind, SpaceInfo] = {
    "continuous": SpaceInfo(3, 2, action_low=LOW, action_high=HIGH),
    "discrete": SpaceInfo(3, 3, "discrete", action_start=5),
    "multi_discrete": SpaceInfo(
        3,
        2,
        "multi_discrete",
        action_low=np.array([1, -1], np.float32),
        action_high=np.array([3, 0], np.float32),
    ),
    "multi_binary": SpaceInfo(
        3,
        3,
        "multi_binary",
        action_low=np.zeros(3, np.float32),
        action_high=np.ones(3, np.float32),
    ),
}


class Choices(gym.Env[np.ndarray, Any]):
    """Episodes of 20 steps with random observations, which check the actions that they get."""

    observation_space = Box(-1.0, 1.0, (3,), np.float32)

    def __init__(self, space: Space[Any]) -> None:
        self.action_space = space
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self._steps += 1
        reward = float(np.asarray(action, np.float64).mean())
        return self._observe(), reward, False, self._steps == 20, {}

    def _observe(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


def register_tasks() -> None:
    """Register environments for the kinds of actions that no environment of Gymnasium has."""
    for name, kind in (("MultiDiscrete-v0", "multi_discrete"), ("MultiBinary-v0", "multi_binary")):
        if name not in gym.registry:
            gym.register(name, Choices, kwargs={"space": SPACES[kind]})
