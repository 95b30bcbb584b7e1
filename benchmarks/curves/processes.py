"""Runs commands of the benchmark in processes that share the cores, up to a time limit."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from curves.settings import SCRIPT

INTERRUPTED = 130
"""Exit code of a run that a signal stopped; its checkpoints are kept where it has a work folder"""
NOT_STARTED = None
PATIENCE = 120.0
"""Seconds for a run to save its checkpoints; it needs about ten"""


def run_processes(
    commands: Sequence[Sequence[str]],
    parallel: int = 1,
    seconds: float | None = None,
    after: Mapping[int, int] | None = None,
) -> list[int | None]:
    """Run the benchmark with each list of arguments, so that none inherits the compiled programs,
    device memory or failure of another. Return their exit codes.

    `after` says which commands need an earlier one, by index: they wait for it, and are not started
    unless its exit code is 0.

    After `seconds` the running ones are asked to stop, and the others are not started.
    """
    shares: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for share in core_shares(parallel):
        shares.put(share)
    running: list[subprocess.Popen[bytes]] = []
    guard = threading.Lock()
    until = None if seconds is None else time.monotonic() + seconds
    ending = False

    def take_share() -> None:
        # Processes that this thread starts inherit its cores, and so do their workers.
        if share := shares.get():
            os.sched_setaffinity(0, share)

    def run(index: int) -> int | None:
        # Commands are started in order, so that the earlier one has been.
        if after and index in after and results[after[index]].result() != 0:
            return NOT_STARTED
        left = None if until is None else until - time.monotonic()
        with guard:
            if ending or (left is not None and left <= 0):
                return NOT_STARTED
            # A session of its own: Ctrl-C reaches this process alone, which passes on one signal.
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *commands[index]], start_new_session=True
            )
            running.append(process)
        try:
            return process.wait(left)
        except subprocess.TimeoutExpired:
            return _end(process)

    # Ends the processes below, which would otherwise continue to train.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    pool = ThreadPoolExecutor(parallel, initializer=take_share)
    results: list[Future[int | None]] = []
    try:
        for index in range(len(commands)):
            results.append(pool.submit(run, index))
        return [result.result() for result in results]
    finally:
        with guard:
            ending = True
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Ask a run to save and stop; end it if it does not."""
    process.terminate()
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def core_shares(parts: int) -> list[list[int]]:
    """Split the cores of this process into equal shares; empty if the system cannot do that."""
    if not hasattr(os, "sched_getaffinity"):
        return [[]] * parts
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // parts
    return [cores[part * size : (part + 1) * size] for part in range(parts)]
