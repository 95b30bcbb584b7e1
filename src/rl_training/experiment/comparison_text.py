"""Tables of scores as text: those of `rl-training compare`, and of the seeds of one training."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence

import numpy as np

from rl_training.errors import printable
from rl_training.experiment import statistics
from rl_training.experiment.score_rows import Improvement, Row
from rl_training.types import SUCCESS_RATE, TrainResult

CAPTION = (
    "Final scores: mean return of each run's last evaluation. IQM: interquartile mean over seeds, "
    "with its 95 % bootstrap interval."
)
OVERALL = (
    "All tasks: normalized scores, 0 for a random policy and 1 for the reference of the task. "
    "gap: optimality gap, less is better."
)
IMPROVEMENT = (
    "Probability of improvement: how often a run of the first beats a run of the second, with "
    "its 95 % interval; 0.5 is no difference."
)
GAP = "  "
NARROWEST = 12
"""Width below which columns of names do not shrink"""


def comparison_text(
    rows: Sequence[Row],
    aggregates: Sequence[Row],
    improvements: Sequence[Improvement],
    notes: Sequence[str],
    width: int = 80,
) -> str:
    """Return the tables and notes of a comparison."""
    parts = [_filled(CAPTION, width), _score_table(rows, width)]
    if aggregates:
        parts += ["", _filled(OVERALL, width), _overall_table(aggregates, width)]
    if shown := _shown_improvements(rows, improvements):
        parts += ["", _filled(IMPROVEMENT, width), _improvement_table(shown, width)]
    if notes:
        parts.append("")
    parts += [_filled(f"note: {note}", width, indent="  ") for note in notes]
    return printable("\n".join(parts))


def _score_table(rows: Sequence[Row], width: int) -> str:
    header = ["task", "algorithm", "IQM", "95 % interval", "mean", "seeds", "steps"]
    cells, task = [], None
    for row in rows:
        cells.append(
            [
                "" if row.task == task else row.task,
                row.label,
                number(row.iqm),
                interval_text(row.low, row.high),
                number(row.mean),
                str(row.seeds),
                "" if row.steps is None else f"{row.steps:,}",
            ]
        )
        task = row.task
    return aligned_table(header, cells, names=2, width=width)


def _overall_table(rows: Sequence[Row], width: int) -> str:
    header = ["algorithm", "IQM", "95 % interval", "mean", "median", "gap", "seeds"]
    cells = [
        [
            row.label,
            number(row.iqm),
            interval_text(row.low, row.high),
            number(row.mean),
            number(row.median),
            number(row.estimates["optimality_gap"].value),
            str(row.seeds),
        ]
        for row in rows
    ]
    return aligned_table(header, cells, names=1, width=width)


def _shown_improvements(
    rows: Sequence[Row], improvements: Sequence[Improvement]
) -> list[Improvement]:
    """Return the pairs over several tasks, where there are some; else those of each task.

    Pairs without an interval are left out: a single seed says nothing.
    """
    known = [each for each in improvements if not math.isnan(each.probability.low)]
    tasks = {row.task for row in rows}
    return [each for each in known if each.task not in tasks] or known


def _improvement_table(found: Sequence[Improvement], width: int) -> str:
    """Return one line for each pair, with the names last, because they can be long."""
    lines = [
        (
            f"{each.probability.value:.2f}",
            f"[{each.probability.low:.2f}, {each.probability.high:.2f}]",
            f"{each.first} over {each.second}" + (f", {each.task}" if len(tasks) > 1 else ""),
        )
        for tasks in [{each.task for each in found}]
        for each in found
    ]
    return "\n".join(
        _filled(GAP.join(line), width, indent=" " * len(GAP.join((*line[:2], ""))))
        for line in lines
    )


def seeds_text(seeds: Sequence[int | None], results: Sequence[TrainResult]) -> str:
    """Return the results of the seeds of one training: every seed, then the mean over them."""
    has_success = any(SUCCESS_RATE in result.metrics for result in results)
    success = ["success"] if has_success else []
    header = ["seed", "step", "updates", "evaluation", "± episodes", *success, ""]
    cells = [
        [
            "-" if seed is None else str(seed),
            f"{int(result.metrics['global_step']):,}",
            f"{int(result.metrics['gradient_steps']):,}",
            _decimal(_final(result), "not evaluated"),
            _decimal(result.metrics["eval_return_std"], "-"),
            *([_success(result)] if has_success else []),
            "finished" if result.stop_reason == "total_timesteps" else result.stop_reason,
        ]
        for seed, result in zip(seeds, results, strict=True)
    ]
    lines = aligned_table(header, cells, names=0, width=80).splitlines()
    rows = [lines[0]]
    for line, result in zip(lines[1:], results, strict=True):
        rows += [line, f"      {result.run_dir}"]
    return "\n".join([*rows, _over_seeds(results)])


def _over_seeds(results: Sequence[TrainResult]) -> str:
    finals = np.array([_final(result) for result in results])
    known = finals[~np.isnan(finals)]
    if not len(known):
        return "mean: no seed was evaluated"
    plural = "seeds" if len(known) > 1 else "seed"
    text = f"mean over {len(known)} {plural}: {known.mean():.2f}"
    if len(known) > 1:
        low, high = statistics.interval(known, statistics.mean)
        text += f", 95 % bootstrap interval [{low:.2f}, {high:.2f}]"
    notes = []
    if len(known) < len(finals):
        notes.append(f"{len(finals) - len(known)} of the seeds were not evaluated")
    if len({result.metrics["global_step"] for result in results}) > 1:
        notes.append("the seeds are at different steps")
    return text + (f" ({'; '.join(notes)})" if notes else "")


def _final(result: TrainResult) -> float:
    return float(result.metrics["eval_return_mean"])


def _decimal(value: float, otherwise: str) -> str:
    return otherwise if math.isnan(value) else f"{value:.2f}"


def _success(result: TrainResult) -> str:
    rate = result.metrics.get(SUCCESS_RATE, math.nan)
    return "-" if rate != rate else f"{rate:.0%}"


def number(value: float) -> str:
    """Write a score with about four digits; `-` if it is unknown."""
    if math.isnan(value):
        return "-"
    if abs(value) >= 1e7:
        return f"{value:.3g}"
    return f"{value:.{0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 3}f}"


def interval_text(low: float, high: float) -> str:
    """Write an interval; `-` if it is unknown."""
    return "-" if math.isnan(low) else f"[{number(low)}, {number(high)}]"


def aligned_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, names: int, width: int
) -> str:
    """Align the first `names` columns to the left and the others to the right.

    If that is wider than `width`, what stands in parentheses after a name gets its own lines.
    """
    lines = [list(header), *map(list, rows)]
    if _table_width(lines) <= width:
        return "\n".join(_aligned(line, _widths(lines), names) for line in lines)
    short = [
        [_split(cell)[0] if column < names else cell for column, cell in enumerate(line)]
        for line in lines
    ]
    widths = _shrunk(_widths(short), names, width)
    texts = []
    for line, brief in zip(lines, short, strict=True):
        texts.append(_aligned(brief, widths, names))
        for column in range(names):
            if details := _split(line[column])[1]:
                indent = " " * (sum(widths[:column]) + len(GAP) * (column + 1))
                texts.append(_filled(indent + details, width, indent=indent))
    return "\n".join(texts)


def _shrunk(widths: Sequence[int], names: int, width: int) -> list[int]:
    """Take what a table is too wide from the widest columns of names."""
    fitting = list(widths)
    while sum(fitting) + len(GAP) * (len(fitting) - 1) > width:
        widest = max(range(names), key=fitting.__getitem__, default=None)
        if widest is None or fitting[widest] <= NARROWEST:
            break
        fitting[widest] -= 1
    return fitting


def _split(name: str) -> tuple[str, str]:
    """Split `sac (tau=0.01)` into `sac` and `tau=0.01`."""
    first, separator, details = name.partition(" (")
    return (first, details.removesuffix(")")) if separator else (name, "")


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _table_width(lines: Sequence[Sequence[str]]) -> int:
    widths = _widths(lines)
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _aligned(cells: Sequence[str], widths: Sequence[int], names: int) -> str:
    """Return a line; a name that is too long continues below it."""
    wrapped = [
        textwrap.wrap(cell, max(1, size)) or [""] for cell, size in zip(cells, widths, strict=True)
    ]
    lines = []
    for parts in itertools.zip_longest(*wrapped, fillvalue=""):
        texts = [
            part.ljust(size) if column < names else part.rjust(size)
            for column, (part, size) in enumerate(zip(parts, widths, strict=True))
        ]
        lines.append(GAP.join(texts).rstrip())
    return "\n".join(lines)


def _filled(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=indent)
