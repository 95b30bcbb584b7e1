"""The rows of a replay buffer: which columns a transition has, and what they may contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rl_training.data.n_step import Transitions
from rl_training.data.storage.stacks import FrameLayout
from rl_training.observations import WORD_BYTES, ObservationSpec
from rl_training.types import ActionKind, ActionSpec


@dataclass(frozen=True)
class RowColumns:
    """The columns of a transition in a row of float32 words."""

    observation: ObservationSpec
    actions: ActionSpec
    frames: FrameLayout | None = None
    """How images are stored; None: observations are stored as they are"""
    returns: bool = False
    """Whether the return of the episode from the transition on follows the other columns"""
    ended: bool = False
    """Whether the end of episodes follows, as `Batch.ended` has it"""
    memory: int = 0
    """How many numbers follow that a recurrent policy remembered, as `Batch.memory` has them"""

    @classmethod
    def of(
        cls,
        observation: ObservationSpec | int,
        actions: ActionSpec | int,
        frames: FrameLayout | None = None,
        *,
        returns: bool = False,
        ended: bool = False,
        memory: int = 0,
    ) -> RowColumns:
        """Columns of vectors and continuous actions may be given by their sizes."""
        if isinstance(observation, int):
            observation = ObservationSpec.vector(observation)
        if isinstance(actions, int):
            actions = ActionSpec("continuous", actions)
        return cls(observation, actions, frames, returns, ended, memory)

    @cached_property
    def widths(self) -> list[int]:
        """Columns of the observation, action, reward, discount, next observation, and others."""
        size = self.observation.size
        width, next_width = (size, size) if self.frames is None else self.frames.widths
        return [width, self.actions.width, 1, 1, next_width, *self.others.values()]

    @cached_property
    def others(self) -> dict[str, int]:
        """Columns of the fields that only some algorithms need."""
        widths = {"returns": int(self.returns), "ended": int(self.ended), "memory": self.memory}
        return {name: width for name, width in widths.items() if width}

    @cached_property
    def end(self) -> int:
        """The column of the end of episodes."""
        return sum(self.widths[:5]) + self.returns

    @cached_property
    def next_obs(self) -> slice:
        """The columns of the next observation."""
        first = sum(self.widths[:4])
        return slice(first, first + self.widths[4])

    @cached_property
    def width(self) -> int:
        return sum(self.widths)

    def of_next_observation(self, words: slice) -> slice:
        """The columns of these words of the next observation, which are no image's."""
        first, length = self.next_obs.start, words.stop - words.start
        if self.frames is not None:
            words = slice(int(np.searchsorted(self.frames.rest_columns, words.start)), 0)
        return slice(first + words.start, first + words.start + length)

    @property
    def row_bytes(self) -> int:
        return WORD_BYTES * self.width

    def pack(self, transitions: Transitions) -> np.ndarray:
        """Concatenate the columns of each transition into a float32 row."""
        number = len(transitions.reward)
        packed = np.empty((number, self.width), dtype=np.float32)
        columns = [field.reshape(number, -1) for field in transitions if field is not None]
        np.concatenate(columns, axis=1, out=packed, casting="same_kind")
        return packed

    def check(self, rows: Tensor, filled_frames: Sequence[int] = ()) -> None:
        """Raise `ValueError` if rows from a file cannot have these columns.

        Discrete actions select outputs of the network, and positions select frames, of which
        `filled_frames` are there for each image: on a GPU, one that is out of range would end the
        process.
        """
        if rows.dtype != torch.float32 or rows.shape[1:] != (self.width,):
            raise ValueError(f"does not contain rows of {self.width} float32 numbers")
        obs, actions, reward, discount, next_obs, *others = torch.split(rows, self.widths, dim=-1)
        if not all(part.isfinite().all() for part in (actions, reward, discount, *others)):
            raise ValueError("contains numbers that are not finite")
        if self.actions.kind != "continuous":
            choices = torch.tensor(self.actions.num_choices, device=rows.device)
            possible = (actions >= 0) & (actions < choices) & (actions == actions.floor())
            if not possible.all():
                raise ValueError(f"contains actions other than 0 to {int(choices.max()) - 1}")
        stored: ObservationSpec | None = self.observation
        if self.frames is not None:
            self.frames.check(obs.numpy(), next_obs.numpy(), filled_frames)
            stored = self.frames.rest
        for columns in (obs.numpy(), next_obs.numpy()):
            if stored is not None and (problem := stored.problem_in(columns[:, : stored.size])):
                raise ValueError(problem)


def stored_actions(columns: Tensor, kind: ActionKind) -> Tensor:
    """Return actions `(..., width)` from a row's float32 columns as `Batch` has them."""
    if kind == "continuous":
        return columns
    indices = columns.long()
    return indices.squeeze(-1) if kind == "discrete" else indices
