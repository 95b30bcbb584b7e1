"""Runs the compiler so that it can be stopped at any moment.

Compilation takes up to a minute, in PyTorch's own Python code and in programs such as g++. Here it
runs in a thread, because PyTorch keeps the state of a compilation per thread: a thread that is
ended leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 3.0
"""How long to wait for a safe moment, or for the thread to end, before trying again"""

UNSAFE_FUNCTIONS = ("__enter__", "__exit__", "__del__", "lazy_init")
"""Functions that must not be left half done, because the next compilation relies on them"""

UNSAFE_FILES = ("<frozen importlib._bootstrap>", subprocess.__file__)
"""A module must be imported completely. `subprocess` returns soon: its program is ended first."""


def run_stoppable(action: Callable[[], object], stopping: Callable[[], bool]) -> bool:
    """Run `action` in a thread until it returns, or until `stopping` returns True.

    Returns whether `action` was completed, and raises its exception if it failed. When this
    function returns, `action` has ended. The programs that it started have ended too, and their
    unfinished output files are deleted.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    others, stopped = _children().get(os.getpid(), []), False
    thread = threading.Thread(target=run, name="compiler", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not stopping():
            thread.join(POLL_SECONDS)
        stopped = thread.is_alive()
        if stopped:
            with _without_ignored_exits():
                _end(thread, others)
    finally:  # a second signal may raise here
        _end_programs(others)
    if not errors:
        return True
    for error in errors:
        _delete_unfinished_output(error)
    if not stopped:
        time.sleep(POLL_SECONDS)  # Ctrl-C reaches the compiler too, and may reach it first
        if not stopping():
            raise errors[0]
    return False


def _end(thread: threading.Thread, others: list[int]) -> None:
    """End a thread and the programs that it runs, at a moment that leaves nothing half done."""
    assert thread.ident is not None
    patient_until = time.monotonic() + PATIENCE_SECONDS
    while thread.is_alive():
        _end_programs(others)
        # Nothing runs between the look at the thread and the request: this thread has the lock.
        frame = sys._current_frames().get(thread.ident)
        if _is_safe(frame) or time.monotonic() > patient_until:
            exit_request = ctypes.py_object(SystemExit)  # ends a thread without a message
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), exit_request)
            thread.join(PATIENCE_SECONDS)
            patient_until = time.monotonic() + PATIENCE_SECONDS
        else:
            thread.join(POLL_SECONDS / 10)


def _is_safe(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in UNSAFE_FUNCTIONS or frame.f_code.co_filename in UNSAFE_FILES:
            return False
        frame = frame.f_back
    return True


@contextlib.contextmanager
def _without_ignored_exits() -> Iterator[None]:
    """Do not print that a SystemExit in a finalizer was ignored."""
    report = sys.unraisablehook

    def filtered(problem: Any) -> None:
        if problem.exc_type is not SystemExit:
            report(problem)

    sys.unraisablehook = filtered
    try:
        yield
    finally:
        sys.unraisablehook = report


def _end_programs(others: list[int]) -> None:
    """End the programs that this process has started, with their descendants, except `others`.

    Python processes are workers, of environments or of the compiler, which end by themselves.
    Without `/proc`, programs are not found, and the compiler ends after its current file.
    """
    children = _children()
    pending = [
        child
        for child in children.get(os.getpid(), [])
        if child not in others and _executable(child) != _executable(os.getpid())
    ]
    while pending:
        program = pending.pop()
        pending += children.get(program, [])
        with contextlib.suppress(OSError):
            os.kill(program, signal.SIGTERM)  # lets it delete its temporary files


def _children() -> dict[int, list[int]]:
    """Map each process of this machine to its running children."""
    children = defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = status.read_text().rpartition(")")[2].split()
            if state != "Z":
                children[int(parent)].append(int(status.parent.name))
    return children


def _executable(process: int) -> str:
    try:
        return os.readlink(f"/proc/{process}/exe")
    except OSError:
        return ""


def _delete_unfinished_output(error: BaseException | None) -> None:
    """Delete the output files of compiler commands that failed.

    PyTorch takes a file in its cache for complete, and a linker that is ended leaves its file.
    """
    while error is not None:
        if isinstance(error, subprocess.CalledProcessError) and "-o" in error.cmd[:-1]:
            Path(error.cmd[error.cmd.index("-o") + 1]).unlink(missing_ok=True)
        error = error.__cause__ or error.__context__
