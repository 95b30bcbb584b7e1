"""Finds frames that are stored already, among the newest ones of a seed."""

from __future__ import annotations

import numpy as np


class RecentFrames:
    """Numbers the frames of a seed, and gives equal frames that follow closely the same number.

    Frames are found by a hash and then compared byte by byte, so two different frames never share a
    number, and no assumption is made about environments, wrappers or the order of transitions.
    """

    def __init__(self, memory: np.ndarray, window: int) -> None:
        """Look for frames among the `window` newest ones.

        `memory` is a ring `(frames, width)` of 64-bit integers with at least `2 * window` frames,
        to which new frames are written.
        """
        assert len(memory) >= 2 * window
        self._memory, self._window = memory, window
        self._weights = _weights(memory.shape[1])
        self._hashes = [0] * window
        self._numbers: dict[int, int] = {}
        self.added = 0
        """Number of frames so far"""

    def place(self, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of each of the frames `(n, width)`, and which of them are new."""
        # At most `window` new frames at once: those that were found are then still in memory.
        parts = [
            self._place(frames[first : first + self._window])
            for first in range(0, len(frames), self._window)
        ]
        if len(parts) == 1:
            return parts[0]
        numbers, is_new = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return numbers, is_new

    def restore(self, added: int, newest: np.ndarray) -> None:
        """Continue after `added` frames, of which `newest` are the last ones, oldest first."""
        self._numbers.clear()
        self.added = added - len(newest)
        for number, frame_hash in enumerate(self._hashes_of(newest), self.added):
            self._memory[number % len(self._memory)] = newest[number - self.added]
            self._numbers[frame_hash] = number
            self._hashes[number % self._window] = frame_hash
        self.added = added

    def _place(self, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hashes = self._hashes_of(frames)
        numbers, is_new = np.empty(len(frames), np.int64), np.zeros(len(frames), np.bool_)
        for index, frame_hash in enumerate(hashes):
            found = self._numbers.get(frame_hash)
            is_new[index] = found is None
            numbers[index] = self._admit(frame_hash) if found is None else found
        self._memory[numbers[is_new] % len(self._memory)] = frames[is_new]
        same = (self._memory[numbers % len(self._memory)] == frames).all(axis=1)
        for index in np.flatnonzero(~same).tolist():  # another frame with the same hash
            numbers[index], is_new[index] = self._admit(hashes[index]), True
            self._memory[numbers[index] % len(self._memory)] = frames[index]
        return numbers, is_new

    def _admit(self, frame_hash: int) -> int:
        """Return the number of a new frame, and forget the oldest one of the window."""
        number = self.added
        self.added += 1
        place = number % self._window
        forgotten = self._hashes[place]
        if self._numbers.get(forgotten) == number - self._window:
            del self._numbers[forgotten]
        self._hashes[place] = frame_hash
        self._numbers[frame_hash] = number
        return number

    def _hashes_of(self, frames: np.ndarray) -> list[int]:
        found: list[int] = np.einsum("ij,j->i", frames, self._weights).tolist()
        return found


def _weights(width: int) -> np.ndarray:
    """Odd factors of a sum that serves as hash, the same in every process."""
    generator = np.random.default_rng(0)
    return generator.integers(0, 2**63, width, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
