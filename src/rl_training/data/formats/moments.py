"""Running minimum, maximum, mean and standard deviation of vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ranges:
    """Minimum, maximum, mean and standard deviation of each component of a vector."""

    low: np.ndarray
    high: np.ndarray
    mean: np.ndarray
    std: np.ndarray


class Moments:
    """Running minimum, maximum, mean and variance of vectors (Chan's parallel algorithm)."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._squares = np.zeros(0)
        self._low = self._high = np.zeros(0)

    def add(self, values: np.ndarray) -> None:
        """Add vectors `(n, components)`."""
        if not len(values):
            return
        values = values.astype(np.float64)
        mean = values.mean(0)
        self._combine(len(values), mean, values.var(0) * len(values), values.min(0), values.max(0))

    @classmethod
    def of_values(cls, values: np.ndarray, counts: np.ndarray) -> Moments:
        """The moments of vectors `(n, components)` that occur several times each, `(n,)`."""
        moments, number = cls(), int(counts.sum())
        if number:
            mean = counts @ values / number
            squares = counts @ (values - mean) ** 2
            moments._combine(number, mean, squares, values.min(0), values.max(0))
        return moments

    def merge(self, other: Moments) -> None:
        """Add all vectors that `other` has seen."""
        if other.count:
            self._combine(other.count, other._mean, other._squares, other._low, other._high)

    def ranges(self) -> Ranges:
        std = np.sqrt(self._squares / max(self.count, 1))
        return Ranges(self._low, self._high, self._mean, std)

    def _combine(
        self, count: int, mean: np.ndarray, squares: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> None:
        if not self.count:
            self._mean, self._squares, self._low, self._high = mean, squares, low, high
        else:
            total, delta = self.count + count, mean - self._mean
            self._squares = self._squares + squares + delta**2 * (self.count * count / total)
            self._mean = self._mean + delta * (count / total)
            self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)
        self.count += count
