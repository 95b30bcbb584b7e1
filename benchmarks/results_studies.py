"""Tables of single questions in docs/results.md: settings, precision, and runs of one seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from learning_rows import Estimate, MeasuredCurve
from reporting import RESULTS
from results_markdown import LINK, number, table, with_interval

from rl_training.experiment import statistics

VARIED = "sac/mujoco"
VARIANT_STEPS = (50_000, 100_000, 200_000, 300_000)
PRECISIONS = ("float32", "tf32")
"""Names of the runs that differ only in the precision of matrix products"""
HALVES = ("first seeds", "second seeds")
SINGLE_RUNS = {
    "ppo_warp": (5e6, 10e6, 15e6, 30e6, 60e6),
    "pixel_pendulum": (5e3, 10e3, 15e3, 20e3, 25e3, 30e3),
}
"""Files with the curve of one seed, and the steps that the page shows"""
PEERS = {"sb3": "Stable-Baselines3", "d3rlpy": "d3rlpy"}
MOST_OF_THE_WAY = 0.9
"""The part of what was learned until which wall times are compared"""
WORLD_RETURNS = (5_000, 10_000)
"""Returns whose wall time is shown for runs in the worlds of a GPU"""


def variants_text(curves: Sequence[MeasuredCurve]) -> str:
    """For each task on which settings of SAC were varied: a row for each of them."""
    parts = []
    for task in dict.fromkeys(curve.task for curve in curves):
        own = [curve for curve in curves if curve.task == task and curve.stale is None]
        own = [curve for curve in own if curve.sources[0]["config"] == VARIED]
        if all(curve.config is not None for curve in own):
            continue
        own.sort(key=lambda curve: (curve.config is None, curve.config, curve.label, curve.name))
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


def peers_text(curves: Sequence[MeasuredCurve]) -> str:
    """Each curve of another package beside ours of the same plan: `PACKAGE-NAME` beside `NAME`."""
    ours = {(curve.task, curve.name): curve for curve in curves if curve.peer is None}
    rows = []
    for theirs in curves:
        own = ours.get((theirs.task, theirs.name.removeprefix(f"{theirs.peer}-")))
        if theirs.peer is not None and own is not None and own.stale is None:
            level = level_of_both(own, theirs)
            rows += [
                peer_row(own, "rl_training", level),
                peer_row(theirs, PEERS[theirs.peer], level),
            ]
    header = ["task", "method", "package", "steps", "mean", "seeds", "seconds", "until (return)"]
    return table(header, "lllrrrrr", rows)


def level_of_both(first: MeasuredCurve, second: MeasuredCurve) -> float:
    """The return at nine tenths of the way from the lower first mean to the lower last mean."""
    start, end = (min(curve.returns[at].mean() for curve in (first, second)) for at in (0, -1))
    return float(start + MOST_OF_THE_WAY * (end - start))


def peer_row(curve: MeasuredCurve, package: str, level: float) -> list[str]:
    reached = np.flatnonzero(curve.returns.mean(axis=1) >= level)
    seconds = curve.seconds.sum(axis=1)
    until = number(seconds[reached[0]]) if len(reached) else "never"
    return [
        curve.task,
        f"[{curve.label}]({LINK}learning/{curve.files[0]})",
        package,
        f"{curve.reached:,}",
        with_interval(Estimate.of(curve.returns[-1], statistics.mean)),
        f"{len(curve.seeds)}",
        number(seconds[-1]),
        f"{until} ({number(level)})",
    ]


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


def worlds_text() -> str:
    """Runs that `world_training.py` watched from outside: a row for each file."""
    rows = []
    for path in sorted((RESULTS / "worlds").glob("*.json")):
        run = json.loads(path.read_text())
        final, killed, evaluations = run["final"], run["killed"], run["evaluations"]
        paces = [each["steps_per_second"] for each in run["pace"]]
        last = "" if killed is None else around_kill(run)
        rows.append(
            [
                f"[{path.stem.replace('__', ', ')}]({LINK}worlds/{path.name})",
                f"{median(paces):,.0f}",
                number(run["compilation_seconds"]),
                *(seconds_to(evaluations, reached) for reached in WORLD_RETURNS),
                *(returns_in(final, simulator) for simulator in ("gymnasium", "simulator")),
                last,
            ]
        )
    header = ["run", "steps/s", "compilation, s"]
    header += [f"{reached:,} after, s" for reached in WORLD_RETURNS]
    header += ["return in MuJoCo", "in MuJoCo Warp", "before and after a kill"]
    return table(header, "l" + "r" * (len(header) - 1), rows)


def returns_in(final: dict[str, float], simulator: str) -> str:
    """Mean and deviation of the last policy; empty for a simulator that it was not trained in."""
    if f"{simulator}_mean" not in final:
        return ""
    return f"{number(final[f'{simulator}_mean'])} ({number(final[f'{simulator}_std'])})"


def seconds_to(evaluations: Sequence[dict[str, Any]], reached: float) -> str:
    """The time of the first evaluation with at least this return; empty if there is none."""
    return next((number(each["seconds"]) for each in evaluations if each["return"] >= reached), "")


def around_kill(run: dict[str, Any]) -> str:
    """The last evaluation before a run was killed, and the first one after it was resumed."""
    at = run["killed"]["at_seconds"]
    before = [each["return"] for each in run["evaluations"] if each["seconds"] <= at]
    after = [each["return"] for each in run["evaluations"] if each["seconds"] > at]
    return f"{number(before[-1])}, {number(after[0])}" if before and after else ""


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
