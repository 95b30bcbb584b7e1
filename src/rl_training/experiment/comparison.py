"""`compare`: the final scores of runs, with intervals, per task and over tasks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_training.errors import UserError
from rl_training.experiment import statistics
from rl_training.experiment.curves import (
    Group,
    RunCurve,
    find_runs,
    group_runs,
    read_curve,
)
from rl_training.experiment.overview import RUNNING, UNREADABLE, shown_text
from rl_training.experiment.score_rows import (
    Improvement,
    Row,
    aggregated_rows,
    improvements,
    rows_by_label,
    scaled_tasks,
    scores_by_task,
    task_row,
)
from rl_training.experiment.settings import comparable_settings, differing_settings
from rl_training.types import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMED = 5
"""Most names that a note lists"""
OF_TASKS = ("env_id", "env_kwargs", "wrappers", "dataset", "total_timesteps")
"""Settings that differ between tasks by nature"""


@dataclass(frozen=True)
class Profile:
    """The share of runs whose normalized score is above each threshold."""

    label: str
    thresholds: np.ndarray
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`."""

    groups: list[Group]
    rows: list[Row]
    """One row for each group with evaluations"""
    aggregates: list[Row]
    """One row for each algorithm over all tasks, of normalized scores"""
    improvements: list[Improvement]
    """For every pair of groups, per task and then over all tasks that both have"""
    notes: tuple[str, ...]
    """What was left out, and what to mind"""
    resamples: int = statistics.RESAMPLES
    seed: int = 0
    scaled_tasks: tuple[str, ...] = field(default=())
    """Tasks whose scores can be normalized"""

    def table(self, width: int = 80) -> str:
        """Return the results as text of at most `width` columns."""
        from rl_training.experiment.comparison_text import comparison_text

        return comparison_text(self.rows, self.aggregates, self.improvements, self.notes, width)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw learning curves, and write them to `path` if it is given (PNG, PDF, SVG, ...)."""
        from rl_training.experiment.comparison_picture import draw_comparison

        overall = [row.label for row in self.aggregates]
        bootstrap = {"resamples": self.resamples, "seed": self.seed}
        return draw_comparison(self.groups, overall, self.scaled_tasks, path, bootstrap)

    def profiles(self, thresholds: Sequence[float] | np.ndarray | None = None) -> list[Profile]:
        """Return the performance profile of each aggregated row, with intervals."""
        if not self.aggregates:
            return []
        scores = [scores_by_task(row) for row in self.aggregates]
        if thresholds is None:
            highest = max(1.0, *(float(np.nanmax(each)) for each in scores))
            thresholds = np.linspace(0.0, highest, 101)
        at = np.asarray(thresholds, dtype=np.float64)
        profile = functools.partial(statistics.performance_profile, thresholds=at)
        found = []
        for row, each in zip(self.aggregates, scores, strict=True):
            ends = statistics.interval(each, profile, resamples=self.resamples, seed=self.seed)
            found.append(Profile(row.label, at, profile(each), *ends))
        return found

    def to_json(self) -> Json:
        """Return all results as values that `json.dumps` accepts."""
        return {
            "final_score": "mean return of the last evaluation of each run",
            "interval": "95 % percentile bootstrap over seeds, stratified by task",
            "resamples": self.resamples,
            "seed": self.seed,
            "rows": [row.to_json() for row in self.rows],
            "aggregates": [row.to_json() for row in self.aggregates],
            "probability_of_improvement": [each.to_json() for each in self.improvements],
            "notes": list(self.notes),
        }


def compare(
    paths: str | Path | Sequence[str | Path],
    *,
    resamples: int = statistics.RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare runs: final scores with intervals over seeds, per task and over tasks.

    `paths` are run folders, or folders that contain them. Runs that differ only in seed form a
    group. The final score of a run is the mean return of its last evaluation; if runs of a group
    have different lengths, that of the last step which all of them reached. `resamples` and `seed`
    are those of the bootstrap. Raises `UserError` if there is nothing to compare.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if resamples < 1:
        raise UserError(f"resamples = {resamples}: must be at least 1")
    curves = _read_all(given)
    groups = group_runs(curves)
    bootstrap: dict[str, Any] = {"resamples": resamples, "seed": seed}
    rows = [task_row(group, bootstrap) for group in groups if group.evaluated]
    if not rows:
        raise UserError(_nothing_evaluated(curves))
    scaled = scaled_tasks(rows)
    aggregates = aggregated_rows(rows, scaled, bootstrap)
    return Comparison(
        groups=groups,
        rows=rows,
        aggregates=aggregates,
        improvements=improvements(rows, bootstrap),
        notes=(
            *_run_notes(curves, groups),
            *_task_notes(rows, scaled, aggregates),
            *_setting_notes(groups, scaled, aggregates),
        ),
        resamples=resamples,
        seed=seed,
        scaled_tasks=scaled,
    )


def _read_all(paths: Sequence[str | Path]) -> list[RunCurve]:
    if not paths:
        raise UserError("nothing to compare; name run folders, or folders that contain them")
    for path in paths:
        if not find_runs([path]):
            raise UserError(
                f"{path}: contains no runs; name run folders, or folders that contain them, such "
                "as `runs`"
            )
    return [read_curve(path) for path in find_runs(paths)]


def _nothing_evaluated(curves: Sequence[RunCurve]) -> str:
    reasons = [f"{curve.path}: {curve.problem}" for curve in curves[:MOST_NAMED] if curve.problem]
    what = "the run has" if len(curves) == 1 else f"none of the {len(curves)} runs has"
    return (
        f"{what} {'no' if len(curves) == 1 else 'an'} evaluation to compare; runs are evaluated "
        "every eval_interval steps and at their end\n  " + "\n  ".join(reasons)
    )


def _run_notes(curves: Sequence[RunCurve], groups: Sequence[Group]) -> list[str]:
    notes = []
    for curve in [each for each in curves if each.state == UNREADABLE][:MOST_NAMED]:
        notes.append(f"{curve.name} is left out: {curve.problem}")
    if running := sum(curve.state == RUNNING for curve in curves):
        notes.append(f"{running} of the runs are still training, so their scores will change")
    for group in groups:
        notes += [f"{group.environment}, {group.label}: {note}" for note in group.notes]
    return notes


def _task_notes(rows: Sequence[Row], scaled: Sequence[str], aggregates: Sequence[Row]) -> list[str]:
    notes = [note for row in aggregates for note in row.notes]
    tasks = list(dict.fromkeys(row.task for row in rows))
    for task in tasks:
        notes += _differences([row for row in rows if row.task == task])
    if any(row.seeds == 1 for row in rows):
        notes.append("a single seed has no interval; train several with --seeds")
    if len(tasks) < 2:
        return notes
    if without := [task for task in tasks if task not in scaled]:
        notes.append(
            f"no constants to normalize {_listed(without)}, so the scores over all tasks leave "
            f"{'it' if len(without) == 1 else 'them'} out"
        )
    complete = {row.label for row in aggregates}
    if len(scaled) > 1 and (partial := sorted(rows_by_label(rows, scaled).keys() - complete)):
        notes.append(f"not in every task, so without a score over all tasks: {_listed(partial)}")
    return notes


def _setting_notes(
    groups: Sequence[Group], scaled: Sequence[str], aggregates: Sequence[Row]
) -> list[str]:
    """Say which algorithms have other settings in one task than in another."""
    notes = []
    for row in aggregates:
        own = [each for each in groups if each.label == row.label and each.environment in scaled]
        settings = comparable_settings([each.runs[0].config for each in own])
        names = [
            shown_text(name)
            for name in differing_settings(settings)
            if name.partition(".")[0] not in OF_TASKS
        ]
        if names:
            notes.append(f"{row.label} has other settings in other tasks: {_listed(names)}")
    return notes


def _differences(rows: Sequence[Row]) -> list[str]:
    """Say in what else than the algorithm the groups of one task differ."""
    notes, task = [], rows[0].task
    if len({row.steps for row in rows}) > 1:
        steps = [f"{row.label} at {row.steps:,}" for row in rows]
        notes.append(f"{task}: final scores are at different steps ({_listed(steps)})")
    seeds = {row.label: {each.seed for each in row.scores} for row in rows}
    everyone = set().union(*seeds.values())
    lacking: dict[str, list[str]] = {}
    for label, own in seeds.items():
        if missing := sorted(everyone - own, key=str):
            lacking.setdefault(_listed([str(seed) for seed in missing]), []).append(label)
    for missing_seeds, labels in lacking.items():
        notes.append(f"{task}: no score for seed {missing_seeds} of {_listed(labels)}")
    return notes


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
