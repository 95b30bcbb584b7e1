"""Sweeps in situations that nobody plans: samplers with a memory, old databases, sudden kills."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Command, tree

from rl_training.errors import RunLockedError, UserError
from rl_training.runtime import jobs
from rl_training.runtime.job_folder import JobStatus
from rl_training.sweeps import ray_executor
from rl_training.sweeps.folder import SweepFolder
from rl_training.sweeps.run import Sweep, open_sweep, run_sweep
from rl_training.sweeps.study import Study
from rl_training.sweeps.worker import Board, work

pytestmark = pytest.mark.usefixtures("no_pictures")
TINY = {
    "total_timesteps": 60,
    "eval_episodes": 1,
    "learning_starts": 20,
    "batch_size": 8,
    "hidden_sizes": [8],
    "buffer_capacity": 100,
}
SHORT = {**TINY, "eval_interval": 20}


def values(**changes: Any) -> dict[str, Any]:
    """The content of a sweep file; None removes a key."""
    usual = {
        "base": "sac/pendulum",
        "set": TINY,
        "search": {"tau": {"log": [1e-3, 1e-1]}, "learning_rate": {"log": [1e-4, 1e-2]}},
        "trials": 24,
        "seeds": 0,
    }
    if "grid" in changes:
        usual |= {"search": None, "trials": None}
    return {key: each for key, each in {**usual, **changes}.items() if each is not None}


def points(sweep: Sweep) -> list[tuple[float, float]]:
    return [(each.params["tau"], each.params["learning_rate"]) for each in sweep.results().trials]


def distance(point: tuple[float, float]) -> float:
    """How far the settings are from the best ones, on logarithmic scales."""
    tau, rate = point
    return math.hypot(math.log(tau / 0.006), math.log(rate / 0.0008))


def search(sweep: Sweep) -> list[tuple[float, float]]:
    """Plan and judge all trials, each plan by a new process."""
    while True:
        study = Study(sweep.folder, sweep.file)
        queued = [each for each in study.plan() if each.state == "queued"]
        if not queued:
            return points(sweep)
        for trial in queued:
            study.begin()
            at = (trial.params["tau"], trial.params["learning_rate"])
            study.finish(trial.number, -distance(at), [0.0])


def test_a_sequence_of_points_goes_on_and_depends_on_no_result(tmp_path: Path) -> None:
    sweep = open_sweep(values(sampler="qmc", trials=100), tmp_path / "out")
    assert sweep.file.is_exact
    found = search(sweep)
    assert len(set(found)) == 100
    smaller = open_sweep(values(sampler="qmc", trials=70), tmp_path / "smaller")
    assert search(smaller) == found[:70]


def test_generations_follow_each_other(tmp_path: Path) -> None:
    sampler = {"nsgaii": {"population_size": 8}}
    sweep = open_sweep(values(sampler=sampler, trials=80, seed=3), tmp_path / "out")
    distances = [distance(point) for point in search(sweep)]
    # Without a memory of generations, every trial is a random one.
    assert sum(distances[-16:]) < 0.6 * sum(distances[:16])


# Folders


def test_a_sweep_that_was_killed_while_its_folder_was_created_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"

    def kill(*_: object) -> None:
        (path / f".tmp-{'0' * 32}").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("rl_training.sweeps.folder.write_json", kill)
        with pytest.raises(KeyboardInterrupt):
            open_sweep(values(), path)
    assert open_sweep(values(), path).folder.exists()


def test_a_database_may_have_sweeps_of_the_same_name(tmp_path: Path) -> None:
    url, path = f"sqlite:///{tmp_path}/study.db", tmp_path / "out"
    first = open_sweep(values(study=url, grid={"tau": [0.1, 0.2]}), path)
    assert len(Study(first.folder, first.file).plan()) == 2
    moved = SweepFolder(path.rename(tmp_path / "moved"))
    assert len(Study(moved, moved.read(url)).trials()) == 2
    shutil.rmtree(moved.path)
    second = open_sweep(values(study=url, grid={"learning_rate": [0.1, 0.2, 0.3]}), path)
    assert second.results().trials == []


def test_sweeps_of_the_same_name_have_names_of_their_own_elsewhere(tmp_path: Path) -> None:
    folders = [open_sweep(values(), tmp_path / each / "out").folder for each in ("a", "b")]
    names = {folder.unique_name for folder in folders}
    assert len(names) == 2
    assert all(name.startswith("out-") for name in names)


# Trials


def run_here(sweep: Sweep) -> None:
    board = Board(sweep.folder, sweep.file)
    assert work(board, sweep.folder, sweep.file, lambda line: None)


def test_a_trial_waits_for_a_paused_process_that_still_has_its_runs_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of a paused process can be taken over, but not the locks of its run folders."""
    train, tried = jobs._train, []

    def locked(*arguments: Any) -> Any:
        tried.append(arguments)
        if len(tried) < 10:
            raise RunLockedError("is being trained by process 1")
        return train(*arguments)

    monkeypatch.setattr(jobs, "_train", locked)
    monkeypatch.setattr("rl_training.sweeps.worker.POLL_SECONDS", 0.0)
    sweep = open_sweep(values(grid={"tau": [0.1]}), tmp_path / "out")
    run_here(sweep)
    assert [trial.state for trial in sweep.results().trials] == ["finished"]


