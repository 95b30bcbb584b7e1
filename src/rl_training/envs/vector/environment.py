"""Step the environments of all seeds together, with errors, snapshots and resets per seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.snapshots.snapshot import (
    SeedSnapshot,
    SnapshotUnsupported,
    seeded_numbers,
    seeded_snapshot,
)
from rl_training.envs.vector.backends import Backend, Placement, start_workers
from rl_training.envs.vector.sequential import SequentialVector
from rl_training.envs.vector.step_arrays import (
    NO_SUCCESS,
    ROW_WORDS,
    ActionTranslator,
    EnvironmentErrors,
    EpisodeEnd,
    EpisodeTracker,
    SeedErrors,
    StepResult,
    WorkerDied,
    as_float32,
    find_errors,
    steps_per_round,
)
from rl_training.envs.vector.worker_vector import WorkerVector
from rl_training.errors import CheckpointError
from rl_training.types import Json


class VectorEnvironment:
    """`num_envs` environments for each seed, in this process or in workers.

    The trajectories of a seed depend neither on the other seeds nor on the backend, except with
    `"ray-async"`: each step then completes those of `steps_per_round` environments per seed that
    are ready first (`StepResult.stepped`), and the others stay under way (`busy`). With
    `seed_every_reset`, every episode starts from its own seed, derived from the run's seed, the
    environment's index and the episode number. Environments without snapshot support can then be
    resumed at episode boundaries.

    Workers that die, or do not reply within `timeout` seconds, are started again, all together at
    most `restarts` times. Unless `seed_every_reset` is set, their environments repeat their last
    steps, and nothing is lost. Where that is not possible, episodes are lost: `StepResult.lost`,
    `why_lost`. `placement` says how many workers there are, and where.

    Raises `EnvironmentSetupError` if an environment cannot be made or its spaces are not supported.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        num_envs: int,
        seed: int | Sequence[int],
        *,
        backend: Backend = "sync",
        seed_every_reset: bool = False,
        timeout: float | None = None,
        restarts: int = 0,
        placement: Placement | None = None,
    ) -> None:
        seeds = [seed] if isinstance(seed, int | np.integer) else list(seed)
        self.num_envs, self.num_seeds = num_envs, len(seeds)
        self.total_envs = self.num_seeds * num_envs
        self._episodes = EpisodeTracker(seeds, num_envs, seed_every_reset=seed_every_reset)
        self.steps_per_round = steps_per_round(backend, num_envs)
        """How many steps of each seed `finish` completes"""
        self._vector: WorkerVector | SequentialVector
        self._learned: dict[int, list[Json]] = {}
        if backend == "sync":
            self._vector, self.spaces = SequentialVector.make(factory, self.total_envs)
        else:
            self._vector, self.spaces = start_workers(
                backend,
                factory,
                num_envs,
                self.num_seeds,
                placement or Placement(),
                self._episodes.lose,
                timeout=timeout,
                restarts=restarts,
                replays=not seed_every_reset,
            )
        self._observation = self.spaces.observation
        self._arrays = self._vector.arrays
        self._actions = ActionTranslator(self.spaces, num_envs, self.num_seeds)
        self.action_scaler = self._actions.scaler
        self._needs_reset = set(range(self.num_seeds))
        """Seeds that cannot act until they are reset or restored, for example after an error"""
        self._unreported: SeedErrors = {}
        """Errors of seeds that lost their worker during the reset of another seed; the next step
        reports them"""
        self._under_way: tuple[np.ndarray | None, SeedErrors] | None = None
        """Between `start` and `finish`: the active seeds (None: all) and the errors so far"""

    def reset(self, seed_indices: Sequence[int] | None = None) -> np.ndarray:
        """Start the first episodes of the given seeds (None: all); returns `(n, obs_dim)` float32.

        A second call starts the same episodes again. The rows of other seeds are their current
        observations. Raises the first error.
        """
        every_seed = range(self.num_seeds)
        obs, errors = self.try_reset(every_seed if seed_indices is None else seed_indices)
        _raise_first(errors)
        return obs

    def try_reset(self, seed_indices: Sequence[int]) -> tuple[np.ndarray, SeedErrors]:
        """Same as `reset`, but returns the errors by seed instead of raising the first one."""
        for seed_index in seed_indices:
            self._episodes.numbers[self._rows(seed_index)] = 0
        errors = self._restart(seed_indices)
        return as_float32(self._arrays.obs), errors

    def _restart(self, seed_indices: Sequence[int]) -> SeedErrors:
        """Restart the current episode of every environment of these seeds; return the errors."""
        if self._under_way is not None and len(set(seed_indices)) < self.num_seeds:
            raise RuntimeError("Call finish() before some seeds are reset or restored.")
        arrays, self._under_way = self._arrays, None
        indices = [index for seed_index in seed_indices for index in self._indices(seed_index)]
        arrays.active[:] = False
        arrays.active[indices] = True
        arrays.clear_results()
        for index in indices:
            self._episodes.restart(index)
            arrays.seeds[index] = self._episodes.seed(index)
        self._needs_reset.update(seed_indices)
        for seed_index in seed_indices:
            self._unreported.pop(seed_index, None)
        errors = self._find_errors(self._vector.reset(), [])
        for seed_index in seed_indices:
            self._seed_next_episodes(seed_index)
        self._episodes.lost.difference_update(indices)
        self._unreported.update(
            (other, errors[other]) for other in errors if other not in self._needs_reset
        )
        self._needs_reset.difference_update(seed_indices)
        self._exclude(errors)
        return {index: errors[index] for index in seed_indices if index in errors}

    def _seed_next_episodes(self, seed_index: int) -> None:
        """Set the seeds of the resets that follow the current episodes."""
        self._arrays.seeds[self._rows(seed_index)] = [
            self._episodes.next_seed(index) for index in self._indices(seed_index)
        ]

    def _seed_after_losses(self) -> None:
        for seed_index in {index // self.num_envs for index in self._episodes.lost}:
            self._seed_next_episodes(seed_index)

    def why_lost(self, seed_index: int = 0) -> str | None:
        """Why a seed lost an episode; None if it lost none. It cannot be resumed exactly then."""
        return self._episodes.why_lost.get(seed_index)

    def watch_for_stop(self, stopping: Callable[[], bool]) -> None:
        """Once `stopping` returns True, wait only a few seconds for a worker that hangs."""
        if isinstance(self._vector, WorkerVector):
            self._vector.deadline.stopping = stopping

    def step(self, actions: np.ndarray, active: np.ndarray | None = None) -> StepResult:
        """Step all environments, and start a new episode where one ended.

        Same as `start` followed by `finish`, but raises the first error. Reset or restore that
        seed before the next step. If its action was not finite, it was not stepped and needs none.
        """
        self.start(actions, active)
        result = self.finish()
        _raise_first(result.errors)
        return result

    def start(self, actions: np.ndarray, active: np.ndarray | None = None) -> None:
        """Start a step, whose results `finish` returns. Worker processes run in between.

        `actions` are `(n, action_dim)` in [-1, 1], or `(n,)` indices from 0 for discrete actions.
        `active`, `(num_seeds,)` bool, selects the seeds that act (None: all).
        """
        if self._under_way is not None:
            raise RuntimeError("Call finish() before the next start().")
        if self._episodes.lost:
            self._seed_after_losses()
        if active is not None:
            active = np.asarray(active, np.bool_)
            active = None if active.all() else active
        errors = self._unreported
        if errors:
            active = self._without(errors, active)
        if self._needs_reset and (active is None or active[list(self._needs_reset)].any()):
            raise RuntimeError("Call reset() or restore() before step().")
        arrays = self._arrays
        action_errors = self._actions.write(np.asarray(actions), active, arrays.actions)
        if action_errors:
            active, errors = self._without(action_errors, active), errors | action_errors
        if active is not None:
            arrays.active[:] = np.repeat(active, self.num_envs)
            arrays.clear_results()
        self._under_way, self._unreported = (active, errors), {}
        self._vector.start(masked=active is not None)

    def finish(self) -> StepResult:
        """Wait for the step that was started and return its results.

        `StepResult.errors` has an `EnvironmentRuntimeError` for each seed with an observation or
        reward that is not finite or has the wrong shape, an environment that raised (see
        `__cause__`), or a worker process that died.
        """
        if self._under_way is None:
            raise RuntimeError("Call start() before finish().")
        try:
            return self._collect(*self._under_way)
        except BaseException:  # interrupted: some environments were stepped, others were not
            self._needs_reset.update(range(self.num_seeds))
            raise
        finally:
            self._under_way = None

    def _collect(self, active: np.ndarray | None, errors: SeedErrors) -> StepResult:
        lost, abandoned, lost_before = None, None, frozenset(self._episodes.lost)
        any_ended, raised = self._vector.finish()
        arrays = self._arrays
        stepped = arrays.active.copy() if self._vector.steps_some else None
        self._episodes.record(arrays.reward, arrays.active if active is not None else stepped)
        if self._episodes.lost:
            self._seed_after_losses()
            lost = self._episodes.take_lost(lost_before)
            abandoned = self._vector.abandoned()
        obs, reward = as_float32(arrays.obs), arrays.reward.astype(np.float32)
        next_obs, finite, ended = obs.copy(), self._observation.are_finite(obs), []
        if any_ended:
            ended = (arrays.terminated | arrays.truncated).nonzero()[0].tolist()
            next_obs[ended] = as_float32(arrays.final_obs[ended])
            finite = finite and self._observation.are_finite(next_obs)
        if raised or not finite:
            found = self._find_errors(raised, ended)
            self._exclude(found, obs, next_obs, reward)
            ended = [index for index in ended if index // self.num_envs not in found]
            errors = errors | found
        terminated, truncated = arrays.terminated.copy(), arrays.truncated.copy()
        episodes = [self._end_episode(index) for index in ended]
        return StepResult(
            next_obs, reward, terminated, truncated, obs, episodes, errors, lost, abandoned, stepped
        )

    def _find_errors(self, raised: EnvironmentErrors, ended: list[int]) -> SeedErrors:
        return find_errors(self._arrays, raised, ended, self.num_envs, self._observation)

    def _without(self, errors: SeedErrors, active: np.ndarray | None) -> np.ndarray:
        active = np.ones(self.num_seeds, np.bool_) if active is None else active.copy()
        active[list(errors)] = False
        return active

    def _exclude(self, errors: SeedErrors, *results: np.ndarray) -> None:
        """Stop seeds with errors from acting, and clear their rows so no error is found twice."""
        for seed_index in errors:
            rows = self._rows(seed_index)
            for values in (self._arrays.obs, *results):
                values[rows] = 0
            self._arrays.rows(rows).clear_results()
        self._needs_reset.update(errors)

    def _end_episode(self, index: int) -> EpisodeEnd:
        success = int(self._arrays.success[index])
        end = self._episodes.end(index, None if success == NO_SUCCESS else bool(success))
        self._arrays.seeds[index] = self._episodes.next_seed(index)
        return end

    @property
    def steps_some(self) -> bool:
        """Whether a step may leave environments of an active seed under way."""
        return self._vector.steps_some

    def busy(self) -> np.ndarray | None:
        """`(n,)` bool: the environments that still step with an earlier action; None: none."""
        return self._vector.busy()

    def infos(self, seed_index: int = 0) -> list[dict[Any, Any]]:
        """The infos of the last step of one seed, also where an episode ended.

        They are empty before the first step. Worker processes send them only on this request, and
        leave out entries that cannot be pickled.
        """
        if self._under_way is not None:
            raise RuntimeError("Call finish() before infos().")
        indices = self._indices(seed_index)
        try:
            return self._vector.infos(indices)
        except WorkerDied:  # the next step reports it
            return [{} for _ in indices]

    def last_actions(self, seed_index: int = 0) -> np.ndarray:
        """The actions of the last step of one seed, in the units of the action space."""
        return self._arrays.actions[self._rows(seed_index)].copy()

    def environments(self, seed_index: int = 0) -> list[gym.Env[Any, Any]] | None:
        """The environments of one seed with their wrappers; None if worker processes have them."""
        return self._vector.environments(self._indices(seed_index))

    def at_episode_boundary(self, seed_index: int = 0) -> bool:
        """Whether every environment of the seed is at the start of an episode."""
        return not self._episodes.lengths[self._rows(seed_index)].any()

    def snapshot(self, seed_index: int = 0) -> Json:
        """The state of the environments of one seed as JSON, the same with either backend.

        With `seed_every_reset` it has only the episode numbers, so take it at an episode boundary.
        Raises `SnapshotUnsupported` if the state of an environment cannot be captured.
        """
        if self._under_way is not None:
            raise RuntimeError("Call finish() before snapshot().")
        if seed_index in self._needs_reset:
            raise RuntimeError("Call reset() or restore() before snapshot().")
        episodes, rows = self._episodes, self._rows(seed_index)
        environments: list[Json] = []
        try:
            if not episodes.seeded[seed_index]:
                environments = self._capture(seed_index)
        except WorkerDied:
            if not episodes.seeded[seed_index]:  # otherwise the loss of its episodes is reported
                raise
        if episodes.seeded[seed_index]:  # perhaps because a worker was lost just now
            # A partial episode is not repeated: its transitions are already in the replay buffer.
            return seeded_snapshot(episodes.numbers[rows] + (episodes.lengths[rows] > 0))
        return SeedSnapshot(
            episodes.numbers[rows],
            episodes.returns[rows],
            episodes.lengths[rows],
            as_float32(self._arrays.obs[rows]),
            environments,
        ).to_json()

    def _capture(self, seed_index: int) -> list[Json]:
        states = []
        for index, answer in enumerate(self._vector.call("read_state", self._indices(seed_index))):
            if "error" in answer:
                raise SnapshotUnsupported(f"Environment {index}: {answer['error']}")
            states.append(answer["state"])
        return states

    def restore(self, snapshot: Json, seed_index: int = 0) -> np.ndarray:
        """Continue a seed from a snapshot; returns its observations, `(num_envs, obs_dim)`.

        With `seed_every_reset`, every environment starts its current episode again. Raises
        `CheckpointError` if the snapshot does not match the environments.
        """
        rows = self._rows(seed_index)
        try:
            if self._episodes.seeded[seed_index]:
                self._episodes.numbers[rows] = seeded_numbers(snapshot, self.num_envs)
                _raise_first(self._restart([seed_index]))
            else:
                saved = SeedSnapshot.from_json(snapshot, self.num_envs, self._observation)
                self._continue_from(saved, seed_index)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"The environments' snapshot does not fit: {error}.") from error
        return as_float32(self._arrays.obs[rows])

    def _continue_from(self, saved: SeedSnapshot, seed_index: int) -> None:
        # The reset replaces dead workers, and some environments can only be restored after one.
        _raise_first(self._restart([seed_index]))
        problems = self._vector.call("write_state", self._indices(seed_index), saved.environments)
        for index, problem in enumerate(problems):
            if problem:
                raise CheckpointError(f"Environment {index}: {problem}")
        rows = self._rows(seed_index)
        self._episodes.numbers[rows] = saved.episode_numbers
        self._episodes.returns[rows] = saved.episode_returns
        self._episodes.lengths[rows] = saved.episode_lengths
        is_vector = self._observation.is_vector
        self._arrays.obs[rows] = saved.obs if is_vector else saved.obs.view(ROW_WORDS)

    def wrapper_statistics(self, seed_index: int = 0) -> list[Json]:
        """What the wrappers of the seed's first environment have learned, as JSON.

        Raises `SnapshotUnsupported` if the `snapshot` method of a wrapper fails.
        """
        if self._under_way is not None:
            raise RuntimeError("Call finish() before wrapper_statistics().")
        with suppress(WorkerDied):  # then those of the last time
            [answer] = self._vector.call("read_statistics", self._indices(seed_index)[:1])
            if "error" in answer:
                raise SnapshotUnsupported(answer["error"])
            self._learned[seed_index] = answer["state"]
        return self._learned.get(seed_index, [])

    def give_statistics(self, statistics: Sequence[Json], seed_index: int = 0) -> None:
        """Load what `wrapper_statistics` returned into the wrappers of one seed.

        Call it before `reset` or `restore`. Raises `CheckpointError` if the environments have
        other wrappers.
        """
        indices = self._indices(seed_index)
        given = [list(statistics)] * len(indices)
        for problem in self._vector.call("write_statistics", indices, given):
            if problem is not None:
                raise CheckpointError(problem)
        self._learned[seed_index] = list(statistics)

    def _rows(self, seed_index: int) -> slice:
        return slice(seed_index * self.num_envs, (seed_index + 1) * self.num_envs)

    def _indices(self, seed_index: int) -> range:
        return range(self.total_envs)[self._rows(seed_index)]

    def close(self) -> None:
        """Close all environments and end their processes; may be called twice."""
        self._vector.close()

    def __enter__(self) -> VectorEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raise_first(errors: SeedErrors) -> None:
    """Raise the error of the lowest seed index, or the environment's own exception behind it."""
    if errors:
        error = errors[min(errors)]
        raise error.__cause__ or error
