"""The data of the page of a sweep, as bounded JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_training.config_files import dump_yaml, packaged_configs
from rl_training.experiment import statistics
from rl_training.report.numbers import Axes, chosen, exact, rounded, text
from rl_training.report.runs import RunDetails, path_argument, shell_command
from rl_training.sweeps.file import SweepFile
from rl_training.sweeps.report.importance import importances, place_of
from rl_training.sweeps.results import SweepResults, ranked
from rl_training.sweeps.settings import Objective
from rl_training.sweeps.space import Choice, Dimension, Range
from rl_training.sweeps.study import FAILED, FINISHED, PRUNED, QUEUED, RUNNING, Trial
from rl_training.types import Json

MOST_TRIALS = 2_000
"""Most trials on a page: the best ones, then the others by number"""
MOST_POINTS, FEWEST_POINTS = 60, 5
"""Points of the curve of a trial"""
ALL_POINTS = 40_000
"""Points of the curves of all trials"""
STATES = (FINISHED, PRUNED, FAILED, RUNNING, QUEUED)
SWEEP_FILE, BASE_FILE = "sweep.yaml", "base.yaml"
MAX_KEY, MAX_CHOICE, MAX_MESSAGE = 80, 40, 500
SHOWN_SETTINGS = (
    *("base", "set", "search", "grid", "trials", "seeds", "fresh_seeds", "objective", "sampler"),
    *("rounds", "prune", "seed", "max_failures", "resources"),
)
"""Settings on the page; those of machines and databases may contain what is nobody's business"""
INTERVALS: Mapping[str, statistics.Statistic] = {
    "iqm": statistics.interquartile_mean,
    "mean": statistics.mean,
    "median": statistics.median_of_runs,
}
"""The statistics over seeds that a bootstrap can judge; the ends of a sample are not among them"""


@dataclass(frozen=True)
class Winner:
    """The job that trains the best trial with fresh seeds."""

    runs: Sequence[RunDetails] = ()
    scores: Mapping[int, float] = field(default_factory=dict)
    """By seed, the metric of the objective; empty until all seeds are trained"""
    problem: str = ""
    """Why there are no scores"""


def sweep_json(results: SweepResults, winner: Winner, detail: float = 1.0) -> Json:
    """Return everything that the page shows of a sweep, apart from the winner's runs."""
    sweep, shown = results.sweep, _shown(results)
    axes, messages = Axes(), dict[str, int]()
    share = min(MOST_POINTS, ALL_POINTS / max(1, len(shown)))
    points = max(FEWEST_POINTS, int(detail * share))
    trials = [_trial_json(trial, sweep, axes, points, messages) for trial in shown]
    states = [trial.state for trial in results.trials]
    return {
        "task": _task(sweep),
        "objective": _objective_json(sweep.objective),
        "exact": sweep.is_exact,
        "why": _exactness(sweep),
        "notes": _notes(results, len(shown)),
        "planned": sweep.trials,
        "states": {each: states.count(each) for each in STATES},
        "seeds": sweep.seeds,
        "fresh_seeds": sweep.fresh_seeds,
        "parameters": [_parameter_json(*each) for each in sweep.space.dimensions.items()],
        "importances": _importances_json(results),
        "best": _best_json(results),
        "winner": {**_score_json(winner.scores, sweep.objective), "problem": winner.problem},
        "trials": trials,
        "axes": axes.values,
        "messages": list(messages),
        **_repeat_json(results),
    }


def _task(sweep: SweepFile) -> Json:
    config = sweep.config(next(sweep.examples()))
    return {"env_id": text(config.env_id), "algorithm": text(config.algo)}


def _objective_json(objective: Objective) -> Json:
    metric, statistic = objective.parts
    return {"metric": metric, "statistic": statistic, "mode": objective.mode}


def _exactness(sweep: SweepFile) -> str:
    """Say in one sentence whether the same sweep gives the same table again."""
    if sweep.is_exact:
        return (
            "This table is exact: the same sweep file gives the same trials and the same values, "
            "whichever trial ends first and whatever is stopped and continued."
        )
    causes = []
    if not sweep.is_planned_in_order:
        causes.append("plans a trial from those that have ended by then")
    if sweep.pruner is not None:
        causes.append("stops trials by comparison with those that have got as far by then")
    return (
        f"This table is statistical: the search {' and '.join(causes)}, so the same sweep file can "
        "give other trials. The decisions of this search are in its study."
    )


