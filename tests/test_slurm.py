"""Sweeps on Slurm: jobs of submitit, time limits, preemption, and what users are told."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_slurm
import pytest
from conftest import Command, tree
from helpers import hashes, tiny

from rl_training.errors import TrainingError, UserError
from rl_training.runtime.job_folder import read_job_status
from rl_training.sweeps import slurm
from rl_training.sweeps.file import read_sweep
from rl_training.sweeps.folder import STUDY_VARIABLE, SweepFolder
from rl_training.sweeps.run import open_sweep, run_sweep
from rl_training.sweeps.slurm import (
    SlurmWorker,
    job_name,
    job_parameters,
    require_slurm,
    run_on_slurm,
)
from rl_training.sweeps.study import RUNNING, Study
from rl_training.sweeps.worker import Board, work

pytest.importorskip("optuna")
pytest.importorskip("submitit")
pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A config whose trials take long enough to be interrupted."""
    config = tiny(tmp_path, num_threads=1, total_timesteps=900, eval_interval=300)
    path = tmp_path / "base.yaml"
    path.write_text(json.dumps({key: each for key, each in config.items() if key != "output_dir"}))
    return path


@pytest.fixture
def values(base: Path) -> dict[str, Any]:
    rates = {"algo_kwargs.learning_rate": [0.001, 0.003]}
    return {"base": str(base), "grid": rates, "seeds": "0-1", "slurm": {"minutes": 30}}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Slurm's commands, in a folder that is also their state."""
    folder = fake_slurm.install(tmp_path / "slurm-commands")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(slurm, "ASK_SECONDS", 1.0)
    yield folder
    fake_slurm.scancel(folder, *{each.stem.partition("_")[0] for each in folder.glob("*.sh")})


