"""Step environments in Ray actors, which may be on other machines: both sides.

A worker has its own `StepArrays`. A request carries the rows of its inputs, and the reply those of
its results, which the parent copies into its arrays. So everything else is the same as with worker
processes that share memory, also when a worker is lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rl_training.envs.cores import available_cores
from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.vector import worker as protocol
from rl_training.envs.vector.sequential import SequentialVector, make_environments
from rl_training.envs.vector.signalling import Deadline
from rl_training.envs.vector.step_arrays import (
    Field,
    StepArrays,
    WorkerDied,
    buffer_size,
    environments_in,
    resized_layout,
)
from rl_training.envs.vector.transport import Worker
from rl_training.envs.wrapping import TRUSTED_MODULES, trust_modules
from rl_training.errors import EnvironmentSetupError, as_exception, last_line, one_line
from rl_training.ray_session import RaySession, ray_session

START_SECONDS = 60.0
"""How long Ray may take to find a place for a worker and to start its process"""
THREADS = "OMP_NUM_THREADS"
_INPUTS = ("actions", "active", "seeds")
_RESULTS, _RESULTS_OF_ENDS = ("obs", "reward", "terminated", "truncated"), ("final_obs", "success")


@dataclass(frozen=True)
class Assignment:
    """The environments of a worker, as far as they can be sent to another machine."""

    factory: bytes
    """Pickled, because its modules can only be imported once `path` is known"""
    layout: Sequence[Field]
    modules: Sequence[str]
    """Modules that may register the environment"""
    path: Sequence[str]
    """Where this process finds modules"""
    threads: int | None
    """Threads of PyTorch, if it is used: a sum that is split between threads may round
    differently"""


class Place(NamedTuple):
    """Where an actor runs."""

    host: str
    node: str
    """Ray's name of the node; one machine may have several"""

    def is_lost(self) -> bool:
        """Whether Ray has noticed that the node is gone, which may take it some seconds."""
        import ray

        return any(each["NodeID"] == self.node and not each["Alive"] for each in ray.nodes())


class EnvironmentActor:
    """The worker's side: some environments, in a process that Ray starts."""

    def __init__(self) -> None:
        self._vector: SequentialVector | None = None

    def place(self) -> Place:
        """Return the machine that Ray has chosen."""
        import ray

        return Place(socket.gethostname(), ray.get_runtime_context().get_node_id())

    def make(self, assignment: Assignment) -> tuple[Exception | None, None]:
        """Make the environments; return the error if that is not possible."""
        protocol.leave_signals_to_parent()
        sys.path.extend(folder for folder in assignment.path if folder not in sys.path)
        try:
            trust_modules(*assignment.modules)
            from ray import cloudpickle

            factory: EnvironmentFactory = cloudpickle.loads(assignment.factory)
            _set_threads(assignment.threads)
            buffer = np.zeros(buffer_size(assignment.layout), np.uint8)
            self._vector = SequentialVector(
                make_environments(factory, environments_in(assignment.layout)),
                StepArrays.view(buffer, assignment.layout),
            )
            _set_threads(assignment.threads)  # making them may have imported PyTorch
        except BaseException as error:
            return protocol.portable(as_exception(error)), None
        return None, None

    def run(self, command: bytes, data: Any) -> tuple[Any, Mapping[str, np.ndarray] | None]:
        """Carry out a command of the parent; return the reply and the rows of results."""
        assert self._vector is not None
        if command == protocol.CALL:
            return protocol.answer(self._vector, data), None
        arrays = self._vector.arrays
        for name, rows in zip(_INPUTS, data, strict=True):
            getattr(arrays, name)[...] = rows
        any_ended, errors = protocol.run_command(self._vector, command)
        names: tuple[str, ...] = ("obs",) if command == protocol.RESET else _RESULTS
        if any_ended:
            names += _RESULTS_OF_ENDS
        results = {name: getattr(arrays, name) for name in names}
        if errors:
            return (any_ended, protocol.portable_errors(errors)), results
        return protocol.ENDED if any_ended else protocol.DONE, results

    def close(self) -> None:
        if self._vector is not None:
            self._vector.close()


