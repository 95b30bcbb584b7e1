"""Sweep files: wrong ones get one message before anything is created; right ones plan trials."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import pytest
from conftest import Command, tree
from helpers import tiny

from rl_training.errors import ConfigError, RunLockedError
from rl_training.runtime import job_needs, jobs
from rl_training.sweeps import worker
from rl_training.sweeps.file import masked, read_sweep, without_password
from rl_training.sweeps.folder import STUDY_VARIABLE, SweepFolder
from rl_training.sweeps.run import open_sweep, run_sweep
from rl_training.sweeps.study import Study
from rl_training.sweeps.worker import Board
from rl_training.sweeps.worker import work as work_on

pytest.importorskip("optuna")
EXAMPLES = Path(__file__).parent.parent / "examples" / "sweeps"
RATE = "algo_kwargs.learning_rate"
PASSWORD = "hunter2hunter2"  # noqa: S105


@pytest.fixture
def base(tmp_path: Path) -> Path:
    config = tiny(tmp_path, num_threads=1, eval_interval=40)
    del config["output_dir"]
    path = tmp_path / "base.yaml"
    path.write_text(json.dumps(config))
    return path


Make = Callable[..., dict[str, Any]]


@pytest.fixture
def make(base: Path) -> Make:
    """Return a function that makes the content of a sweep file with changes; None removes a key."""

    def values(**changes: Any) -> dict[str, Any]:
        usual = {
            "base": str(base),
            "search": {RATE: {"log": [1e-4, 1e-2]}},
            "trials": 6,
            "seeds": "0-1",
        }
        if "grid" in changes:
            usual |= {"search": None, "trials": None}
        return {key: each for key, each in {**usual, **changes}.items() if each is not None}

    return values


def over(**dimension: Any) -> dict[str, Any]:
    return {"search": {RATE: dimension}}


class Bad(NamedTuple):
    changes: dict[str, Any]
    message: str


BAD = {
    "unknown key": Bad({"trails": 3}, "trails = 3: unknown key; did you mean 'trials'?"),
    "wrong type": Bad({"trials": "many"}, "trials = 'many': must be an integer"),
    "no trials": Bad({"trials": 0}, "trials = 0: must be greater than or equal to 1"),
    "empty range": Bad(over(log=[0.1, 0.1]), f"search.{RATE}.log = [0.1, 0.1]: is empty"),
    "reversed range": Bad(over(log=[0.1, 0.01]), "the first bound must be the smaller one"),
    "log of 0": Bad(over(log=[0, 0.01]), f"search.{RATE}.log = [0, 0.01]: bounds must be positive"),
    "one bound": Bad(over(log=[0.1]), "must be [lowest, highest]"),
    "text as bound": Bad(over(uniform=["low", 1]), "= 'low': must be a finite number"),
    "no number": Bad(over(uniform=[0.1, True]), "= True: must be a finite number"),
    "unknown range": Bad(over(logg=[0.1, 1]), "did you mean 'log'?"),
    "two ranges": Bad(over(log=[0.1, 1], uniform=[0, 1]), "must have exactly one of log, uniform"),
    "step of a log": Bad(over(log=[0.1, 1], step=0.1), "only uniform and int have a step"),
    "wide step": Bad(over(uniform=[0, 1], step=2), "must be positive and fit into the range"),
    "fraction as int": Bad(
        {"search": {"algo_kwargs.batch_size": {"int": [1.5, 3]}}}, "must be integers"
    ),
    "a bare value": Bad({"search": {RATE: 0.1}}, f"search.{RATE} = 0.1: must be a range such as"),
    "empty list": Bad(over(choice=[]), f"search.{RATE}.choice = []: must be a non-empty list"),
    "repeated choice": Bad(over(choice=[0.1, 0.1]), "[0.1, 0.1]: repeats a value"),
    "repeated in a grid": Bad(
        {"grid": {"total_timesteps": [1000, "1k"]}}, "grid.total_timesteps = [1000, '1k']: repeats"
    ),
    "unknown config key": Bad(
        {"search": {"envid": ["a", "b"]}}, "search.envid = 'a': unknown key; did you mean 'env_id'?"
    ),
    "unknown hyper-parameter": Bad(
        {"grid": {"algo_kwargs.tauu": [0.1]}}, "grid.algo_kwargs.tauu = 0.1: unknown key"
    ),
    "unknown key in set": Bad({"set": {"algo_kwargs.tauu": 1}}, "set.algo_kwargs.tauu = 1"),
    "outside the bounds": Bad(
        {"search": {"algo_kwargs.tau": {"uniform": [0.5, 2]}}},
        "search.algo_kwargs.tau = 2: must be less than or equal to 1",
    ),
    "outside in a grid": Bad(
        {"grid": {"tau": [0.1, 7]}}, "grid.algo_kwargs.tau = 7: must be less than or equal to 1"
    ),
    "outside in set": Bad({"set": {"tau": -1}}, "set.algo_kwargs.tau = -1: must be greater than"),
    "set twice": Bad(
        {"set": {"learning_rate": 0.1}}, f"search.{RATE}: is set by set.learning_rate too"
    ),
    "not a key": Bad({"set": {"a=b": 1}}, "must be a config key, such as env_id"),
    "a seed of the config": Bad({"set": {"seed": 3}}, "set.seed: a sweep sets this itself"),
    "a folder of the config": Bad({"set": {"output_dir": "x"}}, "use --output-dir"),
    "no such metric": Bad(
        {"objective": {"metric": "train_loss"}}, "objective.metric = 'train_loss': never appears"
    ),
    "no success": Bad(
        {"objective": {"metric": "eval_success_rate_mean"}},
        "objective.metric = 'eval_success_rate_mean': never appears, because the last info of an "
        "episode in Pendulum-v1 has neither is_success nor success",
    ),
    "unknown mode": Bad({"objective": {"mode": "best"}}, "objective.mode = 'best': must be max"),
    "pruning without evaluations": Bad(
        {"prune": {"asha": None}, "set": {"eval_interval": 0}},
        "prune: needs evaluations during a trial, but eval_interval is 0",
    ),
    "evaluations at the end only": Bad(
        {"prune": {"asha": None}, "set": {"eval_interval": 120}}, "set a smaller eval_interval"
    ),
    "rounds of a grid": Bad({"grid": {RATE: [0.1, 0.2]}, "rounds": 2}, "rounds = 2: "),
    "trials of a grid": Bad(
        {"grid": {RATE: [0.1, 0.2]}, "trials": 5}, "trials = 5: the grid has 2 combinations"
    ),
    "large grid": Bad(
        {"grid": {RATE: [n / 1e3 for n in range(1, 999)], "tau": [n / 1e3 for n in range(1, 999)]}},
        "use at most 100,000",
    ),
    "unknown sampler": Bad({"sampler": "tpee"}, "sampler = 'tpee': unknown; did you mean 'tpe'?"),
    "unknown argument": Bad(
        {"sampler": {"tpe": {"multivariat": True}}}, "sampler.tpe.multivariat = True: unknown"
    ),
    "argument of a wrong type": Bad(
        {"sampler": {"tpe": {"n_startup_trials": "x"}}}, "sampler.tpe = {'n_startup_trials': 'x'}"
    ),
    "seed of a sampler": Bad({"sampler": {"tpe": {"seed": 1}}}, "use seed at the top of the file"),
    "unknown pruner": Bad({"prune": {"ash": None}}, "prune = 'ash': unknown; did you mean 'asha'?"),
    "two pruners": Bad({"prune": {"asha": None, "median": None}}, "must name exactly one of"),
    "unknown argument of a pruner": Bad(
        {"prune": {"asha": {"grac": 1}}}, "prune.asha.grac = 1: unknown argument; did you mean"
    ),
    "argument of a pruner": Bad(
        {"prune": {"asha": {"grace": -5}}}, "prune.asha = {'grace': -5}: Optuna refuses it"
    ),
    "unknown environment": Bad(
        {"set": {"env_id": "Pendulu-v1"}}, "'Pendulu-v1' is not registered. Did you mean Pendulum"
    ),
    "no base": Bad({"base": "sac/nothing"}, "config 'sac/nothing': no such file or packaged"),
    "search and grid": Bad(
        {"search": {RATE: [0.1]}, "grid": {RATE: [0.1]}}, "needs either search or grid"
    ),
    "nothing to vary": Bad({"search": {}}, "needs a key to vary"),
    "reversed seeds": Bad({"seeds": "4-0"}, "the range 4-0 is reversed"),
    "repeated seeds": Bad({"seeds": [0, 0]}, "repeats 0"),
    "seen seeds": Bad({"fresh_seeds": "1-2"}, "fresh_seeds: 1 is one of seeds"),
    "no cores": Bad({"resources": {"cpus": 0}}, "resources.cpus = 0: must be greater"),
    "unknown database": Bad(
        {"study": f"nosuch://me:{PASSWORD}@host/db"}, "study = 'nosuch://me:***@host/db': cannot"
    ),
    "missing driver": Bad(
        {"study": f"postgresql://me:{PASSWORD}@127.0.0.1:1/db"}, "study = 'postgresql://me:***@127"
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_wrong_file_gets_one_message_and_creates_nothing(
    rl: Command, work: Path, make: Make, bad: Bad
) -> None:
    (work / "sweep.yaml").write_text(json.dumps(make(**bad.changes)))
    ended = rl("sweep", "sweep.yaml")
    assert ended.code == 2, ended.err
    assert bad.message in ended.err
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert PASSWORD not in ended.err + ended.out
    assert tree(work) == {"sweep.yaml"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers"),
        (["--workers", "many"], "--workers"),
        (["--on", "moon"], "--on 'moon': must be one of local, ray, slurm"),
        (["--join"], "has no sweep to join; start it without --join"),
        (["--out", "page.html"], "--out: needs --report"),
        (["--output-dir", "sweep.yaml"], "sweep.yaml: is not an empty folder and has no sweep"),
        (["--output-dir", "sweep.yaml/x"], "cannot be created (Not a directory)"),
    ],
)
def test_a_wrong_argument_gets_one_message_and_creates_nothing(
    rl: Command, work: Path, make: Make, arguments: list[str], message: str
) -> None:
    (work / "sweep.yaml").write_text(json.dumps(make()))
    ended = rl("sweep", "sweep.yaml", *arguments)
    assert ended.code == 2
    assert message in ended.err
    assert tree(work) == {"sweep.yaml"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: [", "sweep.yaml"),
        ("- base", "sweep.yaml"),
        ("", "sweep.yaml"),
        ("base: sac/pendulum\nbase: td3/pendulum", "base"),
    ],
)
def test_a_file_that_is_not_a_mapping(rl: Command, work: Path, text: str, message: str) -> None:
    (work / "sweep.yaml").write_text(text)
    ended = rl("sweep", "sweep.yaml")
    assert ended.code == 2
    assert message in ended.err
    assert tree(work) == {"sweep.yaml"}


def test_a_missing_file(rl: Command, work: Path) -> None:
    ended = rl("sweep", "missing.yaml")
    assert (ended.code, ended.err) == (2, "error: missing.yaml: no such sweep file\n")


def test_a_full_disk_is_found_before_anything_starts(
    rl: Command, work: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "sweep.yaml").write_text(json.dumps(make()))
    usage = shutil.disk_usage(work)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    ended = rl("sweep", "sweep.yaml", "--output-dir", "out")
    assert ended.code == 2
    assert "out: the checkpoints of 12 runs need about " in ended.err
    assert "use another --output-dir, fewer trials or seeds" in ended.err
    assert tree(work) == {"sweep.yaml"}


def test_a_folder_with_other_files_is_left_alone(rl: Command, work: Path, make: Make) -> None:
    (work / "sweep.yaml").write_text(json.dumps(make()))
    (work / "out").mkdir()
    (work / "out" / "thesis.txt").write_text("text")
    before = tree(work)
    ended = rl("sweep", "sweep.yaml", "--output-dir", "out")
    assert ended.code == 2
    assert "out: is not an empty folder and has no sweep; choose another --output-dir" in ended.err
    assert tree(work) == before


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"trials": 7}, "trials"),
        ({"seeds": "0-2"}, "seeds"),
        ({"search": {RATE: {"log": [1e-4, 1e-1]}}}, "search"),
        ({"seed": 5}, "seed"),
        ({"objective": {"metric": "eval_return_mean"}}, "objective"),
    ],
)
def test_a_folder_with_another_sweep_is_left_alone(
    tmp_path: Path, make: Make, changes: dict[str, Any], key: str
) -> None:
    open_sweep(make(), tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=rf"has another sweep \({key} = .*--output-dir"):
        open_sweep(make(**changes), tmp_path / "out")
    assert tree(tmp_path) == before


def test_what_does_not_change_results_may_change(tmp_path: Path, make: Make) -> None:
    open_sweep(make(), tmp_path / "out")
    changes = {"max_failures": 1, "slurm": {"minutes": 5}, "fresh_seeds": "7-9"}
    assert open_sweep(make(**changes), tmp_path / "out").file.fresh_seeds == [7, 8, 9]


@pytest.mark.parametrize("damage", ["", "{", "{}", '{"settings": 1, "base": {}, "identity": {}}'])
def test_a_damaged_sweep_is_an_error(rl: Command, work: Path, make: Make, damage: str) -> None:
    (work / "sweep.yaml").write_text(json.dumps(make()))
    open_sweep("sweep.yaml", "out")
    (work / "out" / "sweep.json").write_text(damage)
    for source in ("sweep.yaml", "out"):
        ended = rl("sweep", source, "--output-dir", "out")
        assert ended.code in (1, 2)
        assert "sweep.json" in ended.err
        assert "Traceback" not in ended.err


def test_a_missing_package_is_named(
    rl: Command, work: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "sweep.yaml").write_text(json.dumps(make()))
    monkeypatch.setitem(sys.modules, "optuna", None)
    ended = rl("sweep", "sweep.yaml")
    assert ended.code == 2
    assert 'sweeps need Optuna: pip install "rl-training[sweep]"' in ended.err
    assert tree(work) == {"sweep.yaml"}


def test_a_sampler_whose_package_is_missing_is_named(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(ConfigError, match=r"sampler\.cmaes: needs the package cmaes; run `pip"):
        open_sweep(make(sampler="cmaes"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_trials_that_need_a_gpu_are_refused_where_there_is_none(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"resources\.gpus = 0\.5: this machine has no GPU"):
        run_sweep(make(resources={"gpus": 0.5}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# The examples


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_a_sweep_file(path: Path) -> None:
    sweep = read_sweep(path)
    assert path.read_text().startswith("# ")
    assert all(sweep.config(example) for example in sweep.examples())


def test_the_examples_are_what_they_claim() -> None:
    pendulum, grid, hopper = (
        read_sweep(EXAMPLES / f"{name}.yaml") for name in ("pendulum", "grid", "hopper")
    )
    assert (pendulum.is_exact, grid.is_exact, hopper.is_exact) == (True, True, False)
    assert (pendulum.trials, grid.trials, hopper.trials) == (12, 6, 40)
    assert hopper.seeds == [0, 1, 2, 3, 4]
    assert hopper.config({RATE: 1e-3}).total_timesteps == 200_000
    assert hopper.pruner == ("asha", {"grace": 25_000, "factor": 3})


# The success rate


class Task(gym.Env[Any, Any]):
    """An environment that may say at the end of an episode whether it was a success."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,))
    action_space = gym.spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, *, steps: int = 5, says: bool = True) -> None:
        self.steps, self.says, self.taken = steps, says, 0

    def reset(self, **_: Any) -> Any:
        super().reset()
        self.taken = 0
        return self.observation_space.low, {}

    def step(self, action: Any) -> Any:
        self.taken += 1
        done = self.taken >= self.steps
        info = {"is_success": True} if done and self.says else {}
        return self.observation_space.low, 0.0, done, False, info


