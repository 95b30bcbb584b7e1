"""Computations over episodes: next actions, n-step returns, windows, returns to go, sums.

`ends` holds the exclusive end row of each episode, in order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rl_training.data.formats.recording import episode_lengths
from rl_training.data.packing import RowLayout
from rl_training.types import ReturnAfterTruncation

CHUNK_ROWS = 4_096


class EpisodeTotals:
    """Accumulate the ends and returns of episodes from chunks of steps."""

    def __init__(self) -> None:
        self._ends: list[np.ndarray] = []
        self._returns: list[np.ndarray] = []
        self._open, self.rows = 0.0, 0

    def add(self, rewards: np.ndarray, ended: np.ndarray) -> None:
        """Add a chunk; its first steps may continue the episode that is still open."""
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
        """Return ends and returns; an episode that is still open ends with the data."""
        ends, returns = np.concatenate(self._ends), np.concatenate(self._returns)
        if not len(ends) or ends[-1] != self.rows:
            ends, returns = np.append(ends, self.rows), np.append(returns, self._open)
        return ends, returns


def returns_to_go(rewards: np.ndarray, ends: np.ndarray, gamma: float) -> np.ndarray:
    """Discounted sum of rewards from each row to the end of its episode, float32."""
    totals = rewards.astype(np.float64)
    lengths = episode_lengths(ends)
    left = np.repeat(ends, lengths) - np.arange(len(totals))
    covered = 1
    # Doubling: a sum over m steps plus the sum over the m steps after them covers 2m steps.
    while covered < lengths.max(initial=0):
        reaches = np.flatnonzero(left > covered)
        totals[reaches] += gamma**covered * totals[reaches + covered]
        covered *= 2
    return totals.astype(np.float32)


def episode_values(
    rewards: np.ndarray,
    ends: np.ndarray,
    is_truncated: np.ndarray,
    gamma: float,
    after: ReturnAfterTruncation,
) -> np.ndarray:
    """Returns to go, float32, as estimates of the value of the policy that acted.

    The rewards after a truncation are unknown: `after` says what they count as. `is_truncated`
    says which of the episodes were. The result is not finite where it overflows.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the result
        totals = returns_to_go(rewards, ends, gamma)
        if after == "last_reward" and gamma > 0:
            forever = np.where(is_truncated, rewards[ends - 1].astype(np.float64), 0) / (1 - gamma)
            lengths = episode_lengths(ends)
            left = np.repeat(ends, lengths) - np.arange(len(totals))
            totals += (gamma**left * np.repeat(forever, lengths)).astype(np.float32)
    return totals


def add_returns(
    rows: Tensor, ends: np.ndarray, layout: RowLayout, gamma: float, after: ReturnAfterTruncation
) -> None:
    """Set the return of each one-step row, in place."""
    rewards, discounts = (
        rows[:, column].cpu().numpy() for column in (layout.reward, layout.reward + 1)
    )
    is_truncated = discounts[ends - 1] != 0
    returns = episode_values(rewards, ends, is_truncated, gamma, after)
    rows[:, -1] = torch.from_numpy(returns).to(rows.device)


def add_next_actions(rows: Tensor, ends: np.ndarray, layout: RowLayout) -> None:
    """Set the next action of each one-step row to the action of the row after it, in place.

    The last row of an episode has none: the row after it belongs to another episode. It gets NaN,
    so that a target that uses it by mistake is not finite, and the run stops.
    """
    rows[:-1, layout.next_action] = rows[1:, layout.action]
    rows[torch.from_numpy(ends - 1).to(rows.device), layout.next_action] = torch.nan


def make_n_step(rows: Tensor, ends: np.ndarray, layout: RowLayout, n_step: int) -> None:
    """Convert one-step rows to n-step rows, in place, on any device.

    The reward of a row becomes the sum of `gamma^k r_k` over at most `n_step` steps, up to the end
    of the episode. Its discount, next observation and next action are those at the end of the sum.
    """
    total = len(rows)
    for first in range(0, total, CHUNK_ROWS):
        stop = min(first + CHUNK_ROWS, total)
        # Includes the next `n_step - 1` rows, which are still one-step rows.
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
        # A return starts at the row's own observation.
        later = slice(layout.next_obs.start, layout.next_action.stop)
        rows[first:stop, later] = source[here][:, later]


def windows(rows: Tensor, ends: np.ndarray, layout: RowLayout, length: int) -> Tensor:
    """Return rows whose action is a chunk of `length` actions, one for each kept step.

    They are the transitions of `NStepAccumulator` with `chunks`; `windows_kept` says which steps
    start one. The given one-step rows are changed.
    """
    kept = torch.from_numpy(windows_kept(rows, ends, layout, length)).to(rows.device)
    last_rows = ends[np.searchsorted(ends, np.arange(len(rows)), side="right")] - 1
    starts, until = (
        torch.arange(len(rows), device=rows.device)[kept],
        _placed(last_rows, rows)[kept],
    )
    actions = rows[:, layout.action]
    chunk = [actions[torch.minimum(starts + step, until)] for step in range(length)]
    make_n_step(rows, ends, layout, length)
    wanted = rows[kept]
    return torch.cat([wanted[:, : layout.obs_dim], *chunk, wanted[:, layout.reward :]], dim=1)


def windows_kept(rows: Tensor, ends: np.ndarray, layout: RowLayout, length: int) -> np.ndarray:
    """Return which steps `(rows,)` start a window.

    Those of complete windows do, and those after which the episode was terminated sooner.
    """
    episode = np.searchsorted(ends, np.arange(len(rows)), side="right")
    terminated = (rows[_placed(ends - 1, rows), layout.reward + 1] == 0).cpu().numpy()
    kept: np.ndarray = (ends[episode] - np.arange(len(rows)) >= length) | terminated[episode]
    return kept


def _placed(numbers: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(numbers).to(like.device)
