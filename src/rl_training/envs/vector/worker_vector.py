"""Step environments in workers: the parent's side."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from rl_training.envs.vector import worker as protocol
from rl_training.envs.vector.journal import Journal, Request
from rl_training.envs.vector.recovery import Recovery
from rl_training.envs.vector.step_arrays import (
    EnvironmentErrors,
    Field,
    StepArrays,
    WorkerDied,
    environments_in,
)
from rl_training.envs.vector.transport import Launcher, Worker


class WorkerVector:
    """Same as `SequentialVector`, but with the environments in workers that run in parallel.

    Each worker has consecutive environments. Workers are released when this object is closed or
    collected, when the program exits and when the parent process is killed.

    A worker that dies, or does not reply within `launcher.deadline`, is started again at most
    `restarts` times, counted for all workers together (see `Recovery`). With `replays`, nothing is
    lost as long as the environments can be captured and repeat their steps exactly. Otherwise
    `lose` is called for each environment of the worker.
    """

    steps_some = False
    """Whether a step may leave environments of an active seed under way"""

    def __init__(
        self,
        launcher: Launcher,
        layout: list[Field],
        lose: Callable[[int, str], int],
        *,
        restarts: int = 0,
        replays: bool = False,
    ) -> None:
        buffer, self.deadline = launcher.buffer, launcher.deadline
        self.arrays = StepArrays.view(buffer, layout)
        self._number, self._launcher = environments_in(layout), launcher
        self._workers: list[Worker] = []
        self._waiting_for: list[Worker] = []
        self._command = b""
        self._journal = Journal(buffer, layout, replays=replays and restarts > 0)
        self._captures = restarts > 0
        self._recovery = Recovery(
            self._workers,
            self._launcher,
            self.arrays,
            self._journal,
            self.deadline,
            restarts,
            lose,
        )
        # At exit, multiprocessing runs this before it waits for its processes. weakref.finalize
        # could run too late: workers ignore the SIGTERM that multiprocessing sends them.
        self._finalizer = Finalize(self, _end, (launcher, self._workers), exitpriority=10)
        try:
            for start, stop in _chunks(self._number, launcher.workers):
                self._workers.append(self._launcher.launch(start, stop, self._workers))
            self.deadline.restart()
            for worker in list(self._workers):
                _raise_error(self._reply(worker, b""))
        except BaseException:
            self.close()
            raise

    def start(self, *, masked: bool) -> None:
        """Start a step of all environments, or of those in `arrays.active`."""
        if self._captures and self._journal.is_full:
            self._capture()
        self._send(protocol.STEP_MASKED if masked else protocol.STEP)

    def _send(self, command: bytes) -> None:
        self._command = command
        self._waiting_for = self._workers if command == protocol.STEP else self._active_workers()
        for worker in self._waiting_for:
            worker.request(command)

    def _active_workers(self) -> list[Worker]:
        active = self.arrays.active
        return [worker for worker in self._workers if active[worker.start : worker.stop].any()]

    def finish(self) -> tuple[bool, EnvironmentErrors]:
        """Wait for the workers; return whether an episode ended, and the errors."""
        return self._gather()

    def _gather(self) -> tuple[bool, EnvironmentErrors]:
        """Wait for the replies to the last command."""
        any_ended = False
        errors: EnvironmentErrors = {}
        self.deadline.restart()
        try:
            for worker in self._waiting_for:
                reply = self._reply(worker, self._command)
                if reply == protocol.ENDED:
                    any_ended = True
                elif isinstance(reply, WorkerDied):
                    errors.update(dict.fromkeys(range(worker.start, worker.stop), reply))
                elif reply != protocol.DONE:
                    any_ended = any_ended or reply[0]
                    errors.update({worker.start + i: error for i, error in reply[1].items()})
        except BaseException:  # interrupted: it is not known which environments were stepped
            self._journal.stop_replays()
            raise
        if self._captures:
            reset = self.arrays.active.nonzero()[0] if self._command == protocol.RESET else ()
            self._journal.add(self._command, tuple(errors), reset)
        return any_ended, errors

    def busy(self) -> np.ndarray | None:
        """Mask of the environments that still step after `finish`; None: none."""
        return None

    def abandoned(self) -> np.ndarray | None:
        """Mask of the environments that have no worker, because the run stops; None: none."""
        if not self._recovery.abandoned:
            return None
        return np.isin(np.arange(self._number), list(self._recovery.abandoned))

    def _reply(self, worker: Worker, command: bytes, request: Any = None) -> Any:
        """Return the reply to a command, if necessary that of a new worker."""
        reply = worker.reply()
        if isinstance(reply, WorkerDied):
            return self._recovery.recover(worker, reply, command, request)
        return reply

    def reset(self) -> EnvironmentErrors:
        """Start an episode in the environments in `arrays.active`, from `arrays.seeds`.

        Replaces workers that died. Their environments that are not reset get a `WorkerDied` error.
        """
        active = self.arrays.active
        lost: EnvironmentErrors = {}
        for position, worker in enumerate(self._workers):
            if not worker.alive and active[worker.start : worker.stop].any():
                died = worker.reply()
                self._workers[position] = self._start_again(worker)
                others = (i for i in range(worker.start, worker.stop) if not active[i])
                lost.update(dict.fromkeys(others, died))
        self._send(protocol.RESET)
        return lost | self._gather()[1]

    def _start_again(self, worker: Worker) -> Worker:
        successor = self._launcher.launch(worker.start, worker.stop, self._workers)
        self._journal.stop_replays()
        self._recovery.abandoned.difference_update(range(worker.start, worker.stop))
        self.deadline.restart()
        _raise_error(successor.reply())
        return successor

    def call(self, name: str, indices: Sequence[int], *arguments: Sequence[Any]) -> list[Any]:
        """Call a method of these environments; `arguments` have one value per environment.

        `indices` are in ascending order.
        """
        requests = self._requests(name, indices, *arguments)
        self.deadline.restart()
        replies = self._exchange_calls(requests)
        for reply in replies:
            _raise_error(reply)
        if self._captures and name.startswith("write"):
            self._journal.add_call(protocol.CALL, requests)
        return [value for reply in replies for value in reply]

    def _exchange_calls(self, requests: Mapping[int, Request]) -> list[Any]:
        """Send the parts of a call to their workers, and return the replies."""
        called = [worker for worker in self._workers if worker.start in requests]
        for worker in called:
            worker.request(protocol.CALL, requests[worker.start])
        return [self._reply(worker, protocol.CALL, requests[worker.start]) for worker in called]

    def _requests(
        self, name: str, indices: Sequence[int], *arguments: Sequence[Any]
    ) -> dict[int, Request]:
        """The parts of a call, by worker."""
        requests = {}
        for worker in self._workers:
            chosen = [k for k, i in enumerate(indices) if worker.start <= i < worker.stop]
            if chosen:
                rows = [indices[k] - worker.start for k in chosen]
                parts = ([values[k] for k in chosen] for values in arguments)
                requests[worker.start] = (name, rows, *parts)
        return requests

    def _capture(self) -> None:
        """Capture the state of all environments, or else what their wrappers have learned."""
        indices = [index for index in range(self._number) if index not in self._journal.failed]
        what, began = "state" if self._journal.replays else "statistics", time.perf_counter()
        try:
            replies = self.call(f"read_{what}", indices)
        except WorkerDied:
            return None  # the next step reports it
        if self._journal.replays and any("error" in reply for reply in replies):
            self._journal.stop_replays()
            return self._capture()
        states = [reply.get("state") or [] for reply in replies]
        found = self._requests(f"write_{what}", indices, states) if any(states) else {}
        return self._journal.rebase(found, time.perf_counter() - began)

    def infos(self, indices: Sequence[int]) -> list[dict[Any, Any]]:
        """The infos of the last step of these environments, as far as they can be pickled."""
        pickled = self.call("pickled_info", indices)
        return [pickle.loads(info) for info in pickled]  # noqa: S301 (from our own workers)

    def environments(self, indices: Sequence[int]) -> None:
        """None: the environments are in other processes."""

    def close(self) -> None:
        """End all workers; may be called twice."""
        self._finalizer()


def _end(launcher: Launcher, workers: list[Worker]) -> None:
    try:
        launcher.end(workers)
    finally:
        launcher.close()


def _chunks(number: int, parts: int) -> Iterator[tuple[int, int]]:
    """Split `range(number)` evenly into consecutive parts; yield start and stop of each."""
    for part in range(parts):
        yield part * number // parts, (part + 1) * number // parts


def _raise_error(reply: Any) -> None:
    if isinstance(reply, Exception):
        raise reply