@pytest.fixture
def task() -> Any:
    gym.register("Task-v0", Task)
    yield "Task-v0"
    del gym.registry["Task-v0"]


def with_task(make: Make, **kwargs: Any) -> dict[str, Any]:
    changes = {"env_id": "Task-v0", "env_kwargs": kwargs}
    return make(set=changes, objective={"metric": "eval_success_rate_mean"})


def test_an_environment_with_success_is_accepted(make: Make, tmp_path: Path, task: str) -> None:
    assert open_sweep(with_task(make), tmp_path / "out").folder.exists()


def test_an_environment_without_success_is_refused(make: Make, tmp_path: Path, task: str) -> None:
    with pytest.raises(ConfigError, match="an episode in Task-v0 has neither is_success"):
        open_sweep(with_task(make, says=False), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("limit", [{"PROBE_STEPS": 3}, {"PROBE_SECONDS": 0.0}])
def test_an_episode_that_does_not_end_decides_nothing(
    make: Make, task: str, monkeypatch: pytest.MonkeyPatch, limit: dict[str, float], tmp_path: Path
) -> None:
    for name, value in limit.items():
        monkeypatch.setattr(job_needs, name, value)
    assert open_sweep(with_task(make, says=False), tmp_path / "out").folder.exists()


# Planning


def parameters(study: Study) -> list[Any]:
    return [trial.params[RATE] for trial in study.trials()]


def planned(sweep: Any) -> Study:
    study = Study(sweep.folder, sweep.file)
    study.plan()
    return study


def finish(study: Study, *numbers: int) -> None:
    for number in numbers:
        study.begin()
        study.finish(number, float(-((study.trials()[number].params[RATE] - 0.003) ** 2)), [0.0])


class Killed(Exception):
    pass


def test_a_round_is_planned_identically_after_a_kill_in_mid_planning(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = make(rounds=3, sampler={"tpe": {"n_startup_trials": 2}})
    alone = planned(open_sweep(values, tmp_path / "alone"))
    finish(alone, 0, 1, 2)
    alone.plan()
    sweep = open_sweep(values, tmp_path / "killed")
    for first in (0, 3):
        for stored in (1, 2):
            study = Study(sweep.folder, sweep.file)
            original, added = study._study.add_trial, []

            def add(given: Any, original: Any = original, added: Any = added) -> None:
                if added:
                    raise Killed
                added.append(original(given))

            monkeypatch.setattr(study._study, "add_trial", add)
            with pytest.raises(Killed):
                study.plan()
            assert len(study.trials()) == first + stored
        study = planned(sweep)
        assert len(study.trials()) == first + 3
        if first == 0:
            finish(study, 0, 1, 2)
    assert parameters(study) == parameters(alone)
    assert len(set(parameters(study))) == 6


def test_a_round_waits_for_the_one_before(tmp_path: Path, make: Make) -> None:
    study = planned(open_sweep(make(rounds=2), tmp_path / "out"))
    finish(study, 0)
    assert len(study.plan()) == 2
    finish(study, 1)
    assert len(study.plan()) == 4


def test_random_search_does_not_depend_on_what_ends_when(tmp_path: Path, make: Make) -> None:
    values = make(sampler="random")
    first, second = (planned(open_sweep(values, tmp_path / name)) for name in ("a", "b"))
    finish(second, 0, 1, 2)
    second.plan()
    assert parameters(second) == parameters(first)
    other = planned(open_sweep(make(sampler="random", seed=1), tmp_path / "c"))
    assert not set(parameters(other)) & set(parameters(first))


def test_the_last_key_of_a_grid_varies_fastest(tmp_path: Path, make: Make) -> None:
    grid = {"tau": [0.1, 0.2], "batch_size": [16, 32, 64]}
    sweep = open_sweep(make(grid=grid), tmp_path / "out")
    points = [tuple(trial.params.values()) for trial in planned(sweep).trials()]
    assert points == [(tau, size) for tau in (0.1, 0.2) for size in (16, 32, 64)]
    assert sweep.file.is_exact


def test_choices_of_any_type_reach_the_config(tmp_path: Path, make: Make) -> None:
    sizes = [[16], [16, 16]]
    sweep = open_sweep(make(grid={"hidden_sizes": sizes, "device": ["cpu"]}), tmp_path / "out")
    configs = [sweep.file.config(trial.params) for trial in planned(sweep).trials()]
    assert [list(config.algo_kwargs.hidden_sizes) for config in configs] == sizes


def test_counts_may_have_units(make: Make) -> None:
    file = read_sweep(make(set={"total_timesteps": "2k"}, prune={"asha": {"grace": "1k"}}))
    assert file.config({RATE: 0.1}).total_timesteps == 2000
    assert file.pruner == ("asha", {"grace": 1000})


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({"grid": {RATE: [0.1, 0.2]}}, True),
        ({"sampler": "random"}, True),
        ({"sampler": "qmc"}, True),
        ({"rounds": 2}, True),
        ({}, False),
        ({"rounds": 2, "prune": {"asha": None}}, False),
    ],
)
def test_sweeps_are_labelled_exact_or_statistical(
    make: Make, changes: dict[str, Any], exact: bool
) -> None:
    assert read_sweep(make(**changes)).is_exact is exact


