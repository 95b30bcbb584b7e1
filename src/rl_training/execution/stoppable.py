"""Runs the compiler so that it can be stopped at any moment.

Compilation takes up to a minute, in PyTorch's own Python code and in programs such as g++. Here it
runs in a thread, because PyTorch keeps the state of a compilation per thread: a thread that is
ended leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rl_training import internals

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 3.0
"""How long to wait for a safe moment, or for the thread to end, before trying again"""

MOST_SECONDS = 6.0
"""How long to wait in all. A thread that is still in code of the compiler itself ends as soon as it
returns from there, before it could run what was compiled."""

UNSAFE_FUNCTIONS = ("__enter__", "__exit__", "__del__", "lazy_init")
"""Functions that must not be left half done, because the next compilation relies on them"""

UNSAFE_FILES = ("<frozen importlib._bootstrap>", subprocess.__file__)
"""Files whose functions must not be left half done either: an import, and the wait for a program,
which is short because the program is ended first"""

COMPILER = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|clang(\+\+)?|icpx|nvcc|cicc|ptxas)(-[\d.]+)?")
"""Names of programs that PyTorch starts to compile"""

LOADS_LIBRARY = "cdll.LoadLibrary"
"""Part of the Python program with which PyTorch tries out a library"""

OUTPUT_OPTION = "-o"
"""Comes before the name of the file that a compiler writes"""


def run_stoppable(action: Callable[[], object], stopping: Callable[[], bool]) -> bool:
    """Run `action` in a thread until it returns, or until `stopping` returns True.

    Returns whether `action` was completed, and raises its exception if it failed. When this
    function returns or raises, `action` has ended, or ends when it leaves a long call of a library.
    If it was stopped, the compilers that it started have ended too, and their output is deleted.
    """
    errors: list[BaseException] = []
    completed = threading.Event()

    def run() -> None:
        try:
            action()
            completed.set()
        except BaseException as error:
            errors.append(error)

    others = _children().get(os.getpid(), [])
    thread = threading.Thread(target=run, name="compiler", daemon=True)
    thread.start()
    stopped = False
    try:
        while thread.is_alive() and not stopped:
            thread.join(POLL_SECONDS)
            stopped = stopping()
    finally:
        if thread.is_alive():
            _end_surely(thread, others)
        if not completed.is_set():
            _delete_failed_output(errors)
            internals.forget_compiler_probes()
    if completed.is_set():
        return True
    if not stopped:
        time.sleep(POLL_SECONDS)  # Ctrl-C reaches the compiler too, and may reach it first
        stopped = stopping()
    if not stopped:
        raise errors[0]
    return False


def _end_surely(thread: threading.Thread, others: list[int]) -> None:
    """End a thread and the compilers that it runs, even if a second signal raises meanwhile."""
    with _without_ignored_exits():
        try:
            _end(thread, others)
        except BaseException:
            _end(thread, others)
            raise


def _end(thread: threading.Thread, others: list[int]) -> None:
    """End a thread and the compilers that it runs, at a moment that leaves little half done."""
    assert thread.ident is not None
    internals.cancel_compilations()
    patient_until = time.monotonic() + PATIENCE_SECONDS
    give_up_at = time.monotonic() + MOST_SECONDS
    while thread.is_alive() and time.monotonic() < give_up_at:
        _end_compilers(others)
        frame = sys._current_frames().get(thread.ident)
        if _is_safe(frame) or time.monotonic() > patient_until:
            exit_request = ctypes.py_object(SystemExit)  # ends a thread without a message
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), exit_request)
            thread.join(min(PATIENCE_SECONDS, give_up_at - time.monotonic()))
            patient_until = time.monotonic() + PATIENCE_SECONDS
        else:
            thread.join(POLL_SECONDS)
    # Other threads of the compiler may have started programs meanwhile.
    while _end_compilers(others) and time.monotonic() < give_up_at + POLL_SECONDS:
        time.sleep(POLL_SECONDS)


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


def _end_compilers(others: list[int]) -> bool:
    """End the compilers that this process has started, with their descendants, except `others`.

    Deletes their output: PyTorch takes a file in its cache for complete, and a linker that is ended
    leaves its file. Returns whether there were any. Without `/proc` they are not found, and the
    compiler ends after its current file.
    """
    found: set[int] = set()
    # Stopped first, so that none starts another program that would outlive it.
    while new := _compilers(others) - found:
        for program in new:
            _send(program, signal.SIGSTOP)
        found |= new
    # While they are stopped: once they have ended, another process may write to the same file.
    for program in found:
        _delete_output(_command(program), Path(f"/proc/{program}/cwd"))
    for program in found:
        _send(program, signal.SIGTERM)  # lets it delete its temporary files
        _send(program, signal.SIGCONT)
    return bool(found)


def _compilers(others: list[int]) -> set[int]:
    children = _children()
    started = children.get(os.getpid(), [])
    pending = [child for child in started if child not in others and _is_compiler(child)]
    found = set()
    while pending:
        program = pending.pop()
        found.add(program)
        pending += children.get(program, [])
    return found


def _send(process: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.kill(process, number)


def _is_compiler(process: int) -> bool:
    """Whether a process is a compiler, or a Python that loads what one made, to try it out."""
    words = _command(process)
    # The interpreter of a script comes before the name of the script.
    names = [Path(word).name for word in words[:2]]
    return any(map(COMPILER.fullmatch, names)) or any(LOADS_LIBRARY in word for word in words)


def _command(process: int) -> list[str]:
    """The words of the command line of a process; empty if it has ended."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return list(map(os.fsdecode, words))


def _children() -> dict[int, list[int]]:
    """Map each process of this machine to its running children."""
    children = defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = status.read_text().rpartition(")")[2].split()
            if state != "Z":
                children[int(parent)].append(int(status.parent.name))
    return children


def _delete_failed_output(errors: list[BaseException]) -> None:
    """Delete the output of compilers that failed, for example because Ctrl-C reached them too."""
    for raised in errors:
        error: BaseException | None = raised
        while error is not None:
            if isinstance(error, subprocess.CalledProcessError):
                _delete_output(error.cmd, Path())
            error = error.__cause__ or error.__context__


def _delete_output(command: Sequence[str], folder: Path) -> None:
    """Delete the file that a command in this folder writes."""
    for option, name in itertools.pairwise(command):
        # Only plain files, not a device such as /dev/null.
        if option == OUTPUT_OPTION and (folder / name).is_file():
            with contextlib.suppress(OSError):  # it has been deleted
                (folder / name).unlink()
