"""Run the trials of a sweep on a Ray cluster.

This process plans trials and stores results; a Ray task runs one trial. A task whose worker or node
is lost is started again elsewhere and continues from the last checkpoint. Ray Tune is not used: it
would be a second search, a second checkpoint format and a second place that decides what to run.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.checkpoints.lease import LeaseLostError
from rl_training.envs import TRUSTED_MODULES
from rl_training.errors import RunLockedError, UserError, last_line, warn_user
from rl_training.ray_session import RaySession, chosen_address, ray_session, require_ray
from rl_training.runtime.job_folder import JOB
from rl_training.sweeps.file import SweepFile
from rl_training.sweeps.folder import SweepFolder
from rl_training.sweeps.settings import Objective
from rl_training.sweeps.storage import JobStorage, absolute_url, check_storage, published
from rl_training.sweeps.study import Study
from rl_training.sweeps.trial import TrialResult, run_trial
from rl_training.sweeps.worker import Board, Claim, Idle

POLL_SECONDS = 0.5
STOP_SECONDS = 20.0
NOT_COPIED = ["runs/", "sweeps/", ".git/", ".venv/", "*.safetensors", "*.npz", "*.hdf5"]
"""What a working folder may have besides code"""
LOST, FAILED, PREEMPTED = "lost", "failed", "preempted"


@dataclass(frozen=True)
class Assignment:
    """What a task needs to know of its trial."""

    number: int
    folder: str
    """The folder of the job, on a disk that all machines share unless there is a storage"""
    job: str
    """The content of `job.json`"""
    objective: Objective
    storage: str | None
    stored_as: str
    """The name of the trial in the storage"""
    attempt: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How a task ended."""

    result: TrialResult
    message: str = ""


def run_on_ray(
    board: Board, folder: SweepFolder, sweep: SweepFile, number: int, look: Callable[[], None]
) -> None:
    """Run all trials that are left, `number` at once, within `joined_cluster`."""
    driver = _Driver(board, folder, sweep)
    try:
        driver.run(number, look)
    finally:
        driver.stop()


@contextlib.contextmanager
def joined_cluster(sweep: SweepFile, workers: int | None, address: str | None) -> Iterator[int]:
    """Join the cluster of a sweep, and give the number of trials to run there at once.

    Raises `UserError` if trials cannot run there.
    """
    require_ray("--on ray")
    if sweep.settings.storage is not None:
        check_storage(sweep.settings.storage)
    chosen, key = address_of(sweep, address)
    environment = _runtime_environment(sweep, chosen_address(chosen))
    with ray_session(chosen, needed_by="--on ray", key=key, runtime_env=environment) as session:
        # A cluster may grow when trials wait for it; this machine does not.
        is_fixed = workers is None or session.embedded
        fitting = suitable_tasks(sweep, session) if is_fixed else 0
        yield workers or fitting


def address_of(sweep: SweepFile, address: str | None) -> tuple[str | None, str]:
    """The address of the command line or of the sweep file, and what to call it."""
    if address is not None:
        return address, "--address"
    return sweep.settings.ray.address, "ray.address"


def suitable_tasks(sweep: SweepFile, session: RaySession) -> int:
    """How many trials the cluster can run at once; raise `UserError` if it cannot run one."""
    import ray

    wanted = {"CPU": float(sweep.settings.resources.cpus), "GPU": sweep.settings.resources.gpus}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [_times(node, wanted) for node in nodes]
    if not any(fitting):
        needed = ", ".join(f"{amount:g} {kind}" for kind, amount in wanted.items() if amount)
        raise UserError(
            f"resources: a trial needs {needed}, and no node of {session.where} has that"
        )
    return min(sum(fitting), sweep.trials)


def _times(node: dict[str, float], wanted: dict[str, float]) -> int:
    return min(int(node.get(kind, 0.0) / amount) for kind, amount in wanted.items() if amount)


