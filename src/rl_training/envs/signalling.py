"""One byte from one process to another, soon."""

from __future__ import annotations

import os
import select
import time
from multiprocessing.connection import Connection

PATIENCE_SECONDS = 150e-6 if hasattr(os, "sched_yield") else 0.0
"""How long to look again and again: a core that has gone to sleep takes longer to wake than many
an environment to step. Whoever else wants the core gets it in between."""


class Listener:
    """Waits for bytes at one end of a pipe."""

    def __init__(self, connection: Connection) -> None:
        self._descriptor = connection.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def hear(self) -> bytes:
        """The next byte, or none where the other side is gone."""
        deadline = time.perf_counter() + PATIENCE_SECONDS
        while not self._poll.poll(0) and time.perf_counter() < deadline:
            os.sched_yield()
        return os.read(self._descriptor, 1)
