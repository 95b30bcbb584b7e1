"""One of several environments, seen from the process it lives in."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.sequential import SequentialVector
from rl_training.envs.snapshot import (
    SnapshotUnsupported,
    restore_environment,
    snapshot_environment,
)
from rl_training.errors import CheckpointError, EnvironmentSetupError
from rl_training.types import Json

FAULT = "environment_fault"
"""Key of the info that says what is wrong with a step"""


class VectorMember(gym.Wrapper[Any, Any, Any, Any]):
    """The outermost wrapper: checks shapes, and reads and writes state where the state is.

    Trouble is answered, not raised, since an exception would end the worker process. Infos are
    dropped: nothing reads them, and batching them costs more than many an environment's step.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.state_to_write: Json | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """As `gymnasium.Env.reset`, with a `FAULT` in the info where the result is unusable."""
        if seed is not None:
            # An environment that samples from its own spaces must not depend on chance either.
            self.unwrapped.action_space.seed(seed)
            self.unwrapped.observation_space.seed(seed)
        observation, _ = self.env.reset(seed=seed, options=options)
        fault = self._observation_fault(observation)
        return (self._blank(), {FAULT: fault}) if fault else (observation, {})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """As `gymnasium.Env.step`, with a `FAULT` in the info where the result is unusable."""
        observation, reward, terminated, truncated, _ = self.env.step(action)
        fault = self._observation_fault(observation) or _reward_fault(reward)
        if fault:
            return self._blank(), 0.0, False, False, {FAULT: fault}
        return observation, float(reward), bool(terminated), bool(truncated), {}

    def _observation_fault(self, observation: Any) -> str | None:
        expected = self.observation_space.shape
        if expected is None:
            return None
        values = np.asarray(observation)
        if values.dtype.kind not in "biuf":
            return f"its observation is not numeric: {observation!r}"
        if values.shape != expected:
            return f"its observation has shape {values.shape}, not {expected}: {observation!r}"
        return None

    def _blank(self) -> np.ndarray:
        return np.zeros(self.observation_space.shape or (), dtype=self.observation_space.dtype)

    def read_state(self) -> Json:
        """`{"state": snapshot}`, or `{"error": message}`."""
        try:
            return {"state": snapshot_environment(self.env)}
        except SnapshotUnsupported as error:
            return {"error": str(error)}

    def write_state(self) -> str | None:
        """Restore `state_to_write`; returns what is wrong with it, or None."""
        state, self.state_to_write = self.state_to_write, None
        try:
            restore_environment(self.env, state or {})
        except CheckpointError as error:
            return str(error)
        return None


def _reward_fault(reward: Any) -> str | None:
    values = np.asarray(reward)
    if values.dtype.kind not in "biuf" or values.shape != ():
        return f"its reward is not a number: {reward!r}"
    return None


def make_vector(
    factory: EnvironmentFactory, num_envs: int, backend: str
) -> SequentialVector | AsyncVectorEnv:
    """`num_envs` members that are only reset when told to, so that no last observation is lost."""
    parent = os.getpid()

    def make_member() -> VectorMember:
        if os.getpid() != parent:
            _leave_signals_to_parent()
        return VectorMember(factory())

    makers = [make_member] * num_envs
    if backend == "async":
        return AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    vector = SequentialVector(makers)
    if len({id(env.unwrapped) for env in vector.envs}) < num_envs:
        raise EnvironmentSetupError(
            f"{factory.label} returned the same environment twice; it must make a new one each "
            "time, as `lambda: MyEnv()` does."
        )
    return vector


def _leave_signals_to_parent() -> None:
    """Ctrl-C reaches the workers too, which must live until the parent has saved their state."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # So does a termination of the whole process group; a worker ends with its parent's pipe.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