def _notes(results: SweepResults, shown: int) -> list[str]:
    notes = []
    over = sum(trial.is_over for trial in results.trials)
    if not results.is_over:
        notes.append(f"The sweep goes on: {over:,} of {results.sweep.trials:,} trials are over.")
    if shown < len(results.trials):
        notes.append(
            f"The page shows {shown:,} of {len(results.trials):,} trials, the best ones first; "
            "results.json has all of them."
        )
    return notes


def _shown(results: SweepResults) -> list[Trial]:
    """The trials on the page, by number."""
    best_first = ranked(results.sweep, results.trials)[:MOST_TRIALS]
    return sorted(best_first, key=lambda trial: trial.number)


def _trial_json(
    trial: Trial, sweep: SweepFile, axes: Axes, points: int, messages: dict[str, int]
) -> list[Any]:
    """Number, state, place or value of each parameter, objective, seeds, message, steps, curve."""
    steps = sorted(trial.reports)
    places = [steps[place] for place in chosen(len(steps), points)]
    message = text(trial.message, MAX_MESSAGE) if trial.message else None
    return [
        trial.number,
        STATES.index(trial.state),
        [
            place_of(each, trial.params[key]) if isinstance(each, Choice) else trial.params[key]
            for key, each in sweep.space.dimensions.items()
        ],
        None if trial.value is None else exact(trial.value),
        rounded(trial.scores),
        None if message is None else messages.setdefault(message, len(messages)),
        axes.add(np.asarray(places, dtype=np.int64)) if places else None,
        rounded(trial.reports[step] for step in places),
    ]


def _parameter_json(key: str, dimension: Dimension) -> Json:
    named = {"key": text(key, MAX_KEY)}
    if isinstance(dimension, Range):
        is_log = dimension.kind in ("log", "log_int")
        whole = dimension.kind in ("int", "log_int")
        bounds = {"low": dimension.low, "high": dimension.high}
        return {**named, "scale": "log" if is_log else "linear", "whole": whole, **bounds}
    return {**named, "scale": "choice", "values": [_choice_text(each) for each in dimension.values]}


def _choice_text(value: Any) -> str:
    return text(value if isinstance(value, str) else json.dumps(value), MAX_CHOICE)


def _importances_json(results: SweepResults) -> Json:
    found = importances(results.sweep, results.trials)
    keys = list(results.sweep.space.dimensions)
    return {
        "shares": [[keys.index(key), share] for key, share in found.shares.items()],
        "problem": found.problem,
        "trials": found.trials,
        "best": found.best,
    }


def _best_json(results: SweepResults) -> Json | None:
    best, sweep = results.best, results.sweep
    if best is None:
        return None
    scores = dict(zip(sweep.seeds, best.scores, strict=False))
    params = [
        [text(key, MAX_KEY), text(json.dumps(value, ensure_ascii=False))]
        for key, value in best.params.items()
    ]
    return {"number": best.number, "params": params, **_score_json(scores, sweep.objective)}


def _score_json(scores: Mapping[int, float], objective: Objective) -> Json:
    """The objective with its interval over seeds, and the value of each seed."""
    values = [{"seed": seed, "value": exact(value)} for seed, value in scores.items()]
    if not scores:
        return {"value": None, "low": None, "high": None, "values": values}
    given = list(scores.values())
    low = high = float("nan")
    statistic = INTERVALS.get(objective.parts[1])
    if statistic is not None and len(given) > 1 and np.isfinite(given).all():
        low, high = statistics.interval(np.asarray(given)[:, None], statistic)
    found = {"value": objective.score(given), "low": low, "high": high}
    return {**{name: exact(value) for name, value in found.items()}, "values": values}


def _repeat_json(results: SweepResults) -> Json:
    """The sweep as files to save, and the commands that use them."""
    sweep, folder = results.sweep, results.folder.path
    given = sweep.settings.model_dump(mode="json", exclude_defaults=True)
    settings = {key: given[key] for key in SHOWN_SETTINGS if key in given}
    if sweep.settings.grid is None:
        settings["trials"] = sweep.trials
    files = []
    if settings["base"] not in packaged_configs():  # somebody's file, which may be gone
        settings["base"] = BASE_FILE
        files.append([BASE_FILE, dump_yaml(sweep.base)])
    again = folder.with_name(f"{folder.absolute().name}-again")
    commands = [
        ["Repeat", ("sweep", SWEEP_FILE, "--output-dir", path_argument(again), "--report")],
        ["Continue", ("sweep", path_argument(folder), "--report")],
    ]
    shown = [[name, shell_command(*words)] for name, words in commands]
    return {
        "folder": text(str(folder)),
        "files": [[SWEEP_FILE, dump_yaml(settings)], *files],
        "commands": [each for each in shown if each[1] is not None],
    }
