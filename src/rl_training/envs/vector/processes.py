"""Step environments in worker processes: the parent's side."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

from gymnasium.vector.utils import CloudpickleWrapper

from rl_training.envs.cores import available_cores
from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.spaces import describe_spaces
from rl_training.envs.vector import worker as protocol
from rl_training.envs.vector.signalling import (
    LONG_PATIENCE,
    SHORT_PATIENCE,
    Listener,
)
from rl_training.envs.vector.step_arrays import (
    EnvironmentErrors,
    Field,
    StepArrays,
    WorkerDied,
    buffer_size,
    step_layout,
)
from rl_training.envs.wrapping import TRUSTED_MODULES
from rl_training.types import SpaceInfo

_GRACE_SECONDS = 5.0
"""Time that environments have to close before their process is killed"""


@dataclass(eq=False)
class _Worker:
    """A worker process with the environments `start` to `stop - 1`."""

    start: int
    stop: int
    process: BaseProcess
    commands: Connection
    replies: Connection
    patience: float
    waiting: bool = True
    """Whether a reply is due; the first reply says that the environments are made"""
    alive: bool = True

    def __post_init__(self) -> None:
        self._listener = Listener(self.replies, self.patience)
        self._sink = self.commands.fileno()

    def request(self, command: bytes) -> None:
        """Send a command. If the worker has died, `answer` reports it."""
        if self.waiting:
            self.answer()  # discard the reply to a command whose sender was interrupted
        self.waiting = True
        if self.alive:
            with suppress(BrokenPipeError):
                os.write(self._sink, command)

    def send(self, message: Any) -> None:
        """Send the data of a command."""
        if self.alive:
            with suppress(BrokenPipeError):
                self.commands.send(message)

    def answer(self) -> Any:
        """Return the reply byte, or the message after it, which may be an exception.

        Returns `WorkerDied` if the worker process ended.
        """
        byte = self._listener.hear() if self.alive else b""
        try:
            message = self.replies.recv() if byte == protocol.MESSAGE else byte
        except (EOFError, ConnectionError):
            byte = b""
        except BaseException:  # the rest of a partial message would be read as the next reply
            self._give_up()
            raise
        self.waiting = False
        if byte:
            return message
        self._give_up()
        return WorkerDied()

    def _give_up(self) -> None:
        self.waiting = self.alive = False
        _end([self])


class ProcessVector:
    """Same as `SequentialVector`, but with the environments in processes that run in parallel.

    There is at most one worker per core, each with consecutive environments. Workers and shared
    memory are released when this object is closed or collected, when the program exits and when the
    parent process is killed: no named resources are used.
    """

    def __init__(self, factory: EnvironmentFactory, number: int, layout: list[Field]) -> None:
        self._context = multiprocessing.get_context()
        self._buffer = self._context.RawArray("b", buffer_size(layout))
        self._factory, self._layout = CloudpickleWrapper(factory), layout
        self.arrays = StepArrays.view(self._buffer, layout)
        cores = available_cores()
        workers = min(number, cores)
        # One core is for this process, and one for other work, such as gradient updates.
        self._patience = LONG_PATIENCE if cores >= workers + 2 else SHORT_PATIENCE
        self._workers: list[_Worker] = []
        self._waiting_for: list[_Worker] = []
        # At exit, multiprocessing runs this before it waits for its processes. weakref.finalize
        # could run too late: workers ignore the SIGTERM that multiprocessing sends them.
        self._finalizer = Finalize(self, _end, (self._workers,), exitpriority=10)
        try:
            for start, stop in _chunks(number, workers):
                self._workers.append(self._launch(start, stop))
            for worker in self._workers:
                _raise_error(worker.answer())
        except BaseException:
            self.close()
            raise

    @classmethod
    def make(cls, factory: EnvironmentFactory, number: int) -> tuple[ProcessVector, SpaceInfo]:
        """Start workers with `number` environments, and describe their spaces.

        Raises `EnvironmentSetupError` if one cannot be made or its spaces are not supported.
        """
        example = factory()
        try:
            spaces = describe_spaces(example)
            layout = step_layout(number, example.observation_space, example.action_space)
            return cls(factory, number, layout), spaces
        finally:
            example.close()

    def _launch(self, start: int, stop: int) -> _Worker:
        command_reader, commands = self._context.Pipe(duplex=False)
        replies, reply_writer = self._context.Pipe(duplex=False)
        assignment = protocol.Assignment(
            self._factory,
            self._buffer,
            self._layout,
            start,
            stop,
            self._patience,
            list(TRUSTED_MODULES),
        )
        foreign: list[Connection] = []
        if self._context.get_start_method() == "fork":  # other start methods inherit no pipes
            neighbours = [worker for worker in self._workers if worker.alive]
            foreign = [end for worker in neighbours for end in (worker.commands, worker.replies)]
            foreign += [commands, replies]
        process = self._context.Process(
            target=protocol.work,
            args=(assignment, command_reader, reply_writer, foreign),
            daemon=True,
        )
        process.start()
        command_reader.close()
        reply_writer.close()
        return _Worker(start, stop, process, commands, replies, self._patience)

    def start(self, *, masked: bool) -> None:
        """Start a step of all environments, or of those in `arrays.active`."""
        self._waiting_for = self._active_workers() if masked else self._workers
        for worker in self._waiting_for:
            worker.request(protocol.STEP_MASKED if masked else protocol.STEP)

    def _active_workers(self) -> list[_Worker]:
        active = self.arrays.active
        return [worker for worker in self._workers if active[worker.start : worker.stop].any()]

    def finish(self) -> tuple[bool, EnvironmentErrors]:
        """Wait for the workers; return whether an episode ended, and the errors."""
        any_ended = False
        errors: EnvironmentErrors = {}
        for worker in self._waiting_for:
            answer = worker.answer()
            if answer == protocol.ENDED:
                any_ended = True
            elif isinstance(answer, WorkerDied):
                errors.update(dict.fromkeys(range(worker.start, worker.stop), answer))
            elif answer != protocol.DONE:
                any_ended = any_ended or answer[0]
                errors.update({worker.start + i: error for i, error in answer[1].items()})
        return any_ended, errors

    def reset(self) -> EnvironmentErrors:
        """Start an episode in the environments in `arrays.active`, from `arrays.seeds`.

        Replaces workers that died. Their environments that are not reset get a `WorkerDied` error.
        """
        active = self.arrays.active
        lost: list[int] = []
        for worker in self._active_workers():
            if not worker.alive:
                self._replace(worker)
                lost += (index for index in range(worker.start, worker.stop) if not active[index])
        self._waiting_for = self._active_workers()
        for worker in self._waiting_for:
            worker.request(protocol.RESET)
        return dict.fromkeys(lost, WorkerDied()) | self.finish()[1]

    def _replace(self, worker: _Worker) -> None:
        successor = self._launch(worker.start, worker.stop)
        self._workers[self._workers.index(worker)] = successor
        _raise_error(successor.answer())

    def call(self, name: str, indices: Sequence[int], *arguments: Sequence[Any]) -> list[Any]:
        """Call a method of these environments; `arguments` have one value per environment.

        `indices` are in ascending order.
        """
        called = []
        for worker in self._workers:
            chosen = [k for k, i in enumerate(indices) if worker.start <= i < worker.stop]
            if chosen:
                rows = [indices[k] - worker.start for k in chosen]
                worker.request(protocol.CALL)
                worker.send((name, rows, *([values[k] for k in chosen] for values in arguments)))
                called.append(worker)
        answers = [worker.answer() for worker in called]
        for answer in answers:
            _raise_error(answer)
        return [value for answer in answers for value in answer]

    def infos(self, indices: Sequence[int]) -> list[dict[Any, Any]]:
        """The infos of the last step of these environments, as far as they can be pickled."""
        pickled = self.call("pickled_info", indices)
        return [pickle.loads(info) for info in pickled]  # noqa: S301 (from our own workers)

    def environments(self, indices: Sequence[int]) -> None:
        """None: the environments are in other processes."""

    def close(self) -> None:
        """End all worker processes; may be called twice."""
        self._finalizer()


def _chunks(number: int, parts: int) -> Iterator[tuple[int, int]]:
    """Split `range(number)` evenly into consecutive parts; yield start and stop of each."""
    for part in range(parts):
        yield part * number // parts, (part + 1) * number // parts


def _raise_error(answer: Any) -> None:
    if isinstance(answer, Exception):
        raise answer


def _end(workers: Sequence[_Worker]) -> None:
    """Let the workers close their environments; kill those that do not end in time."""
    for worker in workers:
        worker.commands.close()
        worker.replies.close()
    try:
        for worker in workers:
            worker.process.join(_GRACE_SECONDS)
    finally:
        for worker in workers:
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
