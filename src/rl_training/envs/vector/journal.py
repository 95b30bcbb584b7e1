"""Remember what the environments of worker processes did, so that a new worker can do it again."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_training.envs.vector.step_arrays import Field, StepArrays

MIN_STEPS, MAX_SHARE, MAX_BYTES = 1_000, 0.005, 256 * 2**20
"""The environments are captured again after at least this many steps, once that costs at most this
share of the time, or when the steps that are kept for replays take this much memory. A capture
takes 3 ms for CartPole and 8 ms for Hopper, with four environments in two workers."""

Request = tuple[Any, ...]
"""A method of environments, their indices within a worker, and the arguments"""


@dataclass(frozen=True)
class Entry:
    """A step, a reset, or a call that changed the environments."""

    command: bytes
    buffer: bytes = b""
    """A copy of the `StepArrays` after a step or reset"""
    failed: Collection[int] = ()
    """The environments that raised"""
    requests: Mapping[int, Request] = field(default_factory=dict)
    """By worker, the requests of a call"""


@dataclass
class _Base:
    """Where the replay of a worker starts: new environments, which get these requests first."""

    requests: tuple[Request, ...] = ()
    opening: Entry | None = None
    """A reset that started new episodes after these requests, if there was one"""
    since: int = 0
    """The first entry to replay"""


class Journal:
    """The last captured state of the environments, and everything they did since.

    Workers are identified by the index of their first environment.
    """

    def __init__(self, buffer: Any, layout: Sequence[Field], *, replays: bool) -> None:
        """Without `replays`, only what `rebase` is given is remembered."""
        self.replays = replays
        self._buffer, self._layout = np.frombuffer(buffer, np.uint8), layout
        self._entries: list[Entry] = []
        self._bases: dict[int, _Base] = {}
        self._max_steps = max(1, MAX_BYTES // len(self._buffer))
        self._steps, self._next_capture = 0, 0.0
        self._failed: set[int] = set()

    @property
    def is_full(self) -> bool:
        """Whether it is time to capture the environments again."""
        if self.replays and self._steps >= self._max_steps:
            return True
        return self._steps >= MIN_STEPS and time.perf_counter() >= self._next_capture

    @property
    def failed(self) -> Collection[int]:
        """The environments that raised and were not reset since; they are not captured."""
        return self._failed

    def add(self, command: bytes, failed: Collection[int], reset: Collection[int] = ()) -> None:
        """Add a step or reset that has just ended. `reset` are the environments of a reset."""
        self._steps += 1
        if len(reset) or failed:
            self._failed = (self._failed - set(reset)) | set(failed)
        if self.replays:
            self._entries.append(self.entry(command, failed))

    def add_call(self, command: bytes, requests: Mapping[int, Request]) -> None:
        """Add a call that changed the environments."""
        if self.replays:
            self._entries.append(Entry(command, requests=requests))
            return
        self._add_to_bases(requests)

    def rebase(self, requests: Mapping[int, Request], seconds: float) -> None:
        """Forget all entries: by worker, these requests bring new environments to this point.

        `seconds` is how long it took to capture the environments.
        """
        self._entries.clear()
        self._steps, self._next_capture = 0, time.perf_counter() + seconds / MAX_SHARE
        self._bases = {worker: _Base((given,)) for worker, given in requests.items()}

    def restart(self, worker: int, opening: Entry | None, *, after_this: bool) -> None:
        """New environments of a worker were brought to its base and then did `opening`.

        With `after_this`, the entry of the command that is under way does not apply to them.
        """
        base = self._base(worker)
        base.opening, base.since = opening, len(self._entries) + after_this

    def stop_replays(self) -> None:
        """Give up replays, because the environments cannot be captured or do not repeat.

        What was written to the environments is still remembered.
        """
        self.replays = False
        for position, entry in enumerate(self._entries):
            given = entry.requests.items()
            recent = {each: it for each, it in given if position >= self._base(each).since}
            self._add_to_bases(recent)
        self._entries.clear()
        for base in self._bases.values():
            base.since = 0

    def _add_to_bases(self, requests: Mapping[int, Request]) -> None:
        for worker, request in requests.items():
            base = self._base(worker)
            base.requests = _with_request(base.requests, request)

    def requests(self, worker: int) -> tuple[Request, ...]:
        """The requests that bring new environments to the base of a worker."""
        return self._base(worker).requests

    def entries(self, worker: int) -> list[Entry]:
        """What a worker did since its base."""
        base = self._base(worker)
        opening = [] if base.opening is None else [base.opening]
        return opening + self._entries[base.since :]

    def steps(self, worker: int) -> int:
        """How many steps and resets a worker repeats from its base."""
        return sum(1 for entry in self.entries(worker) if entry.buffer)

    def entry(self, command: bytes, failed: Collection[int]) -> Entry:
        """A step or reset that has just ended. `failed` are the environments that raised."""
        return Entry(command, self._buffer.tobytes(), failed)

    def arrays(self, buffer: bytes) -> StepArrays:
        return StepArrays.view(buffer, self._layout)

    def _base(self, worker: int) -> _Base:
        return self._bases.setdefault(worker, _Base())


def _with_request(requests: tuple[Request, ...], new: Request) -> tuple[Request, ...]:
    """Add a request, which replaces earlier calls of the same method of its environments."""
    kept = [_without(new[1], request) if request[0] == new[0] else request for request in requests]
    return (*(request for request in kept if request[1]), new)


def _without(environments: Collection[int], request: Request) -> Request:
    name, *columns = request
    rows = [row for row in zip(*columns, strict=True) if row[0] not in environments]
    return (name, *map(list, zip(*rows, strict=True))) if rows else (name, [])


def same_results(seen: StepArrays, now: StepArrays, chosen: np.ndarray, *, reset: bool) -> bool:
    """Whether the chosen environments returned the same bits twice, in a step or `reset`."""
    if reset:
        return _same(seen.obs, now.obs, chosen)
    names = ("obs", "reward", "terminated", "truncated")
    if not all(_same(getattr(seen, name), getattr(now, name), chosen) for name in names):
        return False
    ended = chosen & (seen.terminated | seen.truncated)
    return all(
        _same(getattr(seen, each), getattr(now, each), ended) for each in ("final_obs", "success")
    )


def _same(seen: np.ndarray, now: np.ndarray, chosen: np.ndarray) -> bool:
    return bool(seen[chosen].tobytes() == now[chosen].tobytes())
