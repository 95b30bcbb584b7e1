"""Rows of a comparison: statistics of final scores, per task and over tasks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.experiment import statistics
from rl_training.experiment.curves import Group, aligned
from rl_training.experiment.efficiency import finite_or_none
from rl_training.types import Json

ALL_TASKS = "all tasks"
MOST_PAIRED = 10
"""Up to this number of groups, every pair is compared; beyond it, each with the best one"""


@dataclass(frozen=True)
class Estimate:
    """A statistic with the ends of its 95 % interval, which are NaN for fewer than two seeds."""

    value: float
    low: float
    high: float

    def to_json(self) -> Json:
        values = {"value": self.value, "low": self.low, "high": self.high}
        return {name: finite_or_none(each) for name, each in values.items()}


@dataclass(frozen=True)
class SeedScore:
    """The final score of one run, so that every number can be traced to its run."""

    seed: int | None
    score: float
    run: Path
    task: str


@dataclass(frozen=True)
class Row:
    """The scores of one group in one task, or of groups of one label over all tasks."""

    task: str
    label: str
    algorithm: str
    estimates: Mapping[str, Estimate]
    """By name: `iqm`, `mean`, `median`, and `optimality_gap` where there are normalized scores. The
    median is over seeds in one task, and over the means of tasks for several tasks."""
    seeds: int
    """Fewest seeds of a task"""
    steps: int | None
    """Step of the evaluation; None if it differs between tasks"""
    scores: tuple[SeedScore, ...]
    """Returns; normalized if this row is over all tasks"""
    notes: tuple[str, ...] = ()

    @property
    def iqm(self) -> float:
        """Interquartile mean."""
        return self.estimates["iqm"].value

    @property
    def low(self) -> float:
        """Lower end of the interval of the interquartile mean."""
        return self.estimates["iqm"].low

    @property
    def high(self) -> float:
        """Upper end of the interval of the interquartile mean."""
        return self.estimates["iqm"].high

    @property
    def mean(self) -> float:
        return self.estimates["mean"].value

    @property
    def median(self) -> float:
        return self.estimates["median"].value

    def to_json(self) -> Json:
        return {
            "task": self.task,
            "label": self.label,
            "algorithm": self.algorithm,
            **{name: found.to_json() for name, found in self.estimates.items()},
            "seeds": self.seeds,
            "steps": self.steps,
            "scores": [
                {"task": each.task, "seed": each.seed, "score": each.score, "run": str(each.run)}
                for each in self.scores
            ],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Improvement:
    """The probability that a run of the first group has a higher score than one of the second."""

    task: str
    first: str
    second: str
    probability: Estimate

    def to_json(self) -> Json:
        return {
            "task": self.task,
            "first": self.first,
            "second": self.second,
            "probability": self.probability.to_json(),
        }


def task_row(group: Group, bootstrap: Mapping[str, Any]) -> Row:
    """Return the row of one group, whose runs have evaluations."""
    steps, scores = aligned(group)
    final = scores[:, -1]
    scaled = statistics.normalized(group.environment, final)
    found = {
        "iqm": _estimate(final, statistics.interquartile_mean, bootstrap),
        "mean": _estimate(final, statistics.mean, bootstrap),
        "median": _estimate(final, statistics.median_of_runs, bootstrap),
    }
    if scaled is not None:
        found["optimality_gap"] = _estimate(scaled, statistics.optimality_gap, bootstrap)
    return Row(
        task=group.environment,
        label=group.label,
        algorithm=group.algorithm,
        estimates=found,
        seeds=len(final),
        steps=int(steps[-1]),
        scores=tuple(
            SeedScore(run.seed, float(score), run.path, group.environment)
            for run, score in zip(group.evaluated, final, strict=True)
        ),
        notes=group.notes,
    )


def _estimate(
    scores: np.ndarray, statistic: statistics.Statistic, bootstrap: Mapping[str, Any]
) -> Estimate:
    low, high = statistics.interval(scores, statistic, **bootstrap)
    return Estimate(float(statistic(scores)), float(low), float(high))


def scaled_tasks(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the tasks whose scores can be normalized."""
    tasks = dict.fromkeys(row.task for row in rows)
    return tuple(task for task in tasks if statistics.normalized(task, 0.0) is not None)


