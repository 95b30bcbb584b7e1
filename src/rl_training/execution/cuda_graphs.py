"""Updates and actions captured as CUDA graphs: one launch from the host instead of a hundred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_training.algorithms.base import Algorithm, Objective
from rl_training.data.source import FeedbackSource, Source
from rl_training.execution.programs import ROWS, UpdateParts, compile_program, give_feedback
from rl_training.types import ROW_ERRORS, Batch, Metrics, Noise, State

WARM_UP_CALLS = 2
"""Before capture: the first call compiles, the second finds every workspace allocated"""


def capture(
    body: Callable[[], Any], device: torch.device, *, changed: list[torch.Tensor]
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """`body` as a graph, and the tensors it gives, which every replay overwrites.

    Calls it a few times first; `changed` lists the tensors it writes, which are put back.
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
    """An update as one graph, in which independent objectives run side by side.

    A small network's kernel occupies a fraction of the device, so two streams of them take hardly
    longer than one. The captured program draws on the pool by a cursor on the device.
    """

    def __init__(self, parts: UpdateParts) -> None:
        self._parts = parts
        self._updates: dict[bool, _ParallelUpdate] = {}
        self._graphs: dict[tuple[Source, bool], tuple[torch.cuda.CUDAGraph, Metrics]] = {}

    def __call__(self, source: Source, *, update_policy: bool) -> Metrics:
        key = source, update_policy
        if key not in self._graphs:
            self._graphs[key] = self._capture(source, update_policy)
        self._parts.pool.advance()
        graph, metrics = self._graphs[key]
        graph.replay()
        return metrics

    def _capture(self, source: Source, update_policy: bool) -> tuple[torch.cuda.CUDAGraph, Metrics]:
        parts = self._parts
        if update_policy not in self._updates:
            self._updates[update_policy] = _ParallelUpdate(parts, update_policy=update_policy)
        body = self._updates[update_policy].from_source(source)
        cursor = parts.pool.cursor
        before = cursor.clone()
        cursor.zero_()  # wherever the pool stands, there are rounds enough to try it out
        changed = list(parts.state.values())
        if isinstance(source, FeedbackSource):
            changed += source.feedback_tensors()
        captured = capture(body, parts.algorithm.device, changed=changed)
        cursor.copy_(before)
        return captured


class _ParallelUpdate:
    """Every objective's gradients on a stream of its own, then the step."""

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
        """The whole update, sampling included."""
        pool = self._parts.pool

        def sample_next() -> tuple[Batch, Noise]:
            noise = pool.at_cursor()
            pool.cursor.add_(1)
            return self._parts.batch_of(source, noise.pop(ROWS)), noise

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
        found: State = {}
        metrics: Metrics = {}
        for stream in self._side_streams:  # before the first branch, so that none waits for it
            stream.wait_stream(main)
        for branch, stream in zip(self._branches, [main, *self._side_streams], strict=True):
            with torch.cuda.stream(stream):
                its_gradients, its_metrics = branch(state, batch, noise)
            found |= its_gradients
            metrics |= its_metrics
        for stream in self._side_streams:
            main.wait_stream(stream)
        self._apply(state, found)
        return metrics

    def _compile_branch(self, objective: Objective) -> Callable[..., tuple[State, Metrics]]:
        algorithm: Algorithm = self._parts.algorithm

        def branch(state: State, batch: Batch, noise: Noise) -> tuple[State, Metrics]:
            return algorithm.differentiate(objective, state, batch, noise)

        return compile_program(self._parts.population.over_slots(branch), self._device)

    def _compile_apply(self, update_policy: bool) -> Callable[[State, State], Any]:
        algorithm: Algorithm = self._parts.algorithm

        def apply(state: State, found: State) -> Metrics:
            algorithm.apply(state, found, policy_updated=update_policy)
            return {}

        return compile_program(self._parts.population.over_slots(apply), self._device)
