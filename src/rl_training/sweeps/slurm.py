"""Run a sweep on Slurm: an array of jobs, each of which takes trials from the sweep's folder.

Slurm sends SIGUSR1 before the time limit. Training saves a checkpoint, and submitit queues the job
again. Slurm sends SIGTERM when it preempts or cancels a job. Training saves as well, but whether
the job is queued again is up to Slurm; otherwise nobody could cancel it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rl_training.errors import (
    STOP_SIGNALS,
    TrainingError,
    UserError,
    one_line,
    stop_signals,
)

if TYPE_CHECKING:
    from rl_training.sweeps.file import SweepFile
    from rl_training.sweeps.folder import SweepFolder

MOST_WORKERS = 32
"""Jobs that are submitted unless `--workers` says otherwise"""
SIGNAL = signal.SIGUSR1
"""Announces the time limit; submitit's own choice, SIGUSR2, does not stop training"""
SIGNAL_NAME = "USR1"
SIGNAL_VARIABLE = "SUBMITIT_PREEMPT_SIGNAL"
SAVE_SECONDS = 120
"""How long before its time limit a job is told to save"""
KILL_SECONDS = 120.0
"""How long a job that was told to end waits for Slurm to end it or queue it again"""
LOOK_SECONDS = 1.0
ASK_SECONDS = 15.0
"""How often Slurm is asked which jobs there are"""
COMMAND_SECONDS = 60


def require_slurm(*, cluster: str = "slurm") -> None:
    """Raise a `UserError` if this machine cannot submit jobs."""
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise UserError(
            '--on slurm: needs submitit; run `pip install "rl-training[slurm]"`'
        ) from None
    missing = [name for name in ("sbatch", "srun", "squeue") if shutil.which(name) is None]
    if cluster == "slurm" and missing:
        raise UserError(
            f"--on slurm: the command {missing[0]} was not found; start this on a login node of a "
            "Slurm cluster, or use --on local"
        )


def suitable_jobs(sweep: SweepFile) -> int:
    """How many jobs to submit."""
    return min(sweep.settings.rounds or sweep.trials, MOST_WORKERS)


def run_on_slurm(
    folder: SweepFolder,
    sweep: SweepFile,
    *,
    workers: int,
    modules: Sequence[str],
    look: Callable[[], None],
    cluster: str = "slurm",
) -> None:
    """Submit jobs and wait until all trials are over; `look` is called every second.

    Jobs that an earlier call has submitted and that are not over count as workers. Ctrl-C leaves
    all jobs as they are; its message says how to cancel them.
    """
    from rl_training.sweeps.results import SweepResults
    from rl_training.sweeps.study import Study

    require_slurm(cluster=cluster)
    study = Study(folder, sweep)

    def is_over() -> bool:
        return SweepResults(folder, sweep, study.trials()).is_over

    if is_over():
        return
    array = JobArray(folder, sweep, cluster)
    try:
        array.submit(workers, modules)
        while not is_over():
            look()
            if not array.is_alive() and not is_over():
                raise TrainingError(array.why_ended())
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt as interruption:
        interruption.add_note(array.how_to_go_on())
        raise
    array.cancel_pending()


class JobArray:
    """The jobs of a sweep: those of this process, and those of an earlier one.

    All have the name of the sweep, which no other sweep has. So they are found again even if the
    process that submitted them was killed before it knew their numbers.
    """

    def __init__(self, folder: SweepFolder, sweep: SweepFile, cluster: str) -> None:
        self._sweep, self._cluster, self._path = sweep, cluster, folder.path.absolute()
        self.name = job_name(folder)
        self._logs = folder.workers.absolute() / "slurm"
        self._jobs: list[Any] = []
        self._asked_at, self._was_alive = -math.inf, True

    def submit(self, wanted: int, modules: Sequence[str]) -> None:
        """Submit jobs until there are as many as `wanted`."""
        import submitit

        earlier = self._number_alive()
        if earlier is None:
            raise UserError(
                "--on slurm: squeue does not answer, so it is not known whether this sweep has "
                "jobs already; start the same command again later"
            )
        missing = wanted - earlier
        if missing <= 0:
            return
        settings = self._sweep.settings
        executor = submitit.AutoExecutor(
            folder=self._logs,
            cluster=self._cluster,
            slurm_max_num_timeout=settings.slurm.requeues,
        )
        executor.update_parameters(**job_parameters(self._sweep, self.name))
        worker = SlurmWorker(str(self._path), tuple(modules))
        try:
            with _job_environment(settings.study):
                self._jobs = executor.map_array(worker, range(missing))
        except submitit.core.utils.FailedJobError as error:  # of sbatch
            raise UserError(
                f"slurm: sbatch has refused the jobs: {one_line(str(error), 500)}"
            ) from None

    def is_alive(self) -> bool:
        """Whether a job is queued or runs; Slurm is asked once in a while."""
        if self._cluster != "slurm":
            return any(not job.done() for job in self._jobs)
        if time.monotonic() > self._asked_at + ASK_SECONDS:
            self._asked_at = time.monotonic()
            self._was_alive = self._number_alive() != 0
        return self._was_alive

    def _number_alive(self) -> int | None:
        """How many jobs are queued or run; None if Slurm does not answer."""
        if self._cluster != "slurm":
            return 0
        listed = _output("squeue", "--me", "--array", "--noheader", "--format=%j")
        return None if listed is None else [*map(str.strip, listed.splitlines())].count(self.name)

    def cancel_pending(self) -> None:
        """Cancel jobs that have not started; the others find that nothing is left and end."""
        if self._cluster == "slurm":
            _output("scancel", "--state=PENDING", f"--name={self.name}")

    def how_to_go_on(self) -> str:
        return (
            f"the Slurm jobs go on; start the same command again to watch them, or stop them with "
            f"checkpoints: scancel --name={self.name}"
        )

    def why_ended(self) -> str:
        from rl_training.sweeps.local import tail

        message = "all Slurm jobs have ended, and trials are left; start the same command again"
        logs = sorted(self._logs.glob("*_log.err"), key=lambda path: path.stat().st_mtime)
        if not logs:
            return f"{message}; there are no logs in {self._logs}: do all nodes share this folder?"
        return f"{message}; the last lines of {logs[-1]} are:\n{tail(logs[-1])}"


