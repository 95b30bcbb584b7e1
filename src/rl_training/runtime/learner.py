"""One algorithm, executed as the run's settings say: eager or compiled, normalised or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_training.algorithms.base import Algorithm
from rl_training.data.normalization import ObservationNormalizer
from rl_training.runtime.execution import Execution
from rl_training.types import Batch, Metrics, Noise, State


class Learner:
    """Updates an algorithm and keeps the newest metrics; the only place that compiles."""

    def __init__(
        self,
        algorithm: Algorithm,
        execution: Execution,
        normalizer: ObservationNormalizer | None = None,
    ) -> None:
        self.algorithm, self.execution, self.normalizer = algorithm, execution, normalizer
        self.latest_metrics: Metrics = {}
        if execution.compiled:
            algorithm.program = CompiledStep(algorithm)

    def update(self, batch: Batch) -> None:
        """One gradient step on raw rows."""
        if self.normalizer is not None:
            batch = self.normalizer.normalize_batch(batch)
        self.latest_metrics.update(self.algorithm.update(batch).metrics)

    def metrics(self) -> dict[str, float]:
        """The newest value of every metric, read back from the device in one transfer."""
        if not self.latest_metrics:
            return {}
        stacked = torch.stack([value.float() for value in self.latest_metrics.values()])
        return dict(zip(self.latest_metrics, stacked.tolist(), strict=True))

    def load_metrics(self, metrics: dict[str, float]) -> None:
        """Restore what `metrics` gave, so that a log after a resume misses nothing."""
        device = self.algorithm.device
        self.latest_metrics = {
            name: torch.tensor(value, device=device) for name, value in metrics.items()
        }


class CompiledStep:
    """Two whole programs, with and without the policy's part, chosen by the host."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._programs = {on: _compile(algorithm, update_policy=on) for on in (True, False)}
        self._batch_size: int | None = None

    def __call__(self, state: State, batch: Batch, noise: Noise, *, update_policy: bool) -> Metrics:
        rows = batch.obs.shape[0]
        if self._batch_size is None:
            self._batch_size = rows
        elif rows != self._batch_size:
            raise ValueError(f"compiled for batches of {self._batch_size} rows, got {rows}")
        return self._programs[update_policy](state, batch, noise)


def _compile(algorithm: Algorithm, *, update_policy: bool) -> Callable[..., Metrics]:
    def program(state: State, batch: Batch, noise: Noise) -> Metrics:
        return algorithm.step(state, batch, noise, update_policy=update_policy)

    # A program belongs to one learner, whose state stays in place and whose batches keep their
    # size, so what it was compiled for need not be checked again at every call.
    # Compiled code is found by code object: each program needs one of its own.
    program.__code__ = program.__code__.replace()
    options: dict[str, Any] = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    if algorithm.device.type == "cpu":
        options["cpp_wrapper"] = True  # kernels are called from C++, not from Python
    return torch.compile(program, fullgraph=True, dynamic=False, options=options)
