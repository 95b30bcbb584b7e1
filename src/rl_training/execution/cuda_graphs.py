"""Updates and actions captured as CUDA graphs: one launch instead of about a hundred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_training.algorithms.base import Algorithm, Objective
from rl_training.data.source import FeedbackSource, Source
from rl_training.execution.programs import ROWS, UpdateParts, compile_program, give_feedback
from rl_training.types import ROW_ERRORS, Batch, Metrics, Noise, State

WARM_UP_CALLS = 2
"""Calls before capture: the first compiles, the second runs with all workspaces allocated"""


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
        cursor.zero_()  # so that enough rounds are left for the calls before capture
        changed = list(parts.state.values())
        if isinstance(source, FeedbackSource):
            changed += source.feedback_tensors()
        captured = capture(body, parts.algorithm.device, changed=changed)
        cursor.copy_(before)
        return captured


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
