"""Step environments one after another in this process, and check what they return."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.envs.make import EnvironmentFactory, close_environment
from rl_training.envs.snapshots.layers import learning_wrappers
from rl_training.envs.snapshots.snapshot import (
    SnapshotUnsupported,
    restore_environment,
    snapshot_environment,
)
from rl_training.envs.spaces import describe_observations
from rl_training.envs.vector.step_arrays import (
    NO_SEED,
    NO_SUCCESS,
    ROW_WORDS,
    EnvironmentErrors,
    StepArrays,
    buffer_size,
    step_layout,
)
from rl_training.envs.wrapper_statistics import give_statistics, read_statistics
from rl_training.errors import (
    CheckpointError,
    EnvironmentRuntimeError,
    as_exception,
    warn_user,
)
from rl_training.observations import NumberTypes, ObservationSpec
from rl_training.types import Json, SpaceInfo

MAX_REWARD = float(np.finfo(np.float32).max)
SUCCESS = ("is_success", "success")
"""Keys of an info that say whether an episode was a success; the first one is preferred"""


class CheckedEnvironment:
    """An environment whose results are checked, with access to its state and wrapper statistics.

    Only the last info is kept, and infos are not batched: that can cost more than the step itself.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        observation_keys: Sequence[str] | None = None,
        number_types: NumberTypes | None = None,
    ) -> None:
        self.env = env
        self._obs_shape = env.observation_space.shape
        observation = describe_observations(env.observation_space, observation_keys, number_types)
        self._packed = None if observation.is_vector else observation
        """Describes observations that are not one vector, and become rows"""
        self._started = False
        self._info: Any = {}

    def reset(self, seed: int | None) -> Any:
        """Start an episode and return its first observation.

        Raises `EnvironmentRuntimeError` if the observation has the wrong shape or type.
        """
        if seed is not None:
            # Makes an environment reproducible that samples from its own spaces.
            self.env.unwrapped.action_space.seed(seed)
            self.env.unwrapped.observation_space.seed(seed)
        observation, _ = self.env.reset(seed=seed)
        self._started = True
        if self._packed is not None:
            return self._row(observation, self._packed)
        self._check_observation(observation)
        return observation

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Return observation, reward, terminated and truncated.

        Raises `EnvironmentRuntimeError` if one of them is unusable.
        """
        observation, reward, terminated, truncated, self._info = self.env.step(action)
        if self._packed is not None:
            observation = self._row(observation, self._packed)
        # Inline, since this runs at every step: the full check is for unusual observations only.
        elif type(observation) is not np.ndarray or (
            observation.shape != self._obs_shape or observation.dtype.kind != "f"
        ):
            self._check_observation(observation)
        if not isinstance(reward, float):
            reward = _checked_reward(reward)
        if not -MAX_REWARD <= reward <= MAX_REWARD:
            raise EnvironmentRuntimeError(f"its reward is not finite in float32: {reward}")
        if type(terminated) is not bool:
            terminated = _checked_flag("terminated", terminated)
        if type(truncated) is not bool:
            truncated = _checked_flag("truncated", truncated)
        return observation, reward, terminated, truncated

    def info(self) -> dict[Any, Any]:
        """The info of the last step, also if an episode ended; empty before the first step."""
        return dict(self._info) if isinstance(self._info, Mapping) else {}

    def pickled_info(self) -> bytes:
        """Same as `info`, for another process; entries that cannot be pickled are left out."""
        info = self.info()
        try:
            return pickle.dumps(info)
        except Exception:  # an object may raise anything when it is pickled
            return pickle.dumps({key: value for key, value in info.items() if _is_portable(value)})

    def end_episode(self) -> int:
        """Return whether the episode was a success, 1 or 0, or `NO_SUCCESS` if that is unknown."""
        self._info = self.info()  # a copy, since the next reset may change the original
        for name in SUCCESS:
            if self._info.get(name) is not None:
                return _read_success(name, self._info[name])
        return NO_SUCCESS

    def _row(self, observation: Any, spec: ObservationSpec) -> np.ndarray:
        """The words of an observation that is not one vector."""
        row = np.zeros(spec.size, np.float32)
        try:
            spec.write(observation, row)
        except ValueError as error:
            raise EnvironmentRuntimeError(str(error)) from None
        return row.view(ROW_WORDS)

    def _check_observation(self, observation: Any) -> None:
        values = np.asarray(observation)
        if values.dtype.kind not in "biuf":
            raise EnvironmentRuntimeError(f"its observation is not numeric: {observation!r}")
        if values.shape != self._obs_shape:
            raise EnvironmentRuntimeError(
                f"its observation has shape {values.shape}, not {self._obs_shape}: {observation!r}"
            )

    def read_state(self) -> Json:
        """Return `{"state": snapshot}` or `{"error": message}`."""
        try:
            return {"state": snapshot_environment(self.env)}
        except SnapshotUnsupported as error:
            return {"error": str(error)}

    def write_state(self, state: Json) -> str | None:
        """Restore a state that `read_state` returned; return an error message or None."""
        try:
            restore_environment(self.env, state or {})
        except CheckpointError as error:
            return str(error)
        return None

    def read_statistics(self) -> Json:
        """Return `{"state": statistics of the wrappers that learn}` or `{"error": message}`."""
        wrappers = learning_wrappers(self.env)
        if not wrappers:
            return {"state": []}
        try:
            return {"state": read_statistics(wrappers, started=self._started)}
        except SnapshotUnsupported as error:
            return {"error": str(error)}

    def write_statistics(self, statistics: list[Json]) -> str | None:
        """Let the wrappers continue from these statistics; return an error message or None."""
        try:
            give_statistics(self.env, statistics)
        except CheckpointError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Close the environment; an error is only a warning."""
        close_environment(self.env)


