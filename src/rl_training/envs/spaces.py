"""What an environment observes and accepts, and how actions in [-1, 1] become its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Box, Discrete, Space

from rl_training.errors import EnvironmentSetupError
from rl_training.types import SpaceInfo


def describe_spaces(env: Env[Any, Any]) -> SpaceInfo:
    """The sizes and bounds an algorithm needs; `EnvironmentSetupError` for unsupported spaces."""
    return describe_space_pair(env.observation_space, env.action_space)


def describe_space_pair(observation_space: Space[Any], action_space: Space[Any]) -> SpaceInfo:
    """As `describe_spaces`, where only the spaces are at hand."""
    obs_dim = _observation_size(observation_space)
    if isinstance(action_space, Discrete):
        start = int(action_space.start)
        return SpaceInfo(obs_dim, int(action_space.n), discrete=True, action_start=start)
    if not isinstance(action_space, Box):
        raise EnvironmentSetupError(
            f"The action space is {action_space}; only Discrete and one-dimensional Box action "
            "spaces are supported."
        )
    if len(action_space.shape) != 1:
        raise EnvironmentSetupError(
            f"The action space is {action_space} of shape {action_space.shape}; "
            "only one-dimensional Box actions are supported."
        )
    if not (np.isfinite(action_space.low).all() and np.isfinite(action_space.high).all()):
        raise EnvironmentSetupError(
            f"The action space is {action_space}, which has no finite bounds. Policies act in "
            "[-1, 1], scaled to the bounds: give the environment's action space finite ones."
        )
    return SpaceInfo(
        obs_dim,
        int(action_space.shape[0]),
        action_low=action_space.low.astype(np.float32),
        action_high=action_space.high.astype(np.float32),
    )


def _observation_size(space: Space[Any]) -> int:
    if isinstance(space, Box) and len(space.shape) == 1:
        return int(space.shape[0])
    raise EnvironmentSetupError(
        f"The observation space is {space}; only flat vector observations (a one-dimensional Box) "
        "are supported. Wrap the environment with gymnasium.wrappers.FlattenObservation."
    )


class ActionScaler:
    """Maps actions between [-1, 1], where policies live, and an environment's bounds.

    `low` and `high` are finite, `(action_dim,)`. Actions are `(action_dim,)` or
    `(n, action_dim)`; the ends map exactly, and what lies outside is clipped.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray) -> None:
        # Results are float32, so its values of the bounds are the ones that can be kept.
        self._high32 = np.asarray(high, dtype=np.float32)
        self.low = np.asarray(low, dtype=np.float32).astype(np.float64)
        self.high = self._high32.astype(np.float64)
        self._half_low, self._half_high = 0.5 * self.low, 0.5 * self.high
        self._symmetric = bool((self.low == -self.high).all())
        self._unit_high = np.ones_like(self._high32)
        self._unit_low = -self._unit_high

    def to_environment(self, action: np.ndarray) -> np.ndarray:
        """[-1, 1] to [low, high], float32."""
        if self._symmetric:  # as below, but in half the time, and nearly all bounds are
            clipped: np.ndarray = np.minimum(np.maximum(action, self._unit_low), self._unit_high)
            return (clipped * self._high32).astype(np.float32, copy=False)
        action = np.asarray(action, dtype=np.float64)
        # A weighted mean of both ends, since `low + (high - low)` may miss `high` by rounding.
        scaled = (1.0 - action) * self._half_low + (1.0 + action) * self._half_high
        return np.minimum(np.maximum(scaled, self.low), self.high).astype(np.float32)

    def from_environment(self, action: np.ndarray) -> np.ndarray:
        """[low, high] to [-1, 1], float32; a component that cannot vary gives 0."""
        action = np.asarray(action, dtype=np.float64)
        width = self.high - self.low
        centred = (action - self.low) - (self.high - action)
        # Zero is centred in a width of zero, so any divisor will do there.
        scaled = np.where(width > 0, centred, 0.0) / np.where(width > 0, width, 1.0)
        return np.clip(scaled, -1.0, 1.0).astype(np.float32)
