"""What `WorkerVector` needs of workers, wherever they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rl_training.envs.vector.signalling import Deadline
from rl_training.envs.vector.step_arrays import WorkerDied
from rl_training.errors import last_line

_GRACE_SECONDS = 5.0
"""Time that environments have to close before their processes are killed"""


class Worker(ABC):
    """A worker with the environments `start` to `stop - 1`, as its parent sees it.

    Its inputs are the rows of its environments in the parent's `StepArrays`, and so are its
    results, once `reply` has returned.
    """

    def __init__(self, start: int, stop: int, deadline: Deadline) -> None:
        self.start, self.stop = start, stop
        self._deadline = deadline
        self._waiting = True
        """Whether a reply is due; the first reply says that the environments are made"""
        self._died: WorkerDied | None = None

    @abstractmethod
    def request(self, command: bytes, data: Any = None) -> None:
        """Send a command and its data. If the worker has died, `reply` reports it."""

    @abstractmethod
    def reply(self) -> Any:
        """Return the reply byte, or the message instead of it, which may be an exception.

        Returns `WorkerDied` if the worker ended or does not reply in time.
        """

    @abstractmethod
    def _give_up(self, *, hung: bool = False) -> WorkerDied:
        """End the worker, which has died or does not reply."""

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

    def fail(self, error: Exception) -> WorkerDied:
        """Give the worker up because its environments raised this error when they were made."""
        self._give_up()
        self._died = WorkerDied(f"could not be started again ({last_line(error)})")
        return self._died

    def _silence(self) -> str:
        if self._deadline.stopping():
            return "did not reply before the run stopped"
        return f"did not reply within {self._deadline.seconds:g} s (env_timeout)"


class Launcher(Protocol):
    """Starts and ends the workers of a `WorkerVector`."""

    @property
    def buffer(self) -> Any:
        """The memory of the parent's `StepArrays`"""

    @property
    def deadline(self) -> Deadline:
        """The time that workers have to reply"""

    @property
    def workers(self) -> int:
        """How many workers to start"""

    def launch(self, start: int, stop: int, others: Iterable[Any]) -> Worker:
        """Start a worker with these environments; `others` are the workers that already run."""

    def end(self, workers: Sequence[Any]) -> None:
        """Let the workers close their environments; kill those that do not end in time."""

    def close(self) -> None:
        """Release what the workers needed, after they have ended."""
