"""Step environments without waiting for the slowest ones, which gives exact results up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rl_training.envs.vector import worker as protocol
from rl_training.envs.vector.journal import Request
from rl_training.envs.vector.ray_workers import Arrival, WorkerActor
from rl_training.envs.vector.step_arrays import EnvironmentErrors, Field, WorkerDied
from rl_training.envs.vector.transport import Launcher
from rl_training.envs.vector.worker_vector import WorkerVector


class AsynchronousVector(WorkerVector):
    """Same as `WorkerVector`, but `finish` returns with `taken` of `num_envs` steps of each seed.

    Every environment has a worker of its own. `start` starts the environments that are idle, and
    `finish` takes the steps that are complete, those that were started first before others. The
    other environments stay busy. Afterwards `arrays.active` has the environments whose steps were
    taken. If a worker dies, its episode is lost: a step that depends on timing is not repeated.
    """

    steps_some = True

    def __init__(
        self,
        launcher: Launcher,
        layout: list[Field],
        lose: Callable[[int, str], int],
        num_envs: int,
        taken: int,
        *,
        restarts: int = 0,
    ) -> None:
        self._num_envs, self._taken = num_envs, taken
        self._begun: dict[int, float] = {}
        """When the steps that were not taken yet were started, in that order"""
        self._candidates = np.zeros(0, np.bool_)
        super().__init__(launcher, layout, lose, restarts=restarts)
        assert len(self._workers) == self._number

    def busy(self) -> np.ndarray | None:
        """Mask of the environments whose steps were started and not taken yet; None: none."""
        if not self._begun:
            return None
        return np.isin(np.arange(self._number), list(self._begun))

    def start(self, *, masked: bool) -> None:
        """Start the idle environments of all seeds, or of those in `arrays.active`."""
        if self._captures and self._journal.is_full:
            self._capture()
        everyone = np.ones(self._number, np.bool_)
        self._candidates = self.arrays.active.copy() if masked else everyone
        self._command = protocol.STEP
        for index in np.flatnonzero(self._candidates).tolist():
            if index not in self._begun:
                self._begun[index] = time.monotonic()
                self._workers[index].request(protocol.STEP)

    def finish(self) -> tuple[bool, EnvironmentErrors]:
        """Wait until enough steps of every seed are complete, and take these."""
        self.deadline.restart()
        chosen = sorted(index for seed in self._seeds() for index in self._first(seed))
        self.arrays.clear_results()
        self.arrays.active[:] = False
        self.arrays.active[chosen] = True
        for index in chosen:
            del self._begun[index]
        self._waiting_for = [self._workers[index] for index in chosen]
        return self._gather()

    def _seeds(self) -> Iterator[list[int]]:
        """The environments of each seed that take part, those that were started first in front."""
        for first in range(0, self._number, self._num_envs):
            seed = range(first, first + self._num_envs)
            begun = [index for index in self._begun if index in seed and self._candidates[index]]
            if begun:
                yield begun

    def _first(self, begun: Sequence[int]) -> list[int]:
        """The environments whose steps are taken; `begun` are in the order of their start."""
        references = [self._actor(index).due for index in begun]
        with suppress(TimeoutError):  # then those that are missing are given up with their reply
            self.deadline.wait(Arrival(references, self._taken))
        found = set(Arrival(references, len(references)).arrived())
        arrived = [each for each, due in zip(begun, references, strict=True) if due in found]
        others = [index for index in begun if index not in arrived]
        overdue = [index for index in others if self._is_overdue(index)]
        for index in overdue:
            self._actor(index).give_up()
        return [*overdue, *arrived, *others][: self._taken]

    def _is_overdue(self, index: int) -> bool:
        return time.monotonic() - self._begun[index] > self.deadline.seconds

    def _actor(self, index: int) -> WorkerActor:
        worker = self._workers[index]
        assert isinstance(worker, WorkerActor)
        return worker

    def reset(self) -> EnvironmentErrors:
        """Start an episode in the environments in `arrays.active`; steps under way are dropped."""
        for index in np.flatnonzero(self.arrays.active).tolist():
            self._begun.pop(index, None)
        return super().reset()

    def _exchange_calls(self, requests: Mapping[int, Request]) -> list[Any]:
        """Call after the steps that are under way, whose replies stay due."""
        replies = []
        for index, request in requests.items():
            if index not in self._begun:
                replies += super()._exchange_calls({index: request})
                continue
            reply = self._actor(index).call_aside(request)
            if isinstance(reply, WorkerDied):  # taking its step brings it back
                raise reply
            replies.append(reply)
        return replies

    def infos(self, indices: Sequence[int]) -> list[dict[Any, Any]]:
        """The infos of the last step of these environments; empty while one is busy."""
        idle = [index for index in indices if index not in self._begun]
        found = dict(zip(idle, super().infos(idle), strict=True))
        return [found.get(index, {}) for index in indices]
