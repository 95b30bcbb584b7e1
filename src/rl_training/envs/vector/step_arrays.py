"""What goes into a step of several environments and what comes out, as arrays in one buffer.

The books kept of each environment's current episode.

Numbers that may go on to a buffer: float32 and finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from rl_training.envs.spaces import ActionScaler
from rl_training.errors import EnvironmentRuntimeError
from rl_training.types import SpaceInfo

_ALIGNMENT = 64
"""A cache line, so that no two arrays share one"""


class Field(NamedTuple):
    """One array's place in the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


@dataclass(frozen=True)
class StepArrays:
    """One row per environment. Written in place, by whoever has the word."""

    actions: np.ndarray
    """In the environment's own units: float32, or a Discrete space's type"""
    active: np.ndarray
    """Bool: whom a masked step or reset means"""
    seeds: np.ndarray
    """int64: the seed of the next reset, or `NO_SEED`"""
    obs: np.ndarray
    """What to act on next, in the space's type"""
    final_obs: np.ndarray
    """An ended episode's last observation; old where none ended"""
    reward: np.ndarray
    """float64"""
    terminated: np.ndarray
    truncated: np.ndarray

    @classmethod
    def view(cls, buffer: Any, layout: Sequence[Field]) -> StepArrays:
        """The arrays of a layout in `buffer`, which must hold `buffer_size(layout)` bytes."""
        return cls(
            **{
                name: np.ndarray(shape, dtype, buffer, offset)
                for name, shape, dtype, offset in layout
            }
        )

    def rows(self, start: int, stop: int) -> StepArrays:
        """The same memory, but only these environments."""
        return StepArrays(*(getattr(self, field.name)[start:stop] for field in fields(self)))

    def clear_results(self) -> None:
        """No reward and no end, for those that will not report."""
        self.reward[:] = 0.0
        self.terminated[:] = False
        self.truncated[:] = False


NO_SEED = -1
"""Where an environment goes on with its own random stream"""


