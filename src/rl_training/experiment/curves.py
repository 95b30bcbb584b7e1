"""Learning curves of runs: read from run folders, grouped by settings and aligned over seeds.

Reads JSON and YAML files only, so that it needs PyTorch only for runs of different versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.checkpoints.format import read_json
from rl_training.checkpoints.run_folder import RUN, RunFolder, read_metrics, short_name
from rl_training.errors import UserError
from rl_training.experiment.overview import (
    UNREADABLE,
    newest_state,
    run_folders,
    run_state,
    saved_settings,
    shown_text,
)
from rl_training.experiment.settings import (
    NOT_LEARNING,
    comparable_settings,
    group_labels,
    short_value,
)
from rl_training.types import Json
from rl_training.validation import user_path

RETURN, SECONDS = "eval/mean_reward", "time/wall_seconds"
"""Keys of an evaluation's row: the mean return, and the training time of the run until then"""
NO_EVALUATIONS = "has no evaluations"
MAX_RETURN = 1e100
"""Larger returns are left out: sums of them would overflow"""
MOST_NAMED = 5
"""Most runs that a note names"""
MOST_TIMES = 200
"""Most points of a curve over wall time"""


@dataclass(frozen=True)
class RunCurve:
    """The evaluations of one run. Points are in the order of their steps, one per step."""

    path: Path
    name: str
    """Name of the run folder, in one line and without control codes"""
    run_id: str | None
    """Id of the run; None if its files have none"""
    algorithm: str
    environment: str
    """Name of the task: the id of the environment, its arguments and wrappers"""
    seed: int | None
    config: Mapping[str, Any]
    """Saved settings, without those of `NOT_LEARNING`"""
    state: str
    """running, finished, stopped or unreadable"""
    steps: np.ndarray
    """Environment steps, or updates if training is offline"""
    wall_seconds: np.ndarray
    """Seconds of training until each evaluation, over all resumes; NaN where unknown"""
    returns: np.ndarray
    """Mean return of each evaluation's episodes"""
    problem: str | None = None
    """Why there are no evaluations, if there are none"""
    left_out: int = 0
    """Number of evaluations without a finite return, which are not among the points"""

    @property
    def last_step(self) -> int:
        """Step of the last evaluation; 0 without one."""
        return int(self.steps[-1]) if len(self.steps) else 0


@dataclass(frozen=True)
class Group:
    """Runs that differ only in seed."""

    label: str
    """The algorithm, and the settings in which it differs from other groups of the same task"""
    algorithm: str
    environment: str
    runs: tuple[RunCurve, ...]
    """One run per seed, those without an evaluation included"""
    notes: tuple[str, ...] = ()
    """What was left out or changed to compare the runs"""

    @property
    def evaluated(self) -> tuple[RunCurve, ...]:
        """The runs with evaluations, in the order of the rows of `aligned`."""
        return tuple(run for run in self.runs if len(run.steps))


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Return the run folders at or below each path, in order and without repetition.

    Raises `UserError` for a path that does not exist. A folder without runs has none.
    """
    found: dict[Path, Path] = {}
    for path in map(user_path, paths):
        if not path.is_dir():
            kind = "is not a folder" if path.exists() else "no such folder"
            raise UserError(f"{path}: {kind}; name run folders, or folders that contain them")
        for run in sorted(run_folders(path)):
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_curve(path: str | Path) -> RunCurve:
    """Read the evaluations of a run. A run that cannot be read is returned with its `problem`."""
    # A path that was found may begin with `~`, which is then the name of a folder.
    folder = user_path(path) if isinstance(path, str) else path
    try:
        return _read_curve(folder)
    except Exception as error:  # whatever one folder contains, the others are shown
        reason = str(error) if isinstance(error, UserError | OSError) else repr(error)
        return make_curve(folder, UNREADABLE, problem=f"cannot be read: {reason}")


def _read_curve(path: Path) -> RunCurve:
    if not path.is_dir():
        raise UserError("there is no such folder")
    run = RunFolder(path)
    saved = newest_state(run)
    config = saved_settings(run) if saved is None else saved["config"]
    problem = None
    try:
        points = _evaluations(run)
    except (UserError, OSError) as error:
        points, problem = {}, f"its metrics cannot be read: {error}"
    return make_curve(path, run_state(run, saved)[0], config, points, description_of(run), problem)


def make_curve(
    path: Path,
    state: str,
    config: Json | None = None,
    points: Mapping[int, tuple[float, float]] | None = None,
    described: Json | None = None,
    problem: str | None = None,
) -> RunCurve:
    """Return the curve of a run from its settings and its evaluations.

    `points` has the wall time and the return of the evaluation at each step, in order. Returns that
    are not finite, or too large to compute with, are left out.
    """
    given, settings, about = points or {}, config or {}, described or {}
    values = {step: point for step, point in given.items() if abs(point[1]) < MAX_RETURN}
    if problem is None and not values:
        problem = NO_EVALUATIONS
    run_id = about.get("run_id")
    return RunCurve(
        path=path,
        name=shown_text(path.name),
        run_id=shown_text(run_id) if isinstance(run_id, str) else None,
        algorithm=shown_text(str(settings["algo"])) if config else "unknown",
        environment=_task(settings, about) if config else "unknown",
        seed=int(settings["seed"]) if config else None,
        config={key: value for key, value in settings.items() if key not in NOT_LEARNING},
        state=state,
        steps=np.array(list(values), dtype=np.int64),
        wall_seconds=np.array([seconds for seconds, _ in values.values()], dtype=np.float64),
        returns=np.array([value for _, value in values.values()], dtype=np.float64),
        problem=None if problem is None else shown_text(problem),
        left_out=len(given) - len(values),
    )


def _evaluations(run: RunFolder) -> dict[int, tuple[float, float]]:
    """Return wall time and return by step, in order; of several at one step, the last one."""
    if run.plain.mode(run.metrics.name) is None:
        return {}
    points = {}
    for row in read_metrics(run.metrics, RETURN):
        step, value = row.get("step"), _number(row[RETURN])
        if isinstance(step, int) and 0 <= step < 2**62:
            points[step] = _number(row.get(SECONDS)), value
    return dict(sorted(points.items()))


def _number(value: Any) -> float:
    """Return a number from a file as a float; NaN if it is not one that a float can hold."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.nan


