"""The learner: samples batches and updates one seed or all seeds of a population."""

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
    """Samples batches, updates the algorithms, and keeps the newest metrics.

    The states of a population are stored in one tensor per name, with a leading axis of slots. The
    `algorithm.state` of each seed is a view of its slot, so saving, loading and acting are the same
    as for a single seed.
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
        """Take one algorithm and one normaliser per seed, and one generator per slot.

        `like` is a learner with the same sizes and settings, whose compiled programs are reused.
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
        """Make `count` gradient steps in every slot, after `already_made` earlier ones.

        `source` replaces the learner's source for this call; its batches must have the same fields.
        """
        chosen = self.source if source is None else source
        chosen.flush()
        with rounded_products(self.execution.rounds_products):
            for number in range(already_made, already_made + count):
                on = self.algorithms[0].updates_policy_after(number)
                self._latest.update(self._program(chosen, update_policy=on))
        self._read = None

    def metrics(self, seed_index: int = 0) -> dict[str, float]:
        """Return the newest value of each metric of a seed, read from the device in one copy."""
        if self._read is None:
            values = [value.float().reshape(-1) for value in self._latest.values()]
            read = torch.stack(values).tolist() if values else []
            self._read = dict(zip(self._latest, read, strict=True))
        slot = self.population.slots[seed_index]
        return {name: values[slot] for name, values in self._read.items()}

    def load_metrics(self, metrics: dict[str, float | None], seed_index: int = 0) -> None:
        """Restore the metrics of a seed, so that a resumed run logs all of them.

        None stands for a value that was not finite.
        """
        slot, width = self.population.slots[seed_index], self.population.width
        device = self.algorithms[0].device
        for name, value in metrics.items():
            empty = torch.full((width,), torch.nan, device=device)
            self._latest.setdefault(name, empty)[slot] = torch.nan if value is None else value
        self._read = None

    def _place(self, normalizers: Sequence[ObservationNormalizer]) -> Tensor | None:
        """Return the shifts and scales of all slots as one tensor, and let normalisers write to it.

        Its shape is `(2, width, 1, obs_dim)`, or `(2, obs_dim)` if there is a single slot.
        """
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
