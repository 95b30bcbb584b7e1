"""The table of a sweep as text: while it runs, and at its end."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rl_training.errors import CheckpointError, printable
from rl_training.runtime.job_folder import JobStatus, read_job_status
from rl_training.sweeps.results import SweepResults, ranked
from rl_training.sweeps.study import RUNNING, Trial

SHOWN = 20
"""Most trials of a table"""


def summary(results: SweepResults) -> str:
    """One line: how many trials are in which state, and the best so far."""
    counts = Counter(trial.state for trial in results.trials)
    planned = results.sweep.trials - len(results.trials)
    states = [f"{count} {state}" for state, count in counts.items()]
    states += [f"{planned} to come"] if planned else []
    best = results.best
    found = "" if best is None else f"; best {number(best.value)} (trial {best.number})"
    noun = "trial" if results.sweep.trials == 1 else "trials"
    return f"{results.sweep.trials} {noun}: {', '.join(states) or 'none yet'}{found}"


def table_rows(results: SweepResults, most: int = SHOWN) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and one row per trial: running ones first, then the best."""
    keys = list(results.sweep.space.dimensions)
    metric = results.sweep.objective.metric
    header = ["trial", "state", metric, "seeds", *map(_short_key, keys)]
    trials = ranked(results.sweep, results.trials)
    running = [trial for trial in trials if trial.state == RUNNING]
    others = [trial for trial in trials if trial.state != RUNNING]
    rows = [
        [
            str(trial.number),
            _state(results, trial),
            number(trial.value),
            " ".join(number(score) for score in trial.scores),
            *(_value(trial.params[key]) for key in keys),
        ]
        for trial in (running + others)[:most]
    ]
    return header, rows


def table_text(results: SweepResults, most: int = SHOWN) -> str:
    """The table in columns, without colors."""
    header, rows = table_rows(results, most)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    left_out = len(results.trials) - len(rows)
    if left_out > 0:
        lines.append(f"... and {left_out:,} more in {results.folder.results}")
    return printable("\n".join(lines))


def failures(trials: Sequence[Trial]) -> list[str]:
    """One line for each trial that failed."""
    return [
        printable(f"trial {trial.number} failed: {trial.message}")
        for trial in trials
        if trial.state == "failed"
    ]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def _state(results: SweepResults, trial: Trial) -> str:
    if trial.state != RUNNING:
        return trial.state
    status: JobStatus | None = None
    with contextlib.suppress(CheckpointError, OSError):
        status = read_job_status(results.folder.trial(trial.number))
    if status is None or not status.total_timesteps:
        return trial.state
    state = "waiting" if status.state == "preempted" else trial.state
    return f"{state} {100 * status.step // status.total_timesteps}%"


def _short_key(key: str) -> str:
    return key.rpartition(".")[2]


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value).strip('"')
