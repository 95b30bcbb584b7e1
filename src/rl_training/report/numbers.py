"""Numbers and texts for the page: short, finite, and never more than it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from rl_training.errors import one_line

DIGITS = 5
"""Significant digits of the points of a curve. Scores keep all digits."""
MOST_REMEMBERED = 1_000
"""Results of slow computations that are kept"""
_MEMORY: dict[tuple[object, ...], Any] = {}
Result = TypeVar("Result")
MAX_TEXT = 200
"""Longest text from a run folder"""


def exact(value: Any) -> float | None:
    """Return a number as it is in the run's files; None if it is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def rounded(values: Iterable[Any]) -> list[float | int | None]:
    """Return the values of a curve with `DIGITS` digits; None where they are not finite."""
    return [_rounded(float(value)) for value in values]


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def text(value: Any, limit: int = MAX_TEXT) -> str:
    """Return a text from a run folder in one line of limited length, without control codes."""
    return one_line(value if isinstance(value, str) else str(value), limit)


def chosen(count: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced places among `count`, the first and the last included."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, max(2, most)).round().astype(np.int64))


def remembered(key: tuple[object, ...], compute: Callable[[], Result]) -> Result:
    """Return what `compute` returned for an equal key before; the page is often made again.

    Arrays in the key are compared by their content.
    """
    hashed = tuple(
        (part.shape, part.tobytes()) if isinstance(part, np.ndarray) else part for part in key
    )
    if hashed not in _MEMORY:
        _MEMORY[hashed] = compute()
    while len(_MEMORY) > MOST_REMEMBERED:
        del _MEMORY[next(iter(_MEMORY))]  # the oldest
    found: Result = _MEMORY[hashed]
    return found


class Axes:
    """The x values of curves. Curves with the same ones share them, which most runs do."""

    def __init__(self) -> None:
        self.values: list[list[float | int | None]] = []
        self._places: dict[tuple[float | int | None, ...], int] = {}

    def add(self, values: Sequence[Any] | np.ndarray) -> int:
        """Return the place of an axis in `values`."""
        is_count = np.issubdtype(np.asarray(values).dtype, np.integer)
        listed: list[float | int | None] = (
            [int(value) for value in values] if is_count else rounded(values)
        )
        key = tuple(listed)
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(listed)
        return self._places[key]
