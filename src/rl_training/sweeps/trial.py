"""Run one trial: train its seeds, report the objective, stop when the pruner says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints.lease import Lease
from rl_training.checkpoints.run_folder import RunFolder, last_metrics, read_metrics
from rl_training.config import TrainConfig
from rl_training.errors import CheckpointError
from rl_training.runtime.job_folder import read_job, run_folders_of
from rl_training.runtime.jobs import EVALUATION, EVALUATION_KEYS, JobResult, continue_job
from rl_training.sweeps.settings import Objective
from rl_training.types import PRUNED

Report = Callable[[int, float], bool]
"""Takes a step and the objective there; returns whether to stop the trial"""


@dataclass(frozen=True)
class TrialResult:
    """What a trial leaves."""

    state: str
    """finished, pruned or preempted"""
    value: float | None = None
    scores: tuple[float, ...] = ()
    signals: tuple[int, ...] = ()
    """The signals that have stopped a trial that was preempted"""


def run_trial(
    folder: Path,
    objective: Objective,
    report: Report,
    *,
    lease: Lease | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrialResult:
    """Train the job in `folder` to its end, wherever it stopped before.

    Raises what stops the trial for good, such as a loss that is not finite.
    """
    config = read_job(folder)
    reporter = _Reporter(folder, config, objective, report)
    return trial_result(
        continue_job(folder, config, callbacks=[*callbacks, reporter], lease=lease), objective
    )


def trial_result(job: JobResult, objective: Objective) -> TrialResult:
    """Judge a job by the last evaluation of each seed."""
    if job.status.state != "finished":
        return TrialResult(job.status.state, signals=job.signals)
    metric = objective.parts[0]
    scores = [float(result.metrics.get(metric, float("nan"))) for result in job.results]
    if missing := [score for score in scores if score != score]:
        raise CheckpointError(
            f"{job.folder}: {len(missing)} of {len(scores)} seeds have no {metric}, which the "
            "objective needs"
        )
    pruned = any(result.stop_reason == PRUNED for result in job.results)
    value = objective.score(scores)
    return TrialResult("pruned" if pruned else "finished", value, tuple(scores))


class _Reporter(Callback):
    """Reports the objective once all seeds of a trial are evaluated at a step."""

    def __init__(
        self, folder: Path, config: TrainConfig, objective: Objective, report: Report
    ) -> None:
        super().__init__()
        self._objective, self._report = objective, report
        self._metric = objective.parts[0]
        self._folders = dict(zip(config.seeds or (), run_folders_of(folder, config), strict=True))
        self._found: dict[int, dict[int, float]] = {}
        """By step and seed, the metric of the evaluations in this process"""
        self._is_pruned = False

    def for_seed(self, seed: int) -> Callback:
        return self

    def on_collect_end(self, context: TrainingContext) -> None:
        if self._is_pruned:
            context.request_stop(PRUNED)

    def on_update_end(self, context: TrainingContext) -> None:
        if self._is_pruned:
            context.request_stop(PRUNED)

    def on_evaluation_end(self, context: TrainingContext) -> None:
        if context.evaluation is None or self._metric not in context.evaluation.metrics:
            return
        step = context.global_step
        found = self._found.setdefault(step, {})
        found[context.config.seed] = float(context.evaluation.metrics[self._metric])
        values = [
            found[seed] if seed in found else self._recorded(folder, step)
            for seed, folder in self._folders.items()
        ]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            self._is_pruned = self._report(step, self._objective.score(known)) or self._is_pruned

    def _recorded(self, folder: Path, step: int) -> float | None:
        """The metric of a seed that is trained by another group, or has ended before this step."""
        key = EVALUATION_KEYS[self._metric]
        with contextlib.suppress(CheckpointError, OSError):
            rows = read_metrics(folder / "metrics.jsonl", key)
            same = [row[key] for row in rows if row.get("step") == step]
            last = last_metrics(RunFolder(folder), EVALUATION)
            if same:
                return float(same[-1])
            if _has_stopped_before(folder, step):
                return float(last[key])
        return None


def _has_stopped_before(folder: Path, step: int) -> bool:
    from rl_training.runtime.policies import read_status

    status = read_status(folder)
    return status.is_finished and status.step < step