def step_layout(
    number: int, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> list[Field]:
    """Where the arrays of `number` environments with these spaces go."""
    obs = ((number, *(observation_space.shape or ())), observation_space.dtype)
    discrete = isinstance(action_space, gym.spaces.Discrete)
    contents: dict[str, tuple[tuple[int, ...], Any]] = {
        "actions": (
            (number, *(action_space.shape or ())),
            action_space.dtype if discrete else np.float32,
        ),
        "active": ((number,), np.bool_),
        "seeds": ((number,), np.int64),
        "obs": obs,
        "final_obs": obs,
        "reward": ((number,), np.float64),
        "terminated": ((number,), np.bool_),
        "truncated": ((number,), np.bool_),
    }
    layout, offset = [], 0
    for name, (shape, dtype) in contents.items():
        layout.append(Field(name, shape, np.dtype(dtype), offset))
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return layout


def buffer_size(layout: Sequence[Field]) -> int:
    """Bytes that `StepArrays.view` needs."""
    last = layout[-1]
    return last.offset + int(np.prod(last.shape)) * last.dtype.itemsize


@dataclass(frozen=True)
class EpisodeEnd:
    """An episode that ended in this step."""

    env_index: int
    episode_return: float
    length: int


class EpisodeBooks:
    """Return, length and number of every environment's episode, and the seed it starts from.

    There are `num_envs` environments to each of `seeds`; an episode's seed is made of its group's
    seed, the environment's index within the seed and the episode's number.
    """

    def __init__(self, seeds: Sequence[int], num_envs: int) -> None:
        self._seeds, self._num_envs = seeds, num_envs
        total = len(seeds) * num_envs
        self.returns = np.zeros(total, dtype=np.float64)
        self.lengths = np.zeros(total, dtype=np.int64)
        self.numbers = np.zeros(total, dtype=np.int64)
        self._everyone = np.ones(total, dtype=np.int64)

    def seed(self, index: int, episodes_ahead: int = 0) -> int:
        """The seed of an environment's current episode, or of a later one."""
        seed_index, within = divmod(index, self._num_envs)
        episode = int(self.numbers[index]) + episodes_ahead
        sequence = np.random.SeedSequence(self._seeds[seed_index], spawn_key=(within, episode))
        return int(sequence.generate_state(1)[0])

    def record(self, reward: np.ndarray, acted: np.ndarray | None) -> None:
        """Enter a step of all environments, or of those in the mask `acted`."""
        # Not in place: for a few numbers, NumPy takes four times as long to look for overlaps.
        self.returns = self.returns + reward
        self.lengths = self.lengths + (self._everyone if acted is None else acted)

    def restart(self, index: int) -> None:
        """The current episode begins (again)."""
        self.returns[index] = 0.0
        self.lengths[index] = 0

    def end(self, index: int) -> EpisodeEnd:
        """Close an episode's books and open those of the next."""
        end = EpisodeEnd(index, float(self.returns[index]), int(self.lengths[index]))
        self.restart(index)
        self.numbers[index] += 1
        return end


EnvironmentErrors = dict[int, Exception]
"""By environment index: an `EnvironmentRuntimeError`, or what the environment itself raised"""


class WorkerDied(EnvironmentRuntimeError):
    """A worker process ended, and the state of all its environments is lost."""

    def __init__(self) -> None:
        super().__init__("An environment's worker process died.")


SeedErrors = dict[int, EnvironmentRuntimeError]
"""By seed: the first thing that is wrong with it"""


def all_finite(values: np.ndarray) -> bool:
    """Whether all are; looking through bytes takes half the time of `.all()` for a few numbers."""
    return b"\0" not in np.isfinite(values).tobytes()


def as_float32(values: np.ndarray) -> np.ndarray:
    """A float32 copy; what is too large becomes infinite, which `all_finite` refuses."""
    if values.dtype == np.float32:
        return values.copy()
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def find_errors(
    arrays: StepArrays, raised: EnvironmentErrors, ended: list[int], num_envs: int
) -> SeedErrors:
    """What is wrong after a step or reset, for each seed, which has `num_envs` rows."""
    errors: SeedErrors = {}
    for index, error in raised.items():
        seed_index, within = divmod(index, num_envs)
        errors.setdefault(seed_index, _seed_error(within, error))
    next_obs = arrays.obs.copy()
    next_obs[ended] = arrays.final_obs[ended]
    for obs in (next_obs, arrays.obs):
        errors = errors_in_values("observation", as_float32(obs), obs, num_envs) | errors
    return errors


def errors_in_values(
    what: str, values: np.ndarray, original: np.ndarray, num_envs: int
) -> SeedErrors:
    """For each seed, an error that names its first environment with a value that is not finite."""
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    errors: SeedErrors = {}
    for index in np.flatnonzero(bad):
        seed_index, within = divmod(int(index), num_envs)
        message = f"Environment {within}: its {what} is not finite in float32: {original[index]}"
        errors.setdefault(seed_index, EnvironmentRuntimeError(message))
    return errors


def _seed_error(within: int, error: Exception) -> EnvironmentRuntimeError:
    """One environment's error as that of its seed; `__cause__` is what the environment raised."""
    if isinstance(error, WorkerDied):
        return EnvironmentRuntimeError(str(error))
    if isinstance(error, EnvironmentRuntimeError):
        return EnvironmentRuntimeError(f"Environment {within}: {error}")
    failure = EnvironmentRuntimeError(
        f"Environment {within} raised {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure


class ActionTranslator:
    """From [-1, 1], or indices from 0 where actions are discrete, to what environments accept."""

    def __init__(self, spaces: SpaceInfo, num_envs: int, num_seeds: int) -> None:
        self.scaler: ActionScaler | None = None
        if spaces.action_low is not None and spaces.action_high is not None:
            self.scaler = ActionScaler(spaces.action_low, spaces.action_high)
        self._spaces, self._num_envs = spaces, num_envs
        self._choices = np.uint64(spaces.action_dim)
        self._total = num_envs * num_seeds
        self._shape = (self._total, spaces.action_dim) if self.scaler else (self._total,)

    def write(
        self, actions: np.ndarray, acting: np.ndarray | None, target: np.ndarray
    ) -> SeedErrors:
        """Put the actions into `target`; returns the seed_indexs whose actions are not finite.

        `acting` says which seeds act, `(num_seeds,)`, or None for all: others are not checked.
        """
        if self.scaler is None:
            target[...] = self._discrete(actions, acting)
            return {}
        if actions.shape != self._shape:
            raise ValueError(f"Actions have shape {actions.shape}; {self._shape} is expected.")
        errors: SeedErrors = {}
        if not all_finite(actions):
            errors = errors_in_values("action", actions, actions, self._num_envs)
            if acting is not None:
                errors = {
                    seed_index: error for seed_index, error in errors.items() if acting[seed_index]
                }
            actions = np.where(np.isfinite(actions), actions, 0.0)  # of those that will not act
        target[...] = self.scaler.to_environment(actions)
        return errors

    def _discrete(self, actions: np.ndarray, acting: np.ndarray | None) -> np.ndarray:
        if actions.shape != self._shape or actions.dtype.kind not in "iu":
            raise ValueError(
                f"Discrete actions are {self._total} integers, not {actions.dtype} of shape "
                f"{actions.shape}."
            )
        if acting is not None:
            actions = np.where(np.repeat(acting, self._num_envs), actions, 0)
        # Negative numbers become huge ones without a sign, so that one comparison finds both.
        if b"\0" in (actions.astype(np.uint64) < self._choices).tobytes():
            raise ValueError(f"Actions {actions} are not all in [0, {self._choices}).")
        return actions + self._spaces.action_start if self._spaces.action_start else actions
