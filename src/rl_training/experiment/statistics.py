"""Statistics over seeds and tasks, with bootstrap intervals.

The definitions are those of Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the
Statistical Precipice", and of its package rliable. Scores have the shape `(..., runs, tasks)`, so
that a learning curve is `(points, runs, tasks)`; a single row of scores is one task. NaN marks a
run that a task does not have: tasks may have different numbers of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Scores = ArrayLike
Value = Any
"""A number, or an array with the leading axes of the scores"""
Statistic = Callable[[np.ndarray], Value]
"""From `(..., runs, tasks)` to `(...)`, or with further axes at the end"""
PairStatistic = Callable[[np.ndarray, np.ndarray], Value]
RESAMPLES = 2_000
CONFIDENCE = 0.95
TRIMMED = 0.25
"""Share of the scores that the interquartile mean leaves out at each end"""
MOST_AT_ONCE = 2**20
"""Scores that are resampled at once, which bounds the memory"""


def interquartile_mean(scores: Scores) -> Value:
    """Mean of the middle half of all scores, over runs and tasks together.

    A quarter of the scores, rounded down, is left out at each end. Where tasks have different
    numbers of runs, those with more runs count more.
    """
    values = _checked(scores)
    pooled = np.sort(values.reshape(*values.shape[:-2], -1), axis=-1)  # NaN comes last
    count = np.sum(~np.isnan(pooled), axis=-1, keepdims=True)
    cut = (TRIMMED * count).astype(np.int64)
    place = np.arange(pooled.shape[-1])
    return _mean(pooled, (place >= cut) & (place < count - cut), axis=-1)


def mean(scores: Scores) -> Value:
    """Mean over tasks of the mean over runs."""
    return np.mean(_task_means(_checked(scores)), axis=-1)


def median(scores: Scores) -> Value:
    """Median over tasks of the mean over runs; for a single task, that is its mean."""
    return np.median(_task_means(_checked(scores)), axis=-1)


def median_of_runs(scores: Scores) -> Value:
    """Median over runs, then mean over tasks: what `median` would be for a single task."""
    return np.mean(np.nanmedian(_checked(scores), axis=-2), axis=-1)


def optimality_gap(scores: Scores, gamma: float = 1.0) -> Value:
    """How far scores are below `gamma` on average; those above it count as `gamma`."""
    return gamma - mean(np.minimum(_checked(scores), gamma))


def probability_of_improvement(first: Scores, second: Scores) -> Value:
    """Probability that a run of `first` beats one of `second`, as a mean over tasks.

    All pairs of runs are compared, and a tie counts as half. The numbers of runs may differ.
    """
    one, other = _checked(first), _checked(second)
    if one.shape[-1] != other.shape[-1]:
        raise ValueError(f"{one.shape[-1]} and {other.shape[-1]} tasks cannot be compared")
    left, right = one[..., :, None, :], other[..., None, :, :]
    wins = (left > right) + 0.5 * (left == right)
    by_task = _mean(wins, ~(np.isnan(left) | np.isnan(right)), axis=(-3, -2))
    return np.mean(by_task, axis=-1)


def performance_profile(scores: Scores, thresholds: ArrayLike, *, average: bool = False) -> Value:
    """Share of runs with a score above each threshold, `(..., thresholds)`, as a mean over tasks.

    With `average`, the share of tasks whose mean over runs is above it.
    """
    values = _checked(scores)
    if average:
        values = _task_means(values)[..., None, :]
    known = ~np.isnan(values)
    shares = [
        np.mean(_mean((values > each).astype(np.float64), known, axis=-2), axis=-1)
        for each in np.asarray(thresholds, dtype=np.float64)
    ]
    return np.stack(shares, axis=-1)


def stratified_bootstrap(
    scores: Scores,
    statistic: Statistic,
    *,
    resamples: int = RESAMPLES,
    seed: int | np.random.Generator = 0,
    indices: np.ndarray | None = None,
) -> np.ndarray:
    """Return the statistic of resampled runs, `(resamples, ...)`.

    The runs of each task are drawn with replacement from those of the same task, and are the same
    at all points of a curve. `indices`, `(resamples, runs, tasks)`, replaces the random choice.
    """
    values = _checked(scores)
    chosen = _indices(values, resamples, seed) if indices is None else np.asarray(indices)
    tasks = np.arange(values.shape[-1])
    return _in_parts(
        lambda part: statistic(_resampled(values, chosen[part], tasks)), len(chosen), values.size
    )


def bootstrap_between(
    first: Scores,
    second: Scores,
    statistic: PairStatistic,
    *,
    resamples: int = RESAMPLES,
    seed: int | np.random.Generator = 0,
    indices: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Like `stratified_bootstrap`, for a statistic of two samples that are drawn separately."""
    one, other = _checked(first), _checked(second)
    random = np.random.default_rng(seed)
    mine, theirs = indices or (
        _indices(one, resamples, random),
        _indices(other, resamples, random),
    )
    tasks = np.arange(one.shape[-1])
    return _in_parts(
        lambda part: statistic(
            _resampled(one, mine[part], tasks), _resampled(other, theirs[part], tasks)
        ),
        len(mine),
        one.size * other.shape[-2],
    )


def interval(
    scores: Scores,
    statistic: Statistic = interquartile_mean,
    *,
    resamples: int = RESAMPLES,
    seed: int | np.random.Generator = 0,
    confidence: float = CONFIDENCE,
    indices: np.ndarray | None = None,
) -> tuple[Value, Value]:
    """Return the ends of the percentile bootstrap interval of a statistic.

    They are NaN if a task has fewer than two runs, which say nothing about the spread.
    """
    drawn = stratified_bootstrap(scores, statistic, resamples=resamples, seed=seed, indices=indices)
    return percentiles(drawn, confidence, known=_has_spread(scores))


def interval_between(
    first: Scores,
    second: Scores,
    statistic: PairStatistic = probability_of_improvement,
    *,
    resamples: int = RESAMPLES,
    seed: int | np.random.Generator = 0,
    confidence: float = CONFIDENCE,
    indices: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[Value, Value]:
    """Like `interval`, for a statistic of two samples."""
    drawn = bootstrap_between(
        first, second, statistic, resamples=resamples, seed=seed, indices=indices
    )
    return percentiles(drawn, confidence, known=_has_spread(first) and _has_spread(second))


def percentiles(
    drawn: np.ndarray, confidence: float = CONFIDENCE, *, known: bool = True
) -> tuple[Value, Value]:
    """Return the values between which the middle `confidence` of the resamples lies."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence}: must be between 0 and 1")
    outside = 50 * (1 - confidence)
    low, high = np.percentile(drawn, [outside, 100 - outside], axis=0)
    return (low, high) if known else (low * math.nan, high * math.nan)


def normalized(task: str, scores: Scores) -> np.ndarray | None:
    """Scores of a task on a scale from 0 (random policy) to 1 (reference); None without a scale.

    The scale is that of `rl_training.data.scores.comparison_scale`.
    """
    from rl_training.data.scores import comparison_scale

    scale = comparison_scale(task)
    if scale is None:
        return None
    return (np.asarray(scores, dtype=np.float64) - scale.low) / (scale.high - scale.low)


def ragged(tasks: Sequence[ArrayLike]) -> np.ndarray:
    """Join the scores of several tasks, `(runs,)` or `(points, runs)` each.

    The result is `(runs, tasks)` or `(points, runs, tasks)`, with NaN where a task has fewer runs.
    """
    arrays = [np.asarray(each, dtype=np.float64) for each in tasks]
    most = max(array.shape[-1] for array in arrays)
    padded = [
        np.concatenate(
            [array, np.full((*array.shape[:-1], most - array.shape[-1]), np.nan)], axis=-1
        )
        for array in arrays
    ]
    return np.stack(padded, axis=-1)


def _checked(scores: Scores) -> np.ndarray:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim < 2 or 0 in values.shape[-2:]:
        raise ValueError(f"scores of shape {values.shape}: need (..., runs, tasks), not empty")
    return values


def _mean(values: np.ndarray, counted: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Mean of the values that are counted; NaN if there are none."""
    total = np.where(counted, values, 0.0).sum(axis=axis)
    number = counted.sum(axis=axis)
    means: np.ndarray = np.divide(
        total, number, out=np.full(np.shape(total), np.nan), where=number > 0
    )
    return means


def _task_means(values: np.ndarray) -> np.ndarray:
    return _mean(values, ~np.isnan(values), axis=-2)


def _runs_per_task(values: np.ndarray) -> np.ndarray:
    """Number of runs of each task; they come first, and have a score at some point."""
    known = ~np.isnan(values).all(axis=tuple(range(values.ndim - 2)))
    counts: np.ndarray = known.sum(axis=0)
    if not (known == (np.arange(len(known))[:, None] < counts)).all():
        raise ValueError("the runs that a task does not have must come after those that it has")
    return counts


def _has_spread(scores: Scores) -> bool:
    return bool(_runs_per_task(_checked(scores)).min() >= 2)


def _indices(values: np.ndarray, resamples: int, seed: int | np.random.Generator) -> np.ndarray:
    """Draw runs for every resample and task, `(resamples, runs, tasks)`.

    A run that a task does not have stays one, so that every resample has as many runs.
    """
    if resamples < 1:
        raise ValueError(f"resamples = {resamples}: must be positive")
    random, counts = np.random.default_rng(seed), _runs_per_task(values)
    if not counts.all():
        raise ValueError("a task has no runs")
    size = (resamples, *values.shape[-2:])
    if (counts == values.shape[-2]).all():
        return random.integers(values.shape[-2], size=size)
    place = np.arange(values.shape[-2])[:, None]
    return np.where(place < counts, random.integers(counts, size=size), place)


def _resampled(values: np.ndarray, indices: np.ndarray, tasks: np.ndarray) -> np.ndarray:
    """Return `(resamples, ..., runs, tasks)`."""
    drawn: np.ndarray = np.moveaxis(values[..., indices, tasks], -3, 0)
    return drawn


def _in_parts(compute: Callable[[slice], np.ndarray], total: int, size: int) -> np.ndarray:
    """Compute for some resamples at a time, so that the memory stays small."""
    step = max(1, MOST_AT_ONCE // size)
    parts = [compute(slice(first, first + step)) for first in range(0, total, step)]
    return np.concatenate(parts)
