"""The process of an experiment tracker, and the rows that wait for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rl_training.errors import one_line
from rl_training.types import Json

MAX_WAITING_ROWS = 5_000
ROWS_AT_ONCE = 100
RETRY_SECONDS = (2.0, 60.0)
"""Time before a request is repeated: at first, and at most; it doubles"""
LAST_ATTEMPTS, LAST_DELAY = 2, 0.5
"""How often a request that fails is repeated at the end of a run"""
_PROGRAM = Path(__file__).with_name("tracker_process.py")


Mark = tuple[int, int]
"""Identifies a row of a run: its position, and its number among the rows of that position"""


class Waiting(NamedTuple):
    """A request that waits for a tracker; rows are sent together."""

    kind: str
    key: str
    """The run"""
    content: Any
    mark: Mark = (-1, 0)
    """The row, if it is one"""


class TrackerProcess:
    """The process of one tracker, with the requests that wait for it."""

    def __init__(self, tracker: str) -> None:
        self.tracker = tracker
        self.problems: deque[str] = deque(maxlen=10)
        """Messages that were not shown yet"""
        self.users = 0
        self._dropped = 0
        """Number of rows that no longer fitted into the queue, or could not be sent"""
        self._receipts: dict[str, Callable[[str, Mark], None]] = {}
        self._waiting: deque[Waiting] = deque()
        self._rows = 0
        self._changed = threading.Condition()
        self._is_closing = self._has_failed = False
        self._why_ended = "its process ended"
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracker-{tracker}", daemon=True)
        self._thread.start()

    def open(self, key: str, run: Json, receipt: Callable[[str, Mark], None]) -> None:
        """Start or continue a remote run; `receipt` is called with the last row that was sent."""
        self._receipts[key] = receipt
        self._put(Waiting("open", key, run))

    def log(self, key: str, mark: Mark, row: Sequence[Any]) -> None:
        self._put(Waiting("log", key, row, mark))

    def finish(self, key: str, summary: Mapping[str, float], status: str) -> None:
        self._put(Waiting("finish", key, {"summary": summary, "status": status}))

    def unsent(self) -> int:
        """Number of rows that were dropped or still wait."""
        with self._changed:
            return self._dropped + self._rows

    def start_closing(self) -> None:
        """Let the process end when nothing waits any more."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def close(self, deadline: float) -> None:
        """Wait for the process to end; end it at the deadline."""
        try:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        finally:
            self._why_ended = "it did not answer in time"
            self._end()
            self._thread.join(1.0)  # it notices that the process has ended

    def _put(self, request: Waiting) -> None:
        with self._changed:
            if self._has_failed:
                self._dropped += request.kind == "log"
                return
            self._waiting.append(request)
            self._rows += request.kind == "log"
            if self._rows > MAX_WAITING_ROWS:
                oldest = next(each for each in self._waiting if each.kind == "log")
                self._waiting.remove(oldest)
                self._rows -= 1
                self._dropped += 1
            self._changed.notify_all()

    def _run(self) -> None:
        """Send what waits, until the queue is empty and closed."""
        delay, most = RETRY_SECONDS
        last_attempts = LAST_ATTEMPTS
        while batch := self._next_batch():
            found = self._ask(batch)
            answer = {"fatal": self._why_ended} if found is None else found
            if "error" in answer and last_attempts:
                self._complain(f"{answer['error']}; training continues, and it is tried again")
                if self._wait_for_closing(delay):
                    last_attempts -= 1
                delay = min(2 * delay, most)
                continue
            if "error" in answer or "fatal" in answer:
                self._fail(answer.get("fatal") or answer["error"])
                break
            delay = RETRY_SECONDS[0]
            self._settle(batch, rejected=answer.get("rejected"))
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()

    def _wait_for_closing(self, seconds: float) -> bool:
        """Wait before a request is repeated; return whether the end of the run has come."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_closing, seconds):
                return False
        time.sleep(LAST_DELAY)
        return True

    def _settle(self, batch: Sequence[Waiting], *, rejected: str | None) -> None:
        """Remove requests that were sent, or that a tracker will never accept."""
        first = batch[0]
        if rejected is not None:
            self._complain(f"{rejected}; rows were not accepted, and training continues")
        with self._changed:
            for each in batch:
                if each in self._waiting:  # else it was dropped in the meantime
                    self._waiting.remove(each)
                    self._rows -= each.kind == "log"
                    self._dropped += rejected is not None and each.kind == "log"
        if first.kind == "log" and rejected is None:
            self._receipts[first.key](self.tracker, batch[-1].mark)

    def _next_batch(self) -> list[Waiting]:
        """Wait for requests; empty if there are none and the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._is_closing)
            if not self._waiting:
                return []
            batch = [self._waiting[0]]
            for each in list(self._waiting)[1:ROWS_AT_ONCE]:
                if not each.kind == batch[0].kind == "log" or each.key != batch[0].key:
                    break
                batch.append(each)
            return batch

    def _ask(self, batch: Sequence[Waiting]) -> Json | None:
        """Send requests of one kind and return the answer; None if the process has ended."""
        first = batch[0]
        arguments: Json = {"key": first.key}
        if first.kind == "open":
            arguments["run"] = first.content
        elif first.kind == "log":
            arguments["rows"] = [each.content for each in batch]
        else:
            arguments |= first.content
        line = json.dumps({"kind": first.kind, "arguments": arguments}) + "\n"
        try:
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(line.encode())
            process.stdin.flush()
            answer = process.stdout.readline()
            return dict(json.loads(answer)) if answer else None
        except (OSError, ValueError):
            return None

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(  # noqa: S603 (this Python and a file of this package)
            [sys.executable, "-P", str(_PROGRAM), self.tracker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which then finishes the run
        )
        return self._process

    def _end(self) -> None:
        """End the process, and those that it has started."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(OSError, AttributeError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()

    def _complain(self, reason: str) -> None:
        self.problems.append(f"{self.tracker}: {one_line(reason, 400)}")

    def _fail(self, reason: str) -> None:
        """Give up."""
        self._complain(f"{reason}; training continues, and nothing more is sent")
        with self._changed:
            self._has_failed = True
            self._dropped, self._rows = self._dropped + self._rows, 0
            self._waiting.clear()
