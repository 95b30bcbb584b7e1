"""A worker: takes trials of a sweep one after another and runs them, until none is left.

Any number of workers, on any number of machines, may share the folder of a sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from rl_training.checkpoints.lease import Lease, LeaseLostError, LeaseWatch
from rl_training.errors import CheckpointError, ConfigError, RunLockedError, UserError, last_line
from rl_training.runtime.job_folder import read_job_status, saved_step
from rl_training.sweeps.file import SweepFile
from rl_training.sweeps.folder import SweepFolder
from rl_training.sweeps.results import write_results
from rl_training.sweeps.study import QUEUED, RUNNING, Study, Trial
from rl_training.sweeps.trial import TrialResult, run_trial

POLL_SECONDS = 1.0


class Idle(Enum):
    """Why there is no trial to run."""

    WAIT = "other workers run the last trials"
    DONE = "all trials are over"


@dataclass(frozen=True)
class Claim:
    """A trial that this process owns."""

    number: int
    lease: Lease


class Board:
    """Hands out trials: those whose process has died first, then those that are queued."""

    def __init__(self, folder: SweepFolder, sweep: SweepFile) -> None:
        self._folder, self._sweep = folder, sweep
        self.study = Study(folder, sweep)
        self._watches: dict[int, LeaseWatch] = {}
        self.stopped_by: tuple[int, ...] = ()
        """The signals that have stopped a trial of this process"""

    def claim(self, own: Collection[int] = ()) -> Claim | Idle:
        """Take a trial, or say why there is none. `own` are those that the caller runs already."""
        with self._folder.lock():
            trials = self.prepare()
            for trial in trials:
                if trial.state != RUNNING or trial.number in own:
                    continue
                if (claim := self._take_over(trial)) is not None:
                    return claim
            if any(trial.state == QUEUED for trial in trials):
                number = self.study.begin()
                return Claim(number, Lease.acquire(self._folder.trial(number)))
        unfinished = any(not trial.is_over for trial in self.study.trials())
        return Idle.WAIT if unfinished else Idle.DONE

    def prepare(self) -> list[Trial]:
        """Plan the trials that are due, and store their jobs; return all trials.

        A trial whose parameters do not go together fails, and the others go on.
        """
        while True:
            trials = self.study.plan()
            if all(self._is_stored(trial) for trial in trials):
                return trials

    def _is_stored(self, trial: Trial) -> bool:
        """Store the job of a trial if that is due; return False if it has failed."""
        if trial.is_over or self._folder.is_prepared(trial.number):
            return True
        try:
            config = self._sweep.config(trial.params)
        except ConfigError as error:
            self.study.fail(trial.number, str(error))
            return False
        self._folder.prepare(self._sweep, trial.number, config)
        return True

    def _take_over(self, trial: Trial) -> Claim | None:
        """Take a trial whose process has ended; None if it is alive."""
        path = self._folder.trial(trial.number)
        watch = self._watches.setdefault(trial.number, LeaseWatch(path))
        lease = Lease.of_free(watch)
        if lease is None:
            return None
        if self._note_death(trial.number):
            lease.release()
            return None
        return Claim(trial.number, lease)

    def _note_death(self, number: int) -> bool:
        """Count that the process of a trial has died, if it has not stopped by itself.

        Returns whether that happened too often without a new checkpoint, so that it has failed.
        """
        try:
            status = read_job_status(self._folder.trial(number))
        except CheckpointError:
            return False
        if status.state in ("preempted", "finished"):
            return False
        step = saved_step(self._folder.trial(number))
        deaths = self.study.note_death(number, step)
        if deaths <= self._sweep.settings.max_failures:
            return False
        self.study.fail(number, f"its process died {deaths} times after the checkpoint of {step:,}")
        return True

    def end(self, number: int, result: TrialResult) -> None:
        """Store the result of a trial that is over."""
        if result.state == "finished":
            assert result.value is not None
            self.study.finish(number, result.value, result.scores)
        elif result.state == "pruned":
            self.study.prune(number, result.scores)
        write_results(self._folder, self._sweep, self.study.trials())

    def fail(self, number: int, error: BaseException) -> None:
        """Store why a trial cannot be completed."""
        message = str(error) if isinstance(error, UserError) else last_line(error)
        self.study.fail(number, message)
        write_results(self._folder, self._sweep, self.study.trials())


def work(board: Board, folder: SweepFolder, sweep: SweepFile, say: Callable[[str], None]) -> bool:
    """Run trials until all are over. Returns False if a signal has stopped one of them."""
    while True:
        claim = board.claim()
        if claim is Idle.DONE:
            return True
        if isinstance(claim, Idle):
            time.sleep(POLL_SECONDS)
            continue
        say(f"trial {claim.number}")
        if not run_claim(board, claim, folder, sweep):
            return False


def run_claim(board: Board, claim: Claim, folder: SweepFolder, sweep: SweepFile) -> bool:
    """Run a trial to its end and store its result; return False if a signal has stopped it."""
    number = claim.number
    try:
        result = run_trial(
            folder.trial(number),
            sweep.objective,
            lambda step, value: board.study.report(number, step, value),
            lease=claim.lease,
        )
    except LeaseLostError:
        return True  # another worker has taken this trial over
    except RunLockedError:  # by a worker that is paused; its trial is tried again
        time.sleep(POLL_SECONDS)
        return True
    except OSError:  # such as a full disk: not the fault of the trial, which can be continued
        raise
    except Exception as error:
        board.fail(number, error)
        return True
    if result.state == "preempted":
        board.stopped_by = result.signals
        return False
    board.end(number, result)
    return True


def say(message: str) -> None:
    """Print a line of a worker's log."""
    print(message, flush=True)
