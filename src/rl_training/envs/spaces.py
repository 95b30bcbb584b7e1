"""Sizes and bounds of an environment's spaces, and scaling of actions to and from [-1, 1]."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Env, Wrapper
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space

from rl_training.errors import EnvironmentSetupError
from rl_training.types import ActionKind, SpaceInfo


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
        return SpaceInfo(obs_dim, int(action_space.n), "discrete", action_start=start)
    kind, low, high = _bounded_actions(action_space)
    shape = tuple(int(size) for size in low.shape)
    return SpaceInfo(
        obs_dim,
        low.size,
        kind,
        action_low=low.reshape(-1).astype(np.float32),
        action_high=high.reshape(-1).astype(np.float32),
        action_shape=None if len(shape) == 1 else shape,
    )


def _bounded_actions(space: Space[Any]) -> tuple[ActionKind, np.ndarray, np.ndarray]:
    """Return the kind of the actions and their bounds, in the shape of an action."""
    if isinstance(space, MultiDiscrete):
        return "multi_discrete", space.start, space.start + space.nvec - 1
    if isinstance(space, MultiBinary):
        return "multi_binary", np.zeros(space.shape), np.ones(space.shape)
    if not isinstance(space, Box):
        raise EnvironmentSetupError(
            f"The action space is {space}; only Box, Discrete, MultiDiscrete and MultiBinary "
            "action spaces are supported."
        )
    if not space.is_bounded("both"):
        raise EnvironmentSetupError(
            f"The action space {space} has no finite bounds, but policies choose actions in a "
            "finite range. Set `action_range` to that range: `action_range: 3.0` for [-3, 3], or "
            "`action_range: [low, high]`."
        )
    return "continuous", space.low, space.high


def _observation_size(space: Space[Any]) -> int:
    if isinstance(space, Box) and len(space.shape) == 1:
        return int(space.shape[0])
    raise EnvironmentSetupError(
        f"The observation space is {space}; only flat vector observations (a one-dimensional Box) "
        "are supported. Wrap the environment with gymnasium.wrappers.FlattenObservation."
    )


class StatedActionRange(Wrapper[Any, Any, Any, Any]):
    """Gives the components of an action that have no finite bounds the ones of `action_range`.

    A component that is bounded on one side keeps that bound.
    """

    def __init__(self, env: Env[Any, Any], action_range: tuple[float, float]) -> None:
        super().__init__(env)
        space = env.action_space
        if not isinstance(space, Box) or space.is_bounded("both"):
            raise EnvironmentSetupError(
                f"action_range = {list(action_range)}: is for action spaces without finite bounds, "
                f"but the action space is {space}; remove action_range"
            )
        finite = np.isfinite(space.low) & np.isfinite(space.high)
        low, high = (
            np.where(finite, bound, np.clip(bound, *action_range))
            for bound in (space.low, space.high)
        )
        if not (low < high)[~finite].all():
            raise EnvironmentSetupError(
                f"action_range = {list(action_range)}: leaves no range for some components of the "
                f"action space {space}"
            )
        self.action_space = Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)


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