def job_name(folder: SweepFolder) -> str:
    """The name of a sweep's jobs, with characters that need no quotes and no escapes."""
    return f"sweep-{re.sub(r'[^A-Za-z0-9._-]', '-', folder.unique_name)}"


def job_parameters(sweep: SweepFile, name: str) -> dict[str, Any]:
    """The options of the jobs, as submitit names them."""
    chosen, resources = sweep.settings.slurm, sweep.settings.resources
    delay = min(SAVE_SECONDS, 15 * chosen.minutes)
    options = {key.replace("_", "-"): value for key, value in chosen.options.items()}
    gpus = math.ceil(resources.gpus)  # Slurm gives out whole ones
    return {
        "name": name,
        "timeout_min": chosen.minutes,
        "mem_gb": chosen.memory_gb,
        "cpus_per_task": resources.cpus,
        "gpus_per_node": gpus if gpus and "gres" not in options else None,
        "slurm_partition": chosen.partition,
        "slurm_account": chosen.account,
        "slurm_array_parallelism": 10_000,  # as many as Slurm starts
        "slurm_setup": [f"export {SIGNAL_VARIABLE}={SIGNAL_NAME}"],
        "slurm_additional_parameters": {
            **options,
            "signal": f"{SIGNAL_NAME}@{delay}",
            "requeue": True,
        },
    }


@dataclass(frozen=True)
class SlurmWorker:
    """What a job runs. submitit stores it in a file, so it must not have anything secret."""

    folder: str
    modules: tuple[str, ...] = ()

    def __call__(self, place: int) -> str:
        """Run trials until none is left, or until Slurm stops this job."""
        received = self._work()
        if SIGNAL in received:
            # submitit's reaction, which is in place again: it stores what `checkpoint` returns,
            # queues this job again and exits.
            signal.raise_signal(SIGNAL)
        if received:
            time.sleep(KILL_SECONDS)
        return "stopped" if received else "done"

    def checkpoint(self, place: int) -> Any:
        """What the job runs when it was queued again: the same; submitit calls this."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, place)

    def _work(self) -> list[int]:
        """Run trials; return the signals that have stopped this process, if any."""
        received: list[int] = []
        try:
            with _raising(received):
                received += self._run_trials()
        except KeyboardInterrupt as interruption:
            received += stop_signals(interruption)
            if signal.SIGINT in received:
                raise
        return received

    def _run_trials(self) -> Sequence[int]:
        from rl_training.envs import trust_modules
        from rl_training.sweeps.folder import STUDY_VARIABLE, SweepFolder
        from rl_training.sweeps.worker import Board, say, work

        trust_modules(*self.modules)
        folder = SweepFolder(Path(self.folder))
        sweep = folder.read(os.environ.get(STUDY_VARIABLE))
        board = Board(folder, sweep)
        return () if work(board, folder, sweep, say) else board.stopped_by


@contextlib.contextmanager
def _raising(received: list[int]) -> Iterator[None]:
    """Let the first of `STOP_SIGNALS` raise `KeyboardInterrupt`; training has its own reaction."""

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt(signal.Signals(number))

    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _job_environment(study: str | None) -> Iterator[None]:
    """Set the variables that jobs inherit; the URL of a database may have a password."""
    from submitit.helpers import environment_variables

    from rl_training.sweeps.folder import STUDY_VARIABLE

    secret = {} if study is None else {STUDY_VARIABLE: study}
    with environment_variables(**{SIGNAL_VARIABLE: SIGNAL_NAME, **secret}):
        yield


def _output(*command: str) -> str | None:
    """What a command of Slurm prints; None if it fails, as on a cluster that is too busy."""
    try:
        done = subprocess.run(  # noqa: S603 (commands of Slurm)
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
