"""A wrapper that hides a part of an observation, so that a policy has to remember."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np


class KeepComponents(gym.ObservationWrapper[Any, Any, Any]):
    """Keeps some components of observations that are vectors, and hides the others.

    For example, `components: [0, 2]` hides the velocities of CartPole-v1.
    """

    def __init__(self, env: gym.Env[Any, Any], components: Sequence[int]) -> None:
        """`components` are the positions of those that are kept, counted from 0."""
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"components: observations must be vectors, not {space}")
        size = space.shape[0]
        possible = all(type(each) is int and 0 <= each < size for each in components)
        if not components or not possible or len(set(components)) < len(components):
            raise ValueError(
                f"components = {list(components)}: must be different integers from 0 to {size - 1}"
            )
        self.components = list(components)
        self.observation_space = gym.spaces.Box(
            space.low[self.components], space.high[self.components], dtype=space.dtype.type
        )

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[self.components]
