"""Observations shifted and scaled to zero mean and unit variance."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.types import Batch, State

CLIP = 10.0
EPSILON = 1e-8


class ObservationNormalizer:
    """Mean and variance of all observations seen, kept with the policy they belong to.

    Replay keeps raw observations; they are normalised when they are used, with the statistics of
    that moment.
    """

    def __init__(self, obs_dim: int, device: torch.device | str = "cpu") -> None:
        # In double precision: over a million steps a float32 mean stops moving.
        self.state: State = {
            "mean": torch.zeros(obs_dim, dtype=torch.float64, device=device),
            "square_sum": torch.zeros(obs_dim, dtype=torch.float64, device=device),
            "count": torch.zeros((), dtype=torch.float64, device=device),
        }
        self._refresh()

    def observe(self, obs: Tensor) -> None:
        """Take observations `(batch, obs_dim)` into the statistics (Chan's parallel form)."""
        mean, square_sum, count = (self.state[k] for k in ("mean", "square_sum", "count"))
        rows = obs.double()
        number = rows.shape[0]
        delta = rows.mean(0) - mean
        total = count + number
        square_sum += (rows - rows.mean(0)).square().sum(0) + delta**2 * (count * number / total)
        mean += delta * (number / total)
        count += number
        self._refresh()

    def normalize(self, obs: Tensor) -> Tensor:
        """Normalised observations, clipped to +-10."""
        return ((obs - self._shift) * self._scale).clamp(-CLIP, CLIP)

    def normalize_batch(self, batch: Batch) -> Batch:
        return batch._replace(
            obs=self.normalize(batch.obs), next_obs=self.normalize(batch.next_obs)
        )

    def load_state(self, state: State) -> None:
        for name, tensor in self.state.items():
            tensor.copy_(state[name])
        self._refresh()

    def _refresh(self) -> None:
        variance = self.state["square_sum"] / self.state["count"].clamp(min=1)
        # Until there are two observations the scale is unknown: leave it at one.
        known = self.state["count"] > 1
        scale = torch.where(known, torch.rsqrt(variance + EPSILON), torch.ones_like(variance))
        self._shift, self._scale = self.state["mean"].float(), scale.float()