class WorkerActor(Worker):
    """A worker in a Ray actor. `rows` are those of its environments in the parent's arrays."""

    def __init__(
        self,
        start: int,
        stop: int,
        actor: Any,
        assignment: Any,
        rows: StepArrays,
        launcher: RayLauncher,
    ) -> None:
        super().__init__(start, stop, launcher.deadline)
        self.actor, self._rows, self._launcher = actor, rows, launcher
        self._place: Place | None = None
        self._placed = actor.place.remote()
        self._due, self._command = actor.make.remote(assignment), b""

    @property
    def due(self) -> Any:
        """The reply that is due, as a reference that `ray.wait` accepts."""
        return self._due

    def request(self, command: bytes, data: Any = None) -> None:
        # A reply that is still due is dropped: its sender was interrupted.
        self._waiting, self._command = True, command
        if self._died is None:
            self._due = self._send(command, data)

    def _send(self, command: bytes, data: Any) -> Any:
        if command != protocol.CALL:
            data = tuple(getattr(self._rows, name) for name in _INPUTS)
        return self.actor.run.remote(command, data)

    def reply(self) -> Any:
        received = self._receive(self._due)
        if isinstance(received, Exception):
            return received
        self._waiting = False
        reply, results = received
        if results is not None:
            self._copy(reply, results)
        return reply

    def call_aside(self, data: Any) -> Any:
        """Call a method of the environments without touching the reply that is due."""
        if self._died is not None:
            return self._died
        received = self._receive(self._send(protocol.CALL, data))
        return received if isinstance(received, Exception) else received[0]

    def give_up(self) -> None:
        """End the worker because its reply is overdue; `reply` then reports that."""
        self._give_up(hung=True)

    def _receive(self, reference: Any) -> Any:
        """Wait for a result of the actor; return it, or the reason why there is none."""
        if self._died is not None:
            return self._died
        import ray

        try:
            if self._place is None and (problem := self._await_place()) is not None:
                return problem
            self._deadline.wait(Arrival([reference]))
            return ray.get(reference)
        except TimeoutError:
            return self._give_up(hung=True)
        except Exception as error:  # whatever Ray raises, the environments are lost
            if "creation task failed" in str(error):
                return self._refuse(f"its Ray actor could not be created: {last_line(error)}")
            return self._give_up(reason=self._reason(error))

    def _await_place(self) -> Exception | None:
        """Wait until Ray has started the actor; return an error that says what is missing."""
        import ray

        limit = Deadline(min(START_SECONDS, self._deadline.seconds))
        limit.stopping = self._deadline.stopping
        try:
            limit.wait(Arrival([self._placed]))
        except TimeoutError:
            if self._deadline.stopping():
                return self._give_up(hung=True)
            return self._refuse(self._launcher.missing(limit.seconds))
        self._place = ray.get(self._placed)
        return None

    def _refuse(self, problem: str) -> EnvironmentSetupError:
        self._give_up(reason=problem)
        return EnvironmentSetupError(f"The worker of {self.label} cannot be started: {problem}")

    def _copy(self, reply: Any, results: Mapping[str, np.ndarray]) -> None:
        """Copy the results of the environments that were stepped or reset, and did not raise."""
        done = self._rows.active.copy()
        if self._command == protocol.STEP:
            done[:] = True
        if not isinstance(reply, bytes):
            done[list(reply[1])] = False
        for name, values in results.items():
            getattr(self._rows, name)[done] = values[done]

    def _reason(self, error: Exception) -> str:
        import ray

        if not isinstance(error, ray.exceptions.RayError):
            return f"died ({one_line(last_line(error), 200)})"
        host = "" if self._place is None else f" on {self._place.host}"
        if isinstance(error, ray.exceptions.OutOfMemoryError):
            return f"died (Ray ended its actor{host}, because memory ran out)"
        if self._place is not None and self._place.is_lost():
            return f"died (its Ray node{host} was lost)"
        if isinstance(error, ray.exceptions.ActorUnavailableError):
            return f"died (its Ray actor{host} cannot be reached: it ended, or its node was lost)"
        if isinstance(error, ray.exceptions.RayActorError):
            return f"died (its Ray actor{host} ended)"
        return f"died (Ray{host}: {one_line(last_line(error), 200)})"

    def _give_up(self, *, hung: bool = False, reason: str = "died") -> WorkerDied:
        self._waiting, self._died = False, WorkerDied(self._silence() if hung else reason)
        _kill(self.actor)
        return self._died


@dataclass(frozen=True)
class Arrival:
    """Waits until some of these references have arrived, for a `Deadline`."""

    references: Sequence[Any]
    number: int = 1

    def poll(self, timeout: float) -> Sequence[Any]:
        found = self.arrived(timeout / 1e3)
        return found if len(found) == self.number else ()

    def arrived(self, seconds: float = 0.0) -> Sequence[Any]:
        """Those that have arrived, in the order of `references`, and not more than `number`."""
        import ray

        number = min(self.number, len(self.references))
        found: list[Any] = ray.wait(list(self.references), num_returns=number, timeout=seconds)[0]
        return found