def aggregated_rows(
    rows: Sequence[Row], scaled: Sequence[str], bootstrap: Mapping[str, Any]
) -> list[Row]:
    """Aggregate the labels that have scores in all tasks with a scale, if there are several."""
    if len(scaled) < 2:
        return []
    by_label = rows_by_label(rows, scaled)
    return [
        _aggregate(by_task, scaled, bootstrap)
        for by_task in by_label.values()
        if by_task.keys() >= set(scaled)
    ]


def rows_by_label(rows: Sequence[Row], tasks: Sequence[str]) -> dict[str, dict[str, Row]]:
    """Return the rows of some tasks by label and task."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.task in tasks:
            found.setdefault(row.label, {})[row.task] = row
    return found


def _aggregate(
    by_task: Mapping[str, Row], tasks: Sequence[str], bootstrap: Mapping[str, Any]
) -> Row:
    rows = [by_task[task] for task in tasks]
    scores = tuple(
        SeedScore(each.seed, float(value), each.run, each.task)
        for row in rows
        for each, value in zip(row.scores, _scaled(row), strict=True)
    )
    joined = statistics.ragged([_scaled(row) for row in rows])
    steps, seeds = {row.steps for row in rows}, {row.seeds for row in rows}
    notes = []
    if len(seeds) > 1:
        notes.append(
            f"{rows[0].label} has {min(seeds)} to {max(seeds)} seeds per task; in the IQM, tasks "
            "with more seeds count more"
        )
    return Row(
        task=ALL_TASKS,
        label=rows[0].label,
        algorithm=rows[0].algorithm,
        estimates={
            "iqm": _estimate(joined, statistics.interquartile_mean, bootstrap),
            "mean": _estimate(joined, statistics.mean, bootstrap),
            "median": _estimate(joined, statistics.median, bootstrap),
            "optimality_gap": _estimate(joined, statistics.optimality_gap, bootstrap),
        },
        seeds=min(seeds),
        steps=steps.pop() if len(steps) == 1 else None,
        scores=scores,
        notes=tuple(notes),
    )


def _scaled(row: Row) -> np.ndarray:
    scaled = statistics.normalized(row.task, [each.score for each in row.scores])
    assert scaled is not None, "only tasks with a scale are aggregated"
    return scaled


def scores_by_task(row: Row) -> np.ndarray:
    """Return the scores of a row as `(runs, tasks)`."""
    tasks: dict[str, list[float]] = {}
    for each in row.scores:
        tasks.setdefault(each.task, []).append(each.score)
    return statistics.ragged(list(tasks.values()))


def improvements(rows: Sequence[Row], bootstrap: Mapping[str, Any]) -> list[Improvement]:
    """Compare pairs of groups in every task, and of labels over the tasks that both have."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    found = []
    for task in tasks:
        own = [row for row in rows if row.task == task]
        for first, second in _pairs(own):
            found.append(_improvement(task, [first], [second], bootstrap))
    by_label = rows_by_label(rows, tasks)
    if len(tasks) < 2 or len(by_label) > MOST_PAIRED:
        return found
    for one, other in itertools.combinations(by_label, 2):
        shared = [task for task in by_label[one] if task in by_label[other]]
        if len(shared) > 1:
            mine = [by_label[one][task] for task in shared]
            theirs = [by_label[other][task] for task in shared]
            name = ALL_TASKS if len(shared) == len(tasks) else f"{len(shared)} tasks"
            found.append(_improvement(name, mine, theirs, bootstrap))
    return found


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    ordered = sorted(rows, key=lambda row: -row.iqm if math.isfinite(row.iqm) else math.inf)
    if len(ordered) <= MOST_PAIRED:
        return list(itertools.combinations(ordered, 2))
    return [(ordered[0], other) for other in ordered[1:]]


def _improvement(
    task: str, first: Sequence[Row], second: Sequence[Row], bootstrap: Mapping[str, Any]
) -> Improvement:
    mine = statistics.ragged([[each.score for each in row.scores] for row in first])
    theirs = statistics.ragged([[each.score for each in row.scores] for row in second])
    if statistics.probability_of_improvement(mine, theirs) < 0.5:
        mine, theirs, first, second = theirs, mine, second, first
    value = float(statistics.probability_of_improvement(mine, theirs))
    low, high = statistics.interval_between(mine, theirs, **bootstrap)
    return Improvement(
        task, first[0].label, second[0].label, Estimate(value, float(low), float(high))
    )
