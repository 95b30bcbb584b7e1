"""Runs the compiler so that it can be stopped at any moment.

Compilation takes up to a minute, in PyTorch's own Python code and in programs such as g++. Here it
runs in a thread, because PyTorch keeps the state of a compilation per thread: a thread that is
ended leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rl_training import internals
from rl_training.execution.compile_cache import CACHE_VARIABLE

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

ELF_HEADER = struct.Struct("=4s36xQ10xHH2x")
"""The parts of a 64-bit header: magic number, offset of the sections, their size and number"""


def run_stoppable(action: Callable[[], object], stopping: Callable[[], bool]) -> bool:
    """Run `action` in a thread until it returns, or until `stopping` returns True.

    Returns whether `action` was completed, and raises its exception if it failed. When this
    function returns or raises, `action` has ended, or ends when it leaves a long call of a library.
    If it was stopped, the compilers that it started have ended too, and what they left unfinished
    is deleted.
    """
    errors: list[BaseException] = []
    completed = threading.Event()

    def run() -> None:
        try:
            action()
            completed.set()
        except BaseException as error:
            errors.append(error)

    began, others = time.time(), _children().get(os.getpid(), [])
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
            _delete_unfinished_output(errors, began)
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

    Returns whether there were any. Without `/proc` they are not found, and the compiler ends after
    its current file.
    """
    found: set[int] = set()
    # Stopped first, so that none starts another program that would outlive it.
    while new := _compilers(others) - found:
        for program in new:
            _send(program, signal.SIGSTOP)
        found |= new
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
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    # The interpreter of a script comes before the name of the script.
    names = [Path(word).name for word in words[:2]]
    return any(map(COMPILER.fullmatch, names)) or any(LOADS_LIBRARY in word for word in words)


def _children() -> dict[int, list[int]]:
    """Map each process of this machine to its running children."""
    children = defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = status.read_text().rpartition(")")[2].split()
            if state != "Z":
                children[int(parent)].append(int(status.parent.name))
    return children


def _delete_unfinished_output(errors: list[BaseException], began: float) -> None:
    """Delete the output files of compilers that failed or were ended.

    PyTorch takes a file in its cache for complete, and a linker that is ended leaves its file.
    """
    for raised in errors:
        error: BaseException | None = raised
        while error is not None:
            if isinstance(error, subprocess.CalledProcessError) and "-o" in error.cmd[:-1]:
                Path(error.cmd[error.cmd.index("-o") + 1]).unlink(missing_ok=True)
            error = error.__cause__ or error.__context__
    folder = os.environ.get(CACHE_VARIABLE)
    for library in Path(folder).rglob("*.so") if folder else ():
        with contextlib.suppress(OSError):
            # A second of tolerance: file systems round times.
            if library.stat().st_mtime >= began - 1 and not _is_complete(library):
                library.unlink()


def _is_complete(library: Path) -> bool:
    """Whether a shared library has its last part, the table of sections that the header names."""
    with library.open("rb") as file:
        header = file.read(ELF_HEADER.size)
    if len(header) < ELF_HEADER.size:
        return False
    magic, table, entry_bytes, entries = ELF_HEADER.unpack(header)
    needed = int(table) + int(entry_bytes) * int(entries)
    return bool(magic != b"\x7fELF") or needed <= library.stat().st_size
