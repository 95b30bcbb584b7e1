"""The table of a sweep: every trial with its parameters, its objective and its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_training.checkpoints.format import write_json
from rl_training.sweeps.file import SweepFile
from rl_training.sweeps.folder import SweepFolder
from rl_training.sweeps.study import FINISHED, Study, Trial
from rl_training.types import Json


@dataclass(frozen=True)
class SweepResults:
    """A sweep and its trials, as the report page and the table need them."""

    folder: SweepFolder
    sweep: SweepFile
    trials: list[Trial]

    @property
    def best(self) -> Trial | None:
        """The finished trial with the best objective; the first one of equals."""
        return best_trial(self.sweep, self.trials)

    @property
    def is_over(self) -> bool:
        complete = len(self.trials) == self.sweep.trials
        return complete and all(trial.is_over for trial in self.trials)

    def to_json(self) -> Json:
        return table_json(self.sweep, self.trials)


def read_results(folder: SweepFolder, study: str | None = None) -> SweepResults:
    """Read the results of a sweep so far; `study` is the URL of its database, if it has one."""
    sweep = folder.read(study)
    return SweepResults(folder, sweep, Study(folder, sweep).trials())


def best_trial(sweep: SweepFile, trials: Sequence[Trial]) -> Trial | None:
    finished = [trial for trial in trials if trial.state == FINISHED]
    sign = 1 if sweep.objective.mode == "max" else -1
    return max(finished, key=lambda trial: sign * (trial.value or 0.0), default=None)


def ranked(sweep: SweepFile, trials: Sequence[Trial]) -> list[Trial]:
    """Finished trials from best to worst, then the others by number."""
    sign = -1 if sweep.objective.mode == "max" else 1
    finished = [trial for trial in trials if trial.state == FINISHED]
    others = [trial for trial in trials if trial.state != FINISHED]
    return sorted(finished, key=lambda trial: (sign * (trial.value or 0.0), trial.number)) + others


def table_json(sweep: SweepFile, trials: Sequence[Trial]) -> Json:
    """The table as JSON. Nothing in it depends on when or where a trial ran."""
    best = best_trial(sweep, trials)
    return {
        "objective": sweep.objective.model_dump(),
        "exact": sweep.is_exact,
        "seeds": sweep.seeds,
        "best": None if best is None else best.number,
        "trials": [_row(trial) for trial in trials],
    }


def _row(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "state": trial.state,
        "params": trial.params,
        "value": trial.value,
        "scores": trial.scores,
        "message": trial.message,
    }


def write_results(folder: SweepFolder, sweep: SweepFile, trials: Sequence[Trial]) -> None:
    """Write `results.json`."""
    write_json(folder.results, table_json(sweep, trials))
