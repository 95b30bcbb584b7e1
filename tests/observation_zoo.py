"""Environments with observations of every kind, whose states can be captured."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "matrix": spaces.Box(-2.0, 2.0, (2, 3), np.float64),
    "number": spaces.Box(-1.0, 1.0, (), np.float32),
    "discrete": spaces.Discrete(7, start=-3),
    "multi-discrete": spaces.MultiDiscrete([3, 4, 2]),
    "multi-binary": spaces.MultiBinary(6),
    "image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
    "gray-image": spaces.Box(0, 255, (10, 9), np.uint8),
    "frames": spaces.Box(0, 255, (3, 12, 12), np.uint8),
    "bytes": spaces.Box(0, 255, (7,), np.uint8),
    "halves": spaces.Box(-2.0, 2.0, (3,), np.float16),
    "typed": spaces.Dict(
        {
            "counts": spaces.Box(-20, 20, (3,), np.int16),
            "half": spaces.Box(-4.0, 4.0, (5,), np.float16),
            "memory": spaces.Box(0, 9, (6,), np.uint8),
            "more": spaces.Tuple(
                [
                    spaces.Box(-9, 9, (), np.int8),
                    spaces.Box(0, 20, (3,), np.uint16),
                    spaces.Box(-9, 9, (2, 2), np.int32),
                    spaces.Box(-1.0, 1.0, (2,)),
                ]
            ),
        }
    ),
    "dictionary": spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (9, 11, 3), np.uint8),
            "position": spaces.Box(-5.0, 5.0, (3,), np.float64),
            "mode": spaces.Discrete(4),
            "arm": spaces.Dict(
                {"joints": spaces.Box(-1, 1, (2, 2)), "grip": spaces.MultiBinary(3)}
            ),
        }
    ),
    "tuple": spaces.Tuple(
        [spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,)), spaces.Tuple([spaces.Discrete(2)])]
    ),
}
"""Observation spaces by name"""

CONTINUOUS = spaces.Box(-2.0, 2.0, (2,), np.float32)


class Zoo(gym.Env[Any, Any]):
    """Random observations of a given space, and rewards that depend on action and state."""

    def __init__(
        self, observation: str = "dictionary", action_space: Any = CONTINUOUS, length: int = 9
    ) -> None:
        self.observation_space = OBSERVATIONS[observation]
        self.action_space = action_space
        self.length, self.time = length, 0
        self.state = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.state = 0, float(self.np_random.random())
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        self.state = 0.9 * self.state + 0.1 * float(np.sum(action))
        reward = -abs(self.state)
        terminated = bool(self.np_random.random() < 0.05)
        return self._observe(), reward, terminated, self.time >= self.length, {}

    def _observe(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()
