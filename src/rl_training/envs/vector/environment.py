"""Several environments as one: stepped together, reset one by one, snapshotted, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.snapshots.snapshot import (
    SeedSnapshot,
    SnapshotUnsupported,
    seeded_numbers,
    seeded_snapshot,
)
from rl_training.envs.vector.backends import Backend, make_vector
from rl_training.envs.vector.step_arrays import (
    NO_SEED,
    ActionTranslator,
    EpisodeBooks,
    EpisodeEnd,
    SeedErrors,
    all_finite,
    as_float32,
    find_errors,
)
from rl_training.errors import CheckpointError
from rl_training.types import Json


class StepResult(NamedTuple):
    """What one step of all environments gave; the arrays are the caller's to keep.

    Rows go by seed, then by environment within it. Those of a seed that did not act hold the
    last observation, no reward and no end; those of a seed at error mean nothing.
    """

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
    errors: SeedErrors
    """By seed: what went wrong there, which other seeds do not notice"""


class VectorEnvironment:
    """`num_envs` environments for each seed, in this process or shared out over several.

    Those of one seed are a seed, which goes exactly as if it were alone, with either backend.
    With `seed_every_reset` each episode starts from a seed of its own, made of the group's seed,
    the environment's index and the episode's number, so that an environment that cannot be
    snapshotted can be resumed where episodes begin.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        num_envs: int,
        seed: int | Sequence[int],
        *,
        backend: Backend = "sync",
        seed_every_reset: bool = False,
    ) -> None:
        seeds = [seed] if isinstance(seed, int | np.integer) else list(seed)
        self.num_envs, self.num_seeds = num_envs, len(seeds)
        self.total_envs = self.num_seeds * num_envs
        self._seed_every_reset = seed_every_reset
        self._books = EpisodeBooks(seeds, num_envs)
        self._vector, self.spaces = make_vector(factory, self.total_envs, backend)
        self._arrays = self._vector.arrays
        self._actions = ActionTranslator(self.spaces, num_envs, self.num_seeds)
        self.action_scaler = self._actions.scaler
        self._ready = np.zeros(self.num_seeds, np.bool_)
        """Which seeds may act: a error leaves nothing to act on, until a reset or restore"""
        self._all_ready = False
        self._lost: SeedErrors = {}
        """Groups whose worker was found dead on behalf of another one, to be told of next time"""
        self._under_way: tuple[np.ndarray | None, SeedErrors] | None = None
        """Between `start` and `finish`: which seeds act (None: all), and their actions' errors"""

    def reset(self, seed_indices: Sequence[int] | None = None) -> np.ndarray:
        """Start the first episodes of all seeds, or of these; returns `(n, obs_dim)` float32.

        A second call starts over, with the same seeds. The rows of other seeds are their current
        observations.
        """
        obs, errors = self.try_reset(
            range(self.num_seeds) if seed_indices is None else seed_indices
        )
        _raise_first(errors)
        return obs

    def try_reset(self, seed_indices: Sequence[int]) -> tuple[np.ndarray, SeedErrors]:
        """As `reset`, but a seed at error is told of instead of raised."""
        for seed_index in seed_indices:
            self._books.numbers[self._rows(seed_index)] = 0
        errors = self._restart(seed_indices)
        return as_float32(self._arrays.obs), errors

    def _restart(self, seed_indices: Sequence[int]) -> SeedErrors:
        """Start the current episodes of these seeds, by their seeds; what went wrong in them."""
        if self._under_way is not None and len(set(seed_indices)) < self.num_seeds:
            raise RuntimeError("Call finish() before some seeds are reset or restored.")
        arrays, self._under_way = self._arrays, None
        indices = [index for seed_index in seed_indices for index in self._indices(seed_index)]
        arrays.active[:] = False
        arrays.active[indices] = True
        arrays.clear_results()
        for index in indices:
            self._books.restart(index)
            arrays.seeds[index] = self._books.seed(index)
        self._set_ready(seed_indices, False)
        self._lost = {
            seed_index: self._lost[seed_index]
            for seed_index in self._lost
            if seed_index not in seed_indices
        }
        errors = find_errors(arrays, self._vector.reset(), [], self.num_envs)
        arrays.seeds[indices] = NO_SEED
        if self._seed_every_reset:
            arrays.seeds[indices] = [self._books.seed(index, 1) for index in indices]
        own = {
            seed_index: errors[seed_index] for seed_index in seed_indices if seed_index in errors
        }
        self._lost.update((other, errors[other]) for other in errors if self._ready[other])
        self._set_ready(seed_indices, True)
        self._exclude(errors)
        return own

    def step(self, actions: np.ndarray, active: np.ndarray | None = None) -> StepResult:
        """Act in every environment, and start a new episode where one ended.

        As `start` and `finish`, but raises the first error. After that a seed must be reset,
        restored or closed, unless its action was not finite: then nothing has happened.
        """
        self.start(actions, active)
        result = self.finish()
        _raise_first(result.errors)
        return result

    def start(self, actions: np.ndarray, active: np.ndarray | None = None) -> None:
        """Let the environments act; `finish` gives what came of it.

        `actions` are `(n, action_dim)` in [-1, 1], or `(n,)` of indices from 0 where actions are
        discrete. `active`, `(num_seeds,)` bool, leaves some seeds, and their actions, aside.
        With worker processes the environments run until `finish` is called.
        """
        if self._under_way is not None:
            raise RuntimeError("Call finish() before the next start().")
        if active is not None:
            active = np.asarray(active, np.bool_)
            active = None if active.all() else active
        errors = self._lost
        if errors:
            active = self._without(errors, active)
        if not (self._all_ready if active is None else self._ready[active].all()):
            raise RuntimeError("Call reset() or restore() before step().")
        arrays = self._arrays
        unfit = self._actions.write(np.asarray(actions), active, arrays.actions)
        if unfit:
            active, errors = self._without(unfit, active), errors | unfit
        if active is not None:
            arrays.active[:] = np.repeat(active, self.num_envs)
            arrays.clear_results()
        self._under_way, self._lost = (active, errors), {}
        self._vector.start(masked=active is not None)

    def finish(self) -> StepResult:
        """Wait for the step that was started.

        `EnvironmentRuntimeError`s are in the result, by seed: an observation or reward that is not
        finite or has the wrong shape, an environment that raised (`__cause__` says what), or a
        worker process that died.
        """
        if self._under_way is None:
            raise RuntimeError("Call start() before finish().")
        try:
            return self._collect(*self._under_way)
        except BaseException:  # interrupted: nobody knows how far each environment came
            self._set_ready(range(self.num_seeds), False)
            raise
        finally:
            self._under_way = None

    def _collect(self, active: np.ndarray | None, errors: SeedErrors) -> StepResult:
        any_ended, raised = self._vector.finish()
        arrays = self._arrays
        self._books.record(arrays.reward, None if active is None else arrays.active)
        obs, reward = as_float32(arrays.obs), arrays.reward.astype(np.float32)
        next_obs, finite, ended = obs.copy(), all_finite(obs), []
        if any_ended:
            ended = (arrays.terminated | arrays.truncated).nonzero()[0].tolist()
            next_obs[ended] = as_float32(arrays.final_obs[ended])
            finite = finite and all_finite(next_obs)
        if raised or not finite:
            found = find_errors(arrays, raised, ended, self.num_envs)
            self._exclude(found, obs, next_obs, reward)
            ended = [index for index in ended if index // self.num_envs not in found]
            errors = errors | found
        terminated, truncated = arrays.terminated.copy(), arrays.truncated.copy()
        episodes = [self._end_episode(index) for index in ended]
        return StepResult(next_obs, reward, terminated, truncated, obs, episodes, errors)

    def _without(self, errors: SeedErrors, active: np.ndarray | None) -> np.ndarray:
        active = np.ones(self.num_seeds, np.bool_) if active is None else active.copy()
        active[list(errors)] = False
        return active

    def _exclude(self, errors: SeedErrors, *results: np.ndarray) -> None:
        """Groups at error must not act, and what they left must not look like a error again."""
        for seed_index in errors:
            rows = self._rows(seed_index)
            for values in (self._arrays.obs, *results):
                values[rows] = 0
            self._arrays.rows(rows.start, rows.stop).clear_results()
        self._set_ready(list(errors), False)

    def _set_ready(self, seed_indices: Sequence[int], ready: bool) -> None:
        self._ready[list(seed_indices)] = ready
        self._all_ready = bool(self._ready.all())

    def _end_episode(self, index: int) -> EpisodeEnd:
        end = self._books.end(index)
        if self._seed_every_reset:
            self._arrays.seeds[index] = self._books.seed(index, episodes_ahead=1)
        return end

    def _rows(self, seed_index: int) -> slice:
        return slice(seed_index * self.num_envs, (seed_index + 1) * self.num_envs)

    def at_episode_boundary(self, seed_index: int = 0) -> bool:
        """Whether every environment of the seed is at the start of an episode."""
        return not self._books.lengths[self._rows(seed_index)].any()

    def snapshot(self, seed_index: int = 0) -> Json:
        """The state of a group's environments as plain JSON, valid for either backend.

        It does not tell whether the seed was alone. Raises `SnapshotUnsupported` where an
        environment cannot be captured. With `seed_every_reset` only the episodes' numbers are
        kept, so take it at an episode boundary.
        """
        if self._under_way is not None:
            raise RuntimeError("Call finish() before snapshot().")
        if not self._ready[seed_index]:
            raise RuntimeError("Call reset() or restore() before snapshot().")
        books, rows = self._books, self._rows(seed_index)
        if self._seed_every_reset:
            # An episode that was cut short is not played again: its steps are known already.
            return seeded_snapshot(books.numbers[rows] + (books.lengths[rows] > 0))
        environments = []
        for index, answer in enumerate(self._vector.call("read_state", self._indices(seed_index))):
            if "error" in answer:
                raise SnapshotUnsupported(f"Environment {index}: {answer['error']}")
            environments.append(answer["state"])
        return SeedSnapshot(
            books.numbers[rows],
            books.returns[rows],
            books.lengths[rows],
            as_float32(self._arrays.obs[rows]),
            environments,
        ).to_json()

    def wrapper_statistics(self, seed_index: int = 0) -> list[Json]:
        """What the wrappers of a group's first environment have learned, as plain JSON.

        Raises `SnapshotUnsupported` where a wrapper's own `snapshot` fails.
        """
        if self._under_way is not None:
            raise RuntimeError("Call finish() before wrapper_statistics().")
        [answer] = self._vector.call("read_statistics", self._indices(seed_index)[:1])
        if "error" in answer:
            raise SnapshotUnsupported(answer["error"])
        learned: list[Json] = answer["state"]
        return learned

    def give_statistics(self, statistics: Sequence[Json], seed_index: int = 0) -> None:
        """Let the wrappers of a group's environments go on from what `wrapper_statistics` gave.

        Its episodes start again. Raises `CheckpointError` where the wrappers are others.
        """
        indices = self._indices(seed_index)
        given = [list(statistics)] * len(indices)
        for problem in self._vector.call("write_statistics", indices, given):
            if problem is not None:
                raise CheckpointError(problem)

    def restore(self, snapshot: Json, seed_index: int = 0) -> np.ndarray:
        """Continue a seed from a snapshot; returns its observations, `(num_envs, obs_dim)`.

        With `seed_every_reset` every environment starts its current episode again. Raises
        `CheckpointError` for a snapshot that does not fit.
        """
        rows = self._rows(seed_index)
        try:
            if self._seed_every_reset:
                self._books.numbers[rows] = seeded_numbers(snapshot, self.num_envs)
                _raise_first(self._restart([seed_index]))
            else:
                saved = SeedSnapshot.from_json(snapshot, self.num_envs, self.spaces.obs_dim)
                self._continue_from(saved, seed_index)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"The environments' snapshot does not fit: {error}.") from error
        return as_float32(self._arrays.obs[rows])

    def _continue_from(self, saved: SeedSnapshot, seed_index: int) -> None:
        # Brings back a worker that died, and any environment into a state it can go on from.
        _raise_first(self._restart([seed_index]))
        problems = self._vector.call("write_state", self._indices(seed_index), saved.environments)
        for index, problem in enumerate(problems):
            if problem:
                raise CheckpointError(f"Environment {index}: {problem}")
        books, rows = self._books, self._rows(seed_index)
        books.numbers[rows] = saved.episode_numbers
        books.returns[rows] = saved.episode_returns
        books.lengths[rows] = saved.episode_lengths
        self._arrays.obs[rows] = saved.obs

    def _indices(self, seed_index: int) -> range:
        return range(seed_index * self.num_envs, (seed_index + 1) * self.num_envs)

    def close(self) -> None:
        """Close all environments and end their processes; may be called twice."""
        self._vector.close()

    def __enter__(self) -> VectorEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raise_first(errors: SeedErrors) -> None:
    """What went wrong first, by seed: where an environment raised, what it raised."""
    if errors:
        error = errors[min(errors)]
        raise error.__cause__ or error
