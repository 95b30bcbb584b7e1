"""Print learning curves of several variants: means, intervals and differences."""

from __future__ import annotations

import csv
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from reporting import print_table

from rl_training.errors import UserError
from rl_training.experiment.statistics import (
    interval,
    interval_between,
    mean,
    probability_of_improvement,
)

RESAMPLES = 10_000
SEED = 0
"""Seed of the bootstrap, so that tables are reproducible"""
COLUMNS = 3
"""Variants per table: more would not fit into 100 columns"""
METHOD = (
    "mean (standard deviation over seeds) [95 % percentile bootstrap interval of the mean, "
    f"{RESAMPLES:,} resamples, seed {SEED}]"
)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the mean; NaN for fewer than two values."""
    low, high = interval(values, mean, resamples=RESAMPLES, seed=SEED)
    return float(low), float(high)


def bootstrap_difference(
    first: Sequence[float], second: Sequence[float]
) -> tuple[float, float, float]:
    """Mean of `first` minus mean of `second`, with its 95 % interval. Unpaired: each side is
    resampled separately, because equal seeds of different variants are unrelated."""
    low, high = interval_between(first, second, _difference, resamples=RESAMPLES, seed=SEED)
    return float(np.mean(first) - np.mean(second)), float(low), float(high)


def _difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return mean(first) - mean(second)


@dataclass(frozen=True)
class Run:
    """The results of some seeds of one variant, from one file."""

    file: str
    env: str
    name: str
    settings: dict[str, Any]
    """Settings that the seeds have in common, including the packaged config"""
    seeds: tuple[int, ...]
    planned_steps: int
    returns: dict[int, list[float]]
    """By step: the mean return of each seed that was evaluated there"""
    steps_per_second: float
    is_dated: bool
    """Whether the file says what its code computed, so that a later change is noticed"""

    @classmethod
    def from_json(cls, file: str, values: dict[str, Any]) -> Run:
        rounds = values["evaluations"]
        return cls(
            file=file,
            env=values["env"],
            name=values["name"],
            settings={"config": values["config"], **values["settings"]},
            seeds=tuple(values["seeds"]),
            planned_steps=values["planned_steps"],
            returns={
                int(each["step"]): [float(one) for one in each["returns"] if one is not None]
                for each in rounds
            },
            steps_per_second=rounds[-1]["steps_per_second"] if rounds else 0.0,
            is_dated=bool(values.get("mathematics")),
        )

    @property
    def reached(self) -> int:
        return max(self.returns, default=0)

    def describe(self) -> str:
        first = f" from {min(self.seeds)}" if min(self.seeds) else ""
        text = f"{self.name}: {len(self.seeds)} seeds{first}, {self.reached:,} steps"
        if self.reached < self.planned_steps:
            text += f" of {self.planned_steps:,} (not finished)"
        text += f", {self.steps_per_second:,.0f} steps/s over all seeds"
        return text if self.is_dated else f"{text}, code not recorded"

    def reason_apart(self, others: Sequence[Run]) -> str | None:
        """Why this run cannot be pooled with the others, or None if it can."""
        for other in others:
            if keys := _differing(self.settings, other.settings):
                return f"its settings differ from those of {other.file} ({', '.join(keys)})"
            if shared := sorted(set(self.seeds) & set(other.seeds)):
                return f"its seeds overlap with those of {other.file} ({_range(shared)})"
        return None


@dataclass(frozen=True)
class Curve:
    """The results of one variant over all its runs."""

    name: str
    seeds: int
    returns: dict[int, list[float]]
    """By step: the mean return of each seed that was evaluated there"""

    @classmethod
    def pool(cls, runs: Sequence[Run]) -> Curve:
        steps = sorted({step for run in runs for step in run.returns})
        return cls(
            name=runs[0].name,
            seeds=sum(len(run.seeds) for run in runs),
            returns={
                step: [value for run in runs for value in run.returns.get(step, [])]
                for step in steps
            },
        )

    def cell(self, step: int) -> str:
        """Mean, deviation and interval; the number of seeds too if some are missing."""
        values = self.returns.get(step)
        if not values:
            return ""
        text = f"{show(float(np.mean(values)))} ({show(deviation(values))})"
        text += f" {_interval(*bootstrap_interval(values))}"
        return text if len(values) == self.seeds else f"{text} n={len(values)}"

    def cell_against(self, other: Curve, step: int) -> str:
        mine, theirs = self.returns.get(step), other.returns.get(step)
        if not mine or not theirs:
            return ""
        difference, low, high = bootstrap_difference(mine, theirs)
        better = float(probability_of_improvement(mine, theirs))
        return f"{show(difference)} {_interval(low, high)} P={better:.2f}"


@dataclass(frozen=True)
class Published:
    """Published results of a method on one task."""

    method: str
    task: str
    seeds: int
    rows: dict[int, tuple[float, float]]
    """By step: mean and deviation over seeds"""

    @property
    def title(self) -> str:
        return f"{self.method}, {self.task}"

    def cell(self, step: int) -> str:
        if step not in self.rows:
            return ""
        center, spread = self.rows[step]
        return f"{show(center)} ({show(spread)})"


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; NaN for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def show(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def _interval(low: float, high: float) -> str:
    return f"[{show(low)}, {show(high)}]"


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    absent = object()  # differs from null
    keys = one.keys() | other.keys()
    return sorted(key for key in keys if one.get(key, absent) != other.get(key, absent))


def _range(seeds: Sequence[int]) -> str:
    return f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"


def read_runs(
    folder: Path, why_stale: Callable[[dict[str, Any]], str | None] = lambda values: None
) -> list[Run]:
    """Read every run in the folder, ordered by file name. A file without a run, with a run that
    cannot be pooled with earlier runs of its name, or with one that `why_stale` gives a reason
    against, is reported and left out."""
    runs: list[Run] = []
    for path in sorted(folder.glob("*.json")):
        try:
            values = json.loads(path.read_text())
            run, outdated = Run.from_json(path.name, values), why_stale(values)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            print(f"note: {path.name} is not a learning curve and is left out ({error!r})")
            continue
        if outdated:
            print(f"note: {path.name} is stale and left out: {outdated}")
        elif reason := run.reason_apart([each for each in runs if _variant(each) == _variant(run)]):
            print(f"note: {path.name} is left out: {reason}")
        else:
            runs.append(run)
    return runs


def _variant(run: Run) -> tuple[str, str]:
    return run.env, run.name


def published_task(env: str) -> str:
    """The name of a Gymnasium task in published data, which uses version 4."""
    return env.lower().replace("-v5", "-v4")


def read_published(path: Path, method: str, env: str) -> Published | None:
    """The rows of the method for the task, or None if there are none."""
    task = published_task(env)
    with path.open(newline="") as lines:
        found = [
            row for row in csv.DictReader(lines) if row["method"] == method and row["task"] == task
        ]
    if not found:
        return None
    rows = {
        int(row["env_steps"]): (float(row["mean_return"]), float(row["std_over_seeds"]))
        for row in found
    }
    return Published(method, task, int(found[0]["seeds"]), rows)


Column = tuple[str, Callable[[int], str]]
"""A title, and a function from a step to the text of its cell"""


def print_env(
    env: str, runs: Sequence[Run], against: str | None, published: Published | None
) -> None:
    """Print the tables of one environment."""
    names = dict.fromkeys(run.name for run in runs)
    curves = [Curve.pool([run for run in runs if run.name == name]) for name in names]
    steps = sorted({step for curve in curves for step in curve.returns})
    columns: list[Column] = [(curve.name, curve.cell) for curve in curves]
    if published is not None:
        columns.append((published.title, published.cell))
    _print_columns(f"{env}: {METHOD}", steps, columns)
    base = next((curve for curve in curves if curve.name == against), None)
    if base is not None:
        compared = [curve for curve in curves if curve is not base]
        _print_columns(
            f"{env}, minus {base.name}: difference of means [95 % interval, unpaired bootstrap], "
            "P = fraction of seed pairs in which the variant is better",
            steps,
            [(curve.name, _against(curve, base)) for curve in compared],
        )
    print()
    for run in runs:
        print(run.describe())
    if published is not None:
        about = f"published, {published.seeds} seeds, a different version of the task {env}"
        print(f"{published.title}: {about}")


def _against(curve: Curve, base: Curve) -> Callable[[int], str]:
    return lambda step: curve.cell_against(base, step)


def _print_columns(title: str, steps: Sequence[int], columns: Sequence[Column]) -> None:
    for first in range(0, len(columns), COLUMNS):
        block = columns[first : first + COLUMNS]
        rows = [[f"{step:,}", *(cell(step) for _, cell in block)] for step in steps]
        # Leave out steps without a value in this block.
        rows = [row for row in rows if any(row[1:])]
        print_table(textwrap.fill(title, 100), ["steps", *(name for name, _ in block)], rows)


def print_summary(
    folder: Path,
    against: str | None,
    published: Path | None,
    method: str,
    why_stale: Callable[[dict[str, Any]], str | None] = lambda values: None,
) -> None:
    """Print a table for each environment in the folder; see `read_runs` for `why_stale`."""
    if published is not None and not published.is_file():
        raise UserError(f"--published {published}: no such file")
    runs = read_runs(folder, why_stale)
    if not runs:
        raise UserError(f"{folder}: contains no learning curves; run benchmarks/learning.py first")
    for env in sorted({run.env for run in runs}):
        own = [run for run in runs if run.env == env]
        paper = None if published is None else read_published(published, method, env)
        print_env(env, own, against, paper)
        if published is not None and paper is None:
            print(f"no published rows of {method} for {published_task(env)}")
        if against is not None and against not in [run.name for run in own]:
            print(f"no variant {against!r} for {env} to compare with")
