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

    def __init__(self, online: Source, offline: Source, ratio: float) -> None:
        if not 0 <= ratio <= 1:
            raise ValueError(f"ratio = {ratio}: must be from 0 to 1")
        self.online, self.offline, self.ratio = online, offline, ratio

    def __len__(self) -> int:
        return len(self.online) + len(self.offline)

    def offline_rows(self, batch_size: int) -> int:
        """How many rows of a batch are offline ones."""
        return round(self.ratio * batch_size)

    def sample(self, batch_size: int) -> Batch:
        number = self.offline_rows(batch_size)
        if number == batch_size:
            return self.offline.sample(batch_size)
        if number == 0:
            return self.online.sample(batch_size)
        return _join(self.offline.sample(number), self.online.sample(batch_size - number))

    def flush(self) -> None:
        self.online.flush()
        self.offline.flush()

    def draw(self, bits: Tensor) -> Batch:
        """As `Source.draw`; `bits` is `(batch,)`, or `(width, batch)` for a population."""
        batch_size = bits.shape[-1]
        number = self.offline_rows(batch_size)
        if number == batch_size:
            return self.offline.draw(bits)
        if number == 0:
            return self.online.draw(bits)
        return _join(self.offline.draw(bits[..., :number]), self.online.draw(bits[..., number:]))


def _join(first: Batch, second: Batch) -> Batch:
    # Rows are the last axis but one of vectors, the last of numbers.
    axis = first.reward.ndim - 1
    pairs = zip(first[:5], second[:5], strict=True)  # the columns that every row has
    return Batch(*(torch.cat(pair, dim=axis) for pair in pairs))
