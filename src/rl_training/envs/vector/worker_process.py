"""A worker process as its parent sees it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from rl_training.envs.vector import worker as protocol
from rl_training.envs.vector.signalling import (
    LONG_PATIENCE,
    SHORT_PATIENCE,
    Deadline,
    Listener,
    Speaker,
)
from rl_training.envs.vector.step_arrays import Field, WorkerDied
from rl_training.envs.wrapping import TRUSTED_MODULES
from rl_training.errors import last_line

_GRACE_SECONDS, _SHORT_GRACE_SECONDS = 5.0, 0.5
"""Time that environments have to close before their processes are killed, also if the program must
end at once"""


_RUNNING: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()
"""The workers of this process"""


class WorkerProcess:
    """A worker process with the environments `start` to `stop - 1`."""

    def __init__(
        self,
        start: int,
        stop: int,
        process: BaseProcess,
        commands: Connection,
        replies: Connection,
        listener: Listener,
        deadline: Deadline,
    ) -> None:
        self.start, self.stop, self.process = start, stop, process
        self.commands, self.replies = commands, replies
        self._listener, self._deadline = listener, deadline
        self._speaker = Speaker(commands, deadline)
        self._waiting = True
        """Whether a reply is due; the first reply says that the environments are made"""
        self._died: WorkerDied | None = None
        _RUNNING.add(self)

    @property
    def alive(self) -> bool:
        """Whether the worker was alive the last time that it was needed."""
        return self._died is None

    @property
    def is_interrupted(self) -> bool:
        """Whether the program stops without waiting for the reply of this worker."""
        return self._waiting and self._deadline.stopping()

    @property
    def grace(self) -> float:
        """How long its environments may take to close, in seconds."""
        return self._deadline.limit(_GRACE_SECONDS)

    @property
    def label(self) -> str:
        """The environments of this worker, for messages."""
        last = self.stop - 1
        return f"environment {last}" if last == self.start else f"environments {self.start}-{last}"

    def request(self, command: bytes, data: Any = None) -> None:
        """Send a command and its data. If the worker has died, `reply` reports it."""
        if self._waiting:
            self.reply()  # discard the reply to a command whose sender was interrupted
        self._waiting = True
        if self._died is not None:
            return
        try:
            with suppress(BrokenPipeError):
                self._speaker.say(command)
                if data is not None:
                    self._speaker.send(data)
        except TimeoutError:
            self._give_up(hung=True)

    def reply(self) -> Any:
        """Return the reply byte, or the message after it, which may be an exception.

        Returns `WorkerDied` if the worker process ended or does not reply in time.
        """
        if self._died is not None:
            return self._died
        try:
            byte = self._listener.hear()
        except TimeoutError:
            return self._give_up(hung=True)
        try:
            message = self._listener.receive() if byte == protocol.MESSAGE else byte
        except TimeoutError:
            return self._give_up(hung=True)
        except (EOFError, ConnectionError):
            byte = b""
        except BaseException:  # the rest of a partial message would be read as the next reply
            self._give_up()
            raise
        self._waiting = False
        return message if byte else self._give_up()

    def _give_up(self, *, hung: bool = False) -> WorkerDied:
        if hung or self.is_interrupted:
            self.process.kill()  # also ends a process that was stopped
        # Before the pipes are closed, because a signal may interrupt what follows.
        self._waiting, self._died = False, WorkerDied(self._silence() if hung else "died")
        end_workers([self])
        if not hung:
            self._died = WorkerDied(f"died ({self._exit()})")
        return self._died

    def fail(self, error: Exception) -> WorkerDied:
        """Give the worker up because its environments raised this error when they were made."""
        self._give_up()
        self._died = WorkerDied(f"could not be started again ({last_line(error)})")
        return self._died

    def _silence(self) -> str:
        if self._deadline.stopping():
            return "did not reply before the run stopped"
        return f"did not reply within {self._deadline.seconds:g} s (env_timeout)"

    def _exit(self) -> str:
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"exit code {code}"
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"


@dataclass(frozen=True)
class Launcher:
    """Starts worker processes that share a buffer with this process."""

    context: multiprocessing.context.BaseContext
    factory: Any
    """In a wrapper that pickles any function"""
    buffer: Any
    layout: Sequence[Field]
    deadline: Deadline
    patience: float = SHORT_PATIENCE

    def launch(self, start: int, stop: int, others: Iterable[WorkerProcess]) -> WorkerProcess:
        """Start a worker with these environments; `others` are the workers that already run."""
        command_reader, commands = self.context.Pipe(duplex=False)
        replies, reply_writer = self.context.Pipe(duplex=False)
        assignment = protocol.Assignment(
            self.factory,
            self.buffer,
            self.layout,
            start,
            stop,
            self.patience,
            list(TRUSTED_MODULES),
        )
        foreign: list[Connection] = []
        if self.context.get_start_method() == "fork":  # other start methods inherit no pipes
            neighbours = [worker for worker in others if worker.alive]
            foreign = [end for worker in neighbours for end in (worker.commands, worker.replies)]
            foreign += [commands, replies]
        process = self.context.Process(  # type: ignore[attr-defined]
            target=protocol.work,
            args=(assignment, command_reader, reply_writer, foreign),
            daemon=True,
        )
        with _signals_delayed():
            process.start()
        command_reader.close()
        reply_writer.close()
        listener = Listener(replies, self.patience, self.deadline)
        return WorkerProcess(start, stop, process, commands, replies, listener, self.deadline)


@contextmanager
def _signals_delayed() -> Iterator[None]:
    """Let signals wait while a process starts: Python ignores what a handler raises in a fork."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, protocol.STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_pipes_to_parent() -> None:
    """Close the pipes that a forked process inherits: workers end when the last copy is closed."""
    for worker in list(_RUNNING):
        worker.commands.close()
        worker.replies.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_pipes_to_parent)


def polling_patience(workers: int, cores: int) -> float:
    """How long to poll before sleeping."""
    # One core is for this process, and one for other work, such as gradient updates.
    return LONG_PATIENCE if cores >= workers + 2 else SHORT_PATIENCE


def end_workers(workers: Sequence[WorkerProcess]) -> None:
    """Let the workers close their environments; kill those that do not end in time.

    A worker whose reply is not awaited because the program stops is killed at once, and the others
    have little time then.
    """
    grace = min((worker.grace for worker in workers), default=0.0)
    for worker in workers:
        worker.commands.close()
        worker.replies.close()
        if worker.is_interrupted:
            grace = min(grace, _SHORT_GRACE_SECONDS)
            worker.process.kill()
    deadline = time.monotonic() + grace
    try:
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for worker in workers:
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