def _checked_reward(reward: Any) -> float:
    values = np.asarray(reward)
    if values.dtype.kind not in "biuf" or values.shape != ():
        raise EnvironmentRuntimeError(f"its reward is not a number: {reward!r}")
    return float(reward)


def _checked_flag(name: str, value: Any) -> bool:
    flag = np.asarray(value)
    if flag.shape != () or flag.dtype.kind not in "biuf" or flag.item() not in (0, 1):
        raise EnvironmentRuntimeError(f"its {name} is not True or False: {value!r}")
    return bool(flag)


def _is_portable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _read_success(name: str, value: Any) -> int:
    flag = np.asarray(value)
    if flag.size != 1 or flag.dtype.kind not in "biuf" or flag.item() not in (0, 1):
        warn_user(f'info["{name}"] must be a bool, 0 or 1; other values are ignored')
        return NO_SUCCESS
    return int(flag.item())


def make_environments(factory: EnvironmentFactory, number: int) -> list[CheckedEnvironment]:
    """Make `number` environments; raises `EnvironmentSetupError`, and closes them, on any error."""
    environments = factory.make_many(number)
    try:
        stored = factory.observation_keys, factory.number_types
        return [CheckedEnvironment(environment, *stored) for environment in environments]
    except BaseException:
        for environment in environments:
            close_environment(environment)
        raise


class SequentialVector:
    """Steps environments one after another, and starts a new episode where one ended.

    Gymnasium's `SyncVectorEnv` cannot step only some environments, continue with the others when
    one raises, seed the next episode within the same step, or write into shared memory, and it
    merges all infos at every step. This loop alone is faster
    (`benchmarks/environments.py --one-process`); with the checks and copies of `VectorEnvironment`
    the two are about equal.
    """

    steps_some = False
    """Every step completes those of all environments of the active seeds"""

    def __init__(self, environments: Sequence[CheckedEnvironment], arrays: StepArrays) -> None:
        self.arrays = arrays
        self._environments = environments
        self._all = range(len(environments))
        self._chosen: Sequence[int] = ()

    @classmethod
    def make(cls, factory: EnvironmentFactory, number: int) -> tuple[SequentialVector, SpaceInfo]:
        """Make `number` environments, and describe their spaces.

        Raises `EnvironmentSetupError` if one cannot be made or its spaces are not supported.
        """
        environments = make_environments(factory, number)
        example = environments[0].env
        try:
            spaces = factory.spaces_of(example)
            layout = step_layout(
                number, example.observation_space, example.action_space, spaces.observation
            )
        except BaseException:
            for environment in environments:
                environment.close()
            raise
        buffer = np.zeros(buffer_size(layout), np.uint8)
        return cls(environments, StepArrays.view(buffer, layout)), spaces

    def start(self, *, masked: bool) -> None:
        """Choose the environments that `finish` steps: all, or those in `arrays.active`."""
        self._chosen = self._masked() if masked else self._all

    def finish(self) -> tuple[bool, EnvironmentErrors]:
        """Step the chosen environments; return whether an episode ended, and the errors."""
        arrays, environments = self.arrays, self._environments
        obs, reward = arrays.obs, arrays.reward
        actions = arrays.actions.copy()  # an environment may keep a reference to its action
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
                    arrays.success[index] = environments[index].end_episode()
                    observation = self._reset_one(index)
                obs[index] = observation
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # an error in one environment must not stop the others
                errors[index] = as_exception(error)
        self._chosen = ()
        return any_ended, errors

    def busy(self) -> None:
        """None: no environment is stepping after `finish`."""

    def abandoned(self) -> None:
        """None: there is no worker process that could end before its environments."""

    def reset(self) -> EnvironmentErrors:
        """Start an episode in the environments in `arrays.active`, from `arrays.seeds`."""
        errors: EnvironmentErrors = {}
        for index in self._masked():
            try:
                self.arrays.obs[index] = self._reset_one(index)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                errors[index] = as_exception(error)
        return errors

    def call(self, name: str, indices: Sequence[int], *arguments: Sequence[Any]) -> list[Any]:
        """Call a method of these environments; `arguments` have one value per environment."""
        rows = zip(*arguments, strict=True) if arguments else ((),) * len(indices)
        return [
            getattr(self._environments[index], name)(*row)
            for index, row in zip(indices, rows, strict=True)
        ]

    def infos(self, indices: Sequence[int]) -> list[dict[Any, Any]]:
        """The infos of the last step of these environments."""
        return [self._environments[index].info() for index in indices]

    def environments(self, indices: Sequence[int]) -> list[gym.Env[Any, Any]]:
        """These environments, with their wrappers."""
        return [self._environments[index].env for index in indices]

    def close(self) -> None:
        for environment in self._environments:
            environment.close()

    def _reset_one(self, index: int) -> Any:
        seed = int(self.arrays.seeds[index])
        return self._environments[index].reset(None if seed == NO_SEED else seed)

    def _masked(self) -> list[int]:
        chosen: list[int] = self.arrays.active.nonzero()[0].tolist()
        return chosen
