"""How much each parameter of a sweep mattered, by Optuna's PED-ANOVA."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_training.sweeps.file import SweepFile
from rl_training.sweeps.space import Choice, Params, Space
from rl_training.sweeps.study import FINISHED, Trial, import_optuna

FEWEST_TRIALS = 10
"""With fewer finished trials, importances would be noise"""
FEWEST_BEST, BEST_OF = 5, 10
"""One of `BEST_OF` trials is among the best, and at least this number of them"""


@dataclass(frozen=True)
class Importances:
    """The share of each parameter, which add up to 1, or why there are none."""

    shares: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    trials: int = 0
    """Finished trials"""
    best: int = 0
    """How many of them count as the best"""


def importances(sweep: SweepFile, trials: Sequence[Trial]) -> Importances:
    """Compare how the parameters of the best trials and of all finished ones are distributed."""
    usable = [
        trial
        for trial in trials
        if trial.state == FINISHED and trial.value is not None and math.isfinite(trial.value)
    ]
    values = [trial.value for trial in usable if trial.value is not None]
    count = len(values)
    wanted = max(FEWEST_BEST, -(-count // BEST_OF))
    ordered = sorted(values, reverse=sweep.objective.mode == "max")
    equal = ordered[wanted:].count(ordered[wanted - 1]) if count > wanted else 0  # to the last one
    best = min(wanted + equal, count)
    if problem := _problem(sweep.space, count, best):
        return Importances(problem=problem, trials=count)
    # Half a trial less, so that rounding does not add one.
    found = _divergences(sweep, usable, (wanted - 0.5) / count)
    total = sum(found.values())
    if not (math.isfinite(total) and total > 0):
        return Importances(
            problem="the best trials have the same parameters as all others", trials=count
        )
    shares = sorted(
        ((key, value / total) for key, value in found.items()), key=lambda item: -item[1]
    )
    return Importances(dict(shares), trials=count, best=best)


def _problem(space: Space, count: int, best: int) -> str:
    """Say why importances cannot be computed; empty if they can."""
    if len(space.dimensions) < 2:
        return "the sweep has a single parameter, so there is nothing to compare it with"
    if count < FEWEST_TRIALS:
        return f"they need at least {FEWEST_TRIALS} finished trials, and there are {count}"
    if best == count:
        return "too many finished trials have the same objective"
    return ""


def _divergences(sweep: SweepFile, trials: Sequence[Trial], share: float) -> dict[str, float]:
    optuna = import_optuna()
    distributions = sweep.space.distributions()
    study = optuna.create_study(
        direction="maximize" if sweep.objective.mode == "max" else "minimize"
    )
    study.add_trials(
        [
            optuna.trial.create_trial(
                params=to_parameters(sweep.space, trial.params),
                distributions=distributions,
                value=trial.value,
            )
            for trial in trials
        ]
    )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=share)
    found = optuna.importance.get_param_importances(study, evaluator=evaluator, normalize=False)
    return {key: float(value) for key, value in found.items()}


def to_parameters(space: Space, values: Params) -> Mapping[str, Any]:
    """Return Optuna's parameters for these settings."""
    return {
        key: each.labels[place_of(each, values[key])] if isinstance(each, Choice) else values[key]
        for key, each in space.dimensions.items()
    }


def place_of(choice: Choice, value: Any) -> int:
    """Return the place of a value among the choices; 1, 1.0 and true are different ones."""
    return [json.dumps(each) for each in choice.values].index(json.dumps(value))