class RayLauncher:
    """Starts workers in Ray actors, in a session of Ray that it opens and closes."""

    def __init__(
        self,
        factory: EnvironmentFactory,
        layout: Sequence[Field],
        deadline: Deadline,
        session: RaySession,
        resources: contextlib.ExitStack,
        workers: int | None,
        cpus: float,
    ) -> None:
        import ray
        from ray import cloudpickle

        self._kind = ray.remote(EnvironmentActor)
        self._session, self._resources = session, resources
        self.buffer: Any = np.zeros(buffer_size(layout), np.uint8)
        self.deadline, self._layout = deadline, layout
        self._arrays = StepArrays.view(self.buffer, layout)
        self._factory = cloudpickle.dumps(factory)
        present = session.resources().get("CPU", 1.0)
        most = environments_in(layout)
        self.workers = min(most, workers or max(1, int(present / cpus) if cpus else most))
        # On this machine alone there is nothing to place, and workers may share cores.
        is_small = session.embedded and self.workers * cpus > present
        self._cpus = 0.0 if is_small else cpus

    @classmethod
    def prepare(
        cls,
        factory: EnvironmentFactory,
        layout: Sequence[Field],
        deadline: Deadline,
        workers: int | None = None,
        *,
        address: str | None = None,
        cpus: float = 1.0,
        one_each: bool = False,
    ) -> RayLauncher:
        """Join or start Ray; `one_each` gives every environment a worker of its own.

        Raises `UserError` if Ray is not installed or cannot be reached.
        """
        if one_each:
            workers = environments_in(layout)
        with contextlib.ExitStack() as opened:
            session = opened.enter_context(ray_session(address, needed_by="vectorization"))
            resources = contextlib.ExitStack()
            launcher = cls(factory, layout, deadline, session, resources, workers, cpus)
            resources.enter_context(opened.pop_all())
            return launcher

    def launch(self, start: int, stop: int, others: Iterable[Any]) -> WorkerActor:
        """Start a worker with these environments; Ray chooses its machine."""
        assignment = Assignment(
            self._factory,
            resized_layout(self._layout, stop - start),
            list(TRUSTED_MODULES),
            [os.path.abspath(folder) for folder in sys.path],
            _threads(),
        )
        # Ray would set one thread per worker, but results of NumPy may depend on their number.
        threads = os.environ.get(THREADS) or str(available_cores())
        actor = self._kind.options(
            num_cpus=self._cpus,
            max_restarts=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {THREADS: threads}},
        ).remote()
        rows = self._arrays.rows(slice(start, stop))
        return WorkerActor(start, stop, actor, assignment, rows, self)

    def missing(self, seconds: float) -> str:
        """Say what a worker that Ray has not started after these seconds may be waiting for."""
        import ray

        present = self._session.resources().get("CPU", 0.0)
        free = ray.available_resources().get("CPU", 0.0)
        return (
            f"Ray has not placed it within {seconds:g} s. It needs {self._cpus:g} CPU, as each of "
            f"{self.workers} workers; {self._session.where} has {present:g}, and {free:g} of them "
            "are free. Use fewer env_workers, a smaller env_worker_cpus, or more machines"
        )

    def end(self, workers: Sequence[WorkerActor]) -> None:
        """Let the workers close their environments; kill those that do not end in time."""
        import ray

        if not ray.is_initialized():  # a program that ends has already closed it
            return
        grace = min((worker.grace for worker in workers), default=0.0)
        patient = [each for each in workers if each.alive and not each.is_interrupted]
        try:
            closing = [worker.actor.close.remote() for worker in patient]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=grace)
        finally:
            for worker in workers:
                _kill(worker.actor)

    def close(self) -> None:
        """Leave the session, which ends an embedded Ray."""
        self._resources.close()


def _threads() -> int | None:
    """The threads of PyTorch; None if this process has not imported it."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def _set_threads(threads: int | None) -> None:
    """Let PyTorch use this many threads, if an environment has imported it."""
    torch = sys.modules.get("torch")
    if torch is not None and threads is not None:
        torch.set_num_threads(threads)


def _kill(actor: Any) -> None:
    import ray

    with contextlib.suppress(Exception):  # it may be gone already
        ray.kill(actor)
