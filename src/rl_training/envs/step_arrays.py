"""What goes into a step of several environments and what comes out, as arrays in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

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
