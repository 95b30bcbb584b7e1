"""Updates and actions captured as CUDA graphs: one launch instead of about a hundred."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Objective
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.source import FeedbackSource, Source
from rl_training.execution.programs import (
    MEMORY,
    RANDOM,
    ActionParts,
    UpdateParts,
    compile_program,
    explore_program,
    give_feedback,
    is_uncompiled,
)
from rl_training.types import ROW_ERRORS, Batch, Metrics, Noise, State

WARM_UP_CALLS = 2
"""Calls before capture: the first compiles, the second runs with all workspaces allocated"""

ALIGNMENT = 16
"""Alignment in bytes of the arrays of a `Staging`"""

Field = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of an array"""


def capture(
    body: Callable[[], Any], device: torch.device, *, changed: list[torch.Tensor]
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture `body` as a graph; return the graph and what `body` returned.

    Every replay overwrites the returned tensors. `body` is called a few times before capture;
    `changed` lists the tensors that it writes, which are restored afterwards.
    """
    kept = [tensor.clone() for tensor in changed]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            body()
    torch.cuda.current_stream(device).wait_stream(stream)
    for tensor, before in zip(changed, kept, strict=True):
        tensor.copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = body()
    return graph, result


class GraphedProgram:
    """An update as one CUDA graph, in which independent objectives run in parallel.

    A kernel of a small network uses a fraction of the device, so two parallel streams take hardly
    longer than one. The graph reads its random numbers at a cursor on the device.
    """

    def __init__(self, parts: UpdateParts) -> None:
        self._parts = parts
        self._updates: dict[bool, _ParallelUpdate] = {}
        self._bodies: dict[tuple[Source, bool], Callable[[], Metrics]] = {}
        self._compiled: set[tuple[Source, bool]] = set()
        self._graphs: dict[tuple[Source, bool], tuple[torch.cuda.CUDAGraph, Metrics]] = {}

    def __call__(self, source: Source, *, update_policy: bool) -> Metrics:
        key = source, update_policy
        if key not in self._graphs:
            self._graphs[key] = self._capture(source, update_policy)
        self._parts.pool.advance()
        graph, metrics = self._graphs[key]
        graph.replay()
        return metrics

    def needs_compiling(self, source: Source, *, update_policy: bool) -> bool:
        key = source, update_policy
        return key not in self._compiled and key not in self._graphs

    def compile(self, source: Source, *, update_policy: bool) -> None:
        """See `Program.compile`. The graph is captured later, by the first update."""
        self._parts.pool.cursor.zero_()  # so that a round is left
        self._body(source, update_policy)()
        self._compiled.add((source, update_policy))

    def written_tensors(self, source: Source) -> list[Tensor]:
        feedback = source.feedback_tensors() if isinstance(source, FeedbackSource) else []
        return [*self._parts.state.values(), *feedback, self._parts.pool.cursor]

    def _capture(self, source: Source, update_policy: bool) -> tuple[torch.cuda.CUDAGraph, Metrics]:
        cursor = self._parts.pool.cursor
        changed, before = self.written_tensors(source), cursor.clone()
        cursor.zero_()  # so that enough rounds are left for the calls before capture
        body = self._body(source, update_policy)
        captured = capture(body, self._parts.algorithm.device, changed=changed)
        cursor.copy_(before)
        return captured

    def _body(self, source: Source, update_policy: bool) -> Callable[[], Metrics]:
        """The update that is compiled and captured."""
        key = source, update_policy
        if key not in self._bodies:
            if update_policy not in self._updates:
                update = _ParallelUpdate(self._parts, update_policy=update_policy)
                self._updates[update_policy] = update
            self._bodies[key] = self._updates[update_policy].from_source(source)
        return self._bodies[key]


class _ParallelUpdate:
    """Computes the gradients of each objective on a separate stream, then applies them."""

    def __init__(self, parts: UpdateParts, *, update_policy: bool) -> None:
        self._parts, self._device = parts, parts.algorithm.device
        objectives = parts.algorithm.objectives(update_policy=update_policy)
        self._branches = [self._compile_branch(objective) for objective in objectives]
        self._side_streams = [
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for _ in objectives[1:]
        ]
        self._apply = self._compile_apply(update_policy)

    def from_source(self, source: Source) -> Callable[[], Metrics]:
        """Return the complete update, including sampling from `source`."""
        pool = self._parts.pool

        def sample_next() -> tuple[Batch, Noise]:
            noise = pool.at_cursor()
            pool.cursor.add_(1)
            return self._parts.batch_of(source, noise), noise

        def feed_back(batch: Batch, metrics: Metrics) -> None:
            give_feedback(source, batch, dict(metrics))

        sample = compile_program(sample_next, self._device)
        give = compile_program(feed_back, self._device)

        def update() -> Metrics:
            batch, noise = sample()
            metrics = self._learn(batch, noise)
            give(batch, metrics)
            metrics.pop(ROW_ERRORS, None)
            return metrics

        return update

    def _learn(self, batch: Batch, noise: Noise) -> Metrics:
        state = self._parts.state
        main = torch.cuda.current_stream(self._device)
        gradients: State = {}
        metrics: Metrics = {}
        for stream in self._side_streams:  # before the first branch, so that none waits for it
            stream.wait_stream(main)
        for branch, stream in zip(self._branches, [main, *self._side_streams], strict=True):
            with torch.cuda.stream(stream):
                branch_gradients, branch_metrics = branch(state, batch, noise)
            gradients |= branch_gradients
            metrics |= branch_metrics
        for stream in self._side_streams:
            main.wait_stream(stream)
        self._apply(state, gradients)
        return metrics

    def _compile_branch(self, objective: Objective) -> Callable[..., tuple[State, Metrics]]:
        algorithm: Algorithm = self._parts.algorithm

        def branch(state: State, batch: Batch, noise: Noise) -> tuple[State, Metrics]:
            return algorithm.differentiate(objective, state, batch, noise)

        return compile_program(self._parts.population.over_slots(branch), self._device)

    def _compile_apply(self, update_policy: bool) -> Callable[[State, State], Any]:
        algorithm: Algorithm = self._parts.algorithm

        def apply(state: State, gradients: State) -> Metrics:
            algorithm.apply(state, gradients, policy_updated=update_policy)
            return {}

        return compile_program(self._parts.population.over_slots(apply), self._device)


class GraphedActions:
    """Copies to the device, runs the policy and copies back, all in one CUDA graph.

    Pending rows of the replay buffer are copied together with the observations, and are written
    after the actions are chosen. A step of the environments therefore needs a single launch.
    """

    def __init__(self, parts: ActionParts, replay: ReplayBuffer | None) -> None:
        population, pool, obs_shape = parts.population, parts.pool, parts.obs_shape
        self._state, self._pool, self._replay = parts.state, pool, replay
        self._device, self._occupied = parts.algorithm.device, population.occupied
        width, self._lead = population.width, population.leading_shape
        fields: dict[str, Field] = {
            "obs": ((width, *obs_shape), torch.float32),
            "progress": (self._lead, torch.float32),
            **{kind: (tuple(n.shape[1:]), n.dtype) for kind, n in pool.numbers.items()},
        }
        if size := parts.algorithm.memory_size:
            fields[MEMORY] = ((width, obs_shape[0], size), torch.float32)
        if replay is not None:
            rows = len(population.slots) * obs_shape[0]
            fields["positions"] = ((rows,), torch.int64)
            fields["rows"] = ((rows, replay.row_width), torch.float32)
            fields["sizes"] = ((width,), torch.int64)
        self._staging = Staging(fields, self._device)
        self._staging.host["obs"][...] = parts.placeholder().numpy()
        self._explore = compile_program(explore_program(parts.algorithm, population), self._device)
        self.memory: np.ndarray | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def begin(self, obs: np.ndarray, progress: float, memory: np.ndarray | None = None) -> None:
        if self._graph is None:
            self._capture()
        # Safe to overwrite: `finish` waited for the copy that read this memory.
        host = self._staging.host
        host["obs"][self._occupied] = obs
        host["progress"][...] = progress
        if memory is not None:
            host[MEMORY][self._occupied] = memory
        self._pool.copy_current(host)
        if self._replay is not None:
            self._replay.stage(host["positions"], host["rows"], host["sizes"])
        assert self._graph is not None
        self._graph.replay()
        self._done.record(self._stream)

    def finish(self) -> np.ndarray:
        self._done.synchronize()
        return self._actions

    def needs_compiling(self) -> bool:
        return is_uncompiled(self._explore)

    @torch.no_grad()
    def compile(self) -> None:
        self._choose()

    def _capture(self) -> None:
        on_host = [
            torch.zeros(each.shape, dtype=each.dtype, pin_memory=True) for each in self._choose()
        ]
        self._actions = on_host[0].numpy()
        if len(on_host) > 1:
            self.memory = on_host[1].numpy()
        self._stream = torch.cuda.current_stream(self._device)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        staged = self._staging.device

        def body() -> None:
            self._staging.upload()
            for copy, chosen in zip(on_host, self._choose(), strict=True):
                copy.copy_(chosen, non_blocking=True)
            if self._replay is not None:
                self._replay.write(staged["positions"], staged["rows"], staged["sizes"])

        if self._replay is not None:
            self._replay.flush()
            host = self._staging.host
            # With no pending rows, the calls before capture write only to an unused row.
            self._replay.stage(host["positions"], host["rows"], host["sizes"])
        self._graph, _ = capture(body, self._device, changed=[])

    def _choose(self) -> tuple[Tensor, ...]:
        """Return the actions, and the next memory of a recurrent policy."""
        staged = self._staging.device
        noise = self._pool.split({kind: staged[kind] for kind in self._pool.numbers})
        del noise[RANDOM]
        obs = staged["obs"] if self._lead else staged["obs"][0]
        inputs = self._state, obs, noise, staged["progress"]
        if MEMORY not in staged:
            return (self._explore(*inputs),)
        memory = staged[MEMORY] if self._lead else staged[MEMORY][0]
        actions, memory = self._explore(*inputs, memory)
        return actions, memory


class Staging:
    """Named arrays that share one block of memory, so that one copy uploads all of them.

    Write to `host`, call `upload`, read from `device`.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        starts, size = {}, 0
        for name, (shape, dtype) in fields.items():
            starts[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (shape, dtype) in fields.items():
            last = starts[name] + math.prod(shape) * dtype.itemsize
            part = slice(starts[name], last)
            self.host[name] = self._host[part].view(dtype).view(shape).numpy()
            self.device[name] = self._device[part].view(dtype).view(shape)

    def upload(self) -> None:
        """Copy all arrays asynchronously; do not write to `host` before the copy is done."""
        self._device.copy_(self._host, non_blocking=True)
