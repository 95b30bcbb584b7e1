"""The tables of docs/results.md and of the guide to algorithms, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from results_markdown import LINK, NO_BREAK, number, table, with_interval

from rl_training.data.scores import TD3
from rl_training.experiment import statistics

NORMALIZED_AT = 200_000
ENOUGH_SEEDS = 8
RATES = ("sac/mujoco", "sac/mujoco_fast")
"""Configs that differ in their learning rate alone"""


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
        if any(curve.is_drawn for curve in own):
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
    verdict, ours = row.verdict(published), ""
    if published.of_training and row.training is not None:
        ours = f" (ours {with_interval(row.training)})"
    ending = ours if verdict is None else f"{ours},{NO_BREAK}{verdict}"
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
        own = [curve for curve in curves if curve.task == task and curve.stale is None]
        # In float32: the label of other precisions says so.
        ours = [[curve for curve in own if curve.label == f"`{config}`"] for config in RATES]
        steps = [{int(step) for curve in each for step in curve.steps} for each in ours]
        if common := set.intersection(*steps):
            rows.append(
                [task, f"{max(common):,}", *(most_seeds(each, max(common)) for each in ours)]
            )
    return table(["task", "steps", *(f"`{config}`" for config in RATES)], "lrrr", rows)


def most_seeds(curves: Sequence[MeasuredCurve], step: int) -> str:
    evaluated = [curve for curve in curves if curve.at(step) is not None]
    best = max(evaluated, key=lambda curve: len(curve.seeds))
    values = best.at(step)
    assert values is not None
    found = Estimate.of(values, statistics.mean)
    # Not in brackets, which mark links in the README.
    ends = f"{number(found.low)} to {number(found.high)}"
    return f"{number(found.value)} ({ends}), {len(best.seeds)} seeds"


def anchor(task: str) -> str:
    return task.lower().replace("/", "")
