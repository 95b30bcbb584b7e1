"""Sample-efficiency curves: a statistic over seeds, and over tasks, at equal steps or wall time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_training.experiment.curves import (
    Group,
    RunCurve,
    aligned,
    aligned_by_time,
    common_steps,
    common_times,
    has_wall_time,
)
from rl_training.experiment.statistics import (
    RESAMPLES,
    Statistic,
    interquartile_mean,
    interval,
    normalized,
    ragged,
)
from rl_training.types import Json

Axis = Literal["steps", "seconds"]
MOST_POINTS = 500
"""Most points of a curve; of more evaluations, evenly spaced ones are used"""


@dataclass(frozen=True)
class LearningCurve:
    """A statistic of evaluation returns over training, with its interval at every point."""

    by: Axis
    at: np.ndarray
    """Steps, or seconds of training"""
    value: np.ndarray
    low: np.ndarray
    """Lower end of the 95 % interval; NaN with fewer than two seeds"""
    high: np.ndarray
    seeds: int
    """Fewest seeds of a task"""
    notes: tuple[str, ...] = ()

    def to_json(self) -> Json:
        values = {"at": self.at, "value": self.value, "low": self.low, "high": self.high}
        return {
            "by": self.by,
            **{name: [finite_or_none(x) for x in array.tolist()] for name, array in values.items()},
            "seeds": self.seeds,
            "notes": list(self.notes),
        }


def finite_or_none(value: float) -> float | None:
    """Return a number as strict JSON can hold it."""
    return value if np.isfinite(value) else None


def learning_curve(
    group: Group,
    *,
    by: Axis = "steps",
    statistic: Statistic = interquartile_mean,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> LearningCurve:
    """Return the curve of one group: its returns at equal steps, or after equal training times.

    Seeds that were trained together shared the machine, and so each has the time of all.
    """
    return _curve([group], by, lambda _, scores: scores, statistic, resamples, seed)


def efficiency_curve(
    groups: Sequence[Group],
    *,
    by: Axis = "steps",
    statistic: Statistic = interquartile_mean,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> LearningCurve:
    """Return the curve of normalized scores of one algorithm over several tasks, one group each."""
    return _curve(groups, by, _normalized, statistic, resamples, seed)


def _normalized(task: str, scores: np.ndarray) -> np.ndarray:
    values = normalized(task, scores)
    if values is None:
        raise ValueError(f"{task}: there are no constants to normalize its scores")
    return values


def _curve(
    groups: Sequence[Group],
    by: Axis,
    scale: Callable[[str, np.ndarray], np.ndarray],
    statistic: Statistic,
    resamples: int,
    seed: int,
) -> LearningCurve:
    used = [_usable(group, by) for group in groups]
    runs = [run for task in used for run in task]
    notes = _notes(groups, runs, by)
    at = _thinned(common_steps(runs) if by == "steps" else common_times(runs))
    if not all(used) or not len(at):
        empty = np.array([], dtype=np.float64)
        apart = (f"the runs have no {by} in common",) if all(used) else ()
        return LearningCurve(by, empty, empty, empty, empty, 0, (*notes, *apart))
    align = aligned if by == "steps" else aligned_by_time
    returns = [(group.environment, align(group, at)[1]) for group in groups]
    scores = ragged([scale(task, rows).T for task, rows in returns])
    low, high = interval(scores, statistic, resamples=resamples, seed=seed)
    fewest = min(len(rows) for _, rows in returns)
    return LearningCurve(by, at, statistic(scores), low, high, fewest, notes)


def _usable(group: Group, by: Axis) -> list[RunCurve]:
    return [run for run in group.evaluated if by == "steps" or has_wall_time(run)]


def _notes(groups: Sequence[Group], used: Sequence[RunCurve], by: Axis) -> tuple[str, ...]:
    missing = sum(len(group.evaluated) for group in groups) - len(used)
    if by == "steps" or not missing:
        return ()
    return (f"{missing} of the runs did not save their training time and are left out",)


def _thinned(points: np.ndarray) -> np.ndarray:
    if len(points) <= MOST_POINTS:
        return points
    chosen: np.ndarray = points[np.linspace(0, len(points) - 1, MOST_POINTS).round().astype(int)]
    return chosen
