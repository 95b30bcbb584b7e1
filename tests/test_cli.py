"""The command line: output of each command, exit codes and error messages."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import typer
from chaos.configs import fuzzed_configs
from conftest import Command, Outcome, tree
from helpers import assert_actions_fit, each_algorithm, first_observations, tiny_of

from rl_training.algorithms.spec import list_built_in_specs
from rl_training.cli.application import _show_warning
from rl_training.cli.options import count
from rl_training.config import TrainConfig
from rl_training.config_files import dump_yaml, load_config, packaged_configs
from rl_training.experiment.comparison import compare
from rl_training.experiment.registry import AlgorithmSpec, list_algorithm_specs
from rl_training.training.engine import planned_updates
from rl_training.validation import parse_seeds

OBSERVATION = "[1.0, 0.0, 0.5]"


@pytest.fixture
def config_file(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    """Write a small config whose runs go to `runs` in the working folder."""
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_yaml({**tiny_config, "output_dir": "runs"}))
    return path


def run_process(*arguments: str | Path, cwd: Path, **options: Any) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "rl_training", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def only_run(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return run


def steps_saved(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


# Commands


def test_train_evaluate_predict_resume_and_runs(rl: Command, work: Path, config_file: Path) -> None:
    trained = rl("train", "--config", config_file)
    run = only_run(work / "runs")
    assert (trained.code, trained.err) == (0, "")
    assert "finished at step 120 (70 updates), evaluation -" in trained.out
    assert str(run.relative_to(work)) in trained.out
    unbiased = "the best checkpoint; for an unbiased estimate:\n  rl-training evaluate"
    assert f"{unbiased} {run.relative_to(work)}\n" in trained.out
    report = trained.out[trained.out.index("finished at") :].splitlines()
    assert [line for line in report if len(line) > 80 and str(run.name) not in line] == []
    assert steps_saved(run)[-1] == 120
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")

    evaluated = rl("evaluate", "--checkpoint", run, "--episodes", "2", "--seed", "5")
    assert evaluated.code == 0
    assert re.search(r"return -[\d.]+ ± [\d.]+ \(95 % confidence interval", evaluated.out)
    which = "over 2 fresh episodes (seed 5), not used to choose the best checkpoint\n"
    assert which in evaluated.out
    assert rl("evaluate", "--checkpoint", run, "--episodes", "2", "--seed", "5") == evaluated
    best = rl("evaluate", "--checkpoint", run, "--best", "--episodes", "1")
    assert "over 1 fresh episode (seed 0), not used" in best.out
    assert re.match(r"return -[\d.]+ \(length 200\.0\)\n", best.out)  # no spread, no interval

    predicted = rl("predict", "--checkpoint", run, "--obs", OBSERVATION)
    assert predicted.code == 0
    (torque,) = json.loads(predicted.out)
    assert -2 <= torque <= 2

    resumed = rl("resume", run, "--total-timesteps", "140")
    assert (resumed.code, resumed.err) == (0, "")
    assert "finished at step 140 (90 updates)" in resumed.out
    assert only_run(work / "runs") == run
    assert steps_saved(run)[-1] == 140

    listed = rl("runs")
    assert listed.code == 0
    assert str(run.relative_to(work)) in listed.out
    row = r"^sac +Pendulum-v1 +0 +finished +140 +100% +-[\d.]+ +-[\d.]+$"
    assert re.search(row, listed.out, re.MULTILINE)
    assert "best and last: mean returns of the runs' own evaluations\n" in listed.out


def test_predict_reads_a_batch_or_lines_of_standard_input(rl: Command, finished_run: Any) -> None:
    batch = rl("predict", "--checkpoint", finished_run.run_dir, "--obs", f"[{OBSERVATION}]")
    lines = rl(
        "predict",
        "--checkpoint",
        finished_run.checkpoint_path,
        stdin=f"{OBSERVATION}\n\n[{OBSERVATION}, [0.0, 1.0, -0.5]]\n",
    )
    one, two = map(json.loads, lines.out.splitlines())
    assert (batch.code, lines.code) == (0, 0)
    assert json.loads(batch.out) == [one]
    assert two[0] == pytest.approx(one)
    assert len(two) == 2


def test_predict_samples_with_stochastic(rl: Command, finished_run: Any) -> None:
    run = finished_run.run_dir
    best = rl("predict", "--checkpoint", run, "--obs", OBSERVATION)
    sampled = rl("predict", "--checkpoint", run, "--obs", OBSERVATION, "--stochastic")
    assert sampled.code == 0
    assert json.loads(sampled.out) != json.loads(best.out)


@pytest.mark.parametrize(
    "command", [("predict", "--obs", OBSERVATION), ("evaluate", "--episodes", 1)]
)
def test_a_policy_can_be_a_positional_argument_or_an_option(
    rl: Any, finished_run: Any, command: tuple[Any, ...]
) -> None:
    name, *options = command
    run = finished_run.run_dir
    by_position = rl(name, run, *map(str, options))
    assert by_position.code == 0
    assert by_position == rl(name, "--checkpoint", run, *map(str, options))
    assert_refused(rl(name, *map(str, options)), "missing policy")
    assert_refused(rl(name, run, "--checkpoint", run, *map(str, options)), "use only one of them")


def test_options_of_train_change_the_config(rl: Command, work: Path, config_file: Path) -> None:
    done = rl(
        *("train", "-c", config_file, "--env", "MountainCarContinuous-v0", "--seed", "7"),
        *("--total-timesteps", "60", "--output-dir", "elsewhere", "--device", "cpu"),
        *("--set", "algo_kwargs.tau=0.25", "--set", "eval_interval=0"),
    )
    assert done.code == 0
    run = only_run(work / "elsewhere")
    config = load_config(run / "config.yaml")
    assert run.name.startswith("sac__MountainCarContinuous-v0__seed7__")
    assert (config.env_id, config.seed) == ("MountainCarContinuous-v0", 7)
    assert (config.total_timesteps, config.eval_interval) == (60, 0)
    assert config.algo_kwargs.model_dump()["tau"] == 0.25
    assert config.algo_kwargs.batch_size == 16


TINY_OPTIONS = (
    *("--device", "cpu", "--total-timesteps", "0.06k", "--set", "eval_episodes=1"),
    *("--set", "batch_size=16", "--set", "hidden_sizes=[16, 16]"),
)


@pytest.mark.usefixtures("no_pictures")
def test_train_needs_only_an_algorithm_and_an_environment(rl: Command, work: Path) -> None:
    done = rl("train", "--algo", "sac", "--env", "Pendulum-v1", *TINY_OPTIONS)
    assert done.code == 0
    config = load_config(only_run(work / "runs") / "config.yaml")
    assert (config.algo, config.env_id, config.total_timesteps) == ("sac", "Pendulum-v1", 60)
    assert config.algo_kwargs.batch_size == 16
    assert config.eval_interval == TrainConfig(algo="sac").eval_interval


@pytest.mark.usefixtures("no_pictures")
def test_train_reads_a_dataset_without_a_config(rl: Command, work: Path) -> None:
    record = ("dataset", "record", "--random", "--env", "Pendulum-v1", "--steps", "0.3k")
    assert rl(*record, "--out", "data.npz").code == 0
    done = rl("train", "--algo", "iql", "--dataset", "data.npz", *TINY_OPTIONS)
    assert done.code == 0
    run = only_run(work / "runs")
    (section,) = load_config(run / "config.yaml").dataset_sections
    assert section.model_dump()["path"] == "data.npz"
    shutil.rmtree(run)
    # The options of the dataset that it replaces are kept, and --set can change them.
    (work / "iql.yaml").write_text(
        "algo: iql\ndataset: {kind: random, size: 9, reward_scale: 2, clip_actions: true}\n"
    )
    changed = ("--dataset", "data.npz", "--set", "dataset.reward_scale=3.0")
    assert rl("train", "-c", "iql.yaml", *changed, *TINY_OPTIONS).code == 0
    (section,) = load_config(only_run(work / "runs") / "config.yaml").dataset_sections
    assert (section.kind, section.reward_scale, section.clip_actions) == ("npz", 3, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["train --algo sac --env Pendulum-v1", "train --config sac/pendulum"]),
        (["--algo", "sac"], ["environment", "--algo sac --env Pendulum-v1"]),
        (["--algo", "dqn"], ["environment", "--algo dqn --env CartPole-v1"]),
        (["--algo", "sacc", "--env", "Pendulum-v1"], ["did you mean 'sac'"]),
        (["--algo", "td3", "-c", "sac/pendulum"], ["--algo td3", "for sac"]),
        (["--algo", "iql", "--env", "Pendulum-v1"], ["recorded data", "--dataset"]),
        (["--algo", "iql", "--dataset", "no.npz"], ["no.npz", "no such file"]),
        (["--algo", "iql", "--dataset", "nonsense"], ["'nonsense'", "Minari id", ".npz"]),
        (["--algo", "sac", "--env", "Pendulum-v1", "--dataset", "x.npz"], ["uses no dataset"]),
        (["--algo", "sac", "--env", ""], ["--env ''"]),
        (["--algo", "sac", "--wrapper", "Scale"], ["--wrapper 'Scale'", "MODULE:CLASS"]),
        (["--algo", "sac", "--wrapper", "no_such_module_here:W"], ["no_such_module_here"]),
        (["--algo", "sac", "--env", "Pendulum-v1", "--wrapper", "os:path"], ["gymnasium.Wrapper"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_choice_of_what_to_train_is_explained(
    rl: Command, work: Path, arguments: list[str], words: list[str]
) -> None:
    assert_refused(rl("train", *arguments), *words)
    assert tree(work) == set()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("60", 60),
        ("+60", 60),
        ("6e1", 60),
        ("0.06k", 60),
        ("10k", 10_000),
        ("1M", 1_000_000),
        ("1.5M", 1_500_000),
        ("2m", 2_000_000),
        ("1B", 10**9),
        ("1e6", 1_000_000),
        ("1.5e3", 1_500),
        ("1_000_000", 1_000_000),
        ("10,000", 10_000),
        ("-5", -5),
    ],
)
def test_counts_can_be_written_in_several_ways(text: str, number: int) -> None:
    assert count(text) == number


@pytest.mark.parametrize(
    "text",
    ["", "k", "1.5", "1.2345k", "1e-3", "1,5M", "10,00", "1__0", "0x10", "1e999", "inf", "٣"],
)
def test_a_wrong_count_is_refused(text: str) -> None:
    with pytest.raises(
        typer.BadParameter, match=r"not an integer such as 10000, 10k, 1\.5M or 1e6"
    ):
        count(text)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [3]), ("0-4", [0, 1, 2, 3, 4]), ("0,2, 5-7", [0, 2, 5, 6, 7]), ("4-4", [4])],
)
def test_seeds_can_be_ranges(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


def test_several_seeds_make_several_runs_and_one_table(
    rl: Command, work: Path, config_file: Path
) -> None:
    done = rl("train", "-c", config_file, "--seeds", "3-4", "--total-timesteps", "40")
    assert done.code == 0
    (row,) = compare(work / "runs").rows
    assert [each.seed for each in row.scores] == [3, 4]
    table = done.out[done.out.index("seed  step") :]
    for each in row.scores:
        line = rf"^ +{each.seed} +40 +\d+ +{each.score:.2f} .*finished\n +runs/{each.run.name}$"
        assert re.search(line, table, re.MULTILINE)
    mean = row.estimates["mean"]
    assert f"mean over 2 seeds: {mean.value:.2f}, 95 % bootstrap interval" in table
    assert f"[{mean.low:.2f}, {mean.high:.2f}]" in table
    assert done.out.count("rl-training evaluate") == 1


def test_a_seed_on_the_command_line_overrides_the_seeds_of_the_file(
    rl: Command, work: Path, config_file: Path
) -> None:
    config_file.write_text(config_file.read_text() + "\nseeds: [0, 1]\n")
    done = rl("train", "-c", config_file, "--seed", "9", "--total-timesteps", "40")
    assert done.code == 0
    assert load_config(only_run(work / "runs") / "config.yaml").seed == 9


def test_training_can_start_from_a_policy(
    rl: Command, work: Path, config_file: Path, finished_run: Any
) -> None:
    """A run without updates saves the initial policy."""
    done = rl(
        *("train", "-c", config_file, "--from-checkpoint", finished_run.run_dir),
        *("--total-timesteps", "20"),
    )
    assert done.code == 0
    saved = only_run(work / "runs") / "checkpoints/step_000000020/model.safetensors"
    assert saved.read_bytes() == (finished_run.checkpoint_path / saved.name).read_bytes()


def test_list_shows_every_algorithm_and_packaged_config(rl: Command) -> None:
    done = rl("list")
    assert done.code == 0
    for spec in list_algorithm_specs():
        assert re.search(rf"^{spec.name} +{spec.action_kind} ", done.out, re.MULTILINE)
    for name in packaged_configs():
        assert name in done.out


def test_list_says_when_to_use_every_built_in_algorithm(rl: Command) -> None:
    text = " ".join(rl("list").out.split())
    for spec in list_built_in_specs():
        assert spec.use_when
        assert f"for: {spec.use_when}" in text


def test_config_prints_the_settings_of_train(rl: Command, tmp_path: Path) -> None:
    done = rl("config", "--config", "sac/pendulum", "--set", "algo_kwargs.tau=0.5")
    assert done.code == 0
    again = tmp_path / "again.yaml"
    again.write_text(done.out)
    assert load_config(again) == load_config("sac/pendulum", ["algo_kwargs.tau=0.5"])


def test_runs_shows_the_state_of_each_run(rl: Command, run_copy: Path) -> None:
    shutil.rmtree(run_copy / "checkpoints")
    done = rl("runs", run_copy.parent)
    assert done.code == 0
    assert "stopped before its first checkpoint" in done.out


def test_runs_in_an_empty_folder(rl: Command, work: Path) -> None:
    assert rl("runs", work) == Outcome(0, f"no runs in {work}\n", "")


def test_doctor_prints_versions_and_devices(rl: Command) -> None:
    done = rl("doctor")
    assert done.code == 0
    for word in ("rl_training", "python", "torch", "gymnasium", "processor", "cuda", "compile"):
        assert re.search(rf"^{word}[ :]", done.out, re.MULTILINE)


@pytest.mark.parametrize(
    "command",
    ["", "train", "resume", "evaluate", "predict", "list", "config", "runs", "dashboard", "doctor"],
)
def test_every_command_has_help(rl: Command, command: str) -> None:
    done = rl(*command.split(), "--help")
    assert done.code == 0
    assert "Usage" in done.out


# Every algorithm


@each_algorithm
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.fast_cases
def test_every_algorithm_trains_evaluates_predicts_and_resumes(
    spec: AlgorithmSpec, rl: Command, work: Path, config_file: Path
) -> None:
    config = tiny_of(spec, Path("runs"), total_timesteps=60)
    config_file.write_text(dump_yaml(config))
    trained = rl("train", "--config", config_file)
    assert (trained.code, trained.err) == (0, "")
    assert f"finished at step 60 ({updates_until(60, config)} updates), evaluation " in trained.out
    run = only_run(work / "runs")
    assert load_config(run / "config.yaml").algo == spec.name

    evaluated = rl("evaluate", "--checkpoint", run, "--episodes", "2", "--seed", "5")
    assert (evaluated.code, evaluated.err) == (0, "")
    assert re.match(r"return -?[\d.]+ ± [\d.]+ .*\bover 2 ", evaluated.out, re.DOTALL)

    observations = json.dumps(first_observations(spec).tolist())
    predicted = rl("predict", "--checkpoint", run, "--obs", observations)
    assert (predicted.code, predicted.err) == (0, "")
    assert_actions_fit(spec, json.loads(predicted.out))

    resumed = rl("resume", run, "--total-timesteps", "70", "--schedule", "extend")
    assert (resumed.code, resumed.err) == (0, "")
    assert f"finished at step 70 ({updates_until(70, config)} updates)" in resumed.out
    assert only_run(work / "runs") == run
    assert steps_saved(run)[-1] == 70


def updates_until(step: int, config: dict[str, Any]) -> int:
    return planned_updates(TrainConfig(**{**config, "total_timesteps": step}))


# Environments in user modules

MODULE = """
    import gymnasium as gym
    import numpy as np

    class Slope(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.steps = 0
            return np.zeros(2, np.float32), {}

        def step(self, action):
            self.steps += 1
            obs = np.array([action[0], self.steps / 10], np.float32)
            return obs, float(action[0]), False, self.steps == 10, {}

    gym.register("%s-v0", entry_point=Slope)
"""


@pytest.fixture
def user_module(work: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Create a module in the working folder that registers the environment `<module name>-v0`."""
    name = f"slopes_{re.sub('[^a-z]+', '_', request.node.name)}"
    (work / f"{name}.py").write_text(textwrap.dedent(MODULE) % name)
    yield name
    sys.modules.pop(name, None)


def test_env_with_a_module_imports_it(
    rl: Command, work: Path, config_file: Path, user_module: str
) -> None:
    done = rl("train", "-c", config_file, "--env", f"{user_module}:{user_module}-v0")
    assert (done.code, done.err) == (0, "")
    config = load_config(only_run(work / "runs") / "config.yaml")
    assert config.env_id == f"{user_module}-v0"


def test_import_registers_the_environments_of_a_module(
    rl: Command, work: Path, config_file: Path, user_module: str
) -> None:
    environment = f"{user_module}-v0"
    assert rl("train", "-c", config_file, "--env", environment).code == 2
    done = rl("train", "-c", config_file, "--env", environment, "--import", user_module)
    assert (done.code, done.err) == (0, "")
    run = only_run(work / "runs")

    del gym.registry[environment]
    sys.modules.pop(user_module)
    forgotten = rl("evaluate", "--checkpoint", run)
    assert forgotten.code == 2
    assert environment in forgotten.err
    assert "--import" in forgotten.err
    assert rl("evaluate", "--checkpoint", run, "--import", user_module).code == 0
    resumed = rl("resume", run, "--total-timesteps", "130", "--import", user_module)
    assert "at step 130" in resumed.out


def test_a_success_rate_is_reported_where_the_environment_has_one(
    rl: Command, work: Path, config_file: Path
) -> None:
    (work / "reached.py").write_text(
        "import gymnasium\n"
        "class Reached(gymnasium.Wrapper):\n"
        "    def step(self, action):\n"
        "        *others, info = self.env.step(action)\n"
        "        return *others, {**info, 'is_success': True}\n"
    )
    done = rl("train", "-c", config_file, "--wrapper", "reached:Reached")
    assert (done.code, done.err) == (0, "")
    assert "success rate 100%" in done.out
    evaluated = rl("evaluate", only_run(work / "runs"), "--import", "reached")
    assert "success rate 100%" in evaluated.out


@pytest.mark.parametrize("command", ["train", "resume", "evaluate"])
def test_files_cannot_import_a_module(
    rl: Command, work: Path, config_file: Path, user_module: str, run_copy: Path, command: str
) -> None:
    """Neither a config nor a checkpoint can cause a module to be imported."""
    wanted = f"{user_module}:{user_module}-v0"
    if command == "train":
        config_file.write_text(config_file.read_text().replace("Pendulum-v1", wanted))
        done = rl("train", "-c", config_file)
    else:
        from test_checkpoint_workflows import rewrite

        for checkpoint in (run_copy / "checkpoints").glob("step_*"):
            rewrite(checkpoint, "policy.json", lambda p: p["environment"].update(id=wanted))
            rewrite(checkpoint, "state.json", lambda s: s["environment"].update(id=wanted))
            rewrite(checkpoint, "state.json", lambda s: s["config"].update(env_id=wanted))
        option = ["--checkpoint"] if command == "evaluate" else []
        done = rl(command, *option, run_copy)
    assert done.code == 2
    assert user_module in done.err
    assert user_module not in sys.modules
    assert not (work / "runs").exists()


# User errors: exit code 2, one message, no files created


def assert_refused(done: Outcome, *words: str) -> None:
    assert done.code == 2
    assert [word for word in words if word not in done.err] == []
    assert "Traceback" not in done.err
    assert len(re.findall(r"^error: ", done.err, re.IGNORECASE | re.MULTILINE)) == 1
    assert "Error" not in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "sede=1"], ["sede = 1", "did you mean 'seed'"]),
        (["--set", "algo_kwargs.learnin_rate=1"], ["algo_kwargs.learnin_rate", "learning_rate"]),
        (["--set", "learnin_rate=1"], ["learnin_rate = 1", "did you mean 'learning_rate'"]),
        (["--set", "learning_rate=fast"], ["algo_kwargs.learning_rate = 'fast'", "a number"]),
        (["--set", "policy_delay=3", "--set", "algo=sacc"], ["did you mean 'sac'"]),
        (["--set", "algo_kwargs.learning_rate=fast"], ["learning_rate = 'fast'", "a number"]),
        (["--set", "num_envs=0"], ["num_envs = 0"]),
        (["--set", "seed"], ["--set 'seed'", "key=value"]),
        (["--set", "seed=["], ["--set seed"]),
        (["--set", "algo=sacc"], ["algo = 'sacc'", "did you mean 'sac'"]),
        (["--set", "compile=maybe"], ["compile = 'maybe'", "auto, on, off"]),
        (["--set", "env_kwargs.gravity=3"], ["Pendulum-v1", "gravity"]),
        (["--set", "env_id=null"], ["env_id", "required"]),
        (["--set", "early_stopping.metric=reward"], ["early_stopping.metric = 'reward'"]),
        (["--set", 'output_dir="a\\0b"'], ["output_dir"]),
        (["--set", "run_name=../x"], ["run_name = '../x'"]),
        (["--env", "Pendulm-v1"], ["'Pendulm-v1'", "Did you mean Pendulum-v1"]),
        (["--env", "Pendulum-v0"], ["'Pendulum-v0'", "Pendulum-v1"]),
        (
            ["--config", "td3/pendulum", "--env", "CartPole-v1"],
            ["'td3'", "continuous", "CartPole-v1", "discrete"],
        ),
        (["--env", "no_such_module_here:X-v0"], ["no_such_module_here"]),
        (["--env", ":Pendulum-v1"], ["':Pendulum-v1'"]),
        (["--import", "no_such_module_here"], ["no_such_module_here"]),
        (["--import", ".relative"], [".relative"]),
        (["--seeds", "0,x"], ["--seeds '0,x'", "0,1,2"]),
        (["--seeds", ""], ["--seeds", "0,1,2"]),
        (["--seeds", "0,-1"], ["seeds", "-1"]),
        (["--seeds", "1,1"], ["--seeds '1,1': repeats 1"]),
        (["--seeds", "0-3,2-5"], ["repeats 2, 3"]),
        (["--seeds", "4-0"], ["4-0 is reversed", "use 0-4"]),
        (["--seeds", "0-4000000000"], ["more than 10,000 seeds"]),
        (["--seeds", "1-"], ["--seeds '1-'", "0-4"]),
        (["--seeds", "0", "--seed", "1"], ["use only one of them"]),
        (["--seed", "-1"], ["seed = -1"]),
        (["--seed", "x"], ["--seed", "integer"]),
        (["--total-timesteps", "0"], ["total_timesteps = 0"]),
        (["--total-timesteps", "many"], ["--total-timesteps", "integer"]),
        (["--device", "gpu"], ["device = 'gpu'", "cuda:N"]),
        (["--device", "cuda:99"], ["device = 'cuda:99'"]),
        (["--from-checkpoint", "nowhere"], ["nowhere", "no such"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_error_in_train_is_explained_and_creates_no_files(
    rl: Command, work: Path, config_file: Path, arguments: list[str], words: list[str]
) -> None:
    assert_refused(rl("train", "--config", config_file, *arguments), *words)
    assert tree(work) == set()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("missing.yaml", None, ["missing.yaml", "no such file"]),
        ("sac/pendulm", None, ["sac/pendulm", "did you mean 'sac/pendulum'"]),
        ("broken.yaml", "algo: [sac", ["broken.yaml", "not valid YAML"]),
        ("twice.yaml", "algo: sac\nalgo: sac\n", ["twice.yaml", "given twice"]),
        ("code.yaml", "algo: !!python/name:os.system", ["code.yaml", "not valid YAML"]),
        ("text.yaml", "hello", ["text.yaml", "key: value"]),
        ("keys.yaml", "algo: sac\nself: 1\n", ["self = 1", "unknown key"]),
        ("huge.yaml", f"algo: sac\nseed: 0x{'f' * 5000}\n", ["seed"]),
        ("nan.yaml", "algo: sac\nenv_id: Pendulum-v1\nenv_kwargs: {g: .nan}", ["env_kwargs"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "config"])
def test_an_error_in_a_config_file_is_explained(
    rl: Command,
    work: Path,
    tmp_path: Path,
    command: str,
    name: str,
    text: str | None,
    words: list[str],
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    path = name if text is None else str(tmp_path / name)
    assert_refused(rl(command, "--config", path), *words)
    assert tree(work) == set()


def test_a_policy_of_another_shape_is_refused_before_files_are_created(
    rl: Command, work: Path, config_file: Path, finished_run: Any
) -> None:
    done = rl(
        *("train", "-c", config_file, "--from-checkpoint", finished_run.run_dir),
        *("--set", "algo_kwargs.hidden_sizes=[8]"),
    )
    assert_refused(done, "do not fit")
    assert tree(work) == set()


def test_an_output_folder_that_is_a_file_is_refused(
    rl: Command, work: Path, config_file: Path
) -> None:
    (work / "taken").write_text("")
    done = rl("train", "-c", config_file, "--output-dir", "taken")
    assert_refused(done, "output_dir = 'taken'")
    assert tree(work) == {"taken"}


def test_a_run_name_that_exists_is_refused(
    rl: Command, work: Path, config_file: Path, run_copy: Path
) -> None:
    before = tree(run_copy)
    done = rl(
        *("train", "-c", config_file, "--output-dir", run_copy.parent),
        *("--set", f"run_name={run_copy.name}"),
    )
    assert_refused(done, "run_name", "resume")
    assert tree(run_copy) == before


@pytest.mark.parametrize(
    "arguments",
    [["trian"], ["train"], ["resume"], ["evaluate"], ["predict"], ["list", "x"], ["--verbose"]],
    ids=" ".join,
)
def test_unknown_commands_and_missing_options_are_explained(
    rl: Command, work: Path, arguments: list[str]
) -> None:
    assert_refused(rl(*arguments))
    assert tree(work) == set()


@pytest.mark.parametrize(
    ("observation", "word"),
    [
        ("[1, 2", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "(3,)"),
        ("[[1, 2, 3, 4]]", "(3,)"),
        ("[]", "(3,)"),
        ("5", "(3,)"),
        ("null", "obs"),
        ('"text"', "obs"),
        ('["a", "b", "c"]', "obs"),
        ('{"a": 1}', "obs"),
        ("[[1, 2, 3], [1, 2]]", "obs"),
        ("[NaN, 1, 2]", "finite"),
        ("[null, 1, 2]", "obs"),
        ("[1e300, 1, 2]", "finite"),
        (f"[{'9' * 400}, 1, 2]", "obs"),
    ],
    ids=lambda value: value[:20],
)
def test_a_wrong_observation_is_explained(
    rl: Command, finished_run: Any, observation: str, word: str
) -> None:
    done = rl("predict", "--checkpoint", finished_run.run_dir, "--obs", observation)
    assert_refused(done, word)
    assert done.out == ""


def test_predict_stops_at_a_wrong_line_and_prints_the_actions_before_it(
    rl: Command, finished_run: Any
) -> None:
    for line, word in (("oops", "'oops' is not JSON"), ("[1, 2]", "(3,)")):
        done = rl("predict", finished_run.run_dir, stdin=f"{OBSERVATION}\n\n{line}\n")
        assert_refused(done, "standard input, line 3: ", word)
        assert "--obs" not in done.err
        assert len(done.out.splitlines()) == 1


def test_predict_says_in_a_terminal_what_it_waits_for(
    rl: Command, finished_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rl("predict", finished_run.run_dir, stdin=f"{OBSERVATION}\n").err == ""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(io, "StringIO", Terminal)
    asked = rl("predict", finished_run.run_dir, stdin=f"{OBSERVATION}\n")
    assert asked.err == "type observations, one per line, such as [0.1, 0.2]; Ctrl-D ends\n"
    assert len(json.loads(asked.out)) == 1


def test_predict_refuses_input_that_is_not_text(work: Path, finished_run: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rl_training", "predict", str(finished_run.run_dir)],
        input=b"\xff\xfe[",
        cwd=work,
        env={**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: standard input: not text in UTF-8")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--episodes", "0"], "must be at least 1"),
        (["--episodes", "-3"], "must be at least 1"),
        (["--episodes", "x"], "--episodes"),
        (["--episodes", "0.5"], "not an integer"),
        (["--seed", "-1"], "seed"),
    ],
)
def test_a_wrong_number_in_evaluate_is_explained(
    rl: Command, finished_run: Any, options: list[str], word: str
) -> None:
    assert_refused(rl("evaluate", "--checkpoint", finished_run.run_dir, *options), word)


@pytest.mark.parametrize(
    ("total", "word"), [("0", "= 0"), ("-5", "= -5"), ("lots", "--total-timesteps")]
)
def test_a_wrong_total_in_resume_is_explained(
    rl: Command, run_copy: Path, total: str, word: str
) -> None:
    before = tree(run_copy)
    assert_refused(rl("resume", run_copy, "--total-timesteps", total), word)
    assert tree(run_copy) == before


def damage_missing_folder(checkpoint: Path) -> Path:
    return checkpoint.with_name("step_000000999")


def damage_an_empty_folder(checkpoint: Path) -> Path:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    return checkpoint


def damage_missing_manifest(checkpoint: Path) -> Path:
    (checkpoint / "MANIFEST.json").unlink()
    return checkpoint


def damage_model_truncated(checkpoint: Path) -> Path:
    os.truncate(checkpoint / "model.safetensors", 1000)
    return checkpoint


def damage_policy_missing(checkpoint: Path) -> Path:
    (checkpoint / "policy.json").unlink()
    return checkpoint


def damage_a_file_instead_of_a_folder(checkpoint: Path) -> Path:
    return checkpoint / "model.safetensors"


def damage_in_every_checkpoint_of_the_run(checkpoint: Path) -> Path:
    for other in checkpoint.parent.glob("step_*"):
        os.truncate(other / "model.safetensors", 1000)
    return checkpoint.parent.parent


@pytest.mark.parametrize(
    "damage",
    [
        damage_missing_folder,
        damage_an_empty_folder,
        damage_missing_manifest,
        damage_model_truncated,
        damage_policy_missing,
        damage_a_file_instead_of_a_folder,
        damage_in_every_checkpoint_of_the_run,
    ],
    ids=lambda damage: damage.__name__.removeprefix("damage_"),
)
@pytest.mark.parametrize("command", ["predict", "evaluate", "resume", "train"])
def test_a_damaged_checkpoint_is_explained(
    rl: Command,
    work: Path,
    config_file: Path,
    run_copy: Path,
    command: str,
    damage: Callable[[Path], Path],
) -> None:
    path = damage(run_copy / "checkpoints/step_000000120")
    before = tree(run_copy)
    arguments: dict[str, list[str | Path]] = {
        "predict": ["--checkpoint", path, "--obs", OBSERVATION],
        "evaluate": ["--checkpoint", path],
        "resume": [path],
        "train": ["-c", config_file, "--from-checkpoint", path],
    }
    assert_refused(rl(command, *arguments[command]), path.name)
    assert (tree(run_copy), tree(work)) == (before, set())


def test_escape_codes_of_warnings_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _show_warning(UserWarning("\x1b[33mWARN: \x1b]0;title\x07an old\x1b[0m environment\x1bc"))
    assert capsys.readouterr().err == "warning: WARN: an old environment\n"


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(rl: Command, run_copy: Path) -> None:
    damage_model_truncated(run_copy / "checkpoints/step_000000120")
    done = rl("predict", "--checkpoint", run_copy, "--obs", OBSERVATION)
    assert done.code == 0
    assert json.loads(done.out)
    assert "warning: skipped a damaged checkpoint" in done.err
    assert "step_000000120" in done.err
    assert "Traceback" not in done.err


def test_a_policy_alone_cannot_be_resumed(rl: Command, run_copy: Path) -> None:
    policy = run_copy.parent / "policy"
    from rl_training import SAC

    SAC.load(run_copy).save(policy)
    assert_refused(rl("resume", policy), "policy")


@pytest.mark.parametrize("command", ["predict", "evaluate", "resume", "export"])
def test_a_folder_of_runs_is_not_called_an_incomplete_checkpoint(
    rl: Command, run_copy: Path, command: str
) -> None:
    options = ["--out", "policy.onnx"] if command == "export" else []
    (run_copy.parent / "another").mkdir()
    assert_refused(rl(command, run_copy.parent, *options), f"such as {run_copy}")
    assert_refused(rl(command, run_copy.parent / "another", *options), "MANIFEST.json")


def test_runs_of_a_missing_folder_is_explained(rl: Command, work: Path) -> None:
    assert_refused(rl("runs", "nowhere"), "nowhere")
    assert tree(work) == set()


# Separate processes


def test_the_module_runs_as_a_program(work: Path, finished_run: Any) -> None:
    done = run_process(
        "predict", "--checkpoint", finished_run.run_dir, cwd=work, input=f"{OBSERVATION}\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)) == 1


def test_an_error_exits_with_2(work: Path) -> None:
    done = run_process("train", "--config", "sac/pendulum", "--set", "sede=1", cwd=work)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "error: sede = 1: unknown key; did you mean 'seed'?"
    ]
    assert (len(done.stdout.splitlines()), tree(work)) == (1, set())


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_an_interrupted_run_exits_with_130_and_can_be_resumed(
    rl: Command, work: Path, config_file: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "rl_training", "train", "-c", str(config_file)]
    endless = ["--total-timesteps", "100000000", "--set", "eval_interval=60"]
    with subprocess.Popen(
        [*command, *endless], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "evaluation" in line:
                break
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    run = only_run(work / "runs")
    assert f"rl-training resume runs/{run.name}" in errors
    reached = steps_saved(run)[-1]
    assert reached >= 60
    assert " stopped " in rl("runs").out

    resumed = rl("resume", f"runs/{run.name}", "--total-timesteps", str(reached + 30))
    assert (resumed.code, resumed.err) == (0, "")
    assert f"finished at step {reached + 30:,}" in resumed.out


UNUSABLE = ["~nosuchuser/x", "x" * 5_000]


@pytest.mark.parametrize("path", UNUSABLE)
@pytest.mark.parametrize(
    "command",
    [
        ["train", "--config", "sac/pendulum", "--set", "total_timesteps=2", "--output-dir"],
        ["train", "--algo", "sac", "--env", "Pendulum-v1", "--from-checkpoint"],
        ["train", "--algo", "bc", "--env", "Pendulum-v1", "--dataset"],
        ["train", "--config"],
        ["config", "--config"],
        ["resume"],
        ["evaluate"],
        ["predict", "--obs", "[1]"],
        ["runs"],
        ["dataset", "info"],
    ],
)
def test_a_path_that_cannot_exist_is_refused(rl: Command, command: list[str], path: str) -> None:
    outcome = rl(*command, path)
    assert outcome.code == 2, outcome.err
    assert path[:10] in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("override", ["=3", "a.b.c=", "a b=1", ".=1", "batch_size.=1", ""])
def test_an_override_that_is_not_a_key_and_a_value_is_refused(rl: Command, override: str) -> None:
    outcome = rl("config", "--config", "sac/pendulum", "--set", override)
    assert outcome.code == 2
    assert override.partition("=")[0] in outcome.err


def test_control_characters_of_arguments_are_escaped(rl: Command) -> None:
    outcome = rl("evaluate", "a\x1b[31mb")
    assert outcome.code == 2
    assert "a\\x1b[31mb" in outcome.err


def test_output_without_a_reader_does_not_end_training(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rl_training", "train", "--config", "sac/pendulum"]
    settings = ["total_timesteps=20", "eval_episodes=1", f"output_dir={tmp_path / 'runs'}"]
    reader, writer = os.pipe()
    os.close(reader)
    options = [part for setting in settings for part in ("--set", setting)]
    ended = subprocess.run([*command, *options], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert ended.returncode == 0, ended.stderr
    assert "Error" not in ended.stderr
    assert list((tmp_path / "runs").glob("*/checkpoints/step_000000020"))


def test_fuzzed_files_are_printed_or_refused(rl: Command, work: Path) -> None:
    """Files that `config` refuses are refused by `train` too, with one message."""
    sources = [config.source for config in fuzzed_configs(seed=1, count=150)]
    codes = []
    for content in sources:
        if isinstance(content, dict):
            continue
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        (work / "fuzzed.yaml").write_bytes(data)
        outcome = rl("config", "--config", "fuzzed.yaml")
        codes.append(outcome.code)
        if outcome.code != 0:
            refused = rl("train", "--config", "fuzzed.yaml")
            assert (outcome.code, refused.code) == (2, 2)
            assert refused.err.startswith("error: ")
            assert refused.err.replace("\n", "").isprintable()
    assert set(codes) == {0, 2}
