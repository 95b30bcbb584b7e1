"""Results of a policy for its card: the evaluation of the policy, and of all seeds of its run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rl_training.checkpoints.format import step_of
from rl_training.checkpoints.run_folder import RunFolder, read_metrics
from rl_training.errors import UserError
from rl_training.experiment.curves import (
    Group,
    RunCurve,
    aligned,
    find_runs,
    group_runs,
    read_curve,
)
from rl_training.experiment.statistics import interquartile_mean, interval
from rl_training.runtime.workflows import evaluate_policy_at
from rl_training.types import Json

MEAN, DEVIATION = "eval/mean_reward", "eval/std_reward"
MOST_POINTS = 500
"""Most evaluations of a learning curve that are published"""
MOST_RUNS = 200
"""Most runs beside the one that is published that are searched for other seeds"""
FEWEST_SEEDS = 2
"""Fewest seeds that have an interval"""


@dataclass(frozen=True)
class PolicyScore:
    """Return of the policy that is published."""

    mean: float
    deviation: float | None
    """Standard deviation over episodes"""
    episodes: int | None
    step: int | None
    """Step of the evaluation; None for new episodes"""
    is_new: bool
    """Whether the episodes were played for the card, not in the run's own evaluations"""


@dataclass(frozen=True)
class SeedScores:
    """Returns of all seeds in their last common evaluation, with an interval over seeds."""

    seeds: tuple[int | None, ...]
    returns: tuple[float, ...]
    step: int
    interquartile_mean: float
    low: float
    high: float
    mean: float
    median: float


@dataclass(frozen=True)
class Results:
    """What the card says of how good a policy is."""

    policy: PolicyScore | None = None
    seeds: SeedScores | None = None
    curve: tuple[tuple[int, float], ...] = ()
    """Step and mean return of the evaluations of the run"""
    training_seconds: float | None = None
    """Time of training until the step of the policy, over all resumes; None if it is not known"""
    notes: tuple[str, ...] = ()
    """How to read the numbers"""

    def to_json(self) -> Json:
        values = asdict(self)
        values["score"] = "mean return of the evaluation episodes, without exploration noise"
        values["interval"] = "95 % of the interquartile mean over seeds, percentile bootstrap"
        return values


def collect_results(
    run: RunFolder | None,
    checkpoint: Path,
    *,
    best: bool,
    episodes: int | None,
    eval_episodes: int | None,
    others: Sequence[str | Path] | None,
) -> Results:
    """Return the results of a checkpoint or saved policy.

    With `episodes`, the policy plays that many new episodes. Otherwise its score is that of the
    run's own evaluation. `others` are runs of other seeds; by default, those in the folder of the
    run that differ from it only in seed.
    """
    notes: list[str] = []
    curve = None if run is None else read_curve(run.path)
    score = (
        _new_score(checkpoint, episodes)
        if episodes is not None
        else _recorded_score(run, step_of(checkpoint), eval_episodes)
    )
    if score is not None and not score.is_new:
        if best:
            notes.append(
                "The best checkpoint was chosen by this evaluation, so its score is optimistic."
            )
        if score.step != step_of(checkpoint):
            notes.append(
                f"The run was last evaluated at step {score.step:,}, before this checkpoint."
            )
    seeds = None if curve is None else _seed_scores(_group_of(curve, others), notes)
    seconds = _training_seconds(curve, step_of(checkpoint))
    return Results(score, seeds, _points(curve), seconds, tuple(notes))


def _new_score(checkpoint: Path, episodes: int) -> PolicyScore:
    found = evaluate_policy_at(checkpoint, num_episodes=episodes).metrics
    return PolicyScore(
        found["eval_return_mean"], found["eval_return_std"], episodes, step=None, is_new=True
    )


def _recorded_score(
    run: RunFolder | None, step: int | None, episodes: int | None
) -> PolicyScore | None:
    """Return the last evaluation of a run until a step."""
    if run is None or not run.plain.has_file(run.metrics.name):
        return None
    rows = [
        row
        for row in read_metrics(run.metrics)
        if _is_finite(row.get(MEAN))
        and isinstance(row.get("step"), int)
        and (step is None or row["step"] <= step)
    ]
    if not rows:
        return None
    last = rows[-1]
    deviation = float(last[DEVIATION]) if _is_finite(last.get(DEVIATION)) else None
    return PolicyScore(float(last[MEAN]), deviation, episodes, int(last["step"]), is_new=False)


def _group_of(curve: RunCurve, others: Sequence[str | Path] | None) -> Group | None:
    """Return the runs that differ from a run only in seed, itself included."""
    if others is None:
        beside = find_runs([curve.path.absolute().parent])
        paths = beside if len(beside) <= MOST_RUNS else []
    else:
        paths = find_runs(others)
    own = curve.path.resolve()
    curves = [curve, *(read_curve(path) for path in paths if path.resolve() != own)]
    # Of several runs of one seed, the one that is published is used.
    curves = [each for each in curves if each is curve or each.seed != curve.seed]
    for group in group_runs(curves):
        if any(each is curve for each in group.runs):
            missing = [each for each in curves if all(each is not run for run in group.runs)]
            if others is not None and missing:
                raise UserError(
                    f"{missing[0].path}: differs from {curve.path} in more than the seed, or "
                    "repeats a seed; its results do not belong on the same card"
                )
            return group
    return None


def _seed_scores(group: Group | None, notes: list[str]) -> SeedScores | None:
    if group is None or len(group.evaluated) < FEWEST_SEEDS:
        return None
    steps, scores = aligned(group)
    final = scores[:, -1]
    if not np.isfinite(final).all():
        return None
    if any(run.last_step != steps[-1] for run in group.evaluated):
        notes.append(f"Seeds of unequal length are compared at step {steps[-1]:,}.")
    if any(run.state != "finished" for run in group.evaluated):
        notes.append("Not all seeds have finished their training.")
    low, high = interval(final[:, None], interquartile_mean)
    return SeedScores(
        seeds=tuple(run.seed for run in group.evaluated),
        returns=tuple(map(float, final)),
        step=int(steps[-1]),
        interquartile_mean=float(interquartile_mean(final[:, None])),
        low=float(low),
        high=float(high),
        mean=float(final.mean()),
        median=float(np.median(final)),
    )


def _points(curve: RunCurve | None) -> tuple[tuple[int, float], ...]:
    if curve is None or not len(curve.steps):
        return ()
    chosen = np.unique(
        np.linspace(0, len(curve.steps) - 1, min(MOST_POINTS, len(curve.steps))).astype(int)
    )
    return tuple((int(curve.steps[index]), float(curve.returns[index])) for index in chosen)


def _training_seconds(curve: RunCurve | None, step: int | None) -> float | None:
    if curve is None or step is None:
        return None
    known = curve.wall_seconds[curve.steps == step]
    return float(known[-1]) if len(known) and np.isfinite(known[-1]) else None


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False
