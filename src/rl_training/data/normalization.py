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
    that moment. The statistics live on the host, where observations arrive; `shift` and `scale`
    follow them on the learner's device.
    """

    def __init__(self, obs_dim: int, device: torch.device | str = "cpu") -> None:
        # In double precision: over a million steps a float32 mean stops moving.
        self.state: State = {
            "mean": torch.zeros(obs_dim, dtype=torch.float64),
            "square_sum": torch.zeros(obs_dim, dtype=torch.float64),
            "count": torch.zeros((), dtype=torch.float64),
        }
        self.place(torch.zeros(2, obs_dim, device=device))

    def place(self, storage: Tensor) -> None:
        """Keep `shift` and `scale` in these two rows, such as a population's, from now on."""
        self.shift, self.scale = storage
        self._storage = storage
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
        return normalize(obs, self._host[0], self._host[1])

    def load_state(self, state: State) -> None:
        for name, tensor in self.state.items():
            tensor.copy_(state[name])
        self._refresh()

    def _refresh(self) -> None:
        variance = self.state["square_sum"] / self.state["count"].clamp(min=1)
        # Until there are two observations the scale is unknown: leave it at one.
        known = self.state["count"] > 1
        scale = torch.where(known, torch.rsqrt(variance + EPSILON), torch.ones_like(variance))
        self._host = torch.stack([self.state["mean"].float(), scale.float()])
        pinned = self._host.pin_memory() if self._storage.is_cuda else self._host
        self._storage.copy_(pinned, non_blocking=True)


def normalize(obs: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return ((obs - shift) * scale).clamp(-CLIP, CLIP)


def normalize_batch(batch: Batch, shift: Tensor, scale: Tensor) -> Batch:
    obs, next_obs = (normalize(rows, shift, scale) for rows in (batch.obs, batch.next_obs))
    return Batch(obs, batch.action, batch.reward, batch.discount, next_obs, *batch[5:])
