"""Low-latency one-byte signalling between processes."""

from __future__ import annotations

import os
import select
import time
from multiprocessing.connection import Connection

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


class Listener:
    """Waits for bytes at the reading end of a pipe."""

    def __init__(self, connection: Connection, patience: float = SHORT_PATIENCE) -> None:
        """`patience` is the maximum time to poll before sleeping, in seconds."""
        self._descriptor = connection.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._most, self._long_waits = patience, 0

    def hear(self) -> bytes:
        """Wait for the next byte and return it; empty if the other side closed the pipe."""
        began = time.perf_counter()
        deadline = began + self._patience()
        while not self._poll.poll(0) and time.perf_counter() < deadline:
            os.sched_yield()
        byte = os.read(self._descriptor, 1)
        soon = time.perf_counter() - began < self._most
        self._long_waits = 0 if soon else self._long_waits + 1
        return byte

    def _patience(self) -> float:
        """Seconds to poll this time; after many long waits, polling would only waste time."""
        is_worthwhile = self._long_waits % _RETRY_PERIOD < _LONG_WAITS
        return self._most if is_worthwhile else min(self._most, SHORT_PATIENCE)
