"""Stores the images of observations as frames, from which they are put together when sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_training.data.n_step import Transitions
from rl_training.data.storage.frame_ring import FrameRing
from rl_training.data.storage.stacks import FrameLayout, FrameStack
from rl_training.errors import warn_user


class FrameStorage:
    """Stores the images of the observations of transitions, each frame once.

    A ring may be too small if episodes are very short. The oldest transitions, whose frames are
    overwritten first, are then no longer sampled.
    """

    def __init__(
        self, layout: FrameLayout, capacity: int, *, num_seeds: int, device: torch.device
    ) -> None:
        self.layout, self._capacity = layout, capacity
        self.rings = [
            FrameRing(
                stack,
                layout.ring_frames(stack, capacity),
                layout.window(stack),
                num_seeds=num_seeds,
                device=device,
            )
            for stack in layout.stacks
        ]
        # By ring, seed and row: how many frames there were before the transition was added.
        self._before = np.zeros((len(self.rings), num_seeds, capacity), np.int64)
        self.oldest = np.zeros(num_seeds, np.int64)
        """The oldest transition of each seed whose frames, and those of later ones, remain. Counted
        from the first one ever added"""
        self._excluded = np.zeros(num_seeds, np.int64)
        self.has_incomplete = False
        """Whether a transition was ever incomplete before it was overwritten"""

    def pack(
        self, transitions: Transitions, owners: np.ndarray | None
    ) -> tuple[Transitions, np.ndarray | None]:
        """Store the frames of transitions, and replace their images by positions of frames.

        The result is sorted by owner, the seed of each transition. Without owners, the transitions
        are split evenly.
        """
        num_seeds = len(self.oldest)
        counts = [len(transitions.reward) // num_seeds] * num_seeds
        if owners is not None:
            order = np.argsort(owners, kind="stable")
            transitions = transitions.select(order)
            owners = owners[order]
            counts = np.bincount(owners, minlength=num_seeds).tolist()
        obs, next_obs = self._store(transitions.obs, transitions.next_obs, counts)
        return transitions._replace(obs=obs, next_obs=next_obs), owners

    def _store(
        self, obs: np.ndarray, next_obs: np.ndarray, counts: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Store frames; return the columns of observations and next observations.

        The rows of the first seed come first: `counts` is how many rows each seed has.
        """
        width, next_width = self.layout.widths
        obs_columns = np.empty((len(obs), width), np.float32)
        next_columns = np.empty((len(obs), next_width), np.float32)
        chosen = self.layout.rest_columns
        obs_columns[:, : len(chosen)] = obs[:, chosen]
        next_columns[:, : len(chosen)] = next_obs[:, chosen]
        for index, ring in enumerate(self.rings):
            both = np.stack([self._frames_of(rows, ring.stack) for rows in (obs, next_obs)], 1)
            positions, added = self._add(ring, both, counts)
            place = self.layout.positions[index]
            obs_columns.view(np.int32)[:, place] = positions[:, 0]
            next_columns.view(np.int32)[:, place] = positions[:, 1]
            next_columns.view(np.int32)[:, width + index] = added
        return obs_columns, next_columns

    def _frames_of(self, rows: np.ndarray, stack: FrameStack) -> np.ndarray:
        """The frames of a stack in rows of observations, `(n, frames, bytes)`."""
        words = np.ascontiguousarray(rows[:, self.layout.observation.columns(stack.leaf.name)])
        images = words.view(np.uint8)[:, : stack.leaf.numbers]
        return images.reshape(len(rows), stack.frames, stack.frame_bytes)

    def _add(
        self, ring: FrameRing, frames: np.ndarray, counts: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return positions `(n, 2, frames)` and how many frames each transition added `(n,)`."""
        positions = np.empty(frames.shape[:3], np.int64)
        added = np.empty(len(frames), np.int64)
        last = 0
        for seed, count in enumerate(counts):
            rows = slice(last, last + count)
            last += count
            if count:
                of_seed = frames[rows].reshape(-1, ring.stack.frame_bytes)
                found, is_new = ring.add(of_seed, seed)
                positions[rows] = found.reshape(positions[rows].shape)
                added[rows] = is_new.reshape(count, -1).sum(1)
        return positions, added

    def note(self, positions: np.ndarray, rows: np.ndarray, rows_added: np.ndarray) -> None:
        """Find the oldest complete transitions after rows were added at storage positions.

        `rows_added` counts all transitions of each seed, with these ones.
        """
        if len(rows_added) == 1:
            owners, seeds = np.zeros(len(rows), np.int64), [0]
        else:
            owners = positions // self._capacity
            seeds = np.unique(owners).tolist()
        for seed in seeds:
            self._count(rows[owners == seed], int(rows_added[seed]), seed)
            if self._advance(int(rows_added[seed]), seed) and not self.has_incomplete:
                self._warn()

    def _count(self, rows: np.ndarray, rows_added: int, seed: int) -> None:
        """Remember how many frames there were before each of a seed's newest rows."""
        places = np.arange(rows_added - len(rows), rows_added) % self._capacity
        counts = np.ascontiguousarray(rows[:, -len(self.rings) :]).view(np.int32)
        for index, ring in enumerate(self.rings):
            since = np.cumsum(counts[::-1, index], dtype=np.int64)[::-1]
            self._before[index, seed, places] = ring.added(seed) - since

    def _advance(self, rows_added: int, seed: int) -> bool:
        """Advance to the oldest complete transition of a seed; return whether one is incomplete."""
        oldest = first = max(int(self.oldest[seed]), rows_added - self._capacity)
        for index, ring in enumerate(self.rings):
            before = self._before[index, seed]
            needed = self.layout.first_needed(ring.stack, ring.added(seed), self._capacity)
            while oldest < rows_added - 1 and before[oldest % self._capacity] < needed:
                oldest += 1
        self.oldest[seed] = oldest
        return oldest > first

    def _warn(self) -> None:
        """Say once that transitions are left out."""
        self.has_incomplete = True
        warn_user(
            f"the replay buffer keeps fewer than {self._capacity:,} transitions: episodes are so "
            "short, or images change so much, that there is no room for all new frames; see "
            "replay_frame_stack"
        )

    def take_incomplete(self, rows_added: np.ndarray) -> np.ndarray:
        """Return the storage positions of incomplete transitions that were not returned before."""
        found = [
            self.incomplete(int(added), seed, int(self._excluded[seed])) + seed * self._capacity
            for seed, added in enumerate(rows_added)
        ]
        self._excluded = self.oldest.copy()
        return np.concatenate(found)

    def incomplete(self, rows_added: int, seed: int, since: int = 0) -> np.ndarray:
        """Return the positions in a seed's ring of incomplete transitions, from `since` on."""
        first = max(since, rows_added - self._capacity)
        return np.arange(first, max(first, int(self.oldest[seed]))) % self._capacity

    def starts(self, rows_added: np.ndarray) -> np.ndarray:
        """Return each seed's position from which rows are sampled; 0 if all rows are."""
        all_rows = self.oldest <= np.maximum(rows_added - self._capacity, 0)
        return np.where(all_rows, 0, self.oldest % self._capacity)

    def restore_counts(self, rows: np.ndarray, rows_added: int, seed: int) -> None:
        """Continue after `rows_added` transitions; `rows` are the last ones, oldest first."""
        self._count(rows, rows_added, seed)
        self.oldest[seed] = 0
        self.has_incomplete |= self._advance(rows_added, seed)
        self._excluded[seed] = self.oldest[seed]

    def flush(self) -> None:
        for ring in self.rings:
            ring.flush()

    def restore(self, columns: Tensor, seeds: Tensor | int) -> Tensor:
        """Return observations `(..., size)` from their columns `(..., width)`.

        `seeds` broadcasts to the leading axes, with an axis of frames. Uses only device tensors.
        """
        parts, rest = {}, 0
        for index, ring in enumerate(self.rings):
            positions = columns[..., self.layout.positions[index]].view(torch.int32).long()
            parts[ring.stack.leaf.name] = ring.gather(positions, seeds)
        for leaf in self.layout.observation.leaves:
            if leaf.kind != "image":
                parts[leaf.name] = columns[..., rest : rest + leaf.words]
                rest += leaf.words
        ordered = [parts[leaf.name] for leaf in self.layout.observation.leaves]
        return ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim=-1)