class _Driver:
    """Starts a task for each trial, and deals with what comes back."""

    def __init__(self, board: Board, folder: SweepFolder, sweep: SweepFile) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._board, self._folder, self._sweep = board, folder, sweep
        self._name = folder.unique_name
        url = sweep.settings.storage
        self._storage = None if url is None else absolute_url(url)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        resources = sweep.settings.resources
        # Reports come to this machine, because only it may have the journal.
        self._reports = (
            ray.remote(_Reports)
            .options(num_cpus=0, scheduling_strategy=here, max_restarts=-1, max_task_retries=-1)
            .remote(str(folder.path), sweep.settings.study)
        )
        self._task = ray.remote(_run_remotely).options(
            num_cpus=resources.cpus, num_gpus=resources.gpus, max_retries=0
        )
        self._claims: dict[Any, Claim] = {}

    def run(self, number: int, look: Callable[[], None]) -> None:
        import ray

        while True:
            idle = self._fill(number)
            look()
            if not self._claims:
                if idle is Idle.DONE:
                    return
                time.sleep(POLL_SECONDS)  # another machine runs the last trials
                continue
            done, _ = ray.wait(list(self._claims), timeout=POLL_SECONDS)
            for task in done:
                self._end(task, self._claims.pop(task))

    def _fill(self, number: int) -> Idle | None:
        """Start tasks while there are trials and room; return why there is no further trial."""
        while len(self._claims) < number:
            claim = self._board.claim({claim.number for claim in self._claims.values()})
            if isinstance(claim, Idle):
                return claim
            self._claims[self._start(claim)] = claim
        return None

    def _start(self, claim: Claim) -> Any:
        path, storage = self._folder.trial(claim.number), self._storage
        attempt = claim.lease.number
        if storage is None:
            claim.lease.release()  # the task takes it, on its machine
        return self._task.remote(
            Assignment(
                claim.number,
                str(path.absolute()),
                (path / JOB).read_text(),
                self._sweep.objective,
                storage,
                self._stored_as(claim.number),
                attempt,
                tuple(TRUSTED_MODULES),
            ),
            self._reports,
        )

    def _end(self, task: Any, claim: Claim) -> None:
        import ray

        try:
            outcome: Outcome = ray.get(task)
        except ray.exceptions.RayError as error:
            self._note_loss(claim.number, error)
            return
        finally:
            claim.lease.release()
        if outcome.result.state == FAILED:
            self._board.fail(claim.number, UserError(outcome.message))
        elif outcome.result.state not in (LOST, PREEMPTED):
            try:
                self._fetch(claim.number)
            except OSError as error:
                self._note_loss(claim.number, error)
                return
            self._board.end(claim.number, outcome.result)

    def _fetch(self, number: int) -> None:
        """Bring the runs of a trial to the folder of the sweep."""
        if self._storage is not None:
            storage = JobStorage(self._storage, self._stored_as(number))
            if not storage.restore(self._folder.trial(number)):
                warn_user(f"the runs of trial {number} were not found in the storage")

    def _stored_as(self, number: int) -> str:
        return f"{self._name}/trial_{number:04}"

    def _note_loss(self, number: int, error: Exception) -> None:
        """Say that a trial will be started again; the board counts how often."""
        warn_user(f"trial {number} lost its worker and continues elsewhere: {last_line(error)}")

    def stop(self) -> None:
        """Stop all tasks with checkpoints; what does not end in time is left to Ray."""
        import ray

        if not ray.is_initialized():
            return
        for task in self._claims:
            with contextlib.suppress(Exception):
                ray.cancel(task, force=False)
        if self._claims:
            with contextlib.suppress(Exception):
                ray.wait(list(self._claims), num_returns=len(self._claims), timeout=STOP_SECONDS)
        for claim in self._claims.values():
            claim.lease.release()
        self._claims.clear()
        with contextlib.suppress(Exception):
            ray.kill(self._reports)


class _Reports:
    """Takes the reports of all tasks, beside the journal."""

    def __init__(self, folder: str, study: str | None) -> None:
        place = SweepFolder(Path(folder))
        self._study = Study(place, place.read(study))

    def report(self, number: int, step: int, value: float) -> bool:
        return self._study.report(number, step, value)


def _run_remotely(assignment: Assignment, reports: Any) -> Outcome:
    """Run a trial in a worker of Ray."""
    import ray

    from rl_training.envs import trust_modules

    trust_modules(*assignment.modules)

    def report(step: int, value: float) -> bool:
        return bool(ray.get(reports.report.remote(assignment.number, step, value)))

    try:
        return Outcome(_run_assigned(assignment, report))
    except (LeaseLostError, RunLockedError) as error:
        return Outcome(TrialResult(LOST), str(error))
    except KeyboardInterrupt:
        return Outcome(TrialResult(PREEMPTED))
    except (OSError, ray.exceptions.RayError):
        raise  # not the fault of the trial, which is started again
    except Exception as error:
        message = str(error) if isinstance(error, UserError) else last_line(error)
        return Outcome(TrialResult(FAILED), message)


def _run_assigned(assignment: Assignment, report: Callable[[int, float], bool]) -> TrialResult:
    if assignment.storage is None:
        return run_trial(Path(assignment.folder), assignment.objective, report)
    storage = JobStorage(assignment.storage, assignment.stored_as)
    with tempfile.TemporaryDirectory(prefix="rl_training-") as scratch:
        folder = Path(scratch)
        if not storage.restore(folder):
            (folder / JOB).write_text(assignment.job)
        with published(storage, folder, assignment.attempt):
            return run_trial(folder, assignment.objective, report)


def _runtime_environment(sweep: SweepFile, address: str | None) -> dict[str, Any] | None:
    """What every machine of a cluster gets: this package, and what the sweep file names."""
    given = sweep.settings.ray
    wanted: dict[str, Any] = {
        "working_dir": given.working_dir,
        "pip": given.pip,
        "env_vars": given.env_vars or None,
    }
    found = {key: value for key, value in wanted.items() if value is not None}
    if address is None:
        return found or None
    found["py_modules"] = [str(Path(__file__).parents[1])]
    if TRUSTED_MODULES:  # they may be in the current folder
        found.setdefault("working_dir", str(Path.cwd()))
    if "working_dir" in found:
        found["excludes"] = NOT_COPIED
    return found
