"""Low-latency signalling of one byte between processes."""

from __future__ import annotations

import os
import select
import time
from multiprocessing.connection import Connection

_CAN_YIELD = hasattr(os, "sched_yield")
SHORT_PATIENCE = 150e-6 if _CAN_YIELD else 0.0
"""Seconds to look again and again: a core that has gone to sleep takes longer to wake than many an
environment to step. Whoever else wants the core gets it in between."""
LONG_PATIENCE = 2e-3 if _CAN_YIELD else 0.0
"""The same where each process has a core to itself: the time of a few rounds of small networks"""
_LONG_WAITS, _TRIED_AGAIN_AFTER = 20, 100
"""Long waits in a row after which polling is short, and after which longer polling is tried again.

One is not enough: a sleeping core can take so long to wake up that this alone makes the next wait a
long one, and polling would stay short for good.
"""


class Listener:
    """Waits for bytes at one end of a pipe."""

    def __init__(self, connection: Connection, patience: float = SHORT_PATIENCE) -> None:
        """`patience` is the longest time to poll before sleeping, in seconds."""
        self._descriptor = connection.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._most, self._long_waits = patience, 0

    def hear(self) -> bytes:
        """The next byte, or none where the other side is gone."""
        began = time.perf_counter()
        deadline = began + self._patience()
        while not self._poll.poll(0) and time.perf_counter() < deadline:
            os.sched_yield()
        byte = os.read(self._descriptor, 1)
        soon = time.perf_counter() - began < self._most
        self._long_waits = 0 if soon else self._long_waits + 1
        return byte

    def _patience(self) -> float:
        """How long to poll this time; where waits are always long, polling only costs time."""
        is_worthwhile = self._long_waits % _TRIED_AGAIN_AFTER < _LONG_WAITS
        return self._most if is_worthwhile else min(self._most, SHORT_PATIENCE)
