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
from rl_training.observations import ObservationLeaf, ObservationSpec

SAMPLED_ROWS = 20_000
"""Steps kept for histograms, spread evenly over the data"""
AT_BOUND = 0.99
"""Fraction of half the range from which an action counts as being at its bound"""


@dataclass(frozen=True)
class LeafSummary:
    """The values of one leaf of the observations."""

    leaf: ObservationLeaf
    ranges: Ranges
    """Of each component; of an image, of all its pixels together"""


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
    observations: tuple[LeafSummary, ...]
    """One for each leaf, in the order of the rows"""
    actions: Ranges
    at_bounds: float | None
    """Fraction of action components within 1 % of a bound; None if the data has no action bounds"""
    beyond_bounds: int
    """Action components that exceed a bound by more than rounding"""
    sample: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Numbers of observations, actions and rewards of evenly spaced steps, for histograms"""


def summarize(recording: Recording, progress: ProgressListener | None = None) -> Summary:
    """Read all steps once and return their statistics."""
    info = recording.info
    totals, stride = EpisodeTotals(), max(1, info.max_rows // SAMPLED_ROWS)
    observations, actions = LeafMoments(info.observation), Moments()
    kept_rows: list[tuple[np.ndarray, ...]] = []
    dropped = terminated = at_bounds = beyond_bounds = 0
    for steps in recording.chunks():
        require_finite(steps, info)
        kept = np.ones(len(steps.reward), np.bool_) if steps.kept is None else steps.kept
        obs, action, reward = steps.obs[kept], steps.action[kept], steps.reward[kept]
        observations.add(obs)
        actions.add(action)
        at_bounds += _count_at_bounds(action, info)
        beyond_bounds += _count_beyond_bounds(action, info)
        terminated += int(steps.terminated[kept].sum())
        dropped += int((~kept).sum())
        chosen = slice(-totals.rows % stride, None, stride)
        kept_rows.append(
            (_numbers(obs[chosen], info), action[chosen].copy(), reward[chosen].copy())
        )
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
        observations.summaries(),
        actions.ranges(),
        at_bounds / components if _known_bounds(info) else None,
        beyond_bounds,
        (sample_obs, sample_actions, sample_rewards),
    )


def _numbers(rows: np.ndarray, info: RecordingInfo) -> np.ndarray:
    """The numbers of observations side by side, without the leaves of other kinds."""
    observation = info.given_observation
    if observation is None:
        return rows.copy()
    leaves = observation.unpack(rows)
    numbers = [leaf.name for leaf in observation.leaves if leaf.kind == "numbers"]
    parts = [leaves[name].reshape(len(rows), -1).astype(np.float32) for name in numbers]
    return np.concatenate([np.zeros((len(rows), 0), np.float32), *parts], axis=1)


class LeafMoments:
    """Running statistics of each leaf of observations."""

    def __init__(self, observation: ObservationSpec) -> None:
        self._observation = observation
        self._moments = {leaf.name: Moments() for leaf in observation.leaves}

    def add(self, rows: np.ndarray) -> None:
        """Add observations, `(n, size)`."""
        if self._observation.is_vector:
            self._moments[""].add(rows)
            return
        for name, values in self._observation.unpack(rows).items():
            if self._observation.leaf(name).kind == "image":
                self._moments[name].merge(_pixel_moments(values))
            else:
                self._moments[name].add(values.reshape(len(rows), -1))

    def summaries(self) -> tuple[LeafSummary, ...]:
        return tuple(
            LeafSummary(leaf, self._moments[leaf.name].ranges())
            for leaf in self._observation.leaves
        )


def _pixel_moments(images: np.ndarray) -> Moments:
    """The moments of all pixels, from how often each of the 256 values occurs."""
    counts = np.bincount(images.reshape(-1), minlength=256)
    present = np.flatnonzero(counts).astype(np.float64)
    return Moments.of_values(present[:, None], counts[counts > 0])


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
