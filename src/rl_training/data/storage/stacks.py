"""Which images of an observation are stacks of frames, and how a stored row refers to frames.

A stack of the last four frames changes by one frame per step. Stored as they are, the observation
and the next observation of a transition contain every frame eight times. So frames are stored once,
in a ring of their own, and the row of a transition holds their positions there. An image that is
no stack is a stack of a single frame: it is the next observation of one transition and the
observation of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from rl_training.observations import WORD_BYTES, ObservationLeaf, ObservationSpec

FrameStackChoice = int | Literal["auto"]

MOST_CHANNELS = 4
"""Last axis of an image up to which it is an axis of colors"""
MOST_FRAMES = 8
"""First axis of an image up to which it may be a stack of frames"""
SPARE = 16
"""A ring has room for one more frame per this many transitions: each episode has one more frame
than transitions"""
ALIGNED_WORDS = 2
"""Frames are compared 64 bits at a time"""


def frames_in(shape: tuple[int, ...], choice: FrameStackChoice = "auto") -> int:
    """Return how many frames are on the first axis of an image; 1 if it is no stack.

    `(frames, height, width, colors)` is a stack. `(frames, height, width)` is one if its first axis
    is short and not a multiple of 3, which may be colors.
    """
    if choice != "auto":
        return choice if shape[0] % choice == 0 else 1
    if len(shape) == 4:
        return shape[0]
    is_stack = len(shape) == 3 and shape[2] > MOST_CHANNELS and shape[0] <= MOST_FRAMES
    return shape[0] if is_stack and shape[0] % 3 else 1


@dataclass(frozen=True)
class FrameStack:
    """An image of an observation, as frames of equal size."""

    leaf: ObservationLeaf
    frames: int

    @property
    def frame_bytes(self) -> int:
        return self.leaf.numbers // self.frames

    @property
    def frame_words(self) -> int:
        """Words of a stored frame, with padding."""
        unit = ALIGNED_WORDS * WORD_BYTES
        return -(-self.frame_bytes // unit) * ALIGNED_WORDS


@dataclass(frozen=True)
class FrameLayout:
    """The columns of observations in stored rows, if images are stored as frames.

    An observation has the words of its other leaves, and for each stack one position per frame as
    int32. The next observation also has, for each stack, how many frames the transition added.
    """

    observation: ObservationSpec
    choice: FrameStackChoice = "auto"
    num_envs: int = 1
    """Environments whose transitions are added in turn"""
    n_step: int = 1
    """Steps of a transition"""

    @classmethod
    def of(
        cls, observation: ObservationSpec, choice: FrameStackChoice, num_envs: int, n_step: int
    ) -> FrameLayout | None:
        """Return the layout of observations with images; None if they have none."""
        if all(leaf.kind != "image" for leaf in observation.leaves):
            return None
        return cls(observation, choice, num_envs, n_step)

    @cached_property
    def stacks(self) -> tuple[FrameStack, ...]:
        images = (leaf for leaf in self.observation.leaves if leaf.kind == "image")
        return tuple(FrameStack(leaf, frames_in(leaf.shape, self.choice)) for leaf in images)

    @cached_property
    def rest(self) -> ObservationSpec | None:
        """The leaves that are not images; None if there are none."""
        leaves = tuple(leaf for leaf in self.observation.leaves if leaf.kind != "image")
        return ObservationSpec(leaves) if leaves else None

    @cached_property
    def rest_columns(self) -> np.ndarray:
        """The words of `rest` in an observation."""
        others = [leaf for leaf in self.observation.leaves if leaf.kind != "image"]
        parts = [np.r_[self.observation.columns(leaf.name)] for leaf in others]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @cached_property
    def widths(self) -> tuple[int, int]:
        """Columns of an observation, and of a next observation."""
        width = len(self.rest_columns) + sum(stack.frames for stack in self.stacks)
        return width, width + len(self.stacks)

    @cached_property
    def positions(self) -> list[slice]:
        """The columns of an observation that are the frame positions of each stack."""
        firsts = np.cumsum([len(self.rest_columns), *(stack.frames for stack in self.stacks)])
        return [slice(first, last) for first, last in pairwise(firsts.tolist())]

    def check(self, obs: np.ndarray, next_obs: np.ndarray, filled: Sequence[int]) -> None:
        """Raise `ValueError` if columns from a file refer to frames that are not there.

        `filled` are the numbers of frames of each stack.
        """
        width, _ = self.widths
        numbers = [np.ascontiguousarray(columns).view(np.int32) for columns in (obs, next_obs)]
        for place, number in zip(self.positions, filled, strict=True):
            if any(((part[:, place] < 0) | (part[:, place] >= number)).any() for part in numbers):
                raise ValueError("refers to frames that are not there")
        counts, most = numbers[1][:, width:], [2 * stack.frames for stack in self.stacks]
        if ((counts < 0) | (counts > most)).any():
            raise ValueError("counts frames that are not possible")

    def window(self, stack: FrameStack) -> int:
        """How many of the newest frames are found again.

        Those of a transition's first observation are at most this old, unless every environment
        starts an episode at once, several times.
        """
        return 2 * (self.n_step + stack.frames) * self.num_envs

    def ring_frames(self, stack: FrameStack, capacity: int) -> int:
        """Frames per seed that are kept for `capacity` transitions."""
        spare = max(capacity // SPARE, 2 * stack.frames)
        return capacity + spare + 2 * self.window(stack)

    def first_needed(self, stack: FrameStack, added: int, capacity: int) -> int:
        """Return how many frames there must have been before a transition that is complete.

        `added` is how many there are now. A transition uses frames from the window before it, or as
        far before it as frames were added at once.
        """
        return added - self.ring_frames(stack, capacity) + 2 * self.window(stack)

    def first_complete(self, counts: np.ndarray, added: Sequence[int], capacity: int) -> int:
        """Return the first of a seed's newest transitions that is complete, like all after it.

        `counts` is how many frames of each stack each of them added, `(transitions, stacks)`.
        """
        incomplete = [0]
        for stack, number, of_stack in zip(self.stacks, added, counts.T, strict=True):
            before = number - np.cumsum(of_stack[::-1], dtype=np.int64)[::-1]
            needed = self.first_needed(stack, number, capacity)
            incomplete.append(int(np.searchsorted(before, needed)))
        return min(max(incomplete), len(counts) - 1)

    def bytes_of(self, capacity: int) -> int:
        """Bytes of the frames of one seed."""
        return sum(
            self.ring_frames(stack, capacity) * stack.frame_words * WORD_BYTES
            for stack in self.stacks
        )
