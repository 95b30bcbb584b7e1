"""A ring of transitions on the learner's device, for one seed or a population of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_training.data.n_step import Transitions
from rl_training.data.priorities import Priorities
from rl_training.types import Batch

MAX_PENDING_ROWS = 4_096
"""Rows that may wait on the host"""

SEGMENT_ROWS = 16_384
"""Rows saved per file: small enough that few unchanged rows are written again."""


class ReplayBuffer:
    """The newest `capacity` transitions of each seed, sampled with replacement.

    Uniformly, or by their errors where there is a `priority_exponent`.

    All columns of a transition lie side by side in one row of one preallocated tensor, so that
    adding is one copy and sampling one gather, on any device and for any number of members.

    A population's programs have a fixed number of slots. A slot without a seed of its own, such
    as one whose seed is not being trained on, reads the first member's rows.
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
        slots: Sequence[int] = (0,),
        width: int = 1,
        priority_exponent: float | None = None,
    ) -> None:
        """`slots` says which of the `width` slots each seed has."""
        self.capacity = capacity
        self.device = torch.device(device)
        self.generator = generator
        self._discrete = discrete
        self._widths = [obs_dim, 1 if discrete else action_dim, 1, 1, obs_dim]
        # The members' rings one after another, and a row that nobody reads.
        self._unused = len(slots) * capacity
        self._rows = torch.zeros(self._unused + 1, self.row_width, device=self.device)
        self._added = np.zeros(len(slots), dtype=np.int64)
        self._ring_starts = np.arange(len(slots))[:, None] * capacity
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._pending_rows = 0
        self._defers = self.device.type == "cuda"
        owners = np.zeros(width, dtype=np.int64)
        owners[list(slots)] = np.arange(len(slots))
        self._seed_of_slot = owners
        shape = () if width == 1 else (width, 1)
        offsets = torch.from_numpy(owners * capacity).to(self.device)
        self._slot_offsets = None if width == 1 else offsets.view(shape)
        self._slot_sizes = torch.ones(shape, dtype=torch.int64, device=self.device)
        self._slot_seeds = 0 if width == 1 else offsets.view(shape) // capacity
        vacant = torch.ones(width, dtype=torch.bool)
        vacant[list(slots)] = False
        self._vacant = vacant.view(shape).to(self.device) if vacant.any() else None
        self.priorities = None
        if priority_exponent is not None:
            self.priorities = Priorities(
                capacity, priority_exponent, num_seeds=len(slots), device=self.device
            )

    def __len__(self) -> int:
        """Rows that every seed has."""
        return min(int(self._added.min()), self.capacity)

    @property
    def sizes(self) -> Tensor:
        """How many rows `draw` chooses from, on the device: a number, or `(width, 1)`."""
        return self._slot_sizes

    def rows_added(self, seed_index: int = 0) -> int:
        """How many rows the seed was ever given."""
        return int(self._added[seed_index])

    @property
    def row_width(self) -> int:
        return sum(self._widths)

    def add(self, transitions: Transitions, owners: np.ndarray | None = None) -> None:
        """Append rows to the seeds that own them, overwriting the oldest once full.

        Where no owners are given, the rows are dealt out evenly: the first ones are the first
        member's. On a GPU they wait on the host until `flush`, or until they travel there with
        other data.
        """
        if not len(transitions.reward):
            return
        rows = _pack(transitions, self.row_width)
        if owners is not None and len(self._added) > 1:
            order = np.argsort(owners, kind="stable")
            rows, positions = self._next_positions_of(rows[order], owners[order])
        else:
            rows, positions = self._next_positions(rows)
        self._pending.append((positions, rows))
        self._pending_rows += len(positions)
        if not self._defers or self._pending_rows >= MAX_PENDING_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait."""
        if not self._pending:
            return
        positions, rows = self._take_pending()
        if self.device.type == "cpu":
            # Through NumPy, which for a handful of rows is several times quicker.
            self._rows.numpy()[positions] = rows
            self._slot_sizes.numpy()[...] = self._sizes().reshape(self._slot_sizes.shape)
            if self.priorities is not None:
                self.priorities.admit(torch.from_numpy(positions))
        else:
            self.write(*map(self._to_device, (positions, rows, self._sizes())))

    def write(self, positions: Tensor, rows: Tensor, sizes: Tensor) -> None:
        """Put rows in their places, and tell `draw` how many there are; by device tensors alone."""
        self._rows.index_copy_(0, positions, rows)
        self._slot_sizes.copy_(sizes.view(self._slot_sizes.shape))
        if self.priorities is not None:
            self.priorities.admit(positions)

    def stage(self, positions: np.ndarray, rows: np.ndarray, sizes: np.ndarray) -> None:
        """Fill arrays, which then go through `write`, with the rows that wait; any rest is unused.

        `positions` and `rows` are as long as there is room for, `sizes` has one for each slot.
        """
        if self._pending_rows > len(positions):
            self.flush()
        number = 0
        if self._pending:
            its_positions, its_rows = self._take_pending()
            number = len(its_positions)
            positions[:number], rows[:number] = its_positions, its_rows
        positions[number:] = self._unused
        sizes[:] = self._sizes()

    def _take_pending(self) -> tuple[np.ndarray, np.ndarray]:
        pending, self._pending, self._pending_rows = self._pending, [], 0
        if len(pending) == 1:
            return pending[0]
        positions, rows = (np.concatenate(parts) for parts in zip(*pending, strict=True))
        # Of rows that overwrite one another the newest counts.
        _, last = np.unique(positions[::-1], return_index=True)
        newest = len(positions) - 1 - last
        return positions[newest], rows[newest]

    def _next_positions(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows, as many of each seed, that are kept, and where they go."""
        num_seeds = len(self._added)
        number = len(rows) // num_seeds
        dropped = max(0, number - self.capacity)
        if dropped:
            rows = rows.reshape(num_seeds, number, -1)[:, dropped:].reshape(-1, rows.shape[-1])
        ranks = self._added[:, None] + np.arange(dropped, number)
        self._added += number
        return rows, (self._ring_starts + ranks % self.capacity).reshape(-1)

    def _next_positions_of(
        self, rows: np.ndarray, owners: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows, sorted by owner, that are kept, and where they go."""
        counts = np.bincount(owners, minlength=len(self._added))
        rank = np.arange(len(rows)) - (np.cumsum(counts) - counts)[owners]
        if counts.max() > self.capacity:
            kept = rank >= counts[owners] - self.capacity
            rows, owners, rank = rows[kept], owners[kept], rank[kept]
        positions = owners * self.capacity + (self._added[owners] + rank) % self.capacity
        self._added += counts
        return rows, positions

    def sample(self, batch_size: int) -> Batch:
        """`batch_size` rows of every slot, drawn with replacement."""
        if not len(self):
            raise ValueError("the replay buffer is empty: nothing to sample")
        self.flush()
        return self.draw(self.random_bits(batch_size))

    def random_bits(self, batch_size: int) -> Tensor:
        """What `draw` takes for a batch, from the buffer's own generator."""
        shape = (*self._slot_sizes.shape[:1], batch_size)
        bits = torch.empty(shape, dtype=torch.int64, device=self.device)
        return bits.random_(generator=self.generator)

    def draw(self, bits: Tensor) -> Batch:
        """The rows that random integers in [0, 2^63) choose, among those that were flushed.

        A pure function of device tensors, so that it can be compiled and captured.
        `bits` is `(batch,)`, or `(width, batch)` for a population.
        """
        if self.priorities is not None:
            return self._draw_by_priority(bits, self.priorities)
        indices = bits % self._slot_sizes
        if self._slot_offsets is not None:
            indices = indices + self._slot_offsets
        return self.rows(indices)

    def _draw_by_priority(self, bits: Tensor, priorities: Priorities) -> Batch:
        indices, weights = priorities.draw(bits, self._slot_seeds, self._slot_sizes)
        if self._slot_offsets is not None:
            indices = indices + self._slot_offsets
        batch = self.rows(indices)
        if self._vacant is not None:  # what a slot without a seed learns concerns nobody
            indices = torch.where(self._vacant, self._unused, indices)
        return Batch(*batch[:5], weights=weights, indices=indices)

    def rows(self, indices: Tensor) -> Batch:
        """The transitions at these positions of the whole storage."""
        gathered = self._rows.index_select(0, indices.reshape(-1))
        gathered = gathered.view(*indices.shape, self.row_width)
        obs, action, reward, discount, next_obs = torch.split(gathered, self._widths, dim=-1)
        if self._discrete:
            action = action.squeeze(-1).long()
        return Batch(obs, action, reward.squeeze(-1), discount.squeeze(-1), next_obs)

    def update_priorities(self, indices: Tensor, errors: Tensor) -> None:
        """Take note of how wrong the learner was about the rows of a batch."""
        if self.priorities is not None:
            self.priorities.update(indices, errors)

    def feedback_tensors(self) -> list[Tensor]:
        """What `learn` writes."""
        return [] if self.priorities is None else self.priorities.tensors()

    def segments(
        self, since: int | None = None, seed_index: int = 0
    ) -> Iterator[tuple[int, Tensor, bool]]:
        """Filled rows in pieces of `SEGMENT_ROWS`: index, rows, and whether they changed.

        A segment has changed if a row of it was written after `rows_added` was `since`.
        """
        self.flush()
        filled = min(self.rows_added(seed_index), self.capacity)
        for index in range(-(-filled // SEGMENT_ROWS)):
            first, last = index * SEGMENT_ROWS, min((index + 1) * SEGMENT_ROWS, filled)
            changed = self._written_since(first, last, since, self.rows_added(seed_index))
            yield index, self._ring(seed_index)[first:last], changed

    def load_segments(self, segments: list[Tensor], rows_added: int, seed_index: int = 0) -> None:
        """Restore what `segments` gave, in order."""
        filled = sum(len(segment) for segment in segments)
        if filled != min(rows_added, self.capacity):
            raise ValueError(f"{filled} replay rows saved, but {rows_added} were added")
        first = 0
        for segment in segments:
            self._ring(seed_index)[first : first + len(segment)] = segment.to(self.device)
            first += len(segment)
        self._added[seed_index] = rows_added
        self._slot_sizes.copy_(self._to_device(self._sizes()).view(self._slot_sizes.shape))

    def priority_state(self, seed_index: int = 0) -> dict[str, Tensor]:
        """The priorities of a member's rows; empty where sampling is uniform."""
        if self.priorities is None:
            return {}
        self.flush()
        return self.priorities.state_dict(
            seed_index, min(self.rows_added(seed_index), self.capacity)
        )

    def load_priority_state(self, state: dict[str, Tensor], seed_index: int = 0) -> None:
        """Restore what `priority_state` gave."""
        if self.priorities is not None:
            self.priorities.load_state_dict(state, seed_index)

    def _ring(self, seed_index: int) -> Tensor:
        return self._rows[seed_index * self.capacity : (seed_index + 1) * self.capacity]

    def _sizes(self) -> np.ndarray:
        """How many rows each slot has to choose from, at least the one of zeros."""
        # Not by `np.clip`, which takes four times as long for a few numbers.
        return np.minimum(np.maximum(self._added[self._seed_of_slot], 1), self.capacity)

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        # From pinned memory, whose reuse PyTorch watches over, the host need not wait for the copy.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _written_since(self, first: int, last: int, since: int | None, added: int) -> bool:
        if since is None or added - since >= self.capacity:
            return True
        # The last time a row of the segment was written, counted in rows added.
        cursor = added % self.capacity
        lap_start = added - cursor
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
