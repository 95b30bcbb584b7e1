"""Statistics of recorded data, computed in one pass over its steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rl_training.data.episodes import EpisodeTotals
from rl_training.data.formats.moments import Moments, Ranges
from rl_training.data.formats.recording import (
    ProgressListener,
    Recording,
    RecordingInfo,
    episode_lengths,
    require_finite,
)
from rl_training.data.packing import action_bounds, fit_spaces, in_model_units, out_of_bounds

SAMPLED_ROWS = 20_000
"""Steps kept for histograms, spread evenly over the data"""
AT_BOUND = 0.99
"""Fraction of half the range from which an action counts as being at its bound"""


@dataclass(frozen=True)
class Summary:
    """Counts, episode returns and lengths, and the ranges of observations and actions."""

    info: RecordingInfo
    steps: int
    dropped: int
    """Steps without a next observation, which are not used for training"""
    returns: np.ndarray
    lengths: np.ndarray
    terminated: int
    """Number of episodes that terminated; the others were truncated"""
    observations: Ranges
    actions: Ranges
    at_bounds: float | None
    """Fraction of action components within 1 % of a bound; None if the data has no action bounds"""
    beyond_bounds: int
    """Action components that exceed a bound by more than rounding"""
    sample: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Observations, actions and rewards of evenly spaced steps, for histograms"""


def summarize(recording: Recording, progress: ProgressListener | None = None) -> Summary:
    """Read all steps once and return their statistics."""
    info = recording.info
    totals, stride = EpisodeTotals(), max(1, info.max_rows // SAMPLED_ROWS)
    observations, actions = Moments(), Moments()
    kept_rows: list[tuple[np.ndarray, ...]] = []
    dropped = terminated = at_bounds = beyond_bounds = 0
    for steps in recording.chunks():
        require_finite(steps, info.name)
        kept = np.ones(len(steps.reward), np.bool_) if steps.kept is None else steps.kept
        obs, action, reward = steps.obs[kept], steps.action[kept], steps.reward[kept]
        observations.add(obs)
        actions.add(action)
        at_bounds += _count_at_bounds(action, info)
        beyond_bounds += _count_beyond_bounds(action, info)
        terminated += int(steps.terminated[kept].sum())
        dropped += int((~kept).sum())
        chosen = slice(-totals.rows % stride, None, stride)
        kept_rows.append((obs[chosen].copy(), action[chosen].copy(), reward[chosen].copy()))
        totals.add(reward, steps.ended[kept])
        if progress is not None:
            progress(totals.rows, info.max_rows)
    ends, returns = totals.finish()
    sample_obs, sample_actions, sample_rewards = (
        np.concatenate(parts) for parts in zip(*kept_rows, strict=True)
    )
    components = totals.rows * sample_actions.shape[1]
    return Summary(
        info,
        totals.rows,
        dropped,
        returns,
        episode_lengths(ends),
        terminated,
        observations.ranges(),
        actions.ranges(),
        at_bounds / components if _known_bounds(info) else None,
        beyond_bounds,
        (sample_obs, sample_actions, sample_rewards),
    )


def _known_bounds(info: RecordingInfo) -> bool:
    low, high = info.action_low, info.action_high
    if low is None or high is None or not info.is_continuous:
        return False
    return bool(np.isfinite(low).all() and np.isfinite(high).all())


def _count_at_bounds(action: np.ndarray, info: RecordingInfo) -> int:
    if not _known_bounds(info):
        return 0
    assert info.action_low is not None
    assert info.action_high is not None
    if info.actions_scaled:
        return int((np.abs(action) >= AT_BOUND).sum())
    middle, half = (
        (info.action_low + info.action_high) / 2,
        (info.action_high - info.action_low) / 2,
    )
    return int((np.abs(action - middle) >= AT_BOUND * half).sum())


def _count_beyond_bounds(action: np.ndarray, info: RecordingInfo) -> int:
    if not _known_bounds(info):
        return 0
    bounds = action_bounds(info, fit_spaces(info, None), None)
    return int(out_of_bounds(in_model_units(action, bounds)).sum())
