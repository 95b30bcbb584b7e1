"""Let a contestant take turns: wait for `go`, run a chunk of steps, and report its time."""

from __future__ import annotations

import sys
import time


class Pace:
    """Call `step` once per unit of work; it blocks between chunks until `go` is read."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._started = steps, 0, 0.0
        self._wait()

    def step(self) -> None:
        self._done += 1
        if self._done == self._steps:
            seconds = (time.perf_counter() - self._started) / self._steps
            print(f"seconds_per_step {seconds}", flush=True)
            self._wait()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit
        self._done, self._started = 0, time.perf_counter()