def test_half_a_line_at_the_end_of_the_journal_is_removed(tmp_path: Path, make: Make) -> None:
    sweep = open_sweep(make(sampler="random", trials=2), tmp_path / "out")
    expected = parameters(planned(sweep))
    journal = sweep.folder.journal
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 5, "worker_id": "x", "trial')
    study = Study(sweep.folder, sweep.file)
    assert parameters(study) == expected
    assert study.begin() == 0
    again = Study(sweep.folder, sweep.file)
    assert [trial.state for trial in again.trials()] == ["running", "queued"]
    lines = journal.read_bytes()
    assert lines.startswith(whole)
    assert [json.loads(line) for line in lines.splitlines()]


def test_a_trial_is_over_once(tmp_path: Path, make: Make) -> None:
    study = planned(open_sweep(make(sampler="random", trials=1), tmp_path / "out"))
    study.begin()
    study.finish(0, 1.0, [1.0])
    study.finish(0, 2.0, [2.0])
    study.fail(0, "too late")
    [trial] = study.trials()
    assert (trial.state, trial.value, trial.message) == ("finished", 1.0, "")


def test_a_trial_whose_last_worker_is_paused_is_tried_again(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused process still has the locks of its runs; that is not a failure of the trial."""
    values = make(sampler="random", trials=1, seeds=[0], set={"total_timesteps": 60})
    sweep = open_sweep(values, tmp_path / "out")
    board = Board(sweep.folder, sweep.file)
    train, refused = jobs._train, []

    def locked(*arguments: Any) -> Any:
        if len(refused) < 8:
            refused.append(1)
            raise RunLockedError("is being trained by process 1")
        return train(*arguments)

    monkeypatch.setattr(jobs, "_train", locked)
    monkeypatch.setattr(worker, "POLL_SECONDS", 0.01)
    assert work_on(board, sweep.folder, sweep.file, lambda line: None)
    assert len(refused) == 8, "more often than a trial may die"
    assert [trial.state for trial in board.study.trials()] == ["finished"]


# Passwords


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:se@cr:et@host/db", "postgresql://me:***@host/db"),
        ("mysql+pymysql://:secret@host", "mysql+pymysql://:***@host"),
        (
            "postgresql://host/db?user=me&password=secret",
            "postgresql://host/db?user=me&password=***",
        ),
        ("sqlite:///study.db", "sqlite:///study.db"),
        ("az://box/runs?sv=1&sig=secret", "az://box/runs?sv=1&sig=***"),
        ("simplecache::s3://me:secret@host/runs", "simplecache::s3://me:***@host/runs"),
        ("s3://bucket/runs", "s3://bucket/runs"),
        (None, None),
    ],
)
def test_passwords_are_masked(url: str | None, shown: str | None) -> None:
    assert masked(url) == shown


def test_a_password_is_masked_in_the_words_of_others() -> None:
    url = "postgresql://me:s%40cret@host/db"
    message = without_password(f"cannot open {url}: wrong password 's@cret'", url)
    assert message == "cannot open postgresql://me:***@host/db: wrong password '***'"


@pytest.fixture
def database(tmp_path: Path) -> str:
    # SQLite ignores what it does not know in such a URL.
    return f"sqlite:///file:{tmp_path / 'study.db'}?password={PASSWORD}&uri=true"


def files(folder: Path) -> str:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return "".join(path.read_bytes().decode(errors="replace") for path in paths)


@pytest.mark.faults
def test_the_password_of_a_database_is_in_no_file_argument_or_log(
    tmp_path: Path, make: Make, database: str
) -> None:
    """The worker processes of a whole sweep are looked at while they run."""
    (tmp_path / "sweep.yaml").write_text(json.dumps(make(study=database, trials=2)))
    command = [sys.executable, "-m", "rl_training", "sweep", "sweep.yaml", "--workers", "1"]
    seen = set()
    with subprocess.Popen(
        [*command, "--output-dir", "out"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            seen |= set(all_arguments())
    assert process.returncode == 0, lines
    assert any("sweep-worker" in each for each in seen)
    assert not [each for each in seen if PASSWORD in each]
    assert PASSWORD not in "".join(lines)
    assert PASSWORD not in files(tmp_path / "out")
    assert "finished" in (tmp_path / "out" / "results.json").read_text()


def all_arguments() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            found.append("")
    return found


def test_a_sweep_with_a_database_needs_its_url_again(
    tmp_path: Path, make: Make, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    sweep = open_sweep(make(study=database), folder)
    Board(sweep.folder, sweep.file).prepare()
    assert not sweep.folder.journal.exists()
    assert PASSWORD not in files(folder)
    with pytest.raises(ConfigError, match=rf"is in a database, .*\*\*\*.* set {STUDY_VARIABLE}"):
        open_sweep(folder)
    with pytest.raises(ConfigError, match="is in a database"):
        open_sweep(make(), folder)
    monkeypatch.setenv(STUDY_VARIABLE, database)
    assert open_sweep(folder).file.settings.study == database
    monkeypatch.delenv(STUDY_VARIABLE)
    journal = open_sweep(make(), tmp_path / "journal")
    with pytest.raises(ConfigError, match=r"the study of .* is a journal file; remove study"):
        open_sweep(make(study=database), journal.folder.path)
    assert os.environ.get(STUDY_VARIABLE) is None


def test_the_password_of_a_storage_is_in_no_file_and_needed_again(
    tmp_path: Path, make: Make
) -> None:
    folder, storage = tmp_path / "out", f"sftp://me:{PASSWORD}@host/runs"
    assert open_sweep(make(storage=storage), folder).file.settings.storage == storage
    assert PASSWORD not in files(folder)
    with pytest.raises(ConfigError, match=r"sftp://me:\*\*\*@host/runs.* with its file"):
        run_sweep(folder, on="ray")


def test_a_stored_sweep_is_read_back(tmp_path: Path, make: Make) -> None:
    sweep = open_sweep(make(), tmp_path / "out")
    assert SweepFolder(tmp_path / "out").read().identity == sweep.file.identity
