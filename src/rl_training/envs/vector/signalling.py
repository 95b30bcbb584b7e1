"""Low-latency signalling between processes: single bytes, and rare messages that follow one."""

from __future__ import annotations

import math
import os
import pickle
import select
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

_CAN_YIELD = hasattr(os, "sched_yield")
SHORT_PATIENCE = 150e-6 if _CAN_YIELD else 0.0
"""Seconds to poll before sleeping: waking a core can take longer than an environment step. Polling
yields the core to other processes."""
LONG_PATIENCE = 2e-3 if _CAN_YIELD else 0.0
"""Polling time if every process has its own core: about a few forward passes of small networks"""
_LONG_WAITS, _RETRY_PERIOD = 20, 100
"""Polling is short after `_LONG_WAITS` consecutive long waits, and long again every `_RETRY_PERIOD`
waits. A single long wait is not enough: waking a sleeping core can itself make the next wait long,
and polling would stay short forever."""

STOP_SECONDS, REPAIR_SECONDS, LAST_SECONDS = 4.0, 3.0, 0.25
"""After a requested stop: how long a reply may take, and the repair of a worker that did not reply.
Their sum limits all waits together, which leaves time to save a checkpoint within ten seconds of a
signal. After that, a reply may take `LAST_SECONDS`, so that other workers can still be captured."""
_SLICE_SECONDS = 0.5
_SIZE_BYTES = 8


class Pollable(Protocol):
    """What a `Deadline` waits for, such as a `select.poll` object."""

    def poll(self, timeout: float) -> Sequence[Any]:
        """Wait at most this many milliseconds; return something if it has arrived."""


class Deadline:
    """The time that another process has left to reply.

    Time in which this process was itself suspended does not count: a slice of the waiting time
    counts at most as long as it was meant to take.
    """

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds` is the time to reply after each `restart`; None: unlimited."""
        self.seconds = math.inf if seconds is None else seconds
        self.stopping: Callable[[], bool] = lambda: False
        """Whether a stop of the program was requested, which shortens every wait"""
        self._left = self.seconds
        self._left_when_stopping = STOP_SECONDS + REPAIR_SECONDS
        """The time of all waits together after a requested stop"""

    def restart(self) -> None:
        """Give the full time again, or less after a requested stop."""
        self._left = self.seconds
        if self.stopping():
            self._shorten()

    def restart_for_repair(self) -> bool:
        """Same as `restart`, for a new worker; return False if there is no time for one."""
        self._left = self.seconds
        if self.stopping():
            self._left = min(self.seconds, REPAIR_SECONDS, self._left_when_stopping)
        return self._left > 0

    def limit(self, seconds: float) -> float:
        """Return at most these seconds, and less if little time is left after a requested stop."""
        return min(seconds, max(self._left_when_stopping, LAST_SECONDS))

    def _shorten(self) -> None:
        self._left = self.limit(min(self._left, STOP_SECONDS))

    def wait(self, poll: Pollable) -> None:
        """Return when what is polled has arrived; raise `TimeoutError` if the time is up."""
        while self._left > 0:
            is_stopping = self.stopping()
            if is_stopping:
                self._shorten()
            planned, began = min(self._left, _SLICE_SECONDS), time.monotonic()
            is_ready = poll.poll(1e3 * planned)
            waited = min(planned, time.monotonic() - began)
            if is_stopping:
                self._left_when_stopping -= waited
            self._left -= waited
            if is_ready:
                return
        if not poll.poll(0):
            raise TimeoutError


class Listener:
    """Waits for bytes and messages at the reading end of a pipe."""

    def __init__(
        self,
        connection: Connection,
        patience: float = SHORT_PATIENCE,
        deadline: Deadline | None = None,
    ) -> None:
        """`patience` is the maximum time to poll before sleeping, in seconds.

        With a `deadline`, every wait raises `TimeoutError` when its time is up.
        """
        self._descriptor, self._deadline = connection.fileno(), deadline
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._most, self._long_waits = patience, 0

    def hear(self) -> bytes:
        """Wait for the next byte and return it; empty if the other side closed the pipe."""
        began = time.perf_counter()
        deadline = began + self._patience()
        while not (heard := self._poll.poll(0)) and time.perf_counter() < deadline:
            os.sched_yield()
        if not heard and self._deadline is not None:
            self._deadline.wait(self._poll)
        byte = os.read(self._descriptor, 1)
        soon = time.perf_counter() - began < self._most
        self._long_waits = 0 if soon else self._long_waits + 1
        return byte

    def receive(self) -> Any:
        """Read a message of `Speaker.send`; raises `EOFError` if the other side ended."""
        size = int.from_bytes(self._read(_SIZE_BYTES), "little")
        return pickle.loads(self._read(size))  # noqa: S301 (from our own workers)

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            if self._deadline is not None:
                self._deadline.wait(self._poll)
            part = os.read(self._descriptor, size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _patience(self) -> float:
        """Seconds to poll this time; after many long waits, polling would only waste time."""
        is_worthwhile = self._long_waits % _RETRY_PERIOD < _LONG_WAITS
        return self._most if is_worthwhile else min(self._most, SHORT_PATIENCE)


class Speaker:
    """Writes bytes and messages to a pipe; raises `BrokenPipeError` if the other side ended."""

    def __init__(self, connection: Connection, deadline: Deadline | None = None) -> None:
        """With a `deadline`, `send` raises `TimeoutError` if the other side does not read."""
        self._descriptor, self._deadline = connection.fileno(), deadline
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)

    def say(self, byte: bytes) -> None:
        os.write(self._descriptor, byte)

    def send(self, message: Any) -> None:
        """Send any object that can be pickled."""
        data = pickle.dumps(message)
        waiting = memoryview(len(data).to_bytes(_SIZE_BYTES, "little") + data)
        while waiting:
            if self._deadline is not None:
                self._deadline.wait(self._poll)
            # A pipe that is ready for writing takes this many bytes without blocking.
            most = len(waiting) if self._deadline is None else select.PIPE_BUF
            waiting = waiting[os.write(self._descriptor, waiting[:most]) :]
