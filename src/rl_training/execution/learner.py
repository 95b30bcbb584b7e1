"""Updates of one seed or of a population, executed as the run's settings say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw
from rl_training.data.source import Source
from rl_training.data.transforms import ObservationNormalizer, normalize_batch
from rl_training.execution.cuda_graphs import GraphedProgram
from rl_training.execution.execution import Execution
from rl_training.execution.programs import ROWS, DirectProgram, Population, Program, UpdateParts
from rl_training.execution.random_streams import RandomPool
from rl_training.models.mlp import rounded_products
from rl_training.types import Batch, Metrics


class Learner:
    """Samples, updates, and keeps the newest metrics.

    A population's states lie in one tensor per name with a leading axis of slots; each member's
    `algorithm.state` is its view of them. So saving, loading and acting need not know of it.
    """

    def __init__(
        self,
        algorithms: Sequence[Algorithm],
        source: Source,
        execution: Execution,
        *,
        population: Population | None = None,
        generators: Sequence[torch.Generator] | None = None,
        normalizers: Sequence[ObservationNormalizer] = (),
        like: Learner | None = None,
    ) -> None:
        """One algorithm and normaliser per member; one generator per slot.

        `like` is a learner of the same sizes and settings, whose compiled programs can be shared.
        """
        self.algorithms, self.source, self.execution = list(algorithms), source, execution
        self.population = population or Population()
        algorithm = self.algorithms[0]
        self.state = self.population.stack_states(self.algorithms)
        self._normalization = self._place(normalizers)
        batch_size = algorithm.hyperparameters.batch_size
        self.pool = RandomPool(
            {**algorithm.update_noise(batch_size), ROWS: Draw("bits", (batch_size,))},
            generators or [algorithm.generator],
            algorithm.device,
        )
        parts = UpdateParts(algorithm, self.state, self.population, self.pool, self._batch_of)
        self._program: Program = (
            GraphedProgram(parts)
            if execution.graphed
            else DirectProgram(
                parts, compiled=execution.compiled, like=None if like is None else like._program
            )
        )
        self._latest: Metrics = {}
        self._read: dict[str, list[float]] | None = None

    @torch.no_grad()
    def update(self, already_made: int, count: int = 1, *, source: Source | None = None) -> None:
        """`count` gradient steps of every slot, after `already_made` earlier ones.

        `source` is another one than the learner's own, whose batches have the same parts.
        """
        chosen = self.source if source is None else source
        chosen.flush()
        with rounded_products(self.execution.rounds_products):
            for number in range(already_made, already_made + count):
                on = self.algorithms[0].updates_policy_after(number)
                self._latest.update(self._program(chosen, update_policy=on))
        self._read = None

    def metrics(self, seed_index: int = 0) -> dict[str, float]:
        """The newest value of every metric, read back from the device in one transfer."""
        if self._read is None:
            values = [value.float().reshape(-1) for value in self._latest.values()]
            read = torch.stack(values).tolist() if values else []
            self._read = dict(zip(self._latest, read, strict=True))
        slot = self.population.slots[seed_index]
        return {name: values[slot] for name, values in self._read.items()}

    def load_metrics(self, metrics: dict[str, float | None], seed_index: int = 0) -> None:
        """Restore what `metrics` gave, so that a log after a resume misses nothing.

        What was not finite is None.
        """
        slot, width = self.population.slots[seed_index], self.population.width
        device = self.algorithms[0].device
        for name, value in metrics.items():
            unknown = torch.full((width,), torch.nan, device=device)
            self._latest.setdefault(name, unknown)[slot] = torch.nan if value is None else value
        self._read = None

    def _place(self, normalizers: Sequence[ObservationNormalizer]) -> Tensor | None:
        """One tensor of all slots' shifts and scales, `(2, width, 1, obs_dim)` or `(2, obs_dim)`"""
        if not normalizers:
            return None
        width, algorithm = self.population.width, self.algorithms[0]
        storage = torch.zeros(2, width, 1, algorithm.obs_dim, device=algorithm.device)
        for slot, normalizer in zip(self.population.slots, normalizers, strict=True):
            normalizer.place(storage[:, slot, 0])
        return storage[:, 0, 0] if width == 1 else storage

    def _batch_of(self, source: Source, bits: Tensor) -> Batch:
        batch = source.draw(bits)
        if self._normalization is None:
            return batch
        return normalize_batch(batch, self._normalization[0], self._normalization[1])
