"""Processes of a trial: commands in forked processes, and what runs in a session."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rl_training import cli

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Process:
    """A running process as /proc describes it."""

    pid: int
    parent: int
    session: int
    state: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.pid})"


def processes() -> list[Process]:
    """Return all processes except those that have ended and wait for their parent."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                found.append(_parse((folder / "stat").read_text()))
    return [each for each in found if each.state not in "ZX"]


def _parse(stat: str) -> Process:
    before, _, after = stat.rpartition(")")
    pid, _, name = before.partition(" (")
    state, parent, _, session = after.split()[:4]
    return Process(int(pid), int(parent), int(session), state, name)


def session_processes(session: int, except_for: int = 0) -> list[Process]:
    return [each for each in processes() if each.session == session and each.pid != except_for]


def end_session(session: int) -> None:
    """Kill every process of a session, also those that are started meanwhile."""
    while found := session_processes(session):
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        time.sleep(0.01)


def descendants(pid: int) -> list[Process]:
    """Return the children of a process and their children."""
    everything, found, parents = processes(), [], {pid}
    while parents:
        children = [each for each in everything if each.parent in parents]
        found += children
        parents = {each.pid for each in children}
    return found


@dataclass
class Child:
    """A process that a trial started."""

    pid: int
    log: Path
    began: float
    log_start: int
    code: int | None = None
    """The exit code, or the negative number of the signal that ended the process"""

    def poll(self) -> bool:
        """Return whether the process has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, timeout: float = 50.0) -> float:
        """Wait until the process has ended and return the seconds that took."""
        began = time.monotonic()
        while not self.poll():
            if time.monotonic() - began > timeout:
                where = _where(self.pid)
                self.send(signal.SIGKILL)
                raise TimeoutError(f"process {self.pid} still runs after {timeout:.0f} s ({where})")
            time.sleep(0.002)
        return time.monotonic() - began

    def wait_until(self, condition: Callable[[], object], timeout: float = 30.0) -> bool:
        """Wait for a condition; return False if the process ended before it was met."""
        until = time.monotonic() + timeout
        while not condition():
            if self.poll():
                return bool(condition())
            if time.monotonic() > until:
                raise TimeoutError(f"not reached within {timeout:.0f} s")
            time.sleep(0.001)
        return True

    def send(self, number: int) -> None:
        if not self.poll():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def output(self) -> str:
        """What the process has printed so far, errors included."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")


def _where(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text()
    return "gone"


def start(action: Callable[[], object], log: Path) -> Child:
    """Run a function in a forked process; what it prints is appended to `log`."""
    log.touch()
    child = Child(0, log, time.monotonic(), log.stat().st_size)
    sys.stdout.flush()
    sys.stderr.flush()
    child.pid = os.fork()
    if child.pid == 0:
        _run_and_exit(action, log)
    return child


def _run_and_exit(action: Callable[[], object], log: Path) -> NoReturn:
    target = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(target, stream)
    code = 0
    try:
        action()
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        # What a signal does while Python itself exits is not up to the package.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def start_command(
    *arguments: object, log: Path, prepare: Callable[[], object] = lambda: None
) -> Child:
    """Run an `rl-training` command in a forked process, as the installed script does.

    `prepare` is called in that process first.
    """

    def run() -> None:
        sys.argv = ["rl-training", *map(str, arguments)]
        prepare()
        cli.main()

    return start(run, log)


def start_fresh_command(
    *arguments: object, log: Path, reached: Path | None = None, **environment: str
) -> Child:
    """Run an `rl-training` command in a new Python process, with these environment variables.

    The step that it has reached is written to the file `reached`, if there is one.
    """
    module = ["rl_training"] if reached is None else ["tests.chaos.counted_command", str(reached)]
    log.touch()
    child = Child(0, log, time.monotonic(), log.stat().st_size)
    with log.open("ab") as target:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, *map(str, arguments)],
            stdout=target,
            stderr=target,
            env={**os.environ, **environment},
            cwd=ROOT,
        )
    child.pid = process.pid
    process.returncode = 0  # it is waited for by its number
    return child


def run_command(
    *arguments: object,
    log: Path,
    prepare: Callable[[], object] = lambda: None,
    timeout: float = 50.0,
) -> Child:
    """Run a command to its end."""
    child = start_command(*arguments, log=log, prepare=prepare)
    child.wait(timeout)
    return child
