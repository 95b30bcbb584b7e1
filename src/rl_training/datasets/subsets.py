"""Choose episodes of recorded data: at random, or by their return."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl_training.data.episodes import EpisodeTotals
from rl_training.data.fingerprint import Hasher
from rl_training.data.formats.recording import (
    ProgressListener,
    Recording,
    Steps,
    episode_lengths,
    require_finite,
)
from rl_training.errors import DataError

ROUNDING = 1e-9
"""Tolerance for sums and products of fractions"""


@dataclass(frozen=True)
class EpisodeTable:
    """The return and length of each episode of recorded data."""

    returns: np.ndarray
    """Sum of the recorded rewards of each episode, float64"""
    lengths: np.ndarray
    sha256: str
    """Hash of all steps in float32"""


class SubsetRecording:
    """The episodes of a recording that were chosen, in their order."""

    def __init__(self, recording: Recording, table: EpisodeTable, chosen: np.ndarray) -> None:
        """`chosen` is a bool for each episode."""
        self._recording, self._chosen = recording, chosen
        self.info = replace(recording.info, max_rows=int(table.lengths[chosen].sum()))

    def chunks(self) -> Iterator[Steps]:
        episode = 0
        for steps in self._recording.chunks():
            kept = np.ones(len(steps.reward), np.bool_) if steps.kept is None else steps.kept.copy()
            ended = steps.ended[kept]
            episodes = episode + np.cumsum(ended) - ended
            episode += int(ended.sum())
            kept[kept] = self._chosen[episodes]
            if kept.any():
                yield steps._replace(kept=kept)


def read_episodes(recording: Recording, progress: ProgressListener | None = None) -> EpisodeTable:
    """Read all steps once and return the episodes; steps without a next observation do not count.

    An episode that is still open at the end of the data counts as a complete one.
    """
    totals, hasher = EpisodeTotals(), Hasher()
    for steps in recording.chunks():
        require_finite(steps, recording.info)
        kept = slice(None) if steps.kept is None else steps.kept
        columns = (
            steps.obs,
            steps.action,
            steps.reward[:, None],
            steps.terminated[:, None],
            steps.next_obs,
        )
        rows = np.concatenate([column[kept].astype(np.float32) for column in columns], axis=1)
        hasher.add(rows, steps.ended[kept])
        totals.add(steps.reward[kept], steps.ended[kept])
        if progress is not None:
            progress(totals.rows, recording.info.max_rows)
    if not totals.rows:
        raise DataError(f"{recording.info.name}: contains no steps")
    ends, returns = totals.finish()
    return EpisodeTable(returns, episode_lengths(ends), hasher.digest())


def best_episodes(
    table: EpisodeTable,
    *,
    top: float | None = None,
    min_return: float | None = None,
    max_return: float | None = None,
    min_length: int | None = None,
) -> np.ndarray:
    """Return which episodes fulfill all conditions, bool `(episodes,)`.

    `top` is the fraction of episodes with the highest returns, of those that fulfill the other
    conditions, rounded up. Of equal returns, the earlier episodes are chosen first.
    """
    chosen = np.ones(len(table.returns), np.bool_)
    if min_return is not None:
        chosen &= table.returns >= min_return
    if max_return is not None:
        chosen &= table.returns <= max_return
    if min_length is not None:
        chosen &= table.lengths >= min_length
    if top is not None:
        order = np.argsort(-table.returns, kind="stable")
        order = order[chosen[order]]
        number = max(1, math.ceil(top * len(order) - ROUNDING))
        chosen[:] = False
        chosen[order[:number]] = True
    return chosen


def split_episodes(episodes: int, fractions: Sequence[float], seed: int, name: str) -> np.ndarray:
    """Assign each episode at random to a part: its index, or -1 if the fractions leave it out.

    The same number of episodes, fractions and seed always give the same parts.
    """
    exact = np.asarray(fractions, np.float64) * episodes
    left_out = episodes - exact.sum()
    shares = np.append(exact, max(left_out, 0.0))
    counts = np.floor(shares + ROUNDING).astype(np.int64)
    # The episodes that are left go to the parts with the largest remainders.
    order = np.argsort(-(shares - counts), kind="stable")
    counts[order[: episodes - int(counts.sum())]] += 1
    if (counts[:-1] == 0).any():
        part = int(np.flatnonzero(counts[:-1] == 0)[0])
        raise DataError(
            f"{name}: has {episodes:,} episodes, too few for a part of {fractions[part]:g}"
        )
    parts = np.append(np.arange(len(fractions)), -1)
    assigned = np.repeat(parts, counts)
    generator = np.random.default_rng(np.random.SeedSequence([seed, episodes]))
    return np.asarray(generator.permutation(assigned))