def description_of(run: RunFolder) -> Json:
    """Return what `run.json` and `metadata.json` say of the run; later files win."""
    described: Json = {}
    for name in ("metadata.json", RUN):
        if run.plain.has_file(name):
            described |= read_json(run.path / name)
    return described


def _task(config: Json, described: Json) -> str:
    """Name a task. Arguments and wrappers can change rewards, so they are part of the name."""
    name = config.get("env_id")
    if name is None:
        environment = described.get("environment")
        label = environment.get("label") if isinstance(environment, dict) else None
        name = short_name(label) if isinstance(label, str) else "(own)"
    arguments = config.get("env_kwargs") or {}
    wrappers = [
        str(each.get("wrapper") if isinstance(each, dict) else each).rpartition(":")[2]
        for each in config.get("wrappers") or []
    ]
    words = [
        *(f"{key}={short_value(value)}" for key, value in sorted(arguments.items())),
        *wrappers,
    ]
    return shown_text(f"{name} ({', '.join(words)})" if words else str(name))


def group_runs(curves: Iterable[RunCurve]) -> list[Group]:
    """Group runs that differ only in seed, ordered by task and label.

    Runs whose settings cannot be read are in no group. Of several runs with one seed, which are
    not independent, the longest is used.
    """
    tasks: dict[tuple[str, str], list[RunCurve]] = {}
    for curve in curves:
        if curve.state != UNREADABLE:
            tasks.setdefault((curve.environment, curve.algorithm), []).append(curve)
    groups = [group for key in sorted(tasks) for group in _groups(tasks[key])]
    return sorted(groups, key=lambda group: (group.environment, group.label))


def _groups(curves: Sequence[RunCurve]) -> list[Group]:
    """Group the runs of one algorithm in one task by their settings."""
    settings = comparable_settings([curve.config for curve in curves])
    buckets: dict[str, list[int]] = {}
    for index, values in enumerate(settings):
        key = json.dumps(sorted(values.items()), sort_keys=True, default=repr)
        buckets.setdefault(key, []).append(index)
    labels = group_labels(
        curves[0].algorithm, [settings[indices[0]] for indices in buckets.values()]
    )
    return [
        _group(label, [curves[index] for index in indices])
        for label, indices in zip(labels, buckets.values(), strict=True)
    ]


def _group(label: str, curves: Sequence[RunCurve]) -> Group:
    notes: list[str] = []
    by_seed: dict[int | None, list[RunCurve]] = {}
    for curve in curves:
        by_seed.setdefault(curve.seed, []).append(curve)
    used = []
    for seed, same in sorted(by_seed.items(), key=lambda item: (item[0] is None, item[0] or 0)):
        longest = max(same, key=lambda curve: (curve.last_step, len(curve.steps), curve.name))
        used.append(longest)
        if len(same) > 1:
            path = shown_text(str(longest.path))
            notes.append(f"seed {seed} has {len(same)} runs; the longest is used: {path}")
    used = _in_common_steps(used)
    if without := [run for run in used if run.problem == NO_EVALUATIONS]:
        notes.append(f"without evaluations, left out: {_named(without)}")
    damaged = [run for run in used if run.problem not in (None, NO_EVALUATIONS)]
    notes += [f"seed {run.seed} is left out: {run.problem}" for run in damaged[:MOST_NAMED]]
    if partial := [run for run in used if run.left_out]:
        notes.append(f"evaluations without a finite return are left out: {_named(partial)}")
    group = Group(label, curves[0].algorithm, curves[0].environment, tuple(used))
    notes += _alignment_notes(group.evaluated)
    return Group(label, group.algorithm, group.environment, group.runs, tuple(notes))