def test_settings_that_do_not_go_together_fail_their_trial_alone(tmp_path: Path) -> None:
    """Ranges are fine by themselves; REDQ needs at least `subset_size` critics."""
    search = {"num_critics": {"int": [2, 4]}, "subset_size": {"int": [1, 4]}}
    changes = {"base": "redq/pendulum", "search": search, "sampler": "random", "trials": 8}
    sweep = open_sweep(values(**changes), tmp_path / "out")
    run_here(sweep)
    states = {}
    for trial in sweep.results().trials:
        fits = trial.params["subset_size"] <= trial.params["num_critics"]
        states.setdefault(fits, set()).add(trial.state)
        assert fits or "num_critics" in trial.message
    assert states == {True: {"finished"}, False: {"failed"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search": {"policy_delay": {"uniform": [1, 8]}}}, "policy_delay.* must be an integer"),
        ({"search": {"tau": {"int": [1, 10**400]}}}, r"search\.tau\.int.* must be a finite number"),
        ({"grid": {".tau": [0.1]}}, r"grid\.'\.tau': must be a config key"),
        ({"seeds": 2**32 - 1}, "fresh_seeds: set them, since seeds end at 4294967295"),
        ({"set": SHORT, "prune": {"hyperband": {"grace": 0}}}, r"prune\.hyperband.* refuses it"),
        ({"set": SHORT, "prune": {"median": {"grace": "x"}}}, r"prune\.median.* refuses it"),
        (
            {"base": "td3/pendulum", "grid": {"env_id": ["Pendulum-v1", "CartPole-v1"]}},
            "needs continuous actions",
        ),
        (
            {"grid": {"algo": ["sac", "td3"], "policy_delay": [1, 2], "initial_alpha": [0.1]}},
            "initial_alpha",
        ),
        (
            {
                "base": "redq/pendulum",
                "grid": {"num_critics": [2, 3], "subset_size": [2, 3]},
            },
            "num_critics",
        ),
    ],
)
def test_settings_that_cannot_work_are_found_before_anything_is_created(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        open_sweep(values(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# The command


@pytest.fixture
def file(work: Path) -> Path:
    path = work / "sweep.yaml"
    path.write_text(yaml.safe_dump(values(grid={"tau": [0.1]})))
    return path


def test_a_report_whose_winner_was_stopped_asks_to_be_started_again(
    rl: Command, work: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(open_sweep(file, work / "out"))
    stopped = jobs.JobResult(work, JobStatus("preempted"))
    monkeypatch.setattr("rl_training.sweeps.run.run_winner", lambda results: stopped)
    ended = rl("sweep", "sweep.yaml", "--output-dir", "out", "--report")
    assert ended.code == 75
    assert "start the same command again" in ended.err
    assert not (work / "out" / "report.html").exists()


def test_a_sweep_without_a_winner_has_a_page(
    rl: Command, work: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no luck")

    with monkeypatch.context() as patched:
        patched.setattr(jobs, "_train", fail)
        run_here(open_sweep(file, work / "out"))
    ended = rl("sweep", "sweep.yaml", "--output-dir", "out", "--report")
    assert ended.code == 1
    assert "trial 0 failed: ValueError: no luck" in ended.err
    assert "no luck" in (work / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "ray", "--address", "nonsense"], "--address = 'nonsense': must be host:port"),
        (["--on", "ray", "--address", "127.0.0.1:1"], "--address = '127.0.0.1:1': the cluster"),
        (["--address", "127.0.0.1:6379"], "--address: needs --on ray"),
    ],
)
def test_a_wrong_address_is_found_before_anything_is_created(
    rl: Command, work: Path, file: Path, options: list[str], message: str
) -> None:
    before = tree(work)
    ended = rl("sweep", str(file), *options)
    assert (ended.code, tree(work)) == (2, before)
    assert message in ended.err


def test_a_missing_cluster_is_found_before_anything_is_created(
    rl: Command, work: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")

    def find_none(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", find_none)
    before = tree(work)
    ended = rl("sweep", str(file), "--on", "ray", "--address", "auto")
    assert (ended.code, tree(work)) == (2, before)
    assert "--address = 'auto': the cluster cannot be joined" in ended.err


@pytest.mark.ray
def test_trials_that_fit_nowhere_are_found_before_anything_is_created(
    rl: Command, work: Path
) -> None:
    (work / "sweep.yaml").write_text(yaml.safe_dump(values(resources={"cpus": 1024})))
    before = tree(work)
    ended = rl("sweep", "sweep.yaml", "--on", "ray")
    assert (ended.code, tree(work)) == (2, before)
    assert "resources: a trial needs 1024 CPU, and no node of" in ended.err


def test_the_folder_of_a_sweep_is_not_moved_by_an_option(
    rl: Command, work: Path, file: Path
) -> None:
    run_here(open_sweep(file, work / "out"))
    ended = rl("sweep", "out", "--output-dir", "other")
    assert ended.code == 2
    assert "--output-dir: out is the folder of a sweep already" in ended.err


def test_code_travels_to_a_cluster_that_a_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    def session(address: str | None, **options: Any) -> Any:
        sent.append(options["runtime_env"])
        raise UserError("enough")

    monkeypatch.setattr(ray_executor, "ray_session", session)
    monkeypatch.setattr(ray_executor, "require_ray", lambda needed_by: None)
    for address in ("10.0.0.1:6379", ""):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError, match="enough"):
            run_sweep(values(), tmp_path / "out", on="ray")
        assert not (tmp_path / "out").exists(), "a cluster is joined before anything is created"
    package = Path(ray_executor.__file__).parents[1]
    assert sent == [{"py_modules": [str(package)]}, None]
