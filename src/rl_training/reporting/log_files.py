"""The files of metrics, which rows are appended to: `metrics.jsonl` and TensorBoard's."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import reprlib
import socket
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_training.callbacks import MAX_NAME_LENGTH, ROW_KEYS
from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.run_folder import MAX_ROW_BYTES, RunFolder
from rl_training.errors import CheckpointError, warn_user
from rl_training.types import Json

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

MAX_WAITING_BYTES = 4 * 2**20
"""Size of the rows that wait for a disk; the oldest ones are dropped beyond it"""
ROWS_AT_ONCE = 256
"""Rows that are written together after the disk has recovered"""
MAX_COUNT = 10**15
"""Largest step or length in a checkpoint"""
LARGEST = sys.float_info.max
_OWN_EVENTS = re.compile(r"events\.out\.tfevents\.[\w.-]{1,150}\.rl_training", re.ASCII)
"""Names of the event files that a resumed run may cut or remove; no other program ends them so"""


class LoggedRow(NamedTuple):
    """A row of metrics, with what TensorBoard needs in addition."""

    position: int
    wall_time: float
    values: dict[str, float | None]

    @classmethod
    def from_json(cls, saved: Sequence[Any]) -> LoggedRow:
        """Return a row from a checkpoint; raise if it is not one that `MetricsLog` could make."""
        position, wall_time, values = saved
        numbers = {
            saved_tag(tag): None if value is None else saved_number(value)
            for tag, value in values.items()
        }
        return cls(saved_count(position), saved_number(wall_time), numbers)


class LogFile:
    """A file that rows are appended to. A row that cannot be written waits for the next one.

    Nothing is raised: training does not depend on its logs. The file always ends with a complete
    row, except just after a failed write; what such a write left is overwritten or cut.
    """

    def __init__(
        self, run: Path, folder: PlainFolder, name: str, encode: Callable[[LoggedRow], bytes]
    ) -> None:
        self._run, self._folder, self._name, self._encode = run, folder, name, encode
        self.path = folder.path / name
        self.length = 0
        """Bytes of the rows that were written"""
        self.waiting: deque[LoggedRow] = deque()
        self.dropped = 0
        """Number of rows that no longer fit into the waiting ones"""
        self._waiting_bytes = 0
        self._descriptor: int | None = None
        self._has_failed = False
        self._warned_of: set[str] = set()

    def append(self, row: LoggedRow) -> None:
        self.enqueue(row)
        self.write_waiting()

    def enqueue(self, row: LoggedRow) -> None:
        """Add a row that is written later."""
        self.waiting.append(row)
        self._waiting_bytes += _size(row)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._waiting_bytes -= _size(self.waiting.popleft())
            self.dropped += 1

    def write_waiting(self) -> None:
        """Write the rows that wait, unless the disk fails again."""
        failed_before, number = self._has_failed, 1
        try:
            self.open()
            while self.waiting:
                # A single row at first: after a failure, the next attempt may fail as well.
                rows = list(itertools.islice(self.waiting, number))
                self._write(b"".join(map(self._encode, rows)))
                for row in rows:
                    self._waiting_bytes -= _size(row)
                    self.waiting.popleft()
                number = ROWS_AT_ONCE
        except (OSError, CheckpointError) as error:  # the latter if a link took its place
            self._fail(error)
            return
        self._has_failed = False
        if failed_before:
            self._warn_once("recovered", f"{self.path}: can be written again{self._lost()}")

    def open(self) -> None:
        """Open the file, unless it is open, and remove everything after its last known row."""
        if self._descriptor is not None:
            return
        with self._folder.open(self._name, "w+b") as file:
            descriptor = os.dup(file.fileno())
        try:
            self._cut(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _cut(self, descriptor: int) -> None:
        self.length = min(self.length, os.fstat(descriptor).st_size)
        os.ftruncate(descriptor, self.length)

    def close(self) -> None:
        """Write the rows that still wait, warn if that fails, and close the file."""
        self.write_waiting()
        self._close()
        if self.waiting:
            self._warn_once(
                "end",
                f"{self.path}: {len(self.waiting):,} rows could not be written; `rl-training "
                f"resume {self._run}` writes them: they are in the last checkpoint or are computed "
                f"again{self._lost()}",
            )

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        os.lseek(self._descriptor, self.length, os.SEEK_SET)
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(self._descriptor, remaining) :]
        self.length += len(data)

    def _fail(self, error: OSError | CheckpointError) -> None:
        self._has_failed = True
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.length)
        self._close()
        self._warn_once(
            "failed",
            f"{self.path}: cannot be written ({getattr(error, 'strerror', None) or error}); "
            "training continues, and the rows wait until it can",
        )

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _warn_once(self, event: str, message: str) -> None:
        """Warn of an event the first time; a disk may fail and recover many times."""
        if event not in self._warned_of:
            self._warned_of.add(event)
            warn_user(message)

    def _lost(self) -> str:
        if not self.dropped:
            return ""
        return f"; {self.dropped:,} older rows did not fit into the buffer and are lost"

    def state_dict(self) -> Json:
        return {"waiting": [list(row) for row in self.waiting], "dropped": self.dropped}

    def load_state_dict(self, state: Json) -> None:
        self.dropped = saved_count(state["dropped"])
        for saved in state["waiting"]:
            self.enqueue(LoggedRow.from_json(saved))


class MetricsFile(LogFile):
    """`metrics.jsonl`: a JSON object per line."""

    def __init__(self, folder: RunFolder) -> None:
        name = folder.metrics.name
        super().__init__(folder.path, folder.plain, name, lambda row: _line(row.values))

    def _cut(self, descriptor: int) -> None:
        super()._cut(descriptor)
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(max(0, self.length - 1))
            if file.read(1) in (b"", b"\n"):
                return
            # After a power cut, the last row may be incomplete.
            start = max(0, self.length - MAX_ROW_BYTES)
            file.seek(start)
            newline = file.read(self.length - start).rfind(b"\n")
        if newline < 0 < start:
            raise CheckpointError(f"it is damaged at byte {self.length:,}; remove the file")
        self.length = start + newline + 1
        super()._cut(descriptor)


class TensorBoardFile(LogFile):
    """An event file of TensorBoard with an event per row.

    It is written here and not by PyTorch's `SummaryWriter`, which writes in a thread and loses what
    it accepted before an error.

    Each process writes a file of its own, because a TensorBoard that is running cannot read on in a
    file that becomes shorter. A checkpoint contains the names and lengths of these files. A resumed
    run first cuts them to these lengths and removes the ones that are newer, as it cuts
    `metrics.jsonl`.
    """

    def __init__(self, folder: RunFolder) -> None:
        host = re.sub(r"[^\w.-]", "-", socket.gethostname(), flags=re.ASCII)[:64]
        name = f"events.out.tfevents.{time.time():.6f}.{host}.{os.getpid()}.rl_training"
        inner = folder.plain.inner(folder.tensorboard.name)
        super().__init__(folder.path, inner, name, _encode_event)
        self.first_step: int | None = None
        """From this step on, a TensorBoard that is running drops what it read from earlier files"""
        self._earlier: dict[str, int] | None = {}
        """Length of the file of each earlier process; None for a checkpoint of an older version"""
        self._earlier_are_cut = False

    def open(self) -> None:
        if self._descriptor is not None:
            return
        self._folder.make()
        if not self._earlier_are_cut:
            self._earlier = self._cut_earlier()
            self._earlier_are_cut = True
        super().open()
        if self.length == 0:
            self._write(_event_file_header(self.first_step))

    def _cut_earlier(self) -> dict[str, int]:
        """Cut or remove the files of earlier processes; return the lengths of those that remain."""
        remaining = {}
        for name, mode in self._folder.entries().items():
            if not stat.S_ISREG(mode) or not _OWN_EVENTS.fullmatch(name):
                continue
            size = self._folder.size(name)
            length = size if self._earlier is None else self._earlier.get(name, 0)
            if length == 0:
                self._folder.remove(name)
                continue
            if length < size:
                with self._folder.open(name, "r+b") as file:
                    os.ftruncate(file.fileno(), length)
            remaining[name] = min(length, size)
        return remaining

    def state_dict(self) -> Json:
        state = super().state_dict()
        if self._earlier is None:
            return state
        own = {self._name: self.length} if self.length else {}
        return {**state, "files": {**self._earlier, **own}}

    def load_state_dict(self, state: Json) -> None:
        super().load_state_dict(state)
        files = state.get("files")
        if files is not None:
            files = {_event_file_name(name): saved_count(length) for name, length in files.items()}
        self._earlier = files


def _encode_event(row: LoggedRow) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=tag, simple_value=math.nan if value is None else value)
        for tag, value in row.values.items()
        if tag not in ROW_KEYS
    ]
    summary = Summary(value=values)
    return _record(Event(wall_time=row.wall_time, step=row.position, summary=summary))


def _event_file_header(first_step: int | None) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    now, version = time.time(), "brain.Event:2"
    header = _record(Event(wall_time=now, file_version=version))
    if first_step is None:
        return header
    restart = SessionLog(status=SessionLog.START)
    return header + _record(Event(wall_time=now, step=first_step, session_log=restart))


def _record(event: Event) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    return record.getvalue()


def _event_file_name(name: str) -> str:
    """Return a name from a checkpoint; raise `ValueError` if this package does not use such."""
    if not _OWN_EVENTS.fullmatch(name):
        raise ValueError(f"{reprlib.repr(name)} is not the name of an event file")
    return name


def saved_tag(name: str) -> str:
    """Return the name of a value from a checkpoint; raise `ValueError` if no row can have it."""
    if not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise ValueError(f"{reprlib.repr(name)} is not the name of a metric")
    return name


def saved_number(value: Any) -> float:
    """Return a number from a checkpoint; raise `ValueError` if it is not one, or not finite."""
    if type(value) not in (int, float) or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{reprlib.repr(value)} is not a finite number")
    number: float = value
    return number


def saved_count(value: Any) -> int:
    """Return a number from a checkpoint; raise `ValueError` unless it can be a count."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{reprlib.repr(value)} is not a count")
    return value


def _line(values: Mapping[str, float | None]) -> bytes:
    return (json.dumps(values) + "\n").encode()


def _size(row: LoggedRow) -> int:
    """Bytes of a row in a checkpoint, roughly."""
    return sum(len(tag) + 32 for tag in row.values)
