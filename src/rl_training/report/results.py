"""Scores and curves of groups, and comparisons between methods, as the page shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_training.experiment import statistics
from rl_training.experiment.curves import Group, aligned, aligned_by_time
from rl_training.experiment.published import published_curves
from rl_training.report.numbers import Axes, chosen, exact, remembered, rounded
from rl_training.types import Json

MOST_METHODS = 12
"""Most methods that are compared in pairs: those with the highest scores"""
MOST_THRESHOLDS = 61
Scored = dict[int, np.ndarray]
"""The final scores of the seeds of each method"""


def final_scores(group: Group) -> tuple[int, np.ndarray] | None:
    """Return the last step that all seeds have reached, and the score of every seed there."""
    steps, scores = aligned(group)
    return (int(steps[-1]), scores[:, -1]) if scores.size else None


def score_json(group: Group, resamples: int) -> Json | None:
    """Return the final score of a group with its interval and every seed's value."""
    final = final_scores(group)
    if final is None:
        return None
    step, scores = final
    low, high = _interval(scores, resamples)
    return {
        "step": step,
        "seeds": len(scores),
        "iqm": exact(statistics.interquartile_mean(scores)),
        "low": exact(low),
        "high": exact(high),
        "mean": exact(statistics.mean(scores)),
        "median": exact(statistics.median_of_runs(scores)),
        "values": [
            {"seed": run.seed, "step": step, "value": exact(value)}
            for run, value in zip(group.evaluated, scores, strict=True)
        ],
    }


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


def _interval(
    scores: np.ndarray,
    resamples: int,
    statistic: statistics.Statistic = statistics.interquartile_mean,
    named: object = "iqm",
) -> tuple[Any, Any]:
    """Return an interval of a statistic; `named` tells which one it is."""
    return remembered(
        ("interval", named, resamples, scores),
        lambda: statistics.interval(scores, statistic, resamples=resamples),
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


def improvement_json(task: int | None, scored: Scored, tasks: int, resamples: int) -> Json | None:
    """Return the probability of improvement for all pairs of methods; None without a pair.

    Methods with a single seed are left out, because nothing is known about their spread.
    """
    methods = _compared(scored)
    if len(methods) < 2:
        return None
    pairs: list[list[Any]] = []
    for place, first in enumerate(methods):
        for second in methods[place + 1 :]:
            one, other = scored[first], scored[second]
            chance = float(statistics.probability_of_improvement(one, other))
            low, high = remembered(
                ("improvement", resamples, one, other),
                lambda one=one, other=other: statistics.interval_between(
                    one, other, resamples=resamples
                ),
            )
            pairs.append([first, second, *_shares([chance, low, high])])
            pairs.append([second, first, *_shares([1 - chance, 1 - high, 1 - low])])
    return {"task": task, "tasks": tasks, "methods": methods, "pairs": pairs}


def profile_json(
    task: int | None, scored: Scored, tasks: int, unit: str, resamples: int
) -> Json | None:
    """Return the share of runs above each threshold, for every method; None without two methods."""
    methods = _compared(scored)
    if len(methods) < 2:
        return None
    everything = np.concatenate([scored[method].ravel() for method in methods])
    low, high = np.nanmin(everything), np.nanmax(everything)
    room = 0.03 * (high - low) or 1.0
    thresholds = np.linspace(low - room, high + room, MOST_THRESHOLDS)
    curves = []
    for method in methods:
        profile: Callable[[np.ndarray], Any] = lambda values: statistics.performance_profile(  # noqa: E731
            values, thresholds
        )
        lower, upper = _interval(scored[method], resamples, profile, thresholds)
        curves.append(
            {
                "method": method,
                "share": _shares(profile(scored[method])),
                "low": _shares(lower),
                "high": _shares(upper),
            }
        )
    return {
        "task": task,
        "tasks": tasks,
        "unit": unit,
        "thresholds": rounded(thresholds),
        "curves": curves,
    }


def overall_json(scored: Scored, tasks: Sequence[str], note: str, resamples: int) -> Json | None:
    """Return aggregates of normalized scores over tasks, `(runs, tasks)` for each method."""
    if not scored or len(tasks) < 2:
        return None
    kinds = {
        "iqm": statistics.interquartile_mean,
        "mean": statistics.mean,
        "median": statistics.median,
        "gap": statistics.optimality_gap,
    }
    rows = []
    for method, scores in scored.items():
        row: Json = {"method": method}
        for name, statistic in kinds.items():
            low, high = _interval(scores, resamples, statistic, name)
            row[name] = [exact(statistic(scores)), exact(low), exact(high)]
        rows.append(row)
    rows.sort(key=lambda row: -row["iqm"][0])
    return {"tasks": list(tasks), "note": note, "rows": rows}


def normalized_scores(by_task: dict[str, Scored]) -> tuple[list[str], Scored]:
    """Return the tasks with a scale, and the normalized scores of the methods with all of them."""
    scaled = {
        task: {method: statistics.normalized(task, scores) for method, scores in scored.items()}
        for task, scored in by_task.items()
        if scored and statistics.normalized(task, 0.0) is not None
    }
    tasks = sorted(scaled)
    if not tasks:
        return [], {}
    shared = set.intersection(*(set(scaled[task]) for task in tasks))
    together = {
        method: statistics.ragged([scaled[task][method] for task in tasks])
        for method in sorted(shared)
    }
    return tasks, together


def _compared(scored: Scored) -> list[int]:
    """Return the methods with at least two seeds, the best first."""
    several = [method for method, scores in scored.items() if len(scores) > 1]
    best = sorted(several, key=lambda each: -float(statistics.interquartile_mean(scored[each])))
    return best[:MOST_METHODS]


def _shares(values: Sequence[float] | np.ndarray) -> list[float | None]:
    return [None if not np.isfinite(value) else round(float(value), 3) for value in values]
