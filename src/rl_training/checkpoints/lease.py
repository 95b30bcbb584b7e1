"""Ownership of a folder by one process, on disks of several machines that may have no locks.

An owner has a numbered file, `.lease-000001`, and rewrites it every few seconds. If the owner has
died, another process takes over by creating the file with the next number, which succeeds for one
process only. The number is a fencing number: an owner that was paused finds a higher one and stops.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rl_training.checkpoints.files import PlainFolder
from rl_training.errors import CheckpointError, RunLockedError, TrainingError, one_line

BEAT_SECONDS = 3.0
"""How often an owner rewrites its file"""
STALE_SECONDS = 30.0
"""An owner on another machine whose file has not changed for so long is dead"""
PATIENCE = 60.0
"""How long a new owner waits for one that is about to end"""
_NAME = re.compile(r"\.lease-(\d{6,12})")
_MAX_BYTES = 4096


class LeaseLostError(TrainingError):
    """Another process has taken over, because this one did not respond for too long."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a lease."""

    machine: str
    """Changes when a machine or container is restarted; processes can be looked up within it"""
    host: str
    process: int
    started: int
    """When the process started, in units of its machine"""
    token: str
    """Unique for each lease"""

    @classmethod
    def this_process(cls) -> Owner:
        process = os.getpid()
        return cls(_machine(), platform.node(), process, _started(process), uuid.uuid4().hex)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; False if this machine cannot know."""
        return self.machine == _machine() and _started(self.process) != self.started

    def __str__(self) -> str:
        here = self.host == platform.node()
        return f"process {self.process}" + ("" if here else f" on {one_line(self.host, 64)}")


@dataclass(frozen=True)
class _Claim:
    """The content of a lease."""

    number: int
    owner: Owner | None
    """None if the file is being written, or damaged"""
    beat: int
    released: bool


class LeaseWatch:
    """Finds out whether the owner of a folder is alive, by looking several times.

    Clocks of machines differ, so only changes of the owner's file count.
    """

    def __init__(self, folder: Path, stale_seconds: float = STALE_SECONDS) -> None:
        self.folder, self._stale_seconds = folder, stale_seconds
        self._seen: _Claim | None = None
        self._since = 0.0
        self.claim: _Claim | None = None
        """What the last look has found; None if nobody has ever owned the folder"""

    def is_free(self) -> bool:
        """Look again; return whether nobody owns the folder, or a process that has ended."""
        claim = self.claim = _newest(self.folder)
        if claim is None or claim.released or (claim.owner is not None and claim.owner.has_ended):
            return True
        if claim != self._seen:
            self._seen, self._since = claim, time.monotonic()
        return time.monotonic() - self._since > self._stale_seconds


class Lease:
    """The ownership of a folder, kept alive by a thread until it is released."""

    def __init__(self, folder: Path, number: int, owner: Owner) -> None:
        self._folder, self.number, self._owner = PlainFolder(folder), number, owner
        self._beat, self._confirmed = 0, _now()
        self._is_lost, self._ended = False, threading.Event()
        self._lock = threading.Lock()
        self.on_beat: Callable[[], None] = lambda: None
        """Called by the thread after each beat"""
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    @classmethod
    def acquire(
        cls, folder: Path, *, patience: float = PATIENCE, stale_seconds: float = STALE_SECONDS
    ) -> Lease:
        """Become the owner of a folder; wait up to `patience` seconds for a previous one.

        Raises `RunLockedError` if the owner is still alive then.
        """
        watch, began = LeaseWatch(folder, stale_seconds), time.monotonic()
        while True:
            if watch.is_free() and (lease := cls._try(folder, watch.claim)) is not None:
                return lease
            if time.monotonic() - began > max(patience, stale_seconds if patience else 0.0):
                owner = watch.claim.owner if watch.claim is not None else None
                raise RunLockedError(
                    f"{folder} is being trained by {owner or 'another process'}; wait for it or "
                    "stop it first"
                )
            time.sleep(0.1)

    @classmethod
    def of_free(cls, watch: LeaseWatch) -> Lease | None:
        """Become the owner of a folder if it is free now; None if it is not."""
        return cls._try(watch.folder, watch.claim) if watch.is_free() else None

    @classmethod
    def _try(cls, folder: Path, found: _Claim | None) -> Lease | None:
        number = 1 if found is None else found.number + 1
        lease = cls(folder, number, Owner.this_process())
        try:
            with lease._folder.open(_name(number), "xb") as file:
                file.write(lease._content())
        except FileExistsError:  # another process was faster
            return None
        lease._thread.start()
        for name in lease._folder.entries():
            if (number_of := _number(name)) is not None and number_of < number:
                with contextlib.suppress(OSError):
                    lease._folder.remove(name)
        return lease

    def check(self) -> None:
        """Raise `LeaseLostError` if another process has taken over. Cheap if called often."""
        if not self._is_lost and _now() - self._confirmed > 2 * BEAT_SECONDS:
            self._confirm()  # this process may have been paused
        if self._is_lost:
            raise LeaseLostError(
                f"{self._folder.path} was taken over by another process, because this one did not "
                "respond for a while; the other one continues"
            )

    @property
    def is_lost(self) -> bool:
        """Whether this process has found out that another one has taken over."""
        return self._is_lost

    def release(self) -> None:
        """Let others own the folder at once; may be called twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError, CheckpointError):
            if not self._is_lost:
                self._write(released=True)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError, CheckpointError):  # a full disk; tried again
                self._confirm()
                if not self._is_lost:
                    self.on_beat()

    def _confirm(self) -> None:
        """Rewrite the file, unless there is a higher number."""
        with self._lock:
            newest = _newest(self._folder.path)
            if newest is None or newest.number != self.number:
                self._is_lost = True
                return
            self._write(released=False)
            self._confirmed = _now()

    def _write(self, *, released: bool) -> None:
        self._beat += 1
        with self._folder.open(_name(self.number), "r+b") as file:
            file.write(self._content(released=released))
            file.truncate()
            file.flush()
            os.fsync(file.fileno())

    def _content(self, *, released: bool = False) -> bytes:
        values = {"owner": asdict(self._owner), "beat": self._beat, "released": released}
        return json.dumps(values).encode()


def _newest(folder: Path) -> _Claim | None:
    plain = PlainFolder(folder)
    try:
        numbers = [found for name in plain.entries() if (found := _number(name)) is not None]
        if not numbers:
            return None
        return _claim(max(numbers), plain.read(_name(max(numbers)), _MAX_BYTES))
    except FileNotFoundError:
        return None


def _claim(number: int, data: bytes) -> _Claim:
    try:
        values = json.loads(data)
        owner = Owner(**values["owner"])
        return _Claim(number, owner, int(values["beat"]), values["released"] is True)
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
        return _Claim(number, None, hash(data), released=False)


def _name(number: int) -> str:
    return f".lease-{number:06}"


def _number(name: str) -> int | None:
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def _now() -> float:
    """Seconds that also pass while this machine is suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _machine() -> str:
    """Identify the running system and, on Linux, the container that sees its own processes only."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"


def _started(process: int) -> int:
    """When a process started; 0 if it has ended, 1 if the system does not tell."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return _exists(process)
    except OSError:
        return 1
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])  # a zombie has ended


def _exists(process: int) -> int:
    if Path("/proc/self/stat").exists():
        return 0
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return 0
    except OSError:
        pass
    return 1
