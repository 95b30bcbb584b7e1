"""Find the steps of an episode in the ring of a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rl_training.data.hindsight.sampled import SampledHindsight
from rl_training.data.storage.rings import newest_writes, to_device
from rl_training.types import Batch


class RingEpisodes:
    """Finds goals for the rows of a replay buffer, among those that are still there.

    Each step of a seed adds one row for each of its environments, in order, so the next row of an
    episode is `num_envs` rows later. If a step adds fewer, because an environment has lost its
    episode, the unfinished episodes of the seed count as ended, and their other steps as new ones.

    For each row the ring has its step in the episode, and the episode's length once it has ended.
    """

    def __init__(
        self,
        hindsight: SampledHindsight,
        capacity: int,
        num_envs: int,
        *,
        num_seeds: int,
        device: torch.device,
    ) -> None:
        self._hindsight, self._capacity, self._num_envs = hindsight, capacity, num_envs
        self._device = device
        self._marks = torch.zeros(num_seeds * capacity, 2, dtype=torch.int32, device=device)
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._added = np.zeros(num_seeds, np.int64)
        # By environment: the first row of its episode, counted from the first one ever added, and
        # how many there are; 0 if the next row starts an episode.
        self._firsts = np.zeros((num_seeds, num_envs), np.int64)
        self._lengths = np.zeros((num_seeds, num_envs), np.int64)

    def add(self, ended: np.ndarray, counts: np.ndarray) -> None:
        """Number the rows of a step; `ended` says whether each is the last one of its episode.

        The rows of the first seed come first: `counts` is how many each seed has.
        """
        last = 0
        for seed, count in enumerate(counts.tolist()):
            if count:
                self._add_step(seed, ended[last : last + count])
            last += count

    def _add_step(self, seed: int, ended: np.ndarray) -> None:
        rows = self._added[seed] + np.arange(len(ended))
        if len(ended) != self._num_envs:
            self.interrupt(seed)
            self._added[seed] += len(ended)
            self._mark(seed, rows, np.zeros_like(rows), np.ones_like(rows))
            return
        self._added[seed] += len(ended)
        steps = self._lengths[seed].copy()
        self._firsts[seed] = np.where(steps == 0, rows, self._firsts[seed])
        self._lengths[seed] += 1
        self._mark(seed, rows, steps, np.zeros_like(rows))
        if ended.any():
            self._end(seed, np.flatnonzero(ended))

    def interrupt(self, seed: int) -> None:
        """End the unfinished episodes of a seed: the next rows do not continue them."""
        self._end(seed, np.flatnonzero(self._lengths[seed]))

    def _end(self, seed: int, environments: np.ndarray) -> None:
        for environment in environments.tolist():
            length = int(self._lengths[seed, environment])
            steps = np.arange(length)
            rows = self._firsts[seed, environment] + steps * self._num_envs
            self._mark(seed, rows, steps, np.full_like(steps, length))
        self._lengths[seed, environments] = 0

    def _mark(self, seed: int, rows: np.ndarray, steps: np.ndarray, lengths: np.ndarray) -> None:
        """Mark those of a seed's rows that are not overwritten yet."""
        kept = rows >= self._added[seed] - self._capacity
        places = seed * self._capacity + rows[kept] % self._capacity
        self._pending.append((places, np.stack([steps, lengths], axis=1)[kept].astype(np.int32)))

    def flush(self) -> None:
        """Write the waiting marks to the device."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        positions, marks = newest_writes(pending)
        self._marks.index_copy_(
            0, to_device(positions, self._device), to_device(marks, self._device)
        )

    def newest(self) -> np.ndarray:
        """The position of the newest row in the ring of each seed."""
        return (self._added - 1) % self._capacity

    def relabel(
        self,
        batch: Batch,
        positions: Tensor,
        bits: Tensor,
        reached: Tensor,
        *,
        newest: Tensor,
        sizes: Tensor,
        offsets: Tensor | None,
    ) -> Batch:
        """Relabel the rows at `positions` of the rings of their slots.

        `reached` are the goals that all rows achieved. `newest`, `sizes` and `offsets` are, for
        each slot, the position of the newest row, the number of rows, and where the ring starts.
        """
        shift: Tensor | int = 0 if offsets is None else offsets
        step, length = self._marks[positions + shift].long().unbind(-1)
        newer = (newest - positions) % self._capacity
        after = torch.where(length > 0, length - 1 - step, newer // self._num_envs)
        before = torch.minimum(step, (sizes - 1 - newer) // self._num_envs)
        is_relabelled, ahead = self._hindsight.choose(bits, before, after)
        where = (positions + ahead * self._num_envs) % self._capacity + shift
        return self._hindsight.relabel(batch, is_relabelled, reached[where])

    def state_dict(self, seed: int) -> dict[str, Tensor]:
        """The marks of a seed's rows in its ring, and its unfinished episodes."""
        self.flush()
        first, filled = seed * self._capacity, min(int(self._added[seed]), self._capacity)
        return {
            "marks": self._marks[first : first + filled].clone(),
            "first_rows": torch.from_numpy(self._firsts[seed] * (self._lengths[seed] > 0)),
            "lengths": torch.from_numpy(self._lengths[seed].copy()),
        }

    def load_state_dict(self, state: Mapping[str, Tensor], rows_added: int, seed: int) -> None:
        """Restore what `state_dict` returned; raises `ValueError` if it cannot be that."""
        filled = min(rows_added, self._capacity)
        marks, firsts, lengths = (state[name] for name in ("marks", "first_rows", "lengths"))
        shapes = [(filled, 2), (self._num_envs,), (self._num_envs,)]
        types = [torch.int32, torch.int64, torch.int64]
        for part, shape, kind in zip((marks, firsts, lengths), shapes, types, strict=True):
            if part.shape != shape or part.dtype != kind:
                raise ValueError(f"does not describe the episodes of {filled:,} rows")
        self._check(marks.long().numpy(), firsts.numpy(), lengths.numpy(), rows_added)
        first = seed * self._capacity
        self._marks[first : first + filled] = marks.to(self._device)
        self._added[seed] = rows_added
        self._firsts[seed], self._lengths[seed] = firsts.numpy(), lengths.numpy()

    def _check(
        self, marks: np.ndarray, firsts: np.ndarray, lengths: np.ndarray, rows_added: int
    ) -> None:
        """Raise `ValueError` if an episode has rows that are not in the ring."""
        step, length = marks.T
        newer = (rows_added - 1 - np.arange(len(marks))) % self._capacity
        after = np.where(length > 0, length - 1 - step, 0)
        lasts = firsts + (lengths - 1) * self._num_envs
        fits = (step >= 0) & (after >= 0) & (after * self._num_envs <= newer)
        unfinished = lengths > 0
        newest = np.arange(self._num_envs) + rows_added - self._num_envs
        if not (
            fits.all()
            and (lengths >= 0).all()
            and (firsts >= 0).all()
            and (lasts[unfinished] == newest[unfinished]).all()
        ):
            raise ValueError("has episodes that do not fit the rows of the replay buffer")
