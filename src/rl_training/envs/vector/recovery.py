"""Start workers again that died or hung, and bring their environments back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from rl_training.envs.vector import worker as protocol
from rl_training.envs.vector.journal import Entry, Journal, Request, same_results
from rl_training.envs.vector.signalling import Deadline
from rl_training.envs.vector.step_arrays import StepArrays, WorkerDied
from rl_training.envs.vector.transport import Launcher, Worker
from rl_training.errors import last_line, warn_user

_REPEATS, _REPLAYS = 2, 5
"""How often a command that ended with the death of its worker is repeated, and the maximum number
of replays. After that, the episodes are given up, because they may be the cause."""
_INPUTS = ("actions", "active", "seeds")


class Recovery:
    """Replaces workers that died, within a budget of `restarts`.

    A new worker gets the last captured state of its environments, repeats what they did since, and
    then the command that was under way. If that is not possible, its episodes are lost: `lose` is
    called with the index of each environment and the reason; it returns the seed of a new episode.
    If the run stops, there may be no new episodes: `abandoned`.
    """

    def __init__(
        self,
        workers: list[Worker],
        launcher: Launcher,
        arrays: StepArrays,
        journal: Journal,
        deadline: Deadline,
        restarts: int,
        lose: Callable[[int, str], int],
    ) -> None:
        self._workers, self._launcher, self._arrays = workers, launcher, arrays
        self._journal, self._deadline = journal, deadline
        self._restarts = self._left = restarts
        self._lose = lose
        self._repeated = 0
        """How often the command that is under way was repeated"""
        self.abandoned: set[int] = set()
        """Environments that lost their worker during a requested stop, and got no new one"""

    def recover(self, worker: Worker, died: WorkerDied, command: bytes, request: Any = None) -> Any:
        """Replace a worker and repeat the command that it did not complete; return the reply.

        The empty command is that of a worker that was just started. Returns a `WorkerDied` if no
        restarts are left, or if the worker was given up because the run stops.
        """
        if worker.start in self.abandoned:
            return died
        has_time = self._deadline.restart_for_repair()
        rows = self._rows(worker)
        kept = StepArrays(*(getattr(rows, field.name).copy() for field in fields(rows)))
        self._repeated = 0
        for attempt in itertools.count(1):
            if self._deadline.stopping() and (attempt > 1 or not self._left or not has_time):
                return self._abandon(worker, died, kept, command)
            if not self._left:
                return WorkerDied(died.reason, self._restarts)
            self._left -= 1
            try:
                worker = self._replace(worker)
                self._check_started(worker)
                reply, what = self._bring_back(worker, died, kept, attempt, command, request)
            except WorkerDied as again:
                died = again
                continue
            except OSError as error:  # no more processes or files allowed
                died = WorkerDied(f"could not be started again ({last_line(error)})")
                continue
            self._report(worker, died, what)
            return reply
        raise AssertionError("unreachable")

    def _bring_back(
        self,
        worker: Worker,
        died: WorkerDied,
        kept: StepArrays,
        attempt: int,
        command: bytes,
        request: Any,
    ) -> tuple[Any, str]:
        """Return the reply of a new worker to the command, and what was done for it."""
        if not command:
            return None, "it was started again"
        rows = self._rows(worker)
        problem = self._restore(worker)
        if self._journal.replays and self._repeated < _REPEATS and attempt <= _REPLAYS:
            if problem is None and self._replay(worker):
                _copy(kept, rows, [field.name for field in fields(rows)])
                steps = self._journal.steps(worker.start)
                what = f"it was started again and repeated {steps} steps, so nothing is lost"
                self._repeated += 1
                return self._exchange(worker, command, request), what
            self._journal.stop_replays()
            why = "the environment does not repeat its steps exactly"
        elif self._journal.replays:
            why = f"{attempt - 1} attempts to repeat its last steps failed"
        else:
            why = "the environment's state cannot be captured"
        if problem is not None:
            what = f"what was captured of {worker.label}, such as statistics of wrappers"
            warn_user(f"{what}, could not be restored: {problem}")
        reason = f"an environment's worker process {died.reason}, and {why}"
        reply = self._start_episodes(worker, reason, kept, command, request)
        return reply, f"it was started again with new episodes, because {why}"

    def _restore(self, worker: Worker) -> str | None:
        """Bring new environments to the state that was captured last; return the first problem."""
        requests = self._journal.requests(worker.start)
        if not requests:
            return None
        rows = self._rows(worker)
        rows.active[:] = True
        self._exchange(
            worker, protocol.RESET
        )  # some environments can only be restored after a reset
        problems = [self._write(worker, request) for request in requests]
        return next(filter(None, problems), None)

    def _write(self, worker: Worker, request: Request) -> str | None:
        """Write to the environments of a worker; return the first problem."""
        problems = self._exchange(worker, protocol.CALL, request)
        if isinstance(problems, Exception):
            return last_line(problems)
        return next(filter(None, problems), None)

    def _replay(self, worker: Worker) -> bool:
        """Repeat what the environments did; return whether they did exactly the same again."""
        return all(
            self._write(worker, entry.requests[worker.start]) is None
            if worker.start in entry.requests
            else self._repeats_exactly(worker, entry)
            for entry in self._journal.entries(worker.start)
        )

    def _repeats_exactly(self, worker: Worker, entry: Entry) -> bool:
        if entry.command == protocol.CALL:  # of other workers
            return True
        rows, first = self._rows(worker), worker.start
        seen = self._journal.arrays(entry.buffer).rows(slice(first, worker.stop))
        chosen = np.ones_like(seen.active) if entry.command == protocol.STEP else seen.active.copy()
        if not chosen.any():
            return True
        _copy(seen, rows, _INPUTS)
        reply = self._exchange(worker, entry.command)
        failed = [] if isinstance(reply, bytes) else sorted(reply[1])
        if failed != sorted(each - first for each in entry.failed if first <= each < worker.stop):
            return False
        chosen[failed] = False
        return same_results(seen, rows, chosen, reset=entry.command == protocol.RESET)

    def _start_episodes(
        self, worker: Worker, reason: str, kept: StepArrays, command: bytes, request: Any
    ) -> Any:
        """Start new episodes in place of lost ones, instead of a step or before another command."""
        rows, is_reset = self._rows(worker), command == protocol.RESET
        for row, index in enumerate(range(worker.start, worker.stop)):
            is_lost = not (is_reset and kept.active[row])
            rows.seeds[row] = self._lose(index, reason) if is_lost else kept.seeds[row]
        rows.active[:] = True
        reply = self._exchange(worker, protocol.RESET)
        errors = {} if isinstance(reply, bytes) else reply[1]
        failed = [worker.start + row for row in errors]
        opening = self._journal.entry(protocol.RESET, failed)
        self._journal.restart(worker.start, opening, after_this=command != protocol.CALL)
        _copy(kept, rows, _INPUTS)
        rows.clear_results()
        return self._exchange(worker, command, request) if command == protocol.CALL else reply

    def _abandon(self, worker: Worker, died: WorkerDied, kept: StepArrays, command: bytes) -> Any:
        """Give up the episodes of a worker without a new one: the run ends with this step."""
        if command not in (protocol.STEP, protocol.STEP_MASKED, protocol.CALL):
            return died
        for index in range(worker.start, worker.stop):
            self._lose(index, f"an environment's worker process {died.reason}")
            self.abandoned.add(index)
        rows = self._rows(worker)
        _copy(kept, rows, ["obs"])
        rows.clear_results()
        warn_user(f"the worker process of {worker.label} {died.reason}; its episodes are lost")
        return died if command == protocol.CALL else protocol.DONE

    def _replace(self, worker: Worker) -> Worker:
        successor = self._launcher.launch(worker.start, worker.stop, self._workers)
        self._workers[self._workers.index(worker)] = successor
        return successor

    def _check_started(self, worker: Worker) -> None:
        self._restart_deadline()
        reply = worker.reply()
        if isinstance(reply, WorkerDied):
            raise reply
        if isinstance(reply, Exception):
            raise worker.fail(reply)

    def _exchange(self, worker: Worker, command: bytes, request: Any = None) -> Any:
        """Send a command and return the reply; raises `WorkerDied`."""
        self._restart_deadline()
        worker.request(command, request)
        reply = worker.reply()
        if isinstance(reply, WorkerDied):
            raise reply
        return reply

    def _restart_deadline(self) -> None:
        """Give every reply its full time, but after a requested stop all of them together."""
        if not self._deadline.stopping():
            self._deadline.restart()

    def _rows(self, worker: Worker) -> StepArrays:
        return self._arrays.rows(slice(worker.start, worker.stop))

    def _report(self, worker: Worker, died: WorkerDied, what: str) -> None:
        left = f"{self._left} restart{'' if self._left == 1 else 's'} left"
        warn_user(f"the worker process of {worker.label} {died.reason}; {what} ({left})")


def _copy(source: StepArrays, target: StepArrays, names: Any) -> None:
    for name in names:
        getattr(target, name)[...] = getattr(source, name)
