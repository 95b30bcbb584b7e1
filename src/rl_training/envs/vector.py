"""Several environments as one: stepped together, reset one by one, snapshotted, and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.snapshot import SnapshotUnsupported
from rl_training.envs.snapshot_codec import Decoder, Encoder
from rl_training.envs.spaces import ActionScaler, describe_space_pair
from rl_training.envs.vector_checks import as_float32, require_finite
from rl_training.envs.vector_member import FAULT, make_vector
from rl_training.errors import CheckpointError, EnvironmentFault, EnvironmentSetupError
from rl_training.types import Json


@dataclass(frozen=True)
class EpisodeEnd:
    """An episode that ended in this step."""

    env_index: int
    episode_return: float
    length: int


@dataclass(frozen=True)
class StepResult:
    """What one step of all environments gave; the arrays are the caller's to keep."""

    next_obs: np.ndarray
    """`(n, obs_dim)` float32: where the action led, also at an episode's end"""
    reward: np.ndarray
    """`(n,)` float32"""
    terminated: np.ndarray
    """`(n,)` bool"""
    truncated: np.ndarray
    """`(n,)` bool"""
    obs: np.ndarray
    """`(n, obs_dim)` float32: what to act on next, a new episode's first where one ended"""
    episodes: list[EpisodeEnd]


