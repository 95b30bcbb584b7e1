"""Environments of this process, checked and stepped one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.snapshots.snapshot import (
    SnapshotUnsupported,
    restore_environment,
    snapshot_environment,
)
from rl_training.envs.vector.step_arrays import (
    NO_SEED,
    EnvironmentErrors,
    StepArrays,
)
from rl_training.envs.wrapper_statistics import give_statistics, read_statistics
from rl_training.errors import CheckpointError, EnvironmentRuntimeError, EnvironmentSetupError
from rl_training.types import Json

MAX_REWARD = float(np.finfo(np.float32).max)


class CheckedEnvironment:
    """An environment whose answers are checked, and whose state is read and written where it is.

    Infos are dropped: nothing reads them, and batching them costs more than many a step.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.env = env
        self._obs_shape = env.observation_space.shape
        self._started = False

    def reset(self, seed: int | None) -> Any:
        """The first observation of an episode; raises `EnvironmentRuntimeError` if unusable."""
        if seed is not None:
            # An environment that samples from its own spaces must not depend on chance either.
            self.env.unwrapped.action_space.seed(seed)
            self.env.unwrapped.observation_space.seed(seed)
        observation, _ = self.env.reset(seed=seed)
        self._started = True
        self._check_observation(observation)
        return observation

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Observation, reward, terminated, truncated; `EnvironmentRuntimeError` where unusable."""
        observation, reward, terminated, truncated, _ = self.env.step(action)
        # What nearly every environment returns is recognised without a call.
        if type(observation) is not np.ndarray or (
            observation.shape != self._obs_shape or observation.dtype.kind != "f"
        ):
            self._check_observation(observation)
        if not isinstance(reward, float):
            reward = _checked_reward(reward)
        if not -MAX_REWARD <= reward <= MAX_REWARD:
            raise EnvironmentRuntimeError(f"its reward is not finite in float32: {reward}")
        return observation, reward, bool(terminated), bool(truncated)

    def _check_observation(self, observation: Any) -> None:
        values = np.asarray(observation)
        if values.dtype.kind not in "biuf":
            raise EnvironmentRuntimeError(f"its observation is not numeric: {observation!r}")
        if values.shape != self._obs_shape:
            raise EnvironmentRuntimeError(
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
        raise EnvironmentRuntimeError(f"its reward is not a number: {reward!r}")
    return float(reward)


def make_environments(factory: EnvironmentFactory, number: int) -> list[CheckedEnvironment]:
    """As many environments, which must not be the same one."""
    environments = [CheckedEnvironment(factory()) for _ in range(number)]
    if len({id(environment.env.unwrapped) for environment in environments}) < number:
        raise EnvironmentSetupError(
            f"{factory.label} returned the same environment twice; it must make a new one each "
            "time, as `lambda: MyEnv()` does."
        )
    return environments


class SequentialVector:
    """Steps its environments in turn, and starts a new episode where one ended.

    Gymnasium's `SyncVectorEnv` has no way to step only some environments, to go on with the others
    when one raises, to start the next episode from a given seed in the same step, or to write into
    arrays that another process reads, and it merges infos, which nothing here needs. This loop
    alone is faster (`benchmarks/environments.py --one-process`); with the checks and copies of a
    `VectorEnvironment` around it the two are about equal.
    """

    def __init__(self, environments: Sequence[CheckedEnvironment], arrays: StepArrays) -> None:
        self.arrays = arrays
        self._environments = environments
        self._everyone = range(len(environments))
        self._chosen: Sequence[int] = ()

    def start(self, *, masked: bool) -> None:
        """Choose whom `finish` steps: all, or those in `arrays.active`."""
        self._chosen = self._masked() if masked else self._everyone

    def finish(self) -> tuple[bool, EnvironmentErrors]:
        """Act in those chosen; returns whether an episode ended, and what went wrong."""
        arrays, environments = self.arrays, self._environments
        obs, reward = arrays.obs, arrays.reward
        actions = arrays.actions.copy()  # an environment may keep the action it was given
        any_ended, errors = False, {}
        for index in self._chosen:
            try:
                observation, reward[index], terminated, truncated = environments[index].step(
                    actions[index]
                )
                arrays.terminated[index] = terminated
                arrays.truncated[index] = truncated
                if terminated or truncated:
                    any_ended = True
                    arrays.final_obs[index] = observation
                    observation = self._reset_one(index)
                obs[index] = observation
            except Exception as error:  # trouble of one environment must not stop the others
                errors[index] = error
        self._chosen = ()
        return any_ended, errors

    def reset(self) -> EnvironmentErrors:
        """Start an episode in those in `arrays.active`, by their `arrays.seeds`."""
        errors: EnvironmentErrors = {}
        for index in self._masked():
            try:
                self.arrays.obs[index] = self._reset_one(index)
            except Exception as error:
                errors[index] = error
        return errors

    def call(self, name: str, indices: Sequence[int], *arguments: Sequence[Any]) -> list[Any]:
        """A method of these environments, each with its own of the arguments."""
        rows = zip(*arguments, strict=True) if arguments else ((),) * len(indices)
        return [
            getattr(self._environments[index], name)(*row)
            for index, row in zip(indices, rows, strict=True)
        ]

    def close(self) -> None:
        for environment in self._environments:
            environment.close()

    def _reset_one(self, index: int) -> Any:
        seed = int(self.arrays.seeds[index])
        return self._environments[index].reset(None if seed == NO_SEED else seed)

    def _masked(self) -> list[int]:
        chosen: list[int] = self.arrays.active.nonzero()[0].tolist()
        return chosen
