"""Reads `metrics.jsonl` while it grows: only new bytes, and in limited memory."""

from __future__ import annotations

import math
import os
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.run_folder import MAX_METRICS_BYTES, MAX_ROW_BYTES, metrics_row
from rl_training.errors import CheckpointError, brief
from rl_training.types import Json

METRICS = "metrics.jsonl"
RETURN, SECONDS, SPEED = "eval/mean_reward", "time/wall_seconds", "time/fps"
POINTS = 1_000
"""A series never has more points, and at least half as many once it had more"""
MAX_TAGS, MAX_NAME_LENGTH = 200, 200
"""Most metrics of a run, and their longest name"""
MAX_STEP, MAX_ROWS, MAX_EVALUATIONS = 2**53, 5_000_000, 100_000
"""The largest step that JavaScript can hold, most rows and evaluations"""
CHUNK_BYTES = 2 * 2**20
"""Bytes that are read at once"""
RECENT_ROWS = 30
"""Rows from which the present speed is computed"""
_SEEN_BYTES = 512
"""Bytes before the position that must be unchanged for reading to go on from there"""


class Series:
    """Values of one metric over steps and seconds, thinned so that its peaks remain.

    When there are too many points, the smallest and the largest of every four remain.
    """

    def __init__(self) -> None:
        self.steps, self.seconds, self.values = array("d"), array("d"), array("d")

    def add(self, step: float, seconds: float, value: float) -> None:
        if len(self.values) >= POINTS:
            self._thin()
        self.steps.append(step)
        self.seconds.append(seconds)
        self.values.append(value)

    def _thin(self) -> None:
        kept: list[int] = []
        for start in range(0, len(self.values), 4):
            group = range(start, min(start + 4, len(self.values)))
            value = self.values.__getitem__
            kept += sorted({min(group, key=value), max(group, key=value)})
        self.steps = array("d", (self.steps[index] for index in kept))
        self.seconds = array("d", (self.seconds[index] for index in kept))
        self.values = array("d", (self.values[index] for index in kept))


