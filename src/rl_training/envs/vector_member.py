"""One of several environments, seen from the process it lives in."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.envs.snapshot import (
    SnapshotUnsupported,
    restore_environment,
    snapshot_environment,
)
from rl_training.envs.wrapper_statistics import give_statistics, read_statistics
from rl_training.errors import CheckpointError, EnvironmentFault
from rl_training.types import Json

MAX_REWARD = float(np.finfo(np.float32).max)


class VectorMember:
    """An environment whose answers are checked, and whose state is read and written where it is.

    Infos are dropped: nothing reads them, and batching them costs more than many a step.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.env = env
        self._obs_shape = env.observation_space.shape
        self._started = False

    def reset(self, seed: int | None) -> Any:
        """The first observation of a new episode; `EnvironmentFault` where it is unusable."""
        if seed is not None:
            # An environment that samples from its own spaces must not depend on chance either.
            self.env.unwrapped.action_space.seed(seed)
            self.env.unwrapped.observation_space.seed(seed)
        observation, _ = self.env.reset(seed=seed)
        self._started = True
        self._check_observation(observation)
        return observation

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Observation, reward, terminated, truncated; `EnvironmentFault` where unusable."""
        observation, reward, terminated, truncated, _ = self.env.step(action)
        # What nearly every environment returns is recognised without a call.
        if type(observation) is not np.ndarray or (
            observation.shape != self._obs_shape or observation.dtype.kind != "f"
        ):
            self._check_observation(observation)
        if not isinstance(reward, float):
            reward = _checked_reward(reward)
        if not -MAX_REWARD <= reward <= MAX_REWARD:
            raise EnvironmentFault(f"its reward is not finite in float32: {reward}")
        return observation, reward, bool(terminated), bool(truncated)

    def _check_observation(self, observation: Any) -> None:
        values = np.asarray(observation)
        if values.dtype.kind not in "biuf":
            raise EnvironmentFault(f"its observation is not numeric: {observation!r}")
        if values.shape != self._obs_shape:
            raise EnvironmentFault(
                f"its observation has shape {values.shape}, not {self._obs_shape}: {observation!r}"
            )

    def read_state(self) -> Json:
        """`{"state": snapshot}`, or `{"error": message}`."""
        try:
            return {"state": snapshot_environment(self.env)}
        except SnapshotUnsupported as error:
            return {"error": str(error)}

    def write_state(self, state: Json) -> str | None:
        """Restore what `read_state` gave; returns what is wrong with it, or None."""
        try:
            restore_environment(self.env, state or {})
        except CheckpointError as error:
            return str(error)
        return None

    def read_statistics(self) -> Json:
        """`{"state": what its wrappers have learned}`, or `{"error": message}`."""
        try:
            return {"state": read_statistics(self.env, started=self._started)}
        except SnapshotUnsupported as error:
            return {"error": str(error)}

    def write_statistics(self, statistics: list[Json]) -> str | None:
        """Let the wrappers go on from these; returns what is wrong with them, or None."""
        try:
            give_statistics(self.env, statistics)
        except CheckpointError as error:
            return str(error)
        return None

    def close(self) -> None:
        self.env.close()


def _checked_reward(reward: Any) -> float:
    values = np.asarray(reward)
    if values.dtype.kind not in "biuf" or values.shape != ():
        raise EnvironmentFault(f"its reward is not a number: {reward!r}")
    return float(reward)