def _in_common_steps(runs: Sequence[RunCurve]) -> list[RunCurve]:
    """Take the evaluations from runs that have no step in common with the others.

    There is no step at which all could be compared, so that as many as possible are kept, and of
    equally many those that went further.
    """
    known = [run for run in runs if len(run.steps)]
    ends = sorted({run.last_step for run in known}, reverse=True)
    if not ends:
        return list(runs)
    step = max(ends, key=lambda end: sum(_covers(run, end) for run in known))
    return [
        run
        if run.problem or _covers(run, step)
        else replace(
            run,
            steps=run.steps[:0],
            wall_seconds=run.wall_seconds[:0],
            returns=run.returns[:0],
            problem=f"its evaluations, at steps {run.steps[0]:,} to {run.last_step:,}, are all "
            f"{'before' if run.last_step < step else 'after'} those of the other seeds",
        )
        for run in runs
    ]


def _covers(run: RunCurve, step: int) -> bool:
    return bool(run.steps[0] <= step <= run.last_step)


def _alignment_notes(runs: Sequence[RunCurve]) -> list[str]:
    """Say how the evaluations of seeds are made comparable, where they are not already."""
    if not runs:
        return []
    notes = []
    common = min(run.last_step for run in runs)
    if longer := [run for run in runs if run.last_step > common]:
        shortest = [run for run in runs if run.last_step == common]
        notes.append(
            f"unequal lengths: all seeds are compared up to step {common:,}, the last evaluation "
            f"of {_named(shortest)}; {_count(longer, 'run')} went further"
        )
    grid = common_steps(runs)
    if any(not np.isin(grid, run.steps).all() for run in runs):
        notes.append(
            "seeds were evaluated at different steps: returns in between are interpolated linearly"
        )
    return notes


def _named(runs: Sequence[RunCurve]) -> str:
    names = [
        f"seed {run.seed}" + (f" ({run.state})" if run.state != "finished" else "")
        for run in runs[:MOST_NAMED]
    ]
    more = len(runs) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _count(runs: Sequence[RunCurve], word: str) -> str:
    return f"{len(runs)} {word}" + ("s" if len(runs) > 1 else "")


def common_steps(runs: Sequence[RunCurve]) -> np.ndarray:
    """Return the steps of all evaluations that lie within the evaluations of every run.

    None if a run ended before another one was first evaluated.
    """
    if not runs or not all(len(run.steps) for run in runs):
        return np.array([], dtype=np.int64)
    first, last = max(run.steps[0] for run in runs), min(run.steps[-1] for run in runs)
    steps = np.unique(np.concatenate([run.steps for run in runs]))
    within: np.ndarray = steps[(steps >= first) & (steps <= last)]
    return within


def aligned(
    group: Group, steps: Sequence[int] | np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and the returns of every seed there, `(seeds, steps)`.

    The rows are those of `group.evaluated`. Without `steps`, these are all at which any seed was
    evaluated, from the latest first evaluation to the earliest last one. Returns between two
    evaluations are interpolated linearly; before the first and after the last they are NaN.
    """
    runs = group.evaluated
    at = common_steps(runs) if steps is None else np.asarray(steps)
    return at, _interpolated(runs, at, lambda run: run.steps)


def aligned_by_time(
    group: Group, seconds: Sequence[float] | np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds of training and the returns of every seed then, `(seeds, seconds)`.

    The rows are the runs of `group.evaluated` whose wall time is known throughout; older versions
    did not save it. Without `seconds`, evenly spaced times at which every such run was evaluated
    before and after. Otherwise as in `aligned`.
    """
    runs = [run for run in group.evaluated if has_wall_time(run)]
    at = common_times(runs) if seconds is None else np.asarray(seconds, dtype=np.float64)
    return at, _interpolated(runs, at, lambda run: run.wall_seconds)


def has_wall_time(run: RunCurve) -> bool:
    """Return whether the wall time of every evaluation is known."""
    known = np.isfinite(run.wall_seconds).all() and (np.diff(run.wall_seconds) >= 0).all()
    return bool(len(run.steps) and known)


def common_times(runs: Sequence[RunCurve]) -> np.ndarray:
    """Return evenly spaced times between the evaluations of every run.

    None if a run ended before another one, perhaps on a slower machine, was first evaluated.
    """
    if not runs:
        return np.array([], dtype=np.float64)
    first = max(run.wall_seconds[0] for run in runs)
    last = min(run.wall_seconds[-1] for run in runs)
    points = min(MOST_TIMES, max(len(run.steps) for run in runs))
    return np.linspace(first, last, points if first < last else int(first == last))


def _interpolated(
    runs: Sequence[RunCurve], at: np.ndarray, positions: Callable[[RunCurve], np.ndarray]
) -> np.ndarray:
    rows = [np.interp(at, positions(run), run.returns, left=np.nan, right=np.nan) for run in runs]
    return np.array(rows, dtype=np.float64).reshape(len(runs), len(at))
