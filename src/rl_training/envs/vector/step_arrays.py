"""The arrays of a vectorized step, the actions written to them, and checks of their values.

`StepArrays` are views of one buffer, so that worker processes can share it. `ActionTranslator`
fills in the actions, `EpisodeTracker` adds up the rewards, `find_errors` turns unusable values into
one error per seed, and `StepResult` is what the caller gets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from rl_training.envs.spaces import ActionScaler
from rl_training.errors import EnvironmentRuntimeError
from rl_training.observations import ObservationSpec
from rl_training.types import SpaceInfo

_ALIGNMENT = 64
"""Bytes of a cache line, so that no two arrays share one"""

ROW_WORDS = np.uint32
"""Type of observation rows: not float32, because words that are not numbers may look like NaN"""

NO_SEED = -1
"""In `StepArrays.seeds`: reset without a seed, which continues the environment's random stream"""

NO_SUCCESS = -1
"""In `StepArrays.success`: the environment does not say whether the episode was a success"""


def steps_per_round(backend: str, num_envs: int) -> int:
    """How many of the `num_envs` environments of a seed complete a step in each round.

    An asynchronous round takes the first half that is ready, so that it waits neither for the
    slowest environment nor for the fastest one alone.
    """
    return -(-num_envs // 2) if backend == "ray-async" else num_envs


class Field(NamedTuple):
    """Name, shape, type and byte offset of one array in the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


def step_layout(
    number: int,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    observation: ObservationSpec | None = None,
) -> list[Field]:
    """Buffer layout of the `StepArrays` of `number` environments with these spaces.

    `observation` describes the observations that are not one vector (None: a vector).
    """
    vector_type = np.dtype(observation_space.dtype)
    if vector_type.kind != "f":  # uint32 would be taken for words, int64 would cut off fractions
        vector_type = np.dtype(np.float64)
    obs = ((number, *(observation_space.shape or ())), vector_type)
    if observation is not None and not observation.is_vector:
        obs = ((number, observation.size), np.dtype(ROW_WORDS))
    continuous = isinstance(action_space, gym.spaces.Box)
    contents: dict[str, tuple[tuple[int, ...], Any]] = {
        "actions": (
            (number, *(action_space.shape or ())),
            np.float32 if continuous else action_space.dtype,
        ),
        "active": ((number,), np.bool_),
        "seeds": ((number,), np.int64),
        "obs": obs,
        "final_obs": obs,
        "reward": ((number,), np.float64),
        "terminated": ((number,), np.bool_),
        "truncated": ((number,), np.bool_),
        "success": ((number,), np.int8),
    }
    return _placed(contents)


def resized_layout(layout: Sequence[Field], number: int) -> list[Field]:
    """The same layout for another number of environments."""
    return _placed({each.name: ((number, *each.shape[1:]), each.dtype) for each in layout})


def _placed(contents: Mapping[str, tuple[tuple[int, ...], Any]]) -> list[Field]:
    layout, offset = [], 0
    for name, (shape, dtype) in contents.items():
        layout.append(Field(name, shape, np.dtype(dtype), offset))
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return layout


def environments_in(layout: Sequence[Field]) -> int:
    """The number of environments that a layout is for."""
    return layout[0].shape[0]


def buffer_size(layout: Sequence[Field]) -> int:
    """Size in bytes of the buffer that `StepArrays.view` needs."""
    last = layout[-1]
    return last.offset + int(np.prod(last.shape)) * last.dtype.itemsize


@dataclass(frozen=True)
class StepArrays:
    """One row per environment, written in place by the process that currently owns the buffer."""

    actions: np.ndarray
    """In the units of the action space: float32, or the type of a space of integers"""
    active: np.ndarray
    """Bool: the environments that a masked step or a reset applies to"""
    seeds: np.ndarray
    """int64: the seed of the next reset, or `NO_SEED`"""
    obs: np.ndarray
    """Observation to act on next: a vector in the type of its space (float64 if that has whole
    numbers), or else a row's words"""
    final_obs: np.ndarray
    """Last observation of an episode that just ended; outdated where none ended"""
    reward: np.ndarray
    """float64"""
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    """int8: 1 or 0, or `NO_SUCCESS`, for an episode that just ended; outdated where none ended"""

    @classmethod
    def view(cls, buffer: Any, layout: Sequence[Field]) -> StepArrays:
        """Views of a buffer with at least `buffer_size(layout)` bytes."""
        return cls(
            **{
                name: np.ndarray(shape, dtype, buffer, offset)
                for name, shape, dtype, offset in layout
            }
        )

    def rows(self, rows: slice) -> StepArrays:
        """Views of some environments' rows."""
        return StepArrays(*(getattr(self, field.name)[rows] for field in fields(self)))

    def clear_results(self) -> None:
        """Set zero rewards and no episode ends, for environments that will not be stepped."""
        self.reward[:] = 0.0
        self.terminated[:] = False
        self.truncated[:] = False


class ActionTranslator:
    """Checks actions and converts them to the environment's units.

    Continuous actions come in [-1, 1], others as indices from 0. Components are in one axis.
    """

    def __init__(self, spaces: SpaceInfo, num_envs: int, num_seeds: int) -> None:
        self.scaler: ActionScaler | None = None
        self._spaces, self._num_envs = spaces, num_envs
        self._total = num_envs * num_seeds
        self._shape: tuple[int, ...] = (self._total, spaces.action_dim)
        if spaces.is_continuous:
            self.scaler = ActionScaler(*spaces.bounds)
            return
        if spaces.action_kind == "discrete":
            self._shape = (self._total,)
        self._choices = np.asarray(spaces.actions.num_choices, np.uint64)
        self._start = spaces.first_choice
        self._shifts = bool(np.any(self._start))

    def write(
        self, actions: np.ndarray, active: np.ndarray | None, target: np.ndarray
    ) -> SeedErrors:
        """Write the actions to `target`; return errors for seeds whose actions are not finite.

        `active`, `(num_seeds,)` bool, selects the seeds to check (None: all).
        """
        if self.scaler is None:
            target[...] = self._indices(actions, active).reshape(target.shape)
            return {}
        if actions.shape != self._shape:
            raise ValueError(f"Actions have shape {actions.shape}; {self._shape} is expected.")
        errors: SeedErrors = {}
        if not all_finite(actions):
            errors = errors_in_values("action", actions, actions, self._num_envs)
            if active is not None:
                errors = {index: error for index, error in errors.items() if active[index]}
            actions = np.where(np.isfinite(actions), actions, 0.0)  # these seeds are not stepped
        target[...] = self.scaler.to_environment(actions).reshape(target.shape)
        return errors

    def _indices(self, actions: np.ndarray, active: np.ndarray | None) -> np.ndarray:
        """Check indices from 0, and return them in the environment's numbers."""
        if actions.shape != self._shape or actions.dtype.kind not in "iu":
            kind = self._spaces.action_kind.replace("_", "-").capitalize()
            raise ValueError(
                f"{kind} actions must be {' x '.join(map(str, self._shape))} integers, not "
                f"{actions.dtype} of shape {actions.shape}."
            )
        if active is not None:
            rows = np.repeat(active, self._num_envs)
            actions = np.where(rows if actions.ndim == 1 else rows[:, None], actions, 0)
        # As unsigned integers, negative numbers are huge, so one comparison checks both bounds.
        if b"\0" in (actions.astype(np.uint64) < self._choices).tobytes():
            raise ValueError(f"Actions {actions} are not all in [0, {self._choices}).")
        return actions + self._start if self._shifts else actions


@dataclass(frozen=True)
class EpisodeEnd:
    """An episode that ended in this step."""

    env_index: int
    episode_return: float
    length: int
    success: bool | None = None
    """`is_success` or `success` of the last info; None if the environment does not provide it"""


class StepResult(NamedTuple):
    """Results of one step of all environments. The arrays are copies that the caller may keep.

    Rows are ordered by seed, then by environment of that seed. If a seed was not active, its rows
    have the last observation, zero reward and no episode end. If a seed is in `errors`, its rows
    are undefined.
    """

    next_obs: np.ndarray
    """`(n, obs_dim)` float32: observation after the action, also at the end of an episode"""
    reward: np.ndarray
    """`(n,)` float32"""
    terminated: np.ndarray
    """`(n,)` bool"""
    truncated: np.ndarray
    """`(n,)` bool"""
    obs: np.ndarray
    """`(n, obs_dim)` float32: observation to act on next; after an episode end, the first
    observation of the next episode"""
    episodes: list[EpisodeEnd]
    errors: SeedErrors
    """Errors by seed index; they do not affect other seeds"""
    lost: np.ndarray | None = None
    """`(n,)` bool: environments whose episode was lost with their worker process. `obs` is the
    first observation of a new episode, and there is no transition to it. None if there are none"""
    abandoned: np.ndarray | None = None
    """`(n,)` bool: those of `lost` without a new episode, because the run stops. `obs` is their
    last observation. None if there are none"""
    stepped: np.ndarray | None = None
    """`(n,)` bool: the environments that completed a step; the rows of the others are like those of
    a seed that was not active. None: all environments of the active seeds"""


class EpisodeTracker:
    """Tracks the return, length, number and seed of each environment's current episode.

    There are `num_envs` environments for each of `seeds`. An episode's seed is derived from its
    entry in `seeds`, the index of the environment among those of the seed, and the episode number.
    """

    def __init__(self, seeds: Sequence[int], num_envs: int, *, seed_every_reset: bool) -> None:
        self._seeds, self._num_envs = seeds, num_envs
        self.seeded = [seed_every_reset] * len(seeds)
        """By seed: whether every episode starts from its own seed, not only the first"""
        self.lost: set[int] = set()
        """Environments that lost an episode since the last step"""
        self.why_lost: dict[int, str] = {}
        """By seed: why it lost an episode, if it lost any"""
        total = len(seeds) * num_envs
        self.returns = np.zeros(total, dtype=np.float64)
        self.lengths = np.zeros(total, dtype=np.int64)
        self.numbers = np.zeros(total, dtype=np.int64)
        self._ones = np.ones(total, dtype=np.int64)

    def seed(self, index: int, episodes_ahead: int = 0) -> int:
        """The seed of an environment's current episode, or of a later one."""
        seed_index, within = divmod(index, self._num_envs)
        episode = int(self.numbers[index]) + episodes_ahead
        sequence = np.random.SeedSequence(self._seeds[seed_index], spawn_key=(within, episode))
        return int(sequence.generate_state(1)[0])

    def record(self, reward: np.ndarray, active: np.ndarray | None) -> None:
        """Add a step of all environments, or of those in the mask `active`, `(n,)` bool."""
        # Not in place: for small arrays, NumPy's overlap check takes four times as long.
        self.returns = self.returns + reward
        self.lengths = self.lengths + (self._ones if active is None else active)

    def restart(self, index: int) -> None:
        """Start an environment's current episode again."""
        self.returns[index] = 0.0
        self.lengths[index] = 0

    def next_seed(self, index: int) -> int:
        """The seed of the reset after the current episode, or `NO_SEED`."""
        seeded = self.seeded[index // self._num_envs]
        return self.seed(index, episodes_ahead=1) if seeded else NO_SEED

    def lose(self, index: int, reason: str) -> int:
        """Give up the episode of an environment whose worker was lost; return the next seed.

        Its seed continues with episodes that start from their own seeds.
        """
        seed_index = index // self._num_envs
        self.lost.add(index)
        self.why_lost[seed_index], self.seeded[seed_index] = reason, True
        self.restart(index)
        self.numbers[index] += 1
        return self.seed(index)

    def take_lost(self, before: Collection[int]) -> np.ndarray:
        """Mask of the environments that lost an episode in this step, or `before` it."""
        for index in self.lost.difference(before):
            self.restart(index)  # the new episode was started, but not stepped
        lost = np.zeros(len(self.lengths), np.bool_)
        lost[list(self.lost)] = True
        self.lost.clear()
        return lost

    def end(self, index: int, success: bool | None = None) -> EpisodeEnd:
        """End an environment's current episode and start the next one."""
        end = EpisodeEnd(index, float(self.returns[index]), int(self.lengths[index]), success)
        self.restart(index)
        self.numbers[index] += 1
        return end


EnvironmentErrors = dict[int, Exception]
"""By environment index: an `EnvironmentRuntimeError`, or the exception the environment raised"""

SeedErrors = dict[int, EnvironmentRuntimeError]
"""By seed index: the first error of the seed's environments"""


class WorkerDied(EnvironmentRuntimeError):
    """A worker process ended or hung, and the state of all its environments is lost."""

    def __init__(self, reason: str, restarts: int = 0) -> None:
        """`restarts` is how often workers were started again before, if that is the limit."""
        self.reason = reason
        used = f" All {restarts} restarts of a run are used (env_restarts)." if restarts else ""
        super().__init__(f"An environment's worker process {reason}.{used}")


def all_finite(values: np.ndarray) -> bool:
    """Whether all values are finite; for small arrays twice as fast as `.all()`."""
    return b"\0" not in np.isfinite(values).tobytes()


def as_float32(values: np.ndarray) -> np.ndarray:
    """A float32 copy; values out of range become infinite, which `all_finite` detects.

    The words of observation rows keep their bits.
    """
    if values.dtype == ROW_WORDS:
        return values.copy().view(np.float32)
    if values.dtype == np.float32:
        return values.copy()
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def find_errors(
    arrays: StepArrays,
    raised: EnvironmentErrors,
    ended: list[int],
    num_envs: int,
    observation: ObservationSpec,
) -> SeedErrors:
    """The first error of each seed after a step or reset.

    `raised` has the exceptions of the environments, `ended` the indices of environments whose
    episode ended, and `num_envs` is the number of environments of one seed.
    """
    errors: SeedErrors = {}
    for index, error in raised.items():
        seed_index, within = divmod(index, num_envs)
        errors.setdefault(seed_index, _seed_error(within, error))
    next_obs = arrays.obs.copy()
    next_obs[ended] = arrays.final_obs[ended]
    for obs in (next_obs, arrays.obs):
        values, shown = as_float32(obs), obs
        if not observation.is_vector:  # the words of other leaves are not floats
            values = shown = observation.floats_in(values)
        kind = observation.narrowest_float
        errors = errors_in_values("observation", values, shown, num_envs, kind) | errors
    return errors


def errors_in_values(
    what: str, values: np.ndarray, original: np.ndarray, num_envs: int, kind: str = "float32"
) -> SeedErrors:
    """For each seed, an error that names its first environment with a value that is not finite.

    `kind` is the type in which it should be.
    """
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    errors: SeedErrors = {}
    for index in np.flatnonzero(bad):
        seed_index, within = divmod(int(index), num_envs)
        message = f"Environment {within}: its {what} is not finite in {kind}: {original[index]}"
        errors.setdefault(seed_index, EnvironmentRuntimeError(message))
    return errors


def _seed_error(within: int, error: Exception) -> EnvironmentRuntimeError:
    """Convert an environment's error to one of its seed; `__cause__` is the original exception."""
    if isinstance(error, WorkerDied):
        return EnvironmentRuntimeError(str(error))
    if isinstance(error, EnvironmentRuntimeError):
        return EnvironmentRuntimeError(f"Environment {within}: {error}")
    failure = EnvironmentRuntimeError(
        f"Environment {within} raised {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure
