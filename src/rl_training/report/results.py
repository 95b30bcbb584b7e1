"""Scores and curves of groups, and comparisons between methods, as the page shows them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_training.experiment import statistics
from rl_training.experiment.curves import Group, aligned, aligned_by_time
from rl_training.experiment.published import published_curves
from rl_training.experiment.score_rows import (
    ALL_TASKS,
    Improvement,
    Row,
    aggregated_rows,
    improvements,
    scaled_tasks,
    scores_by_task,
    task_row,
)
from rl_training.report.numbers import Axes, chosen, exact, remembered, rounded
from rl_training.types import Json

MOST_PROFILES = 12
"""Most methods with a performance profile in one chart: those with the highest scores"""
MOST_THRESHOLDS = 61
NORMALIZED, RETURN = "normalized score", "mean evaluation return"
OVERALL_NOTE = (
    "Scores are normalized per task: 0 is a random policy, 1 the reference of the task. Intervals: "
    "95 % stratified bootstrap over the seeds of each task."
)


def group_rows(groups: Sequence[Group], resamples: int) -> list[Row | None]:
    """Return the scores of every group, as `rl_training.compare` computes them."""
    return [_group_row(group, resamples) if group.evaluated else None for group in groups]


def _group_row(group: Group, resamples: int) -> Row:
    bootstrap = {"resamples": resamples, "seed": 0}
    return remembered(("row", resamples, _key(group)), lambda: task_row(group, bootstrap))


def _key(group: Group) -> tuple[object, ...]:
    """Return what the scores of a group depend on."""
    _, scores = aligned(group)
    runs = tuple((run.path, run.seed, run.last_step) for run in group.evaluated)
    return group.environment, group.label, runs, group.notes, scores[:, -1].tobytes()


def score_json(row: Row | None) -> Json | None:
    """Return the final score of a group with its interval and every seed's value."""
    if row is None:
        return None
    return {
        "step": row.steps,
        "seeds": row.seeds,
        **{name: exact(value) for name, value in _ends(row).items()},
        "values": [
            {"seed": each.seed, "step": row.steps, "value": exact(each.score)}
            for each in row.scores
        ],
    }


def _ends(row: Row) -> dict[str, float]:
    return {
        "iqm": row.iqm, "low": row.low, "high": row.high, "mean": row.mean, "median": row.median
    }  # fmt: skip


def curve_json(group: Group, axes: Axes, points: int, resamples: int) -> Json | None:
    """Return the curve of a group over steps."""
    steps, scores = aligned(group)
    return _curve(steps, scores, axes, points, resamples)


def time_json(group: Group, axes: Axes, points: int, resamples: int) -> Json | None:
    """Return the curve of a group over training time; None if its runs did not record it."""
    seconds, scores = aligned_by_time(group)
    return _curve(seconds, scores, axes, points, resamples)


def _curve(
    x: np.ndarray, scores: np.ndarray, axes: Axes, points: int, resamples: int
) -> Json | None:
    if not scores.size:
        return None
    places = chosen(len(x), points)
    values = scores[:, places].T[:, :, None]  # points, runs, one task
    curve: Json = {
        "x": axes.add(x[places]),
        "center": rounded(statistics.interquartile_mean(values)),
        "seeds": scores.shape[0],
        "low": None,
        "high": None,
    }
    if scores.shape[0] > 1:
        low, high = _interval(values, resamples)
        curve |= {"low": rounded(low), "high": rounded(high)}
    return curve


def _interval(scores: np.ndarray, resamples: int) -> tuple[Any, Any]:
    return remembered(
        ("interval", resamples, scores), lambda: statistics.interval(scores, resamples=resamples)
    )


def published_json(task: int, environment: str, last_step: int) -> list[Json]:
    """Return the published curves of a task, with the values nearest below `last_step`."""
    found = []
    for curve in published_curves(environment):
        reached = np.flatnonzero(curve.steps <= last_step)
        final = None
        if len(reached):
            place = int(reached[-1])
            final = {
                "step": int(curve.steps[place]),
                "mean": exact(curve.mean[place]),
                "deviation": exact(curve.deviation[place]),
            }
        found.append(
            {
                "task": task,
                "method": curve.method,
                "variant": curve.variant,
                "note": curve.version_note,
                "seeds": curve.seeds,
                "source": curve.source,
                "steps": [int(step) for step in curve.steps],
                "mean": curve.mean.tolist(),
                "deviation": curve.deviation.tolist(),
                "final": final,
            }
        )
    return found


def comparisons_json(
    rows: Sequence[Row], tasks: Sequence[str], methods: Sequence[str], resamples: int
) -> Json:
    """Return scores over tasks, probabilities of improvement and performance profiles."""
    scores = tuple((row.task, row.label, tuple(each.score for each in row.scores)) for row in rows)
    return remembered(
        ("comparisons", resamples, scores, tuple(tasks), tuple(methods)),
        lambda: _comparisons(rows, tasks, methods, resamples),
    )


def _comparisons(
    rows: Sequence[Row], tasks: Sequence[str], methods: Sequence[str], resamples: int
) -> Json:
    bootstrap = {"resamples": resamples, "seed": 0}
    # A single seed says nothing about the spread, so it is not compared in these ways.
    several = [row for row in rows if row.seeds > 1]
    scaled = scaled_tasks(several)
    aggregates = aggregated_rows(several, scaled, bootstrap)
    pairs = improvements(several, bootstrap)
    compared = len({row.task for row in several})
    chances = [
        _improvement_json(task, [each for each in pairs if each.task == name], compared, methods)
        for task, name in [(None, ALL_TASKS), *enumerate(tasks)]
    ]
    profiles = [_profile_json(None, aggregates, len(scaled), NORMALIZED, methods, resamples)]
    for task, name in enumerate(tasks):
        own = [row for row in several if row.task == name]
        profiles.append(_profile_json(task, own, 1, RETURN, methods, resamples))
    return {
        "overall": _overall_json(aggregates, scaled, methods),
        "improvement": [each for each in chances if each is not None],
        "profiles": [each for each in profiles if each is not None],
    }


def _improvement_json(
    task: int | None, pairs: Sequence[Improvement], tasks: int, methods: Sequence[str]
) -> Json | None:
    if not pairs:
        return None
    shown: list[list[Any]] = []
    for pair in pairs:
        first, second, found = pair.first, pair.second, pair.probability
        chances = [found.value, found.low, found.high]
        reverse = [1 - found.value, 1 - found.high, 1 - found.low]
        shown.append([methods.index(first), methods.index(second), *_shares(chances)])
        shown.append([methods.index(second), methods.index(first), *_shares(reverse)])
    wins = {method: 0.0 for method, *_ in shown}
    for method, _, chance, *_ in shown:
        wins[method] += chance or 0.0
    order = sorted(wins, key=lambda method: -wins[method])
    return {"task": task, "tasks": tasks, "methods": order, "pairs": shown}


def _profile_json(
    task: int | None,
    rows: Sequence[Row],
    tasks: int,
    unit: str,
    methods: Sequence[str],
    resamples: int,
) -> Json | None:
    """Return the share of runs above each threshold for every row; None for fewer than two."""
    if len(rows) < 2:
        return None
    best = sorted(rows, key=lambda row: -row.iqm)[:MOST_PROFILES]
    scores = [scores_by_task(row) for row in best]
    low = min(float(np.nanmin(each)) for each in scores)
    high = max(float(np.nanmax(each)) for each in scores)
    room = 0.03 * (high - low) or 1.0
    thresholds = np.linspace(low - room, high + room, MOST_THRESHOLDS)
    profile = functools.partial(statistics.performance_profile, thresholds=thresholds)
    curves = []
    for row, each in zip(best, scores, strict=True):
        lower, upper = statistics.interval(each, profile, resamples=resamples)
        shares = {"share": profile(each), "low": lower, "high": upper}
        curves.append(
            {
                "method": methods.index(row.label),
                **{name: _shares(values) for name, values in shares.items()},
            }
        )
    return {
        "task": task,
        "tasks": tasks,
        "unit": unit,
        "thresholds": rounded(thresholds),
        "curves": curves,
    }


def _overall_json(
    aggregates: Sequence[Row], tasks: Sequence[str], methods: Sequence[str]
) -> Json | None:
    """Return aggregates of normalized scores over tasks."""
    if not aggregates:
        return None
    rows = [
        {
            "method": methods.index(row.label),
            # The value and both ends of its interval, as the page draws them.
            **{name: list(found.to_json().values()) for name, found in row.estimates.items()},
        }
        for row in sorted(aggregates, key=lambda row: -row.iqm)
    ]
    return {"tasks": list(tasks), "note": OVERALL_NOTE, "rows": rows}


def _shares(values: Sequence[float] | np.ndarray) -> list[float | None]:
    return [round(float(value), 3) if np.isfinite(value) else None for value in values]
