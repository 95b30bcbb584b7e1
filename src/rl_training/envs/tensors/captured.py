"""Functions of tensors that stay in place, as CUDA graphs: one launch instead of a hundred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

import torch

WARM_UP_CALLS = 3
"""Calls before capture, in which workspaces are allocated"""

Result = TypeVar("Result")


class Captured(Generic[Result]):
    """Calls a function; on a GPU, replays it as one graph after the first calls.

    The function takes nothing, reads and writes tensors that stay where they are, and neither waits
    for the device nor branches on data. Every replay overwrites the tensors that it returned. If
    the function of another `Captured` calls it, it becomes a part of that graph.
    """

    def __init__(
        self, function: Callable[[], Result], device: torch.device, *, enabled: bool = True
    ) -> None:
        self._function, self._is_captured = function, enabled and device.type == "cuda"
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    def __call__(self) -> Result:
        if not self._is_captured or self._calls < WARM_UP_CALLS or is_capturing():
            self._calls += 1
            return self._function()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._result = self._function()
        self._graph.replay()
        return cast(Result, self._result)  # None where the function returns nothing


def is_capturing() -> bool:
    """Whether what is launched now becomes a part of a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
