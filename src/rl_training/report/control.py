"""Stops and resumes runs for the dashboard.

A run folder may come from a stranger, and its lock file may name any process. So a signal is sent
only to a process that was seen to hold the lock, and a run is resumed by the command line without
any `--import`, which refuses code that a run folder names.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.run_folder import LOCK, RunFolder
from rl_training.errors import CheckpointError, UserError, one_line

MAX_LOCK_BYTES, MAX_FILES = 128, 65_536
"""Longest lock file, and most open files of a process that are looked at"""
MAX_MESSAGE_BYTES, MAX_MESSAGE = 8_192, 400
"""End of a command's output that is read, and longest message that is shown"""
MAX_STARTED = 64
"""Most runs that were resumed here and still train"""
_ENDED_WELL = (0, 130, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a run that finished or was stopped"""
_OWNER = re.compile(rb"(\d{1,10}) ([\w.-]{1,64})", re.ASCII)
_HELD = re.compile(r"^lock:\s*\d+: FLOCK\s+ADVISORY\s+WRITE\s", re.MULTILINE)


class ControlRefusedError(UserError):
    """A run cannot be stopped or resumed; the message says why."""


def stop(folder: PlainFolder) -> int:
    """Ask the process that trains in this folder to stop with a checkpoint; return its number.

    Raises `ControlRefusedError` unless the process is known to hold the lock of the run right now.
    """
    with _verified_holder(folder) as (process, descriptor):
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        except (ProcessLookupError, PermissionError) as error:
            raise ControlRefusedError(f"process {process} cannot be stopped ({error})") from None
    return process


@contextlib.contextmanager
def _verified_holder(folder: PlainFolder) -> Iterator[tuple[int, int]]:
    """Yield the number and a descriptor of the process that holds the lock.

    The descriptor is opened first and names the same process until it is closed, even if the
    process ends and another one gets its number.
    """
    if not hasattr(os, "pidfd_open") or not os.path.isdir("/proc/self/fdinfo"):
        raise ControlRefusedError(
            "runs can be stopped from here on Linux only; press Ctrl-C where the run was started"
        )
    try:
        process, lock = _named_holder(folder)
        descriptor = os.pidfd_open(process)
    except (CheckpointError, OSError, OverflowError) as error:
        raise ControlRefusedError(f"no process is training this run ({error})") from None
    try:
        if not _belongs_to_user(process):
            raise ControlRefusedError(f"process {process} belongs to another user")
        if process == os.getpid() or not _holds(process, lock):
            raise ControlRefusedError(
                f"process {process}, which the lock file names, does not hold the lock; stop the "
                "run where it was started"
            )
        yield process, descriptor
    finally:
        os.close(descriptor)


def _named_holder(folder: PlainFolder) -> tuple[int, os.stat_result]:
    """Return the process that a lock file names, if the lock is held, and the file's status."""
    with folder.open(LOCK) as file:
        found = os.fstat(file.fileno())
        words = file.read(MAX_LOCK_BYTES)
    if not is_running(folder):
        raise ControlRefusedError("no process is training this run")
    named = _OWNER.fullmatch(words.strip())
    if named is None or int(named[1]) <= 1:
        raise ControlRefusedError("the lock file does not name the process that trains this run")
    host = named[2].decode()
    if host != platform.node():
        raise ControlRefusedError(f"this run is trained on another machine, {host}")
    return int(named[1]), found


def is_running(folder: PlainFolder) -> bool:
    """Return whether a process is training in a folder.

    The lock is tried in shared mode for a moment, which a process that starts to train waits for.
    """
    run = RunFolder(folder.path)
    run.plain = folder
    return run.is_locked()


def _belongs_to_user(process: int) -> bool:
    """Return whether all user ids of a process are those of this one."""
    try:
        status = Path(f"/proc/{process}/status").read_text(errors="replace")
    except OSError:
        return False
    found = re.search(r"^Uid:((?:\s+\d+)+)$", status, re.MULTILINE)
    return found is not None and set(map(int, found[1].split())) == {os.getuid()}


def _holds(process: int, lock: os.stat_result) -> bool:
    """Return whether a process has the lock file open and holds the exclusive lock on it."""
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{process}/fd")[:MAX_FILES]:
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{process}/fd/{number}")
                if not stat.S_ISREG(found.st_mode) or not os.path.samestat(found, lock):
                    continue
                if _HELD.search(Path(f"/proc/{process}/fdinfo/{number}").read_text()):
                    return True
    return False


class Resumed:
    """The runs that were resumed from here. They outlive this process."""

    def __init__(self) -> None:
        self._started: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        self._problems: dict[str, str] = {}
        self._lock = threading.Lock()

    def start(self, identifier: str, folder: PlainFolder) -> int:
        """Resume a run in a process of its own; return its number."""
        self.problems()
        with self._lock:
            return self._start(identifier, folder)

    def _start(self, identifier: str, folder: PlainFolder) -> int:
        if identifier in self._started or is_running(folder):
            raise ControlRefusedError("this run is already being trained")
        if len(self._started) >= MAX_STARTED:
            raise ControlRefusedError(f"{MAX_STARTED} runs that were resumed from here still train")
        if not folder.has_file("config.yaml"):
            raise ControlRefusedError("this run does not exist anymore")
        self._problems.pop(identifier, None)
        output = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process has ended)
        try:
            # -P: the current folder may be one with runs of strangers; it must not provide modules.
            process = subprocess.Popen(  # noqa: S603 (a fixed command and a path of our own)
                [sys.executable, "-P", "-m", "rl_training", "resume", str(folder.path.resolve())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            output.close()
            raise ControlRefusedError(f"the run cannot be resumed ({error})") from None
        self._started[identifier] = process, output
        return process.pid

    def problems(self) -> dict[str, str]:
        """Return why runs that were resumed here ended with an error, by their identifiers."""
        with self._lock:
            for identifier, (process, output) in list(self._started.items()):
                code = process.poll()
                if code is None:
                    continue
                del self._started[identifier]
                with output:
                    if code not in _ENDED_WELL:
                        message = _last_message(output) or f"exit code {code}"
                        self._problems[identifier] = f"could not be resumed: {message}"
            return dict(self._problems)


def _last_message(output: IO[bytes]) -> str:
    """Return the error that a command printed, or else its last line."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_MESSAGE_BYTES))
    lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return one_line((errors or lines or [""])[-1], MAX_MESSAGE)
