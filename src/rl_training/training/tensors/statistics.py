"""Figures of the episodes of worlds, kept on the device and read when they are logged."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.envs.tensors.contract import TensorStep
from rl_training.types import State


class EpisodeStatistics:
    """Return and length of the current and of the last episode of each world, and broken worlds.

    Reading changes nothing, so figures do not depend on how often they are read.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        numbers = torch.zeros(num_envs, dtype=torch.float64, device=device)
        counts = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.state: State = {
            "returns": numbers,
            "lengths": counts,
            "last_returns": numbers.clone(),
            "last_lengths": counts.clone(),
            "broken": counts.clone(),
        }
        """`last_lengths` is 0 before the first end of an episode"""

    def add(self, step: TensorStep) -> None:
        """Add one step of all worlds."""
        state, healthy = self.state, ~step.broken
        ended = (step.terminated | step.truncated) & healthy
        # Not multiplied by a mask: the reward of a broken world may be infinite.
        returns = state["returns"] + torch.where(healthy, step.reward, 0.0)
        lengths = state["lengths"] + 1
        state["last_returns"].copy_(torch.where(ended, returns, state["last_returns"]))
        state["last_lengths"].copy_(torch.where(ended, lengths, state["last_lengths"]))
        goes_on = healthy & ~ended  # the episode of a broken world is discarded
        state["returns"].copy_(torch.where(goes_on, returns, 0.0))
        state["lengths"].copy_(torch.where(goes_on, lengths, 0))
        state["broken"] += step.broken

    def metrics(self, worlds: slice) -> dict[str, float]:
        """Means over the last episode of each world that has ended one."""
        known = self.state["last_lengths"][worlds] > 0
        count = known.sum()
        figures: list[Tensor] = [
            count.double(),
            torch.where(known, self.state["last_returns"][worlds], 0.0).sum() / count,
            self.state["last_lengths"][worlds].sum() / count,
            self.state["broken"][worlds].sum().double(),
        ]
        number, mean_return, mean_length, broken = torch.stack(figures).tolist()
        found = {"broken_worlds": broken} if broken else {}
        if number:
            found |= {"ep_rew_mean": mean_return, "ep_len_mean": mean_length}
        return found

    def broken(self, worlds: slice) -> int:
        """How often worlds broke; waits for the device."""
        return int(self.state["broken"][worlds].sum())