@pytest.fixture(params=["local", "slurm"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """submitit's local executor, and its Slurm executor with commands that act like Slurm."""
    if request.param == "slurm":
        request.getfixturevalue("fake")
    for name in ("run_on_slurm", "require_slurm"):
        monkeypatch.setattr(
            slurm, name, functools.partial(getattr(slurm, name), cluster=request.param)
        )
    return str(request.param)


def when(condition: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Wait until a condition holds; return what it has found."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def process_in_training(folder: Path) -> int | None:
    """The process of a trial that has made steps and is not about to end."""
    for path in sorted(folder.glob("trials/*")):
        if (path / "sac__seed1" / "metrics.jsonl").exists():
            status = read_job_status(path)
            if status.state == "running":
                return status.process
    return None


def table(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def files_of(folder: Path) -> str:
    """All that submitit has written, as text."""
    paths = (each for each in (folder / "workers").rglob("*") if each.is_file())
    return "\n".join(path.read_bytes().decode(errors="replace") for path in paths)


@pytest.fixture
def undisturbed(tmp_path: Path, values: dict[str, Any]) -> Path:
    folder = tmp_path / "undisturbed"
    sweep = open_sweep(values, folder)
    assert work(Board(sweep.folder, sweep.file), sweep.folder, sweep.file, lambda line: None)
    return folder


@pytest.mark.faults
def test_an_interrupted_job_is_queued_again_and_changes_nothing(
    tmp_path: Path, values: dict[str, Any], undisturbed: Path, cluster: str
) -> None:
    folder, signaled = tmp_path / "sweep", []

    def interrupt() -> None:
        process = when(lambda: process_in_training(folder))
        os.kill(process, signal.SIGUSR1)
        signaled.append(process)

    disturber = threading.Thread(target=interrupt)
    disturber.start()
    results = run_sweep(values, folder, on="slurm", workers=1)
    disturber.join()
    assert [trial.state for trial in results.trials] == ["finished"] * 2
    assert table(folder) == table(undisturbed)
    statuses = [read_job_status(folder / "trials" / f"trial_000{number}") for number in (0, 1)]
    assert max(status.attempt for status in statuses) == 2
    assert signaled[0] not in [status.process for status in statuses]
    log = files_of(folder)
    assert "Calling checkpoint method" in log
    assert "Requeued job" in log
    for path in sorted(folder.glob("trials/*/sac__seed*/checkpoints/step_000000900")):
        same = undisturbed / path.relative_to(folder)
        assert hashes(path) == hashes(same)
        assert hashes(path)


@pytest.mark.faults
def test_a_preempted_job_saves_and_leaves_the_decision_to_slurm(
    tmp_path: Path, values: dict[str, Any], undisturbed: Path, fake: Path
) -> None:
    folder = tmp_path / "sweep"

    def cancel() -> None:
        when(lambda: process_in_training(folder))
        subprocess.run(["scancel", fake_slurm.FIRST_JOB], check=True)

    disturber = threading.Thread(target=cancel)
    disturber.start()
    with pytest.raises(TrainingError, match=r"have ended, and trials are left; start the same"):
        run_sweep(values, folder, on="slurm", workers=1)
    disturber.join()
    assert not (fake / "requeued").exists()
    states = [read_job_status(path).state for path in folder.glob("trials/*")]
    assert "preempted" in states
    run_sweep(values, folder, on="slurm", workers=1)
    assert table(folder) == table(undisturbed)


@pytest.mark.faults
def test_ctrl_c_leaves_jobs_running_and_the_same_command_watches_them(
    tmp_path: Path, values: dict[str, Any], fake: Path
) -> None:
    folder = tmp_path / "sweep"

    def look(results: Any) -> None:
        if any(trial.state == RUNNING for trial in results.trials):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        run_sweep(values, folder, on="slurm", workers=2, look=look)
    [note] = stopped.value.__notes__
    assert note.endswith(f"checkpoints: scancel --name={job_name(SweepFolder(folder))}")
    results = run_sweep(values, folder, on="slurm", workers=2)
    assert [trial.state for trial in results.trials] == ["finished"] * 2
    assert len(list(fake.glob("*.sh"))) == 1, "no further jobs were submitted"


def test_signals_between_trials_stop_a_worker(
    tmp_path: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = open_sweep(values, tmp_path / "sweep")
    monkeypatch.setattr(slurm, "KILL_SECONDS", 0.0)
    seen: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: seen.append(number))
        for number in (signal.SIGTERM, signal.SIGUSR1)
    }

    def claim(board: Board) -> Any:
        signal.raise_signal(sent[-1])
        raise AssertionError("the signal did not stop it")

    monkeypatch.setattr(Board, "claim", claim)
    sent: list[int] = []
    try:
        for number, expected in ((signal.SIGTERM, []), (signal.SIGUSR1, [signal.SIGUSR1])):
            sent.append(number)
            assert SlurmWorker(str(sweep.folder.path))(0) == "stopped"
            assert seen == expected, "only the time limit is passed on to submitit"
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def test_the_options_of_jobs(values: dict[str, Any], tmp_path: Path, fake: Path) -> None:
    section = {
        "partition": "gpu",
        "account": "lab",
        "minutes": 90,
        "memory_gb": 20,
        "requeues": 7,
        "options": {"constraint": "a100", "mail_type": "END", "exclusive": True},
    }
    sweep = read_sweep({**values, "slurm": section, "resources": {"cpus": 3, "gpus": 0.5}})
    import submitit

    executor = submitit.AutoExecutor(tmp_path / "jobs", cluster="slurm")
    executor.update_parameters(**job_parameters(sweep, "sweep-hopper"))
    text = executor._executor._make_submission_file_text("command", "0")
    for line in (
        "--partition=gpu",
        "--account=lab",
        "--time=90",
        "--mem=20GB",
        "--cpus-per-task=3",
        "--gpus-per-node=1",
        "--constraint=a100",
        "--mail-type=END",
        "--exclusive",
        "--signal=USR1@120",
        "--requeue",
        "--job-name=sweep-hopper",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "export SUBMITIT_PREEMPT_SIGNAL=USR1\n" in text


def test_a_kind_of_gpu_replaces_their_number(values: dict[str, Any]) -> None:
    section = {"options": {"gres": "gpu:a100:1"}}
    sweep = read_sweep({**values, "slurm": section, "resources": {"gpus": 1}})
    parameters = job_parameters(sweep, "name")
    assert parameters["gpus_per_node"] is None
    assert parameters["slurm_additional_parameters"]["gres"] == "gpu:a100:1"


def test_a_short_time_limit_leaves_time_for_training(values: dict[str, Any]) -> None:
    sweep = read_sweep({**values, "slurm": {"minutes": 2}})
    assert job_parameters(sweep, "name")["slurm_additional_parameters"]["signal"] == "USR1@30"


def test_the_password_of_a_database_reaches_jobs_by_their_environment_alone(
    tmp_path: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import submitit

    password = "hunter2hunter2"  # noqa: S105
    url = f"sqlite:///{tmp_path / 'study.db'}?user=me&password={password}"
    folder = SweepFolder(tmp_path / "sweep")
    sweep = read_sweep(values)
    folder.open(sweep)
    seen: list[str | None] = []

    def start(self: Any, command: str) -> Any:
        seen.append(os.environ.get(STUDY_VARIABLE))
        return submitit.local.local.LocalJob(self.folder, "1")

    monkeypatch.setattr(submitit.LocalExecutor, "_submit_command", start)
    secret = sweep.settings.model_copy(update={"study": url})
    array = slurm.JobArray(folder, type(sweep)(secret, sweep.base), "local")
    array.submit(1, ["module"])
    assert seen == [url]
    assert STUDY_VARIABLE not in os.environ
    assert "submitted.pkl" in "".join(tree(folder.path))
    assert password not in files_of(folder.path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": 5}, "slurm.options.time: use slurm.minutes"),
        ({"gpus_per_node": 1}, "slurm.options.gpus_per_node: use resources.gpus"),
        ({"--constraint": "x"}, "must be the long name of an option of sbatch"),
        ({"comment": "two\nlines"}, "must be one line of text"),
        ({"constraint": ["a"]}, "slurm.options.constraint = ['a']: must be one line of text"),
    ],
)
def test_options_that_cannot_work_are_refused(
    rl: Command, work: Path, values: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    (work / "sweep.yaml").write_text(json.dumps({**values, "slurm": {"options": options}}))
    ended = rl("sweep", "sweep.yaml")
    assert ended.code == 2
    assert message in ended.err
    assert tree(work) == {"sweep.yaml"}


def test_a_machine_without_slurm_is_named_before_anything_is_created(
    rl: Command, work: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "sweep.yaml").write_text(json.dumps(values))
    monkeypatch.setenv("PATH", "")
    ended = rl("sweep", "sweep.yaml", "--on", "slurm")
    assert ended.code == 2
    assert ended.err == (
        "error: --on slurm: the command sbatch was not found; start this on a login node of a "
        "Slurm cluster, or use --on local\n"
    )
    assert tree(work) == {"sweep.yaml"}


def test_a_missing_package_is_named_before_anything_is_created(
    rl: Command, work: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "sweep.yaml").write_text(json.dumps(values))
    monkeypatch.setitem(sys.modules, "submitit", None)
    ended = rl("sweep", "sweep.yaml", "--on", "slurm")
    assert ended.code == 2
    assert 'needs submitit; run `pip install "rl-training[slurm]"`' in ended.err
    assert tree(work) == {"sweep.yaml"}


def test_what_sbatch_says_is_passed_on(tmp_path: Path, values: dict[str, Any], fake: Path) -> None:
    (fake / "sbatch").write_text("#!/bin/sh\necho 'invalid partition specified: x' >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"sbatch has refused .*invalid partition specified: x"):
        run_sweep(values, tmp_path / "sweep", on="slurm", workers=2)


def test_slurm_that_does_not_answer_is_not_the_end_of_jobs(
    tmp_path: Path, values: dict[str, Any], fake: Path
) -> None:
    sweep = open_sweep(values, tmp_path / "sweep")
    array = slurm.JobArray(sweep.folder, sweep.file, "slurm")
    (fake / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert array.is_alive()
    with pytest.raises(UserError, match="squeue does not answer"):
        array.submit(2, ())
    assert not list(fake.glob("*.sh"))


@pytest.mark.thorough
def test_a_command_that_is_stopped_before_it_knows_its_jobs_finds_them_again(
    tmp_path: Path, values: dict[str, Any], fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import submitit

    folder, submit = tmp_path / "a sweep, of mine", submitit.SlurmExecutor._submit_command

    def stopped(self: Any, command: str) -> Any:
        submit(self, command)
        raise KeyboardInterrupt

    monkeypatch.setattr(submitit.SlurmExecutor, "_submit_command", stopped)
    (fake / "srun").write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(KeyboardInterrupt) as interrupted:
        run_sweep(values, folder, on="slurm", workers=2)
    assert "scancel --name=sweep-a-sweep--of-mine-" in interrupted.value.__notes__[0]
    sweep = open_sweep(values, folder)
    array = slurm.JobArray(sweep.folder, sweep.file, "slurm")
    assert array.is_alive()
    array.submit(2, ())
    assert len(list(fake.glob("*.sh"))) == 1, "no further jobs were submitted"
    other = open_sweep(values, tmp_path / "other")
    assert not slurm.JobArray(other.folder, other.file, "slurm").is_alive()


def test_no_jobs_are_submitted_for_a_sweep_that_is_over(
    tmp_path: Path, values: dict[str, Any], fake: Path
) -> None:
    sweep = open_sweep(values, tmp_path / "sweep")
    study = Study(sweep.folder, sweep.file)
    for trial in study.plan():
        study.begin()
        study.finish(trial.number, 1.0, [1.0, 1.0])
    run_on_slurm(sweep.folder, sweep.file, workers=2, modules=(), look=lambda: None)
    assert not list(fake.glob("*.sh"))
    require_slurm()