class VectorEnvironment:
    """`num_envs` environments from one factory, in this process or in one process each.

    Both backends give the same trajectories. With `seed_every_reset` each episode starts from a
    seed of its own, made of `seed`, the environment's index and the episode's number, so that an
    environment that cannot be snapshotted can be resumed where episodes begin.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        num_envs: int,
        seed: int,
        *,
        backend: Literal["sync", "async"] = "sync",
        seed_every_reset: bool = False,
    ) -> None:
        self.num_envs = num_envs
        self._seed = seed
        self._seed_every_reset = seed_every_reset
        self._returns = np.zeros(num_envs, dtype=np.float64)
        self._lengths = np.zeros(num_envs, dtype=np.int64)
        self._episode_numbers = np.zeros(num_envs, dtype=np.int64)
        self._current_obs: np.ndarray | None = None
        self._vector = make_vector(factory, num_envs, backend)
        try:
            self.spaces = describe_space_pair(
                self._vector.single_observation_space, self._vector.single_action_space
            )
        except EnvironmentSetupError:
            self.close()
            raise
        self.action_scaler = self._make_scaler()

    def _make_scaler(self) -> ActionScaler | None:
        if self.spaces.action_low is None or self.spaces.action_high is None:
            return None
        return ActionScaler(self.spaces.action_low, self.spaces.action_high)

    def reset(self) -> np.ndarray:
        """Start every environment's first episode; returns `(n, obs_dim)` float32.

        A second call starts over, with the same seeds.
        """
        self._episode_numbers[:] = 0
        return self._reset_all()

    def _reset_all(self) -> np.ndarray:
        """Start every environment's current episode, by its seed."""
        self._returns[:] = 0.0
        self._lengths[:] = 0
        seeds = [self._episode_seed(index) for index in range(self.num_envs)]
        obs, infos = self._ask(self._vector.reset, seed=seeds)
        return self._remember(self._checked_obs(obs, infos))

    def _episode_seed(self, index: int) -> int:
        episode = int(self._episode_numbers[index])
        sequence = np.random.SeedSequence(self._seed, spawn_key=(index, episode))
        return int(sequence.generate_state(1)[0])

    def step(self, actions: np.ndarray) -> StepResult:
        """Act in every environment, and start a new episode where one ended.

        `actions` is `(n, action_dim)` in [-1, 1], or `(n,)` of indices from 0 where actions are
        discrete. Raises `EnvironmentFault`, and returns nothing, where an action, observation or
        reward is not finite or an observation or reward has the wrong shape; then only `reset`,
        `restore` and `close` are left.
        """
        if self._current_obs is None:
            raise RuntimeError("Call reset() or restore() before step().")
        scaled = self._environment_actions(np.asarray(actions))
        self._current_obs = None  # a fault leaves nothing to act on, until a reset or restore
        raw_obs, raw_reward, terminated, truncated, infos = self._ask(self._vector.step, scaled)
        next_obs = self._checked_obs(raw_obs, infos)
        reward = as_float32(raw_reward)
        require_finite("reward", reward, raw_reward)
        self._returns += raw_reward
        self._lengths += 1
        ended = terminated | truncated
        episodes = [self._episode_end(int(index)) for index in np.flatnonzero(ended)]
        obs = self._reset_ended(ended, next_obs) if episodes else next_obs.copy()
        return StepResult(next_obs, reward, terminated, truncated, self._remember(obs), episodes)

    def _environment_actions(self, actions: np.ndarray) -> np.ndarray:
        if self.action_scaler is None:
            return self._discrete_actions(actions)
        expected = (self.num_envs, self.spaces.action_dim)
        if actions.shape != expected:
            raise ValueError(f"Actions have shape {actions.shape}; {expected} is expected.")
        require_finite("action", actions, actions)
        return self.action_scaler.to_environment(actions)

    def _discrete_actions(self, actions: np.ndarray) -> np.ndarray:
        if actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu":
            raise ValueError(
                f"Discrete actions are {self.num_envs} integers, not {actions.dtype} of shape "
                f"{actions.shape}."
            )
        if (actions < 0).any() or (actions >= self.spaces.action_dim).any():
            raise ValueError(f"Actions {actions} are not all in [0, {self.spaces.action_dim}).")
        space = self._vector.single_action_space
        assert isinstance(space, gym.spaces.Discrete)
        return (actions.astype(np.int64) + self.spaces.action_start).astype(space.dtype)

    def _episode_end(self, index: int) -> EpisodeEnd:
        """Close the books of an environment's episode and open those of the next."""
        end = EpisodeEnd(index, float(self._returns[index]), int(self._lengths[index]))
        self._returns[index] = 0.0
        self._lengths[index] = 0
        self._episode_numbers[index] += 1
        return end

    def _reset_ended(self, ended: np.ndarray, next_obs: np.ndarray) -> np.ndarray:
        seeds = [
            self._episode_seed(index) if self._seed_every_reset and ended[index] else None
            for index in range(self.num_envs)
        ]
        options = {"reset_mask": ended.copy()}
        raw_obs, infos = self._ask(self._vector.reset, seed=seeds, options=options)
        # The rows of environments that go on may be anything here: they did not report.
        raw_obs = np.where(ended[:, None], raw_obs, next_obs)
        return self._checked_obs(raw_obs, infos)

    def _checked_obs(self, raw: np.ndarray, infos: Json) -> np.ndarray:
        """`raw` as float32; `EnvironmentFault` if an environment is at fault."""
        for index in np.flatnonzero(infos.get(f"_{FAULT}", ())):
            raise EnvironmentFault(f"Environment {index}: {infos[FAULT][index]}")
        obs = as_float32(raw)
        require_finite("observation", obs, raw)
        return obs

    def _remember(self, obs: np.ndarray) -> np.ndarray:
        self._current_obs = obs.copy()  # what a caller does to its own must not reach a snapshot
        return obs

    def _ask(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (EOFError, ConnectionError) as error:
            if not isinstance(self._vector, AsyncVectorEnv):
                raise
            self._end_workers()
            raise EnvironmentFault("An environment's worker process died.") from error

    @property
    def at_episode_boundary(self) -> bool:
        """Whether every environment is at the start of an episode."""
        return not self._lengths.any()

    def snapshot(self) -> Json:
        """The state of all environments as plain JSON, valid for either backend.

        Raises `SnapshotUnsupported` where an environment cannot be captured. With
        `seed_every_reset` only the episodes' numbers are kept, so take it at an episode boundary.
        """
        if self._current_obs is None:
            raise RuntimeError("Call reset() or restore() before snapshot().")
        counters = {
            "seed_every_reset": self._seed_every_reset,
            "episode_numbers": self._episode_numbers.tolist(),
        }
        if self._seed_every_reset:
            # An episode that was cut short is not played again: its steps are known already.
            begun = self._episode_numbers + (self._lengths > 0)
            return {**counters, "episode_numbers": begun.tolist()}
        environments = []
        for index, answer in enumerate(self._ask(self._vector.call, "read_state")):
            if "error" in answer:
                raise SnapshotUnsupported(f"Environment {index}: {answer['error']}")
            environments.append(answer["state"])
        return {
            **counters,
            "episode_returns": self._returns.tolist(),
            "episode_lengths": self._lengths.tolist(),
            "observations": Encoder().encode(self._current_obs),
            "environments": environments,
        }

    def restore(self, snapshot: Json) -> np.ndarray:
        """Continue from a snapshot; returns the observations as they were, `(n, obs_dim)`.

        With `seed_every_reset` every environment starts its current episode again. Raises
        `CheckpointError` for a snapshot that does not fit.
        """
        try:
            if snapshot["seed_every_reset"] is not self._seed_every_reset:
                raise ValueError("it was taken with another setting of seed_every_reset")
            numbers = self._counters(snapshot["episode_numbers"], np.int64)
            if self._seed_every_reset:
                self._episode_numbers[:] = numbers
                return self._reset_all()
            return self._restore_environments(snapshot, numbers)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"The environments' snapshot does not fit: {error}.") from error

    def _restore_environments(self, snapshot: Json, numbers: np.ndarray) -> np.ndarray:
        returns = self._counters(snapshot["episode_returns"], np.float64)
        lengths = self._counters(snapshot["episode_lengths"], np.int64)
        states = snapshot["environments"]
        if not isinstance(states, list) or len(states) != self.num_envs:
            raise ValueError(f"it is not of {self.num_envs} environments")
        obs = Decoder().decode(snapshot["observations"])
        expected = (self.num_envs, self.spaces.obs_dim)
        if not isinstance(obs, np.ndarray) or obs.shape != expected or obs.dtype != np.float32:
            raise ValueError(f"its observations are not float32 of shape {expected}")
        # Clears what the vector environment remembers of ended episodes.
        self._reset_all()
        self._ask(self._vector.set_attr, "state_to_write", states)
        for index, problem in enumerate(self._ask(self._vector.call, "write_state")):
            if problem:
                raise CheckpointError(f"Environment {index}: {problem}")
        self._episode_numbers[:] = numbers
        self._returns[:] = returns
        self._lengths[:] = lengths
        return self._remember(obs)

    def _counters(self, values: object, dtype: type[np.generic]) -> np.ndarray:
        counters = np.array(values, dtype=dtype)
        if counters.shape != (self.num_envs,) or not np.isfinite(counters).all():
            raise ValueError(f"{values!r} are not counters of {self.num_envs} environments")
        return counters

    def close(self) -> None:
        """Close all environments and end their processes; may be called twice."""
        try:
            self._vector.close()
        except (EOFError, ConnectionError):
            if not isinstance(self._vector, AsyncVectorEnv):
                raise
            self._end_workers()

    def _end_workers(self) -> None:
        """End processes that can no longer be asked to close, since one of them died."""
        assert isinstance(self._vector, AsyncVectorEnv)
        for process in self._vector.processes:
            process.kill()
            process.join()
        self._vector.closed = True

    def __enter__(self) -> VectorEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