class MetricsTail:
    """What the rows of a run say, as far as they were read.

    A resumed run cuts its metrics to those of its checkpoint and computes the later rows again. The
    file is then read from its beginning, as is one that was replaced.
    """

    def __init__(self, folder: PlainFolder, is_wanted: Callable[[str], bool] = bool) -> None:
        """`is_wanted` tells which metrics are kept as series."""
        self._folder, self._is_wanted = folder, is_wanted
        self.version = 0
        """Increases with every value of `series` and `evaluations`, and with every problem"""
        self._stamp: tuple[int, int, int] | None = None
        self._reset()

    def _reset(self) -> None:
        self.series: dict[str, Series] = {}
        self.evaluations: dict[int, tuple[float, float]] = {}
        """Wall time and mean return of the evaluation at each step; NaN if it is not finite"""
        self.last: dict[str, float] = {}
        """The last value of each metric"""
        self.step, self.rows = 0, 0
        self.version += 1
        self.problem: str | None = None
        """Why not everything is shown"""
        self.is_complete = False
        """Whether everything in the file was read"""
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_ROWS)
        self._position, self._seen, self._ended = 0, b"", False

    @property
    def changed_at(self) -> float | None:
        """Time at which the file was last written, in seconds since 1970."""
        return None if self._stamp is None else self._stamp[2] / 1e9

    def read(self, most_bytes: int = CHUNK_BYTES) -> bool:
        """Read new rows from about this many bytes; return whether anything changed."""
        try:
            if self._folder.mode(METRICS) is None:
                return self._forget(None)
            with self._folder.open(METRICS) as file:
                return self._read(file.fileno(), most_bytes)
        except (CheckpointError, OSError) as error:
            return self._forget(f"its metrics cannot be read: {brief(error)}")

    def _forget(self, problem: str | None) -> bool:
        changed = self._stamp is not None or self.problem != problem
        self._stamp = None
        self._reset()
        self.problem, self.is_complete = problem, True
        return changed

    def _read(self, file: int, most_bytes: int) -> bool:
        found = os.fstat(file)
        stamp = found.st_ino, found.st_size, found.st_mtime_ns
        if stamp == self._stamp and self.is_complete:
            return False
        is_other = self._stamp is None or self._stamp[0] != found.st_ino
        is_new = is_other or self._was_rewritten(file, found.st_size)
        if is_new:
            self._reset()
        self._stamp, rows_before = stamp, self.rows
        if not self._ended:
            self._read_on(file, min(found.st_size, MAX_METRICS_BYTES), most_bytes)
        if self.is_complete and found.st_size > MAX_METRICS_BYTES:
            self._end(f"only the first {MAX_METRICS_BYTES // 2**20} MiB of its metrics are shown")
        return is_new or self.rows > rows_before

    def _was_rewritten(self, file: int, size: int) -> bool:
        start = self._position - len(self._seen)
        return size < self._position or os.pread(file, len(self._seen), start) != self._seen

    def _read_on(self, file: int, end: int, most_bytes: int) -> None:
        # At least one row: the longest would never fit into a smaller number of bytes.
        wanted = min(end - self._position, max(most_bytes, MAX_ROW_BYTES + 1))
        data = os.pread(file, wanted, self._position) if wanted > 0 else b""
        self.is_complete = self._position + len(data) >= end
        self._take(data)

    def _take(self, data: bytes) -> None:
        """Add all complete lines. The rest is read again when its line is complete."""
        lines = data.split(b"\n")
        if len(lines.pop()) > MAX_ROW_BYTES and not lines:
            self._end(f"line {self.rows + 1:,} of its metrics is too long; the rest is not shown")
        for line in lines:
            row = metrics_row(line)
            if row is None or self.rows >= MAX_ROWS:
                what = "is damaged" if row is None else "is one too many"
                self._end(f"line {self.rows + 1:,} of its metrics {what}; the rest is not shown")
                break
            self.rows += 1
            self._add(row)
        read = data[: data.rfind(b"\n") + 1]
        self._position += len(read)
        self._seen = (self._seen + read[-_SEEN_BYTES:])[-_SEEN_BYTES:]

    def _end(self, problem: str) -> None:
        if self.problem != problem:
            self.version += 1
        self.problem, self._ended, self.is_complete = problem, True, True

    def _add(self, row: Json) -> None:
        step = row.pop("step", None)
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            return
        numbers = {tag: value for tag, each in row.items() if (value := _finite(each)) is not None}
        seconds = numbers.get(SECONDS, math.nan)
        self.step = max(self.step, step)
        for tag, value in numbers.items():
            self._add_value(tag, step, seconds, value)
        if RETURN in row and len(self.evaluations) < MAX_EVALUATIONS:
            self.evaluations[step] = seconds, numbers.get(RETURN, math.nan)
            self.version += 1
        if SECONDS in numbers:
            self._recent.append((step, seconds))

    def _add_value(self, tag: str, step: int, seconds: float, value: float) -> None:
        if tag not in self.last:
            if len(self.last) >= MAX_TAGS or len(tag) > MAX_NAME_LENGTH or not tag.isprintable():
                return
            if self._is_wanted(tag):
                self.series[tag] = Series()
        self.last[tag] = value
        if tag in self.series:
            self.series[tag].add(step, seconds, value)
            self.version += 1

    def speed(self) -> float | None:
        """Return the present speed in steps per second; None if it is not known."""
        if len(self._recent) > 1:
            (first, began), (last, ended) = self._recent[0], self._recent[-1]
            if last > first and ended > began:
                return (last - first) / (ended - began)
        known = self.last.get(SPEED)
        return known if known is not None and known > 0 else None


def _finite(value: Any) -> float | None:
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:  # an integer that no float can hold
        return None
