"""Rows that follow one another in time: n-step returns, returns to go, and sums over episodes.

`ends` are the rows after each episode's last one, in order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rl_training.data.packing import RowLayout

CHUNK_ROWS = 4_096


def episode_lengths(ends: np.ndarray) -> np.ndarray:
    return np.diff(ends, prepend=0)


class EpisodeTotals:
    """Where episodes end, and the sum of their rewards, from steps that come in pieces."""

    def __init__(self) -> None:
        self._ends: list[np.ndarray] = []
        self._returns: list[np.ndarray] = []
        self._open, self.rows = 0.0, 0

    def add(self, rewards: np.ndarray, ended: np.ndarray) -> None:
        """Take a piece; its first steps may belong to the episode that is still open."""
        if not len(rewards):
            return
        last = np.flatnonzero(ended)
        starts = np.concatenate([[0], last + 1])
        sums = np.add.reduceat(np.append(rewards.astype(np.float64), 0.0), starts)
        sums[0] += self._open
        self._open = float(sums[-1])
        self._returns.append(sums[:-1])
        self._ends.append(last + 1 + self.rows)
        self.rows += len(rewards)

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends and returns; an episode that is still open ends with the data."""
        ends, returns = np.concatenate(self._ends), np.concatenate(self._returns)
        if not len(ends) or ends[-1] != self.rows:
            ends, returns = np.append(ends, self.rows), np.append(returns, self._open)
        return ends, returns


def returns_to_go(rewards: np.ndarray, ends: np.ndarray, gamma: float) -> np.ndarray:
    """For each row the discounted sum of rewards from there to its episode's end, float32."""
    totals = rewards.astype(np.float64)
    lengths = episode_lengths(ends)
    left = np.repeat(ends, lengths) - np.arange(len(totals))
    covered = 1
    # What covers m steps, and the same from m steps on, together cover 2m.
    while covered < lengths.max(initial=0):
        reaches = np.flatnonzero(left > covered)
        totals[reaches] += gamma**covered * totals[reaches + covered]
        covered *= 2
    return totals.astype(np.float32)


def make_n_step(rows: Tensor, ends: np.ndarray, layout: RowLayout, n_step: int) -> None:
    """Turn one-step rows into n-step ones, in place, on any device.

    A row's reward becomes the sum of `gamma^k r_k` over the next steps, at most `n_step` and none
    beyond the episode's end; its discount and next observation are those where the sum stops.
    """
    total = len(rows)
    for first in range(0, total, CHUNK_ROWS):
        stop = min(first + CHUNK_ROWS, total)
        # Of later rows, which are still one-step ones, as many as the last of these reaches.
        source = rows[first : min(stop + n_step - 1, total)].clone()
        numbers = np.arange(first, stop)
        last_rows = ends[np.searchsorted(ends, numbers, side="right")] - 1
        until = torch.from_numpy(last_rows - first).to(rows.device)
        start = torch.arange(stop - first, device=rows.device)
        reward = torch.zeros(stop - first, device=rows.device)
        discount = torch.ones(stop - first, device=rows.device)
        step_rewards, step_discounts = source[:, layout.reward], source[:, layout.reward + 1]
        for step in range(n_step):
            alive = start + step <= until
            here = torch.minimum(start + step, until)
            reward += torch.where(alive, discount * step_rewards[here], 0.0)
            discount = torch.where(alive, discount * step_discounts[here], discount)
        rows[first:stop, layout.reward] = reward
        rows[first:stop, layout.reward + 1] = discount
        rows[first:stop, layout.next_obs] = source[here][:, layout.next_obs]
