"""Batches from two sources at once."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.data.source import Source
from rl_training.types import Batch


class Mixture:
    """Every batch has its exact share of offline rows, first; the rest are online ones.

    A source whose share of a batch is nothing is not asked.
    """

    def __init__(
        self, online: Source, offline: Source, ratio: float, *, marks: bool = False
    ) -> None:
        """`marks`: batches say which rows are offline even where all, or none, are."""
        if not 0 <= ratio <= 1:
            raise ValueError(f"ratio = {ratio}: must be from 0 to 1")
        self.online, self.offline, self.ratio = online, offline, ratio
        self.marks = marks or 0 < ratio < 1

    def __len__(self) -> int:
        return len(self.online) + len(self.offline)

    def offline_alone(self) -> Mixture:
        """A source of offline rows whose batches have the same parts as this one's."""
        return Mixture(self.online, self.offline, 1.0, marks=self.marks)

    def offline_rows(self, batch_size: int) -> int:
        """How many rows of a batch are offline ones."""
        return round(self.ratio * batch_size)

    def needs_online_rows(self, batch_size: int) -> bool:
        """Whether a batch has any."""
        return self.offline_rows(batch_size) < batch_size

    def sample(self, batch_size: int) -> Batch:
        """Rows drawn at random, each source by its own generator."""
        number = self.offline_rows(batch_size)
        offline = self.offline.sample(number) if number else None
        online = self.online.sample(batch_size - number) if number < batch_size else None
        return self._join(offline, online)

    def flush(self) -> None:
        self.online.flush()
        self.offline.flush()

    def draw(self, bits: Tensor) -> Batch:
        """As `Source.draw`; `bits` is `(batch,)`, or `(width, batch)` for a population."""
        batch_size = bits.shape[-1]
        number = self.offline_rows(batch_size)
        offline = self.offline.draw(bits[..., :number]) if number else None
        online = self.online.draw(bits[..., number:]) if number < batch_size else None
        return self._join(offline, online)

    def _join(self, offline: Batch | None, online: Batch | None) -> Batch:
        parts = [part for part in (offline, online) if part is not None]
        if not self.marks:
            return parts[0]
        # Rows are the last axis but one of vectors, the last of numbers.
        axis = parts[0].reward.ndim - 1
        columns = [part[:5] for part in parts]  # those that every row has
        obs, action, reward, discount, next_obs = (
            torch.cat(column, dim=axis) for column in zip(*columns, strict=True)
        )
        marks = [torch.full_like(part.reward, part is offline, dtype=torch.bool) for part in parts]
        is_offline = torch.cat(marks, dim=axis)
        return Batch(obs, action, reward, discount, next_obs, is_offline=is_offline)
