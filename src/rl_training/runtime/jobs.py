"""Run a job: start its seeds, continue them where they stopped, or find that they are finished."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints.lease import PATIENCE, Lease, LeaseLostError
from rl_training.checkpoints.run_folder import (
    RunFolder,
    last_metrics,
    read_metrics,
    settle_unfinished,
)
from rl_training.config import ConfigSource, TrainConfig
from rl_training.envs import EnvironmentSource
from rl_training.errors import (
    CheckpointError,
    RunLockedError,
    TrainingInterrupted,
    last_line,
    one_line,
    stop_signals,
)
from rl_training.runtime.job_folder import (
    JobState,
    JobStatus,
    prepare_job,
    read_job_status,
    run_folders_of,
    write_status,
)
from rl_training.runtime.policies import read_status
from rl_training.training.resume import resume_runs
from rl_training.training.run import start_population
from rl_training.types import TrainResult
from rl_training.validation import user_path

EVALUATION = "eval/mean_reward"
EVALUATION_KEYS = {
    "eval_return_mean": EVALUATION,
    "eval_return_std": "eval/std_reward",
    "eval_length_mean": "eval/mean_ep_length",
    "eval_success_rate": "eval/success_rate",
}
"""Metrics of an evaluation, and their names in `metrics.jsonl`"""
MAX_MESSAGE = 500


@dataclass(frozen=True)
class JobResult:
    """What a job leaves: its state, and the result of each seed."""

    folder: Path
    status: JobStatus
    results: list[TrainResult] = field(default_factory=list)
    signals: tuple[int, ...] = ()
    """The signals that have stopped a job that was preempted"""


def run_or_resume(
    config: ConfigSource,
    seeds: Sequence[int],
    folder: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    env: EnvironmentSource | None = None,
    patience: float = PATIENCE,
) -> JobResult:
    """Start a job, continue it where it stopped, or find that it is finished.

    `patience` is how long to wait for another process that owns the job, in seconds. An error of
    the run is raised after `status.json` has recorded it. See `workflows.run_or_resume`.
    """
    resolved = prepare_job(config, seeds, folder)
    return continue_job(
        user_path(folder), resolved, callbacks=callbacks, env=env, patience=patience
    )


def continue_job(
    path: Path,
    config: TrainConfig,
    *,
    callbacks: Sequence[Callback] = (),
    env: EnvironmentSource | None = None,
    patience: float = PATIENCE,
    lease: Lease | None = None,
) -> JobResult:
    """Like `run_or_resume`, for a job that is prepared, and perhaps owned already."""
    if (finished := _finished(path, config)) is not None:
        if lease is not None:
            lease.release()
        return finished
    with lease or Lease.acquire(path, patience=patience) as owned:
        monitor = _Monitor(path, config, owned)
        with monitor.reporting():
            results = _train(path, config, [*callbacks, monitor], env)
            monitor.note_results(results)
            return JobResult(path, monitor.end("finished"), results)
        return JobResult(path, monitor.end("preempted"), signals=monitor.signals)


def _train(
    path: Path, config: TrainConfig, callbacks: Sequence[Callback], env: EnvironmentSource | None
) -> list[TrainResult]:
    """Train the seeds that are not finished, together where they are at the same step."""
    settle_unfinished(path)
    folders = run_folders_of(path, config)
    if not any(map(os.path.lexists, folders)):
        start_population(config, environment=env, callbacks=callbacks)
    elif unfinished := [folder for folder in folders if not _is_finished(folder)]:
        resume_runs(unfinished, environment=env, callbacks=callbacks)
    return [_stored_result(folder) for folder in folders]


def _finished(path: Path, config: TrainConfig) -> JobResult | None:
    """The result of a job that is finished; None if it is not."""
    with contextlib.suppress(CheckpointError):
        status = read_job_status(path)
        if status.state == "finished":
            return JobResult(
                path, status, [_stored_result(f) for f in run_folders_of(path, config)]
            )
    return None


def _is_finished(folder: Path) -> bool:
    """Whether a run has ended, and its last evaluation is recorded."""
    run = RunFolder(folder)
    if run.is_unstarted():
        return False
    status = read_status(folder)
    return status.is_finished and last_metrics(run, EVALUATION).get("step") == status.step


def _stored_result(folder: Path) -> TrainResult:
    """The result of a run that has finished, read from its folder."""
    run, status = RunFolder(folder), read_status(folder)
    row = last_metrics(run, EVALUATION)
    reader = run.latest_checkpoint(lambda found: found.verify(["state.json"]))
    metrics = {
        "global_step": float(status.step),
        "gradient_steps": float(row.get("gradient_steps", math.nan)),
        **{name: _number(row[key]) for name, key in EVALUATION_KEYS.items() if key in row},
    }
    return TrainResult(
        run_dir=folder,
        checkpoint_path=reader.folder,
        best_checkpoint_path=run.best_checkpoint(),
        metrics=metrics,
        stop_reason=str(reader.json("state.json")["progress"]["stop_reason"]),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


class _Monitor(Callback):
    """Writes `status.json` while the seeds of a job train, and stops them if the job is lost."""

    def __init__(self, path: Path, config: TrainConfig, lease: Lease) -> None:
        super().__init__()
        self._path, self._lease, self._total = path, lease, config.total_timesteps
        self._seeds, self._step, self._best = config.seeds or [], 0, dict[int, float]()
        self._writing = threading.Lock()
        self._is_over = False
        self.signals: tuple[int, ...] = ()
        """The signals that have stopped training"""

    def for_seed(self, seed: int) -> Callback:
        return self

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report the job as running; what ends it is reported too. A preemption is not raised."""
        self._write("running")
        self._lease.on_beat = self._beat
        try:
            yield
        except TrainingInterrupted as interruption:
            self.end("preempted")
            self.signals = tuple(stop_signals(interruption))
            if signal.SIGINT in self.signals:
                raise
        except LeaseLostError:
            self._is_over = True  # the status belongs to the process that has taken over
            raise
        except RunLockedError:  # the last owner was paused and still has the locks of its runs
            self.end("preempted")
            raise
        except KeyboardInterrupt:
            self.end("preempted")
            raise
        except BaseException as error:
            self.end("failed", last_line(error))
            raise

    def end(self, state: JobState, message: str = "") -> JobStatus:
        self._is_over = True
        return self._write(state, message)

    def on_train_start(self, context: TrainingContext) -> None:
        self._step = context.global_step
        self._note_best(context)

    def on_collect_end(self, context: TrainingContext) -> None:
        self._lease.check()
        self._step = context.global_step

    def on_update_end(self, context: TrainingContext) -> None:
        self._lease.check()
        self._step = context.global_step

    def on_evaluation_end(self, context: TrainingContext) -> None:
        self._lease.check()  # an evaluation may take long, and its row is written after this
        self._note_best(context)

    def _note_best(self, context: TrainingContext) -> None:
        found = [context.best_return]
        if context.evaluation is not None:
            found.append(context.evaluation.metrics["eval_return_mean"])
        known = [value for value in found if value is not None]
        if known:
            self._best[context.config.seed] = max(known)

    def note_results(self, results: Sequence[TrainResult]) -> None:
        """Note what all seeds have reached; another process may have trained some of them."""
        self._step = max(int(result.metrics["global_step"]) for result in results)
        for seed, result in zip(self._seeds, results, strict=True):
            rows = read_metrics(result.run_dir / "metrics.jsonl", EVALUATION)
            known = [float(row[EVALUATION]) for row in rows if row[EVALUATION] is not None]
            if known:
                self._best[seed] = max(known)

    def _beat(self) -> None:
        self._write("running")

    def _write(self, state: JobState, message: str = "") -> JobStatus:
        best = list(self._best.values())
        status = JobStatus(
            state,
            self._step,
            self._total,
            sum(best) / len(best) if best else None,
            self._lease.number,
            time.time(),
            platform.node(),
            os.getpid(),
            one_line(message, MAX_MESSAGE),
        )
        with self._writing:  # of this thread and that of the lease
            is_stale = state == "running" and self._is_over
            if not is_stale and not self._lease.is_lost:
                write_status(self._path, status)
        return status
