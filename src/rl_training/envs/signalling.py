"""One byte from one process to another, soon."""

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


class Listener:
    """Waits for bytes at one end of a pipe."""

    def __init__(self, connection: Connection, patience: float = SHORT_PATIENCE) -> None:
        """`patience` is how long it stays awake at most, if that may spare it to go to sleep."""
        self._descriptor = connection.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._most, self._patience = patience, min(patience, SHORT_PATIENCE)

    def hear(self) -> bytes:
        """The next byte, or none where the other side is gone."""
        began = time.perf_counter()
        deadline = began + self._patience
        while not self._poll.poll(0) and time.perf_counter() < deadline:
            os.sched_yield()
        byte = os.read(self._descriptor, 1)
        # Waits are like one another: after one that was too long, patience would be in vain.
        soon = time.perf_counter() - began < self._most
        self._patience = self._most if soon else min(self._most, SHORT_PATIENCE)
        return byte
