"""The tables of docs/results.md and of the guide to algorithms, as Markdown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from learning_rows import (
    ABOVE,
    BELOW,
    INSIDE,
    Estimate,
    MeasuredCurve,
    ResultRow,
    main_curves,
    normalized_scores,
    result_rows,
)
from published_rows import PublishedRow, counterparts
from reporting import RESULTS

from rl_training.data.scores import TD3
from rl_training.experiment import statistics

LINK = "../benchmarks/results/"
"""From docs/ to the files; `../` more from a folder in it"""
NO_BREAK = "\u00a0"
"""A space that keeps an interval in one line of a narrow column"""
VARIANT_STEPS = (50_000, 100_000, 200_000, 300_000)
PRECISIONS = ("float32", "tf32")
"""Names of the runs that differ only in the precision of matrix products"""
HALVES = ("first seeds", "second seeds")
NORMALIZED_AT = 200_000
ENOUGH_SEEDS = 8
RATES = ("sac/mujoco", "sac/mujoco_fast")
"""Configs that differ in their learning rate alone"""
SINGLE_RUNS = {
    "ppo_warp": (5e6, 10e6, 15e6, 30e6, 60e6),
    "pixel_pendulum": (5e3, 10e3, 15e3, 20e3, 25e3, 30e3),
}
"""Files with the curve of one seed, and the steps that the page shows"""


def table(header: Sequence[str], alignment: str, rows: Sequence[Sequence[str]]) -> str:
    """A table with a letter for each column in `alignment`: l for left, r for right."""
    rule = "|".join({"l": "---", "r": "---:"}[letter] for letter in alignment)
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    text = "\n".join([lines[0], f"|{rule}|", *lines[1:]])
    return re.sub(r"\|  (?=\|)", "| ", text) + "\n"


def number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"


def with_interval(found: Estimate) -> str:
    if math.isnan(found.low):
        return number(found.value)
    return f"{number(found.value)} [{number(found.low)},{NO_BREAK}{number(found.high)}]"


def summary_text(curves: Sequence[MeasuredCurve]) -> str:
    """How many published means are inside or below our intervals."""
    found = [
        verdict
        for curve in main_curves(curves)
        for row in result_rows(curve)
        for published in row.published
        if (verdict := row.verdict(published)) is not None
    ]
    reached = len(found) - found.count(ABOVE)
    counts = ", ".join(f"{found.count(each)} {each}" for each in (INSIDE, BELOW, ABOVE))
    unfinished = [curve for curve in curves if not curve.is_complete]
    outdated = [curve for curve in curves if curve.stale is not None]
    few = [curve for curve in curves if len(curve.seeds) < ENOUGH_SEEDS]
    text = (
        f"In {reached} of {len(found)} comparisons, the published mean is inside or below our "
        f"interval ({counts}).\n{len(curves)} curves: {len(unfinished)} not finished, "
        f"{len(outdated)} stale"
    )
    return text + (f", {len(few)} with fewer than {ENOUGH_SEEDS} seeds.\n" if few else ".\n")


def tasks_text(curves: Sequence[MeasuredCurve]) -> str:
    """A section for each task: picture, table, and the runs behind it."""
    shown = main_curves(curves)
    sections = []
    for task in dict.fromkeys(curve.task for curve in shown):
        own = [curve for curve in shown if curve.task == task]
        parts = [f"### {task}\n"]
        if any(curve.stale is None for curve in own):
            parts.append(f"![Learning curves on {task}](images/{picture_name(task)})\n")
        parts += [task_table(own), *(f"- {about(curve)}\n" for curve in own)]
        sections.append("\n".join(parts[: -len(own)]) + "\n" + "".join(parts[-len(own) :]))
    return "\n".join([*sections, *normalized_text(shown)])


def picture_name(task: str) -> str:
    return f"results_{task.replace('/', '-')}.png"


def task_table(curves: Sequence[MeasuredCurve]) -> str:
    header = ["method", "steps", "mean", "interquartile mean", "seeds", "seconds", "published mean"]
    rows = [row_cells(row) for curve in curves for row in result_rows(curve)]
    return table(header, "lrrrrrl", rows)


def row_cells(row: ResultRow) -> list[str]:
    curve = row.curve
    seconds = " and ".join(number(each) for each in row.seconds)
    marks = "".join(f", **{mark}**" for mark in curve.marks)
    return [
        f"{curve.label}{marks}",
        f"{row.step:,}",
        with_interval(row.mean),
        with_interval(row.middle),
        f"{len(curve.seeds)}",
        seconds,
        "<br>".join(published_cell(row, each) for each in row.published),
    ]


def published_cell(row: ResultRow, published: PublishedRow) -> str:
    spread = (
        "" if published.deviation is None else f"{NO_BREAK}±{NO_BREAK}{number(published.deviation)}"
    )
    verdict = row.verdict(published)
    ending = "" if verdict is None else f": {verdict}"
    return f"{published.title}: {number(published.mean)}{spread}{ending}"


def about(curve: MeasuredCurve) -> str:
    """Where the numbers of a curve come from, and what to mind."""
    first = curve.sources[0]
    files = [f"[{file}]({LINK}learning/{file})" for file in curve.files]
    machine, commit = first["machine"], first.get("commit")
    episodes = first.get("eval_episodes") or first["settings"]["eval_episodes"]
    words = [
        f"{curve.label}: {' and '.join(files)}",
        f"{episodes} episodes per evaluation",
        str(machine.get("gpu") or machine.get("processor")),
        f"PyTorch {machine['torch']}",
        f"commit `{commit[:7]}`" if commit else "code not recorded",
    ]
    if not curve.is_complete:
        words.append(f"stopped after {curve.reached:,} of {curve.planned:,} steps")
    if curve.stale is not None:
        words.append(f"stale: {curve.stale}")
    return ", ".join(words)


def normalized_text(curves: Sequence[MeasuredCurve]) -> list[str]:
    """Scores over the five tasks after 200,000 steps; nothing where a task is missing."""
    found = normalized_scores(curves, list(TD3), NORMALIZED_AT)
    if not found:
        return []
    rows = [
        [
            f"`{config}`",
            f"{each.value:.2f} [{each.low:.2f}, {each.high:.2f}]",
            ", ".join(published_scores(config)),
        ]
        for config, each in sorted(found.items())
    ]
    title = f"### Five tasks after {NORMALIZED_AT:,} steps\n"
    lead = (
        "Mean over HalfCheetah, Hopper, Walker2d, Ant and Humanoid of the score in which a random "
        "policy has 0\nand TD3 after a million steps has 1.\n"
    )
    return ["\n".join([title, lead, table(["method", "score", "published"], "lrl", rows)])]


def published_scores(config: str) -> list[str]:
    """The same score of each published curve of the method."""
    scores: dict[str, list[float]] = {}
    for task, (low, high) in TD3.items():
        for row in counterparts(config, f"{task}-v4"):
            if row.is_curve and row.step == NORMALIZED_AT:
                scores.setdefault(row.title, []).append((row.mean - low) / (high - low))
    return [
        f"{title}: {sum(values) / len(values):.2f}"
        for title, values in scores.items()
        if len(values) == len(TD3)
    ]


def variants_text(curves: Sequence[MeasuredCurve]) -> str:
    """For each task with several settings of one algorithm: a row for each of them."""
    parts = []
    for task in dict.fromkeys(curve.task for curve in curves):
        own = [curve for curve in curves if curve.task == task and curve.stale is None]
        studied = {curve.sources[0]["config"] for curve in own if curve.config is None}
        own = [curve for curve in own if curve.sources[0]["config"] in studied]
        own.sort(key=lambda curve: (curve.config is None, curve.config, curve.label, curve.name))
        if own:
            rows = [
                [
                    f"{each.label} ([{each.name}]({LINK}learning/{each.files[0]}))",
                    f"{len(each.seeds)}",
                    *(mean_at(each, step) for step in VARIANT_STEPS),
                ]
                for each in own
            ]
            header = ["settings", "seeds", *(f"{step:,}" for step in VARIANT_STEPS)]
            alignment = "l" + "r" * (len(header) - 1)
            parts.append(f"**{task}**\n\n{table(header, alignment, rows)}")
    return "\n".join(parts)


def mean_at(curve: MeasuredCurve, step: int) -> str:
    values = curve.at(step)
    return "" if values is None else with_interval(Estimate.of(values, statistics.mean))


def precision_text(curves: Sequence[MeasuredCurve]) -> str:
    """TF32 minus float32 by steps, and both halves of the seeds after the last step."""
    rows, halves = [], []
    for task in dict.fromkeys(curve.task for curve in curves):
        named = {curve.name: curve for curve in curves if curve.task == task and not curve.stale}
        if set(PRECISIONS) <= set(named):
            pair = [named[name] for name in PRECISIONS]
            rows += difference_rows(task, *pair)
            halves += [half_row(curve) for curve in pair if len(curve.files) == len(HALVES)]
    steps = sorted({step for _, by_step in rows for step in by_step})
    lines = [[title, *(by_step.get(step, "") for step in steps)] for title, by_step in rows]
    header = ["TF32 minus float32", *(f"{step:,}" for step in steps)]
    parts = [table(header, "l" + "r" * len(steps), lines)]
    if halves:
        header = ["means after the last step", *HALVES, "second minus first"]
        parts.append(table(header, "lrrr", halves))
    return "\n".join(parts)


def half_row(curve: MeasuredCurve) -> list[str]:
    """The means of the seeds in each of two files, and their difference."""
    final, first = curve.returns[-1], len(curve.sources[0]["seeds"])
    parts = final[:first], final[first:]
    means = [with_interval(Estimate.of(part, statistics.mean)) for part in parts]
    return [f"{curve.task}, {curve.name}", *means, difference(parts[1], parts[0])]


def difference_rows(
    task: str, base: MeasuredCurve, other: MeasuredCurve
) -> list[tuple[str, dict[int, str]]]:
    parts = [(f"{task}, {len(other.seeds)} seeds", slice(None))]
    first = 0
    if len(other.files) > 1 and base.seeds == other.seeds:
        for source in other.sources:
            seeds = source["seeds"]
            part = slice(first, first + len(seeds))
            parts.append((f"of these, seeds {min(seeds)} to {max(seeds)}", part))
            first = part.stop
    common = [int(step) for step in other.steps if base.at(int(step)) is not None]
    return [
        (
            title,
            {
                step: difference(returns_at(other, step, part), returns_at(base, step, part))
                for step in common
            },
        )
        for title, part in parts
    ]


def returns_at(curve: MeasuredCurve, step: int, part: slice) -> np.ndarray:
    values = curve.at(step)
    assert values is not None
    return values[part]


def difference(first: np.ndarray, second: np.ndarray) -> str:
    """The mean of the first seeds minus that of the second ones, with its interval."""

    def minus(one: np.ndarray, two: np.ndarray) -> Any:
        return statistics.mean(one) - statistics.mean(two)

    low, high = statistics.interval_between(first, second, minus)
    return with_interval(Estimate(float(minus(first, second)), float(low), float(high)))


def single_run_text(name: str) -> str:
    """The curve of one seed, from a file of its own."""
    values = json.loads((RESULTS / f"{name}.json").read_text())
    curve = values["curve"] if "curve" in values else values["curves"]["0"]
    chosen = [min(curve, key=lambda point: abs(point["step"] - step)) for step in SINGLE_RUNS[name]]
    rows = [
        [
            f"{point['step']:,}",
            f"{number(point['score'])} ({number(point['std'])})",
            number(point["seconds"]),
        ]
        for point in chosen
    ]
    return table(["steps", "mean (deviation over episodes)", "seconds"], "rrr", rows)


def guide_text(curves: Sequence[MeasuredCurve], titles: Mapping[str, str]) -> str:
    """For each method and task: the best mean at the largest step count."""
    rows = []
    current = [curve for curve in main_curves(curves) if curve.stale is None]
    for algorithm, task in sorted({(curve.algorithm, curve.task) for curve in current}):
        own = [curve for curve in current if (curve.algorithm, curve.task) == (algorithm, task)]
        last = max(curve.reached for curve in own)
        best = max(
            (result_rows(curve)[-1] for curve in own if curve.reached == last),
            key=lambda row: row.mean.value,
        )
        rows.append(
            [
                f"[{titles[algorithm]}]({algorithm}.md)",
                f"[{task}](../results.md#{anchor(task)})",
                best.curve.label,
                f"{last:,}",
                with_interval(best.mean),
                f"{len(best.curve.seeds)}",
            ]
        )
    header = ["method", "task", "config", "steps", "mean", "seeds"]
    return table(header, "lllrrr", rows)


def measured_text(curves: Sequence[MeasuredCurve], algorithm: str) -> str:
    """For the page of an algorithm: the last row of each of its curves."""
    own = [curve for curve in main_curves(curves) if curve.algorithm == algorithm]
    if not own:
        return "Not measured yet at full length.\n"
    rows = [
        [f"[{curve.task}](../results.md#{anchor(curve.task)})", *row_cells(result_rows(curve)[-1])]
        for curve in own
    ]
    header = ["task", "config", "steps", "mean", "interquartile mean", "seeds"]
    return table(header, "llrrrr", [cells[: len(header)] for cells in rows])


def rates_text(curves: Sequence[MeasuredCurve]) -> str:
    """Pairs of configs on each task, after the most steps that both have."""
    rows = []
    for task in dict.fromkeys(curve.task for curve in curves):
        ours = [[c for c in curves if _is(c, task, config) and not c.stale] for config in RATES]
        steps = [{int(step) for curve in each for step in curve.steps} for each in ours]
        if common := set.intersection(*steps):
            rows.append(
                [task, f"{max(common):,}", *(most_seeds(each, max(common)) for each in ours)]
            )
    return table(["task", "steps", *(f"`{config}`" for config in RATES)], "lrrr", rows)


def _is(curve: MeasuredCurve, task: str, config: str) -> bool:
    return curve.task == task and curve.label == f"`{config}`"


def most_seeds(curves: Sequence[MeasuredCurve], step: int) -> str:
    best = max((c for c in curves if c.at(step) is not None), key=lambda c: len(c.seeds))
    values = best.at(step)
    assert values is not None
    found = Estimate.of(values, statistics.mean)
    # Not in brackets, which mark links in the README.
    ends = f"{number(found.low)} to {number(found.high)}"
    return f"{number(found.value)} ({ends}), {len(best.seeds)} seeds"


def anchor(task: str) -> str:
    return task.lower().replace("/", "")
