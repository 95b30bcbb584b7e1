"""Ring buffers of transitions on the learner's device, for one seed or a population of seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_training.data.hindsight.rings import RingEpisodes
from rl_training.data.hindsight.sampled import SampledHindsight
from rl_training.data.n_step import Transitions
from rl_training.data.priorities import Priorities
from rl_training.data.storage.frame_ring import FrameRing
from rl_training.data.storage.frames import FrameStorage
from rl_training.data.storage.rings import delivered, newest_writes, segments_of, to_device
from rl_training.data.storage.rows import RowColumns, stored_actions
from rl_training.data.storage.stacks import FrameLayout
from rl_training.observations import ObservationSpec
from rl_training.types import ActionSpec, Batch

MAX_PENDING_ROWS = 4_096
"""Rows that may wait on the host before they are written to the device"""

SEGMENT_ROWS = 16_384
"""Rows saved per file: small enough that few unchanged rows are written again"""


class ReplayBuffer:
    """The newest `capacity` transitions of each seed, sampled with replacement.

    Sampling is uniform, or prioritized if `priority_exponent` is given.

    A transition is one row of a preallocated tensor. Adding is one copy and sampling is one gather,
    on any device and for any number of seeds. Images are stored as frames, each frame once: see
    `FrameLayout`. What is sampled does not depend on that.

    A population's programs have a fixed number of slots. A slot without a seed, such as one whose
    seed is no longer trained, reads the rows of the first seed.
    """

    def __init__(
        self,
        capacity: int,
        observation: ObservationSpec | int,
        actions: ActionSpec | int,
        *,
        frames: FrameLayout | None = None,
        device: torch.device | str = "cpu",
        on_host: bool = False,
        generator: torch.Generator | None = None,
        slots: Sequence[int] = (0,),
        width: int = 1,
        first_seed: int = 0,
        priority_exponent: float | None = None,
        returns: bool = False,
        ended: bool = False,
        memory: int = 0,
        hindsight: SampledHindsight | None = None,
        num_envs: int = 1,
    ) -> None:
        """`slots` holds the slot of each seed; the first seed has the index `first_seed`.

        `observation` may be the size of a vector, and `actions` the number of components of
        continuous ones. `frames` says how images are stored; without it each observation is stored
        as it is. `device` is that of batches and, unless `on_host`, of the rows. With `returns`,
        transitions have a return. With `ended`, they say whether their episode ended, and
        `memory` is how many numbers a recurrent policy remembered before them. With `hindsight`,
        sampled transitions get other goals. With `ended` or `hindsight`, `num_envs` environments of
        each seed add one row each, again and again.
        """
        self._first_seed = first_seed
        self.capacity = capacity
        self.batch_device = torch.device(device)
        self.device = torch.device("cpu") if on_host else self.batch_device
        """Where the rows are"""
        self.is_on_host = self.device != self.batch_device
        """Whether batches are copied from the host to another device. `draw` then waits for random
        integers that are on that device, and cannot be captured"""
        self.generator = generator
        self.columns = RowColumns.of(
            observation, actions, frames, returns=returns, ended=ended, memory=memory
        )
        self._widths = self.columns.widths
        # The rings of all seeds, followed by an unused row that is never read.
        self._unused = len(slots) * capacity
        self._rows = torch.zeros(self._unused + 1, self.row_width, device=self.device)
        self._added, self._num_envs = np.zeros(len(slots), dtype=np.int64), num_envs
        self._ring_starts = np.arange(len(slots))[:, None] * capacity
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._pending_rows = 0
        # Nothing is sampled before a rollout is complete, and many rows are written faster at once.
        self._defers = self.device.type == "cuda" or ended
        owners = np.zeros(width, dtype=np.int64)
        owners[list(slots)] = np.arange(len(slots))
        self._seed_of_slot, self._owners = owners, torch.from_numpy(owners).to(self.device)
        self._counts = torch.zeros(len(slots), dtype=torch.int64, device=self.device)
        """Rows ever added for each seed, if they are added on the device"""
        shape = () if width == 1 else (width, 1)
        offsets = torch.from_numpy(owners * capacity).to(self.device)
        self._slot_offsets = None if width == 1 else offsets.view(shape)
        self._slot_sizes = torch.ones(shape, dtype=torch.int64, device=self.device)
        self._slot_seeds = 0 if width == 1 else offsets.view(shape) // capacity
        vacant = torch.ones(width, dtype=torch.bool)
        vacant[list(slots)] = False
        self._vacant = vacant.view(shape).to(self.device) if vacant.any() else None
        self._frames = None
        if frames is not None:
            self._frames = FrameStorage(frames, capacity, num_seeds=len(slots), device=self.device)
        self._slot_starts = torch.zeros_like(self._slot_sizes)
        self.priorities = None
        if priority_exponent is not None:
            self.priorities = Priorities(
                capacity, priority_exponent, num_seeds=len(slots), device=self.device
            )
        self._episodes: RingEpisodes | None = None
        if hindsight is not None:
            self._episodes = RingEpisodes(
                hindsight, capacity, num_envs, num_seeds=len(slots), device=self.device
            )
            self._reached = self.columns.of_next_observation(hindsight.goals.achieved)
        self._slot_newest = torch.zeros_like(self._slot_sizes)

    @staticmethod
    def row_bytes(
        observation: ObservationSpec | int,
        actions: ActionSpec | int,
        *,
        frames: FrameLayout | None = None,
        prioritized: bool = False,
    ) -> int:
        """Bytes of one row of one seed: its words, and its priority. Frames are not included."""
        return RowColumns.of(observation, actions, frames).row_bytes + 4 * prioritized

    def __len__(self) -> int:
        """Number of rows of the seed with the fewest rows."""
        return min(int(self._complete().min()), self.capacity)

    @property
    def sizes(self) -> Tensor:
        """Number of rows that `draw` selects from, on the device: a scalar, or `(width, 1)`."""
        return self._slot_sizes.to(self.batch_device)

    @property
    def can_be_staged(self) -> bool:
        """Whether `stage` and `write` can add rows; `flush` alone adds frames and episodes."""
        return self._frames is None and self._episodes is None and not self.is_on_host

    @property
    def relabels(self) -> bool:
        """Whether sampled transitions get other goals; `add` then needs to know what ended."""
        return self._episodes is not None

    def rows_added(self, seed_index: int = 0) -> int:
        """Number of rows ever added for the seed."""
        return int(self._added[seed_index - self._first_seed])

    @property
    def row_width(self) -> int:
        return self.columns.width

    def add(
        self,
        transitions: Transitions,
        seed_indices: np.ndarray | None = None,
        ended: np.ndarray | None = None,
    ) -> None:
        """Append rows to the seeds that own them, overwriting the oldest rows when full.

        `seed_indices` holds the seed of each row. Without it, the rows are split evenly: the first
        rows belong to the first seed. `ended` says whether each row is the last of its episode;
        only a buffer that `relabels` needs it. On a GPU the rows wait on the host until `flush`,
        or until `stage` copies them together with other data.
        """
        if not len(transitions.reward):
            return
        owners = None
        if seed_indices is not None and len(self._added) > 1:
            owners = seed_indices - self._first_seed
        if self._frames is not None:
            transitions, owners = self._frames.pack(transitions, owners)
        rows = self.columns.pack(transitions)
        if self._episodes is not None:
            assert ended is not None, "goals are those of the same episode"
            self._number(self._episodes, ended, owners)
        if owners is not None:
            order = np.argsort(owners, kind="stable")
            rows, positions = self._next_positions_of(rows[order], owners[order])
        else:
            rows, positions = self._next_positions(rows)
        self._pending.append((positions, rows))
        self._pending_rows += len(positions)
        if self._frames is not None:
            self._frames.note(positions, rows[:, self.columns.next_obs], self._added)
        if not self._defers or self._pending_rows >= MAX_PENDING_ROWS:
            self.flush()

    def pack_on_device(self, batch: Batch) -> Tensor:
        """Return the rows `(batch, row_width)` of transitions that are on the device."""
        columns = [batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs]
        if self.columns.ended:
            assert batch.ended is not None
            columns.append(batch.ended)
        if self.columns.memory:
            assert batch.memory is not None
            columns.append(batch.memory)
        number = len(batch.reward)
        return torch.cat([each.reshape(number, -1).float() for each in columns], dim=1)

    def add_on_device(self, rows: Tensor) -> None:
        """Append what `pack_on_device` returned, as many rows for each seed, in their order.

        A graph can capture it: where the rows go is counted on the device. `count_on_device` has to
        be called as often.
        """
        assert self.can_be_staged, "the rows are on the device, and there is nothing besides them"
        of_seeds = rows.view(len(self._added), -1, self.row_width)
        number = of_seeds.shape[1]
        first = max(0, number - self.capacity)  # of equal positions, only the newest is written
        ranks = self._counts[:, None] + torch.arange(first, number, device=self.device)
        rings = self.capacity * torch.arange(len(self._added), device=self.device)[:, None]
        positions = (ranks % self.capacity + rings).flatten()
        self._rows.index_copy_(0, positions, of_seeds[:, first:].flatten(0, 1))
        if self.priorities is not None:
            self.priorities.admit(positions)
        self._counts += number
        sizes = self._counts.clamp(max=self.capacity).index_select(0, self._owners)
        self._slot_sizes.copy_(sizes.view(self._slot_sizes.shape))

    def count_on_device(self, number: int) -> None:
        """Note on the host that `add_on_device` appended this many rows for all seeds together."""
        self._added += number // len(self._added)

    def _number(self, episodes: RingEpisodes, ended: np.ndarray, owners: np.ndarray | None) -> None:
        """Number the rows that are added next."""
        num_seeds = len(self._added)
        counts = np.full(num_seeds, len(ended) // num_seeds)
        if owners is not None:
            ended = ended[np.argsort(owners, kind="stable")]
            counts = np.bincount(owners, minlength=num_seeds)
        episodes.add(ended, counts)

    def interrupt(self, seed_index: int = 0) -> None:
        """Note that the next rows of a seed do not continue its episodes."""
        if self._episodes is not None:
            self._episodes.interrupt(seed_index - self._first_seed)
        if self.columns.ended:
            self.flush()
            added = self.rows_added(seed_index)
            newest = np.arange(max(0, added - self._num_envs), added) % self.capacity
            ends = self._ring(seed_index)[:, self.columns.end]
            ends[self._to_device(newest)] = ends[self._to_device(newest)].clamp(min=1)

    def flush(self) -> None:
        """Write the waiting rows to the device."""
        if self._episodes is not None:
            self._flush_episodes(self._episodes)
        if not self._pending:
            return
        if self._frames is not None:
            self._frames.flush()
        positions, rows = self._take_pending()
        if self.device.type == "cpu":
            # NumPy is several times faster than PyTorch for a few rows.
            self._rows.numpy()[positions] = rows
            self._slot_sizes.numpy()[...] = self._sizes().reshape(self._slot_sizes.shape)
            if self.priorities is not None:
                self.priorities.admit(torch.from_numpy(positions))
        else:
            self.write(*map(self._to_device, (positions, rows, self._sizes())))
        if self._frames is not None and self._frames.has_incomplete:
            self._leave_out_incomplete(self._frames)

    def _flush_episodes(self, episodes: RingEpisodes) -> None:
        episodes.flush()
        newest = episodes.newest()[self._seed_of_slot]
        self._slot_newest.copy_(self._to_device(newest).view(self._slot_newest.shape))

    def _leave_out_incomplete(self, frames: FrameStorage) -> None:
        """Sample no row whose frames are gone."""
        starts = frames.starts(self._added)[self._seed_of_slot]
        self._slot_starts.copy_(self._to_device(starts).view(self._slot_starts.shape))
        incomplete = frames.take_incomplete(self._added)
        if self.priorities is not None and len(incomplete):
            self.priorities.exclude(self._to_device(incomplete))

    def write(self, positions: Tensor, rows: Tensor, sizes: Tensor) -> None:
        """Write rows at `positions` and update the sizes that `draw` uses; device tensors only."""
        self._rows.index_copy_(0, positions, rows)
        self._slot_sizes.copy_(sizes.view(self._slot_sizes.shape))
        if self.priorities is not None:
            self.priorities.admit(positions)

    def stage(self, positions: np.ndarray, rows: np.ndarray, sizes: np.ndarray) -> None:
        """Copy the waiting rows into arrays that are later passed to `write`.

        `positions` and `rows` have a fixed length; the remaining entries point to the unused row.
        `sizes` has one entry for each slot.
        """
        if self._pending_rows > len(positions):
            self.flush()
        number = 0
        if self._pending:
            pending_positions, pending_rows = self._take_pending()
            number = len(pending_positions)
            positions[:number], rows[:number] = pending_positions, pending_rows
        positions[number:] = self._unused
        sizes[:] = self._sizes()

    def _take_pending(self) -> tuple[np.ndarray, np.ndarray]:
        pending, self._pending, self._pending_rows = self._pending, [], 0
        return newest_writes(pending)

    def _next_positions(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows to keep and their positions; all seeds have the same number of rows."""
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
        """Return the rows to keep and their positions; `rows` are sorted by owner."""
        counts = np.bincount(owners, minlength=len(self._added))
        rank = np.arange(len(rows)) - (np.cumsum(counts) - counts)[owners]
        if counts.max() > self.capacity:
            kept = rank >= counts[owners] - self.capacity
            rows, owners, rank = rows[kept], owners[kept], rank[kept]
        positions = owners * self.capacity + (self._added[owners] + rank) % self.capacity
        self._added += counts
        return rows, positions

    def sample(self, batch_size: int) -> Batch:
        """Sample `batch_size` rows for every slot, with replacement."""
        if not len(self):
            raise ValueError("cannot sample from an empty replay buffer")
        self.flush()
        return self.draw(self.random_bits(batch_size))

    def random_bits(self, batch_size: int) -> Tensor:
        """Random integers for `draw`, from the buffer's generator."""
        shape = (*self._slot_sizes.shape[:1], batch_size)
        bits = torch.empty(shape, dtype=torch.int64, device=self.device)
        return bits.random_(generator=self.generator)

    def draw(self, bits: Tensor) -> Batch:
        """Return the rows selected by random integers in [0, 2^63), among the flushed rows.

        `bits` is `(batch,)`, or `(width, batch)` for a population. Uses only device tensors, so
        that it can be compiled and captured.
        """
        if self.is_on_host:
            batch = self._draw(bits.to(self.device))
            return Batch(
                *(part if part is None else delivered(part, self.batch_device) for part in batch)  # type: ignore[arg-type]
            )
        return self._draw(bits)

    def _draw(self, bits: Tensor) -> Batch:
        if self.priorities is not None:
            return self._draw_by_priority(bits, self.priorities)
        indices = bits % self._slot_sizes
        if self._frames is not None:
            indices = (indices + self._slot_starts) % self.capacity
        positions = indices
        if self._slot_offsets is not None:
            indices = indices + self._slot_offsets
        batch = self.rows(indices)
        if self._episodes is None:
            return batch
        # What is left of the bits is as random as what has chosen the rows.
        return self._episodes.relabel(
            batch,
            positions,
            bits // self._slot_sizes,
            self._rows[:, self._reached],
            newest=self._slot_newest,
            sizes=self._slot_sizes,
            offsets=self._slot_offsets,
        )

    def _draw_by_priority(self, bits: Tensor, priorities: Priorities) -> Batch:
        indices, weights = priorities.draw(bits, self._slot_seeds, self._slot_sizes)
        if self._slot_offsets is not None:
            indices = indices + self._slot_offsets
        batch = self.rows(indices)
        if self._vacant is not None:  # errors of a slot without a seed are discarded
            indices = torch.where(self._vacant, self._unused, indices)
        return batch.with_fields(weights=weights, indices=indices)

    def rows(self, indices: Tensor) -> Batch:
        """Return the transitions at these storage positions."""
        gathered = self._rows.index_select(0, indices.reshape(-1))
        gathered = gathered.view(*indices.shape, self.row_width)
        columns = torch.split(gathered, self._widths, dim=-1)
        obs, action, reward, discount, next_obs = columns[:5]
        if self._frames is not None:
            seeds = 0 if len(self._added) == 1 else (indices // self.capacity)[..., None]
            obs, next_obs = (self._frames.restore(part, seeds) for part in (obs, next_obs))
        action = stored_actions(action, self.columns.actions.kind)
        batch = Batch(obs, action, reward.squeeze(-1), discount.squeeze(-1), next_obs)
        if not self.columns.others:
            return batch
        others = dict(zip(self.columns.others, columns[5:], strict=True))
        return batch.with_fields(
            **{
                name: part if name == "memory" else part.squeeze(-1)
                for name, part in others.items()
            }
        )

    def at(self, positions: Tensor) -> Batch:
        """Return the transitions at these positions of each slot's ring, `(batch,)` or
        `(width, batch)`.
        """
        offsets = self._slot_offsets
        return self.rows(positions if offsets is None else positions + offsets)

    def update_priorities(self, indices: Tensor, errors: Tensor) -> None:
        """Set the priorities of the rows of a batch from the learner's errors."""
        if self.priorities is not None:
            self.priorities.update(indices.to(self.device), errors.to(self.device))

    def feedback_tensors(self) -> list[Tensor]:
        """The tensors that `update_priorities` writes."""
        return [] if self.priorities is None else self.priorities.tensors()

    def segments(
        self, since: int | None = None, seed_index: int = 0
    ) -> Iterator[tuple[int, Tensor, bool]]:
        """Yield the filled rows in segments of `SEGMENT_ROWS`: index, rows, whether they changed.

        A segment has changed if any of its rows was written after `rows_added` was `since`.
        """
        self.flush()
        added, ring = self.rows_added(seed_index), self._ring(seed_index)
        for index, part, changed in segments_of(added, self.capacity, SEGMENT_ROWS, since):
            yield index, ring[part], changed

    def frames_added(self, seed_index: int = 0) -> list[int]:
        """Number of frames ever added for the seed, for each image; empty without frames."""
        seed = seed_index - self._first_seed
        return [ring.added(seed) for ring in self._rings]

    def frame_segments(
        self, image: int, since: int | None = None, seed_index: int = 0
    ) -> Iterator[tuple[int, Tensor, bool]]:
        """Yield the frames of an image in segments: index, frames, whether they changed.

        A segment has changed if any of its frames was written after `frames_added` was `since`.
        """
        return self._rings[image].segments(since, seed_index - self._first_seed)

    def load_frames(
        self, image: int, segments: list[Tensor], frames_added: int, seed_index: int = 0
    ) -> None:
        """Restore the frames that `frame_segments` returned, in order."""
        self._rings[image].load(segments, frames_added, seed_index - self._first_seed)

    @property
    def _rings(self) -> list[FrameRing]:
        return [] if self._frames is None else self._frames.rings

    def check_rows(self, rows: Tensor, frames_added: Sequence[int] = ()) -> None:
        """Raise `ValueError` if rows from a file cannot be rows of this buffer.

        `frames_added` are the frames of the same file's seed, as in `frames_added`.
        """
        rings = zip(self._rings, frames_added, strict=True)
        self.columns.check(rows, [min(added, ring.capacity) for ring, added in rings])

    def load_segments(self, segments: list[Tensor], rows_added: int, seed_index: int = 0) -> None:
        """Restore the rows that `segments` returned, in order; their frames come first."""
        filled = sum(len(segment) for segment in segments)
        if filled != min(rows_added, self.capacity):
            raise ValueError(f"{filled} replay rows were saved, but {rows_added} were added")
        first = 0
        for segment in segments:
            self._ring(seed_index)[first : first + len(segment)] = segment.to(self.device)
            first += len(segment)
        seed = seed_index - self._first_seed
        self._added[seed] = self._counts[seed] = rows_added
        if self._frames is not None and filled:
            ring = self._ring(seed_index)[:filled, self.columns.next_obs].cpu().numpy()
            self._frames.restore_counts(np.roll(ring, -(rows_added % filled), 0), rows_added, seed)
            self._leave_out_incomplete(self._frames)
        self._slot_sizes.copy_(self._to_device(self._sizes()).view(self._slot_sizes.shape))

    def episode_state(self, seed_index: int = 0) -> dict[str, Tensor]:
        """Which rows of a seed belong together; empty unless the buffer `relabels`."""
        if self._episodes is None:
            return {}
        return self._episodes.state_dict(seed_index - self._first_seed)

    def load_episode_state(self, state: dict[str, Tensor], seed_index: int = 0) -> None:
        """Restore what `episode_state` returned, after the rows."""
        if self._episodes is not None:
            added = self.rows_added(seed_index)
            self._episodes.load_state_dict(state, added, seed_index - self._first_seed)
            self._flush_episodes(self._episodes)

    def priority_state(self, seed_index: int = 0) -> dict[str, Tensor]:
        """Priorities of a seed's rows; empty if sampling is uniform."""
        if self.priorities is None:
            return {}
        self.flush()
        filled = min(self.rows_added(seed_index), self.capacity)
        return self.priorities.state_dict(seed_index - self._first_seed, filled)

    def load_priority_state(self, state: dict[str, Tensor], seed_index: int = 0) -> None:
        """Restore the priorities that `priority_state` returned."""
        if self.priorities is None:
            return
        seed, incomplete = seed_index - self._first_seed, None
        if self._frames is not None:
            incomplete = self._to_device(self._frames.incomplete(int(self._added[seed]), seed))
        self.priorities.load_state_dict(state, seed, incomplete)

    def _ring(self, seed_index: int) -> Tensor:
        start = (seed_index - self._first_seed) * self.capacity
        return self._rows[start : start + self.capacity]

    def _sizes(self) -> np.ndarray:
        """Number of rows that each slot selects from; at least 1, to avoid a division by zero."""
        # `np.clip` takes four times as long for small arrays.
        complete = self._complete()[self._seed_of_slot]
        sizes: np.ndarray = np.minimum(np.maximum(complete, 1), self.capacity)
        return sizes

    def _complete(self) -> np.ndarray:
        """Number of rows of each seed, with overwritten ones, without those whose frames are."""
        return self._added if self._frames is None else self._added - self._frames.oldest

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)
