"""A ring of transitions on the learner's device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rl_training.data.n_step import Transitions
from rl_training.types import Batch

SEGMENT_ROWS = 16_384
"""Rows saved per file: small enough that few unchanged rows are written again."""


class ReplayBuffer:
    """The newest `capacity` transitions, sampled uniformly with replacement.

    All columns of a transition lie side by side in one row of one preallocated tensor, so that
    adding is one copy and sampling one gather, on any device.
    """

    def __init__(
        self,
        capacity: int,
        obs_dim: int,
        action_dim: int,
        *,
        discrete: bool = False,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
    ) -> None:
        self.capacity = capacity
        self.device = torch.device(device)
        self.generator = generator
        self._discrete = discrete
        self._widths = [obs_dim, 1 if discrete else action_dim, 1, 1, obs_dim]
        self._rows = torch.zeros(capacity, sum(self._widths), device=self.device)
        self.rows_added = 0

    def __len__(self) -> int:
        return min(self.rows_added, self.capacity)

    def add(self, transitions: Transitions) -> None:
        """Append rows, overwriting the oldest once full."""
        number = len(transitions.reward)
        if number == 0:
            return
        if number > self.capacity:
            self.rows_added += number - self.capacity
            transitions = Transitions(*(field[-self.capacity :] for field in transitions))
            number = self.capacity
        rows = torch.from_numpy(_pack(transitions, sum(self._widths))).to(self.device)
        start = self.rows_added % self.capacity
        until_end = min(number, self.capacity - start)
        self._rows[start : start + until_end] = rows[:until_end]
        self._rows[: number - until_end] = rows[until_end:]
        self.rows_added += number

    def sample(self, batch_size: int) -> Batch:
        """`batch_size` rows drawn uniformly with replacement."""
        if not len(self):
            raise ValueError("the replay buffer is empty: nothing to sample")
        indices = torch.randint(
            len(self), (batch_size,), generator=self.generator, device=self.device
        )
        return self.rows(indices)

    def rows(self, indices: Tensor) -> Batch:
        """The transitions at these positions."""
        gathered = self._rows.index_select(0, indices)
        obs, action, reward, discount, next_obs = torch.split(gathered, self._widths, dim=-1)
        if self._discrete:
            action = action.squeeze(-1).long()
        return Batch(obs, action, reward.squeeze(-1), discount.squeeze(-1), next_obs)

    def segments(self, since: int | None = None) -> Iterator[tuple[int, Tensor, bool]]:
        """Filled rows in pieces of `SEGMENT_ROWS`: index, rows, and whether they changed.

        A segment has changed if a row of it was written after `rows_added` was `since`.
        """
        for index in range(-(-len(self) // SEGMENT_ROWS)):
            first, last = index * SEGMENT_ROWS, min((index + 1) * SEGMENT_ROWS, len(self))
            yield index, self._rows[first:last], self._written_since(first, last, since)

    def load_segments(self, segments: list[Tensor], rows_added: int) -> None:
        """Restore what `segments` gave, in order."""
        filled = sum(len(segment) for segment in segments)
        if filled != min(rows_added, self.capacity):
            raise ValueError(f"{filled} replay rows saved, but {rows_added} were added")
        first = 0
        for segment in segments:
            self._rows[first : first + len(segment)] = segment.to(self.device)
            first += len(segment)
        self.rows_added = rows_added

    def _written_since(self, first: int, last: int, since: int | None) -> bool:
        if since is None or self.rows_added - since >= self.capacity:
            return True
        # The last time a row of the segment was written, counted in rows added.
        cursor = self.rows_added % self.capacity
        lap_start = self.rows_added - cursor
        newest = (
            lap_start + min(last, cursor) if cursor > first else lap_start - self.capacity + last
        )
        return newest > since


def _pack(transitions: Transitions, width: int) -> np.ndarray:
    """The columns side by side, as float32."""
    number = len(transitions.reward)
    packed = np.empty((number, width), dtype=np.float32)
    columns = [field.reshape(number, -1) for field in transitions]
    np.concatenate(columns, axis=1, out=packed, casting="same_kind")
    return packed
