"""Sizes and bounds of an environment's spaces, and scaling of actions to and from [-1, 1]."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Box, Discrete, Space

from rl_training.errors import EnvironmentSetupError
from rl_training.types import SpaceInfo


def describe_spaces(env: Env[Any, Any]) -> SpaceInfo:
    """Return the sizes and bounds of an environment's spaces.

    Raises `EnvironmentSetupError` for unsupported spaces.
    """
    return describe_space_pair(env.observation_space, env.action_space)


def describe_space_pair(observation_space: Space[Any], action_space: Space[Any]) -> SpaceInfo:
    """Same as `describe_spaces`, for a pair of spaces without an environment."""
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
            f"The action space {action_space} has no finite bounds, but actions in [-1, 1] are "
            "scaled to the bounds. Give the environment an action space with finite bounds."
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
    """Scales actions between [-1, 1], the range of policies, and the bounds of an action space.

    `low` and `high` are finite, `(action_dim,)`. Actions are `(action_dim,)` or
    `(n, action_dim)`. The bounds map exactly; actions out of range are clipped.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray) -> None:
        # Actions are float32, so the bounds are rounded to float32 too.
        self._high32 = np.asarray(high, dtype=np.float32)
        self.low = np.asarray(low, dtype=np.float32).astype(np.float64)
        self.high = self._high32.astype(np.float64)
        self._half_low, self._half_high = 0.5 * self.low, 0.5 * self.high
        self._symmetric = bool((self.low == -self.high).all())
        self._unit_high = np.ones_like(self._high32)
        self._unit_low = -self._unit_high

    def to_environment(self, action: np.ndarray) -> np.ndarray:
        """Scale from [-1, 1] to [low, high], float32."""
        if self._symmetric:  # the common case, in half the time
            clipped: np.ndarray = np.minimum(np.maximum(action, self._unit_low), self._unit_high)
            return (clipped * self._high32).astype(np.float32, copy=False)
        action = np.asarray(action, dtype=np.float64)
        # A weighted mean of the bounds, since `low + (high - low)` can differ from `high`.
        scaled = (1.0 - action) * self._half_low + (1.0 + action) * self._half_high
        return np.minimum(np.maximum(scaled, self.low), self.high).astype(np.float32)

    def from_environment(self, action: np.ndarray) -> np.ndarray:
        """Scale from [low, high] to [-1, 1], float32; 0 where `low == high`."""
        action = np.asarray(action, dtype=np.float64)
        width = self.high - self.low
        centred = (action - self.low) - (self.high - action)
        scaled = np.where(width > 0, centred, 0.0) / np.where(width > 0, width, 1.0)
        return np.clip(scaled, -1.0, 1.0).astype(np.float32)
