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

from gymnasium.vector.utils import CloudpickleWrapper

from rl_training.envs.cores import available_cores
from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.vector import worker as protocol
from rl_training.envs.vector.signalling import (
    LONG_PATIENCE,
    SHORT_PATIENCE,
    Deadline,
    Listener,
    Speaker,
)
from rl_training.envs.vector.step_arrays import (
    Field,
    WorkerDied,
    buffer_size,
    environments_in,
)
from rl_training.envs.vector.transport import Worker
from rl_training.envs.wrapping import TRUSTED_MODULES
from rl_training.errors import STOP_SIGNALS

_SHORT_GRACE_SECONDS = 0.5
"""Time that environments have to close if the program must end at once"""


_RUNNING: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()
"""The workers of this process"""


class WorkerProcess(Worker):
    """A worker in a process of this machine, which shares the `StepArrays` with its parent."""

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
        super().__init__(start, stop, deadline)
        self.process, self.commands, self.replies = process, commands, replies
        self._listener, self._speaker = listener, Speaker(commands, deadline)
        _RUNNING.add(self)

    def request(self, command: bytes, data: Any = None) -> None:
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

    def _exit(self) -> str:
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"exit code {code}"
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"


@dataclass(frozen=True)
class ProcessLauncher:
    """Starts worker processes that share a buffer with this process."""

    context: multiprocessing.context.BaseContext
    factory: Any
    """In a wrapper that pickles any function"""
    buffer: Any
    layout: Sequence[Field]
    deadline: Deadline
    workers: int
    patience: float = SHORT_PATIENCE

    @classmethod
    def prepare(
        cls,
        factory: EnvironmentFactory,
        layout: Sequence[Field],
        deadline: Deadline,
        workers: int | None = None,
    ) -> ProcessLauncher:
        """Prepare at most `workers` processes; by default one per core."""
        context, cores = multiprocessing.get_context(), available_cores()
        buffer = context.RawArray("b", buffer_size(layout))
        number = min(environments_in(layout), workers or cores)
        patience = polling_patience(number, cores)
        wrapped = CloudpickleWrapper(factory)
        return cls(context, wrapped, buffer, layout, deadline, number, patience)

    def end(self, workers: Sequence[WorkerProcess]) -> None:
        end_workers(workers)

    def close(self) -> None:
        """Nothing: no named resources are used."""

    def launch(self, start: int, stop: int, others: Iterable[WorkerProcess]) -> WorkerProcess:
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
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
