"""Health of the learned networks at evaluations, and where the time of runs goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_training.report.numbers import Axes, chosen, rounded, text
from rl_training.types import Json

HEALTH = "health/"
"""How the names of these values begin in the rows of evaluations"""
PHASES = (
    *("environments", "acting", "sampling", "update", "compilation"),
    *("evaluation", "health", "saving"),
)
MOST_METRICS, MAX_NAME = 24, 60
OTHER = "other"


@dataclass(frozen=True)
class Health:
    """The values of one run at its evaluations."""

    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    """By name, NaN where an evaluation lacks it"""


def health_of(rows: Sequence[Json]) -> Health:
    """Collect the values of a run from the rows of its evaluations."""
    by_step = {
        row["step"]: row
        for row in rows
        if type(row.get("step")) is int
        and 0 <= row["step"] < 2**62
        and any(key.startswith(HEALTH) for key in row)
    }
    steps = sorted(by_step)
    names = sorted({key for row in by_step.values() for key in row if key.startswith(HEALTH)})
    metrics = {
        text(name.removeprefix(HEALTH), MAX_NAME): np.array(
            [_number(by_step[step].get(name)) for step in steps]
        )
        for name in names[:MOST_METRICS]
    }
    return Health(np.array(steps, dtype=np.int64), metrics)


def phase_seconds(row: Json, total: Any) -> dict[str, float]:
    """Return the seconds of each phase from a row of the log, and all seconds as `total`."""
    found = {phase: _number(row.get(f"time/{phase}_seconds")) for phase in PHASES}
    known = {phase: value for phase, value in found.items() if value >= 0}
    if not known:
        return {}
    wall = _number(row.get("time/wall_seconds"))
    if not wall > 0:
        wall = _number(total)
    seconds = sum(known.values())
    known["total"] = max(wall, seconds) if wall > 0 else seconds
    return known


def group_health(runs: Sequence[Health], axes: Axes, points: int) -> Json | None:
    """Return mean, smallest and largest value over seeds, at the steps of all evaluations."""
    known = [run for run in runs if len(run.steps)]
    if not known:
        return None
    steps = np.unique(np.concatenate([run.steps for run in known]))
    steps = steps[chosen(len(steps), points)]
    names = sorted({name for run in known for name in run.metrics})[:MOST_METRICS]
    metrics = [{"name": name, **_summary(name, known, steps)} for name in names]
    return {
        "x": axes.add(steps),
        "metrics": [metric for metric in metrics if any(v is not None for v in metric["center"])],
    }


def _summary(name: str, runs: Sequence[Health], steps: np.ndarray) -> Json:
    rows = np.array([_at(run, name, steps) for run in runs if name in run.metrics])
    counted = np.isfinite(rows)
    number = counted.sum(axis=0)
    total = np.where(counted, rows, 0.0).sum(axis=0)
    center = np.divide(total, number, out=np.full(len(steps), np.nan), where=number > 0)
    if len(rows) == 1:
        return {"center": rounded(center), "low": None, "high": None}
    low = np.where(counted, rows, np.inf).min(axis=0)
    high = np.where(counted, rows, -np.inf).max(axis=0)
    return {"center": rounded(center), "low": rounded(low), "high": rounded(high)}


def _at(run: Health, name: str, steps: np.ndarray) -> np.ndarray:
    values = run.metrics[name]
    known = np.isfinite(values)
    if not known.any():
        return np.full(len(steps), np.nan)
    found: np.ndarray = np.interp(steps, run.steps[known], values[known], left=np.nan, right=np.nan)
    return found


def group_phases(runs: Sequence[tuple[Mapping[str, float], int]]) -> Json | None:
    """Return the mean seconds of each phase over runs, given with their steps."""
    known = [(seconds, step) for seconds, step in runs if seconds.get("total", 0) > 0]
    if not known:
        return None
    total = float(np.mean([seconds["total"] for seconds, _ in known]))
    means = {
        phase: float(np.mean([seconds.get(phase, 0.0) for seconds, _ in known])) for phase in PHASES
    }
    means[OTHER] = max(0.0, total - sum(means.values()))
    speeds = [step / seconds["total"] for seconds, step in known]
    return {
        "total": rounded([total])[0],
        "speed": rounded([np.mean(speeds)])[0],
        "seconds": [[phase, *rounded([value])] for phase, value in means.items()],
        "runs": len(known),
    }


def _number(value: Any) -> float:
    """Return a finite number from a row; NaN if it is none."""
    if type(value) not in (int, float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
