"""A ring of the frames of one image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_training.data.storage.recent_frames import RecentFrames
from rl_training.data.storage.rings import newest_writes, segments_of, to_device
from rl_training.data.storage.stacks import FrameStack
from rl_training.observations import WORD_BYTES

SEGMENT_BYTES = 32 * 2**20
"""Bytes of frames saved per file: small enough that few unchanged frames are written again"""


def segment_frames(stack: FrameStack) -> int:
    """Frames saved per file."""
    return max(1, SEGMENT_BYTES // stack.frame_bytes)


class FrameRing:
    """The newest frames of one image of every seed."""

    def __init__(
        self, stack: FrameStack, capacity: int, window: int, *, num_seeds: int, device: torch.device
    ) -> None:
        self.stack, self.capacity, self.window = stack, capacity, window
        self.device = device
        # Integers: copying a float may change the bits of what looks like NaN.
        self._frames = torch.zeros(
            num_seeds * capacity, stack.frame_words, dtype=torch.int32, device=device
        )
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self.recent = [RecentFrames(self._host_memory(seed), window) for seed in range(num_seeds)]

    def _host_memory(self, seed: int) -> np.ndarray:
        """What new frames are compared with: the ring itself, or a part of it on the host."""
        if self.device.type == "cpu":
            return self._ring(seed).numpy().view(np.uint64)
        return np.zeros((2 * self.window, self.stack.frame_words // 2), np.uint64)

    def added(self, seed: int) -> int:
        """Number of frames ever added for the seed."""
        return self.recent[seed].added

    def add(self, frames: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Store the frames `(n, bytes)`; return the position of each, and which of them are new."""
        words = self._padded(frames)
        numbers, is_new = self.recent[seed].place(words)
        positions = numbers % self.capacity
        if self.device.type != "cpu" and is_new.any():
            places = positions[is_new] + seed * self.capacity
            self._pending.append((places, words[is_new].view(np.int32)))
        return positions, is_new

    def _padded(self, frames: np.ndarray) -> np.ndarray:
        """The frames `(n, bytes)` as 64-bit integers."""
        stored_bytes = self.stack.frame_words * WORD_BYTES
        if stored_bytes == self.stack.frame_bytes:
            return np.ascontiguousarray(frames).view(np.uint64)
        padded = np.zeros((len(frames), stored_bytes), np.uint8)
        padded[:, : self.stack.frame_bytes] = frames
        return padded.view(np.uint64)

    def flush(self) -> None:
        """Write the waiting frames to the device."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        positions, frames = newest_writes(pending)
        self._frames.index_copy_(
            0, to_device(positions, self.device), to_device(frames, self.device)
        )

    def gather(self, positions: Tensor, seeds: Tensor | int) -> Tensor:
        """Return the words `(..., leaf.words)` of images; `positions` is `(..., frames)`."""
        places = positions + seeds * self.capacity
        frames = self._frames.index_select(0, places.reshape(-1))
        shape, leaf = positions.shape[:-1], self.stack.leaf
        if self.stack.frame_bytes % WORD_BYTES == 0:
            frames = frames[:, : self.stack.frame_bytes // WORD_BYTES]
            return frames.reshape(*shape, leaf.words).view(torch.float32)
        image = frames.view(torch.uint8)[:, : self.stack.frame_bytes]
        image = image.reshape(*shape, leaf.numbers)
        padding = leaf.words * WORD_BYTES - leaf.numbers
        return torch.nn.functional.pad(image, (0, padding)).view(torch.float32)

    def segments(self, since: int | None, seed: int) -> Iterator[tuple[int, Tensor, bool]]:
        """Yield the frames in segments: index, frames `(n, bytes)`, whether they have changed."""
        self.flush()
        length = segment_frames(self.stack)
        for index, part, changed in segments_of(self.added(seed), self.capacity, length, since):
            frames = self._ring(seed)[part].view(torch.uint8)
            yield index, frames[:, : self.stack.frame_bytes], changed

    def load(self, segments: Sequence[Tensor], added: int, seed: int) -> None:
        """Restore what `segments` returned, in order; raise `ValueError` if it does not fit."""
        shape = (self.stack.frame_bytes,)
        if any(part.dtype != torch.uint8 or part.shape[1:] != shape for part in segments):
            raise ValueError(f"does not contain frames of {self.stack.frame_bytes} bytes")
        filled = sum(map(len, segments))
        if filled != min(added, self.capacity):
            raise ValueError(f"{filled} frames were saved, but {added} were added")
        ring, first = self._ring(seed), 0
        for segment in segments:
            target = ring[first : first + len(segment)].view(torch.uint8)
            target[:, : self.stack.frame_bytes] = segment.to(self.device)
            first += len(segment)
        newest = np.arange(max(0, added - self.window), added)
        chosen = ring[torch.from_numpy(newest % self.capacity).to(self.device)]
        self.recent[seed].restore(added, chosen.cpu().numpy().view(np.uint64))

    def _ring(self, seed: int) -> Tensor:
        return self._frames[seed * self.capacity : (seed + 1) * self.capacity]
