"""Batches that combine online and offline transitions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.types import Batch

Ratio = float | Literal["uniform"]


class Mixture:
    """A source that mixes a replay buffer and an offline dataset in every batch.

    If `ratio` is a number, exactly that fraction of each batch is offline rows, placed first; the
    other rows are online. A source with no rows in the batch is not sampled. If `ratio` is
    "uniform", every row of both sources is equally likely, as if they were in one buffer.
    """

    def __init__(
        self, online: ReplayBuffer, offline: OfflineDataset, ratio: Ratio, *, marks: bool = False
    ) -> None:
        """With `marks`, batches have `is_offline` even if all rows come from one source."""
        if ratio != "uniform" and not 0 <= ratio <= 1:
            raise ValueError(f"ratio = {ratio}: must be between 0 and 1, or 'uniform'")
        self.online, self.offline, self.ratio = online, offline, ratio
        self.marks = marks or ratio == "uniform" or 0 < ratio < 1

    def __len__(self) -> int:
        return len(self.online) + len(self.offline)

    def offline_alone(self) -> Mixture:
        """Return a source of offline rows only, whose batches have the same fields."""
        return Mixture(self.online, self.offline, 1.0, marks=self.marks)

    def offline_rows(self, batch_size: int) -> int:
        """Number of offline rows in a batch; for "uniform", the average number."""
        ratio = len(self.offline) / len(self) if self.ratio == "uniform" else self.ratio
        return round(ratio * batch_size)

    def needs_online_rows(self, batch_size: int) -> bool:
        """Whether a batch can contain online rows."""
        return self.ratio == "uniform" or self.offline_rows(batch_size) < batch_size

    def sample(self, batch_size: int) -> Batch:
        """Sample a batch; each source uses its own generator."""
        if self.ratio == "uniform":
            self.flush()
            return self.draw(self.online.random_bits(batch_size))
        number = self.offline_rows(batch_size)
        offline = self.offline.sample(number) if number else None
        online = self.online.sample(batch_size - number) if number < batch_size else None
        return self._join(offline, online)

    def flush(self) -> None:
        self.online.flush()
        self.offline.flush()

    def draw(self, bits: Tensor) -> Batch:
        """See `Source.draw`; `bits` is `(batch,)`, or `(width, batch)` for a population."""
        if self.ratio == "uniform":
            return self._draw_uniformly(bits)
        batch_size = bits.shape[-1]
        number = self.offline_rows(batch_size)
        offline = self.offline.draw(bits[..., :number]) if number else None
        online = self.online.draw(bits[..., number:]) if number < batch_size else None
        return self._join(offline, online)

    def _draw_uniformly(self, bits: Tensor) -> Batch:
        recorded = len(self.offline)
        total = recorded + self.online.sizes
        chosen = bits % total
        is_offline = chosen < recorded
        # Read both sources for every row: the split is known only on the device, and tensor shapes
        # must not depend on it.
        recorded_rows, collected = chosen.clamp(max=recorded - 1), (chosen - recorded).clamp(min=0)
        if self.online.relabels:  # both do; what is left of the bits chooses goals
            left = bits // total
            offline = self.offline.relabelled(recorded_rows, left)
            online = self.online.draw(collected + left * self.online.sizes)
        else:
            offline, online = self.offline.rows(recorded_rows), self.online.draw(collected)
        obs, action, reward, discount, next_obs, *returns = (
            torch.where(is_offline.view(*is_offline.shape, *[1] * (a.ndim - bits.ndim)), a, b)
            for a, b in zip(_columns(offline), _columns(online), strict=True)
        )
        batch = Batch(obs, action, reward, discount, next_obs, is_offline=is_offline)
        return batch.with_fields(returns=returns[0]) if returns else batch

    def _join(self, offline: Batch | None, online: Batch | None) -> Batch:
        parts = [part for part in (offline, online) if part is not None]
        if not self.marks:
            return parts[0]
        # The row axis is the second to last of vectors, and the last of scalars.
        axis = parts[0].reward.ndim - 1
        obs, action, reward, discount, next_obs, *returns = (
            torch.cat(column, dim=axis) for column in zip(*map(_columns, parts), strict=True)
        )
        marks = [torch.full_like(part.reward, part is offline, dtype=torch.bool) for part in parts]
        is_offline = torch.cat(marks, dim=axis)
        batch = Batch(obs, action, reward, discount, next_obs, is_offline=is_offline)
        return batch.with_fields(returns=returns[0]) if returns else batch


def _columns(batch: Batch) -> list[Tensor]:
    """The fields that both sources have, in order; returns are the last, if there are any."""
    return [*batch[:5], *([] if batch.returns is None else [batch.returns])]
