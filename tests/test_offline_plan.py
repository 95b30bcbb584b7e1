"""Plans with recorded data, runs that start from others, and other packages."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(1, str(Path(__file__).parents[1] / "benchmarks" / "contestants"))

import learning
import recorded_data
from curves import data, mathematics, peer_runs, plan, processes, run
from learning_curve import LearningCurve

import rl_training
from rl_training.config_files import load_config, read_yaml
from rl_training.errors import UserError

PLANS = Path(__file__).parents[1] / "benchmarks" / "plans"
TASK = "Pendulum-v1"
PLAN = """
defaults: {seeds: 2, steps: 8, eval_interval: 4, eval_episodes: 1, tasks: [Pendulum-v1]}
runs:
  - {name: imitated, config: bc/pendulum, data: medium-expert, set: {batch_size: 8}}
  - {name: offline, config: iql/pendulum, data: replay, set: {batch_size: 8, hidden_sizes: [8, 8]}}
  - {name: online, config: iql/pendulum, data: replay, init_from: offline, set: {regime: mixed,
     batch_size: 8, learning_starts: 4, hidden_sizes: [8, 8]}}
"""


def recipe(folder: Path, *more: str) -> argparse.Namespace:
    sizes = ["--train-steps", "250", "--eval-interval", "100", "--eval-episodes", "1"]
    places = ["--data", str(folder / "data"), "--about", str(folder / "about"), "--device", "cpu"]
    words = ["--tasks", TASK, "--config", "sac/pendulum", "--steps", "220", "--num-envs", "1"]
    return recorded_data.parse_arguments([*words, *sizes, *places, *more])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recorded data, whose medium policy is that of the first evaluation."""
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_data, "medium_return", lambda *_: -1e9)
        recorded_data.record(TASK, recipe(folder))
    return folder


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Numbers in place of those of rehearsals, which take a second each."""
    numbers = {"loss": 1.0}

    def found(config: Any) -> dict[str, Any]:
        return {"settings": dict(config.to_mapping()["algo_kwargs"]), "numbers": dict(numbers)}

    monkeypatch.setattr(run, "mathematics", found)
    monkeypatch.setattr(plan, "cached_mathematics", lambda: found)
    return numbers


def parse(folder: Path, recorded: Path, text: str = PLAN) -> argparse.Namespace:
    (folder / "plan.yaml").write_text(text)
    places = {"plan": folder / "plan.yaml", "out": folder / "out", "work": folder / "work"}
    places |= {"data-folder": recorded / "data", "data-about": recorded / "about"}
    words = [word for name, path in places.items() for word in (f"--{name}", str(path))]
    return learning.parse_arguments([*words, "--device", "cpu"])


def measure(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, *, at_most: int = 9
) -> bool:
    """Measure a plan in this process, as long as there are commands left to start."""

    def run_here(commands: Sequence[Sequence[str]], *_: Any) -> list[int | None]:
        for words in commands[:at_most]:
            learning.measure_variants(learning.parse_arguments(words))
        return [0 if index < at_most else None for index in range(len(commands))]

    with monkeypatch.context() as patch:
        patch.setattr(plan, "run_processes", run_here)
        return plan.measure_plan(arguments.plan, arguments)


def result(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    return json.loads((arguments.out / f"{TASK}__{name}.json").read_text())


def test_the_recipe_records_three_kinds_and_describes_them(recorded: Path) -> None:
    known = data.read_about(recorded / "about", TASK)
    assert {kind: known[kind]["rows"] for kind in known} == {
        "replay": 100,  # up to the first evaluation, which was good enough
        "medium": 220,
        "expert": 220,
    }
    assert [known[kind]["trained_steps"] for kind in data.KINDS] == [100, 100, 250]
    prints = {known[kind]["fingerprint"] for kind in data.KINDS}
    assert len(prints) == 3
    for kind in data.KINDS:
        path = data.data_file(recorded / "data", TASK, kind)
        assert data.data_fingerprint(path) == known[kind]["fingerprint"]


def test_files_that_exist_are_kept_and_those_of_other_settings_are_an_error(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorded_data, "run_or_resume", None)  # nothing is trained again
    recorded_data.record(TASK, recipe(recorded))
    recorded_data.show(TASK, data.read_about(recorded / "about", TASK))
    assert "fingerprint" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"replay\.npz: was recorded by other settings"):
        recorded_data.record(TASK, recipe(recorded, "--seed", "1"))


def test_a_plan_of_offline_runs_and_of_runs_that_start_from_them(
    tmp_path: Path,
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rehearsed: dict[str, float],
) -> None:
    arguments = parse(tmp_path, recorded)
    assert measure(arguments, monkeypatch, at_most=2)
    assert "2 of 3 runs are done" in capsys.readouterr().out
    kept = arguments.work / f"{TASK}__offline" / run.FINAL
    assert sorted(each.name for each in kept.iterdir()) == [run.CURVE, "seed0", "seed1"]

    class Killed(run.CurveRecorder):
        def on_evaluation_end(self, context: Any) -> None:
            super().on_evaluation_end(context)
            if context.position == 8:
                raise ValueError("no power")  # nothing more is saved

    with monkeypatch.context() as patch:
        patch.setattr(run, "CurveRecorder", Killed)
        with pytest.raises(Exception, match="no power"):
            measure(arguments, monkeypatch)
    runs = sorted((arguments.work / f"{TASK}__online" / run.RUNS).iterdir())
    starts = [read_yaml(each / "config.yaml")["init_from"] for each in runs]
    assert sorted(starts) == [str(kept / "seed0"), str(kept / "seed1")]
    assert measure(arguments, monkeypatch)
    assert "online: started" in capsys.readouterr().out
    assert not kept.exists()  # nothing needs them any more

    offline, online = result(arguments, "offline"), result(arguments, "online")
    assert len(online["sessions"]) == 2
    assert online["init_from"]["name"] == "offline"
    assert online["init_from"]["returns"] == offline["evaluations"][-1]["returns"]
    known = data.read_about(recorded / "about", TASK)
    parts = result(arguments, "imitated")["data"]["parts"]
    assert [each["fingerprint"] for each in parts] == [
        known[kind]["fingerprint"] for kind in ("medium", "expert")
    ]
    assert str(tmp_path) not in json.dumps([offline, online])
    arguments.list = True
    capsys.readouterr()
    assert plan.measure_plan(arguments.plan, arguments)
    assert "3 of 3 runs are done" in capsys.readouterr().out

    # Other numbers of the first run make the second one stale too.
    values = result(arguments, "online")
    values["init_from"]["mathematics"]["numbers"] = {"loss": 2.0}
    (arguments.out / f"{TASK}__online.json").write_text(json.dumps(values))
    plan.measure_plan(arguments.plan, arguments)
    text = capsys.readouterr().out
    assert "online: stale: offline, from which it starts: the code computes something" in text
    # Its checkpoints are needed again, and gone.
    assert "offline: open: trained again, because its checkpoints are gone" in text


def test_data_that_is_missing_is_named_once_with_the_command_that_makes_it(
    tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not plan.measure_plan(tmp_path / "plan.yaml", parse(tmp_path, tmp_path))
    text = capsys.readouterr().out
    assert text.count("waits for recorded data") == 3
    assert text.count("recorded data is missing") == 1
    assert f"make them with: python benchmarks/recorded_data.py --tasks {TASK} --data" in text
    arguments = parse(tmp_path, recorded)
    with pytest.raises(UserError, match="recorded data is missing"):
        data.check_data(tmp_path, arguments.data_about, TASK, "expert")


def test_results_on_other_data_are_stale_and_files_must_be_those_described(
    tmp_path: Path, recorded: Path, rehearsed: dict[str, float]
) -> None:
    arguments = parse(tmp_path, recorded)
    first = plan.read_plan(arguments.plan, arguments)[0]
    run.learn(first.variant, first.arguments)
    assert plan.state_of(first, plan.cached_mathematics()).kind == plan.DONE
    about = json.loads(data.about_file(recorded / "about", TASK).read_text())
    about["files"]["expert"]["fingerprint"] = "0" * 64
    data.about_file(tmp_path, TASK).write_text(json.dumps(about))
    first.arguments.data_about = tmp_path
    state = plan.state_of(first, plan.cached_mathematics())
    assert state.text == "stale: it learned from other recorded data; measured again"
    with pytest.raises(UserError, match=r"expert\.npz: has the fingerprint .* describes 0000"):
        data.check_data(recorded / "data", tmp_path, TASK, "medium-expert")


def test_the_fingerprint_of_a_config_contains_that_of_its_data(recorded: Path) -> None:
    config = load_config("bc/pendulum")
    names = (None, "medium", "expert", "medium-expert")
    known = [name and data.described(recorded / "about", TASK, name) for name in names]
    prints = [run.fingerprint(config, each, start) for each in known for start in (None, "a", "b")]
    assert len(set(prints)) == 12


def test_parts_of_a_mixture_have_one_scale_of_rewards() -> None:
    config = load_config("iql/mujoco", ["dataset.reward_scale=2.0"])
    parts = [
        {"kind": "medium", "return_low": -100.0, "return_high": 900.0},
        {"kind": "expert", "return_low": 1000.0, "return_high": 3900.0},
    ]
    mixed = data.with_data(config, Path("files"), {"parts": parts}).dataset_sections
    assert [each.reward_scale for each in mixed] == [0.5, 0.5]
    assert [each.reward_normalization for each in mixed] == ["none", "none"]
    alone = data.with_data(config, Path("files"), {"parts": parts[:1]}).dataset_sections
    assert [(each.reward_scale, each.reward_normalization) for each in alone] == [
        (2.0, "return_range")
    ]


@pytest.mark.parametrize(
    "name",
    ["rebrac/pendulum", pytest.param("cal_ql/pendulum_mixed", marks=pytest.mark.thorough)],
)
def test_methods_that_need_data_are_rehearsed_too(name: str) -> None:
    config = load_config(name, ["dataset.size=10"])
    found = mathematics.mathematics(config)
    assert len(found["numbers"]) > 6
    scaled = load_config(config, ["dataset.reward_scale=3.0"])
    assert mathematics.stale(found, mathematics.mathematics(scaled)) is not None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("data: replay", "data: best", ["run 2: data = 'best'", "medium-expert"]),
        ("init_from: offline", "init_from: absent", ["run 3: init_from = 'absent'"]),
        ("init_from: offline", "init_from: offline, seeds: 1", ["the same seeds"]),
        ("data: medium-expert,", "", ["bc needs recorded data; choose it with data"]),
        ("data: medium-expert", "data: medium, peer: sb3", ["peer = 'sb3'", "package"]),
        (
            "data: medium-expert",
            "data: medium, peer: {package: sb3, algo: SAC}",
            ["d3rlpy learns from data"],
        ),
    ],
)
def test_mistakes_in_a_plan_with_data_are_named(
    tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    arguments = parse(tmp_path, tmp_path, PLAN.replace(old, new))
    with pytest.raises(UserError) as caught:
        plan.read_plan(arguments.plan, arguments)
    assert all(word in str(caught.value) for word in words)


def test_a_command_waits_for_the_one_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, time; time.sleep(0.2); sys.exit(int(sys.argv[1]))")
    monkeypatch.setattr(processes, "SCRIPT", script)
    after = {1: 0, 3: 2, 4: 3}
    codes = processes.run_processes([["0"], ["0"], ["3"], ["0"], ["0"]], 2, after=after)
    assert codes == [0, 0, 3, None, None]


PEER = """
import json, sys
task = json.loads(sys.argv[1])
assert task["batch_size"] == 8 and task["options"] == {"noise": 0.5}
print("a note")
print(json.dumps({"versions": {"peer": "1.0"}}))
for step in (4, 8):
    if task["seed"] == FAILS and step == 8:
        sys.exit(1)
    print(json.dumps({"step": step, "return": step + task["seed"], "seconds": float(step)}))
"""


def test_other_packages_are_measured_in_the_same_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_runs, "available_python", lambda _: sys.executable)
    monkeypatch.setattr(peer_runs, "CONTESTANTS", tmp_path)
    text = (
        PLAN.split("runs:")[0] + "runs:\n  - {name: other, config: sac/pendulum, peer: {package: "
        "sb3, algo: SAC, options: {noise: 0.5}}, set: {batch_size: 8}}\n"
    )
    arguments = parse(tmp_path, tmp_path, text)
    [each] = plan.read_plan(arguments.plan, arguments)
    script = tmp_path / "sb3_curve.py"
    script.write_text(PEER.replace("FAILS", "1"))
    with pytest.raises(UserError, match=r"exit codes \[0, 1\]"):
        learning.measure_variants(learning.parse_arguments(each.words))
    rehearsal = mathematics.cached_mathematics()
    assert plan.state_of(each, rehearsal).text == "started: 8 steps evaluated; continues"
    script.write_text(PEER.replace("FAILS", "None"))
    assert measure(arguments, monkeypatch)
    values = result(arguments, "other")
    assert [found["returns"] for found in values["evaluations"]] == [[4, 5], [8, 9]]
    assert values["evaluations"][1]["wall_seconds"] == 8.0
    assert values["versions"] == {"peer": "1.0"}
    assert plan.state_of(each, rehearsal).kind == plan.DONE
    other = parse(tmp_path, tmp_path, text.replace("0.5", "0.25"))
    [each] = plan.read_plan(other.plan, other)
    assert plan.state_of(each, rehearsal).kind == plan.STALE


def test_a_process_of_a_peer_continues_from_what_it_has_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"folder": str(tmp_path / "seed0"), "environment": TASK, "eval_episodes": 1}
    count = [0]

    def curve() -> LearningCurve:
        def save(folder: Path) -> None:
            (folder / "model").write_text(str(count[0]))

        return LearningCurve(task, ["numpy"], lambda _: np.zeros(1), save, time.perf_counter())

    first = curve()
    assert (first.saved, first.step) == (None, 0)
    for count[0] in (5, 10):
        first.evaluate(count[0])
    printed = capsys.readouterr().out.splitlines()
    again = curve()
    assert again.step == 10
    assert again.saved is not None
    assert (again.saved / "model").read_text() == "10"
    assert [each.name for each in (tmp_path / "seed0").iterdir() if each.is_dir()] == ["step10"]
    assert capsys.readouterr().out.splitlines() == printed
    again.evaluate(15)
    seconds = [json.loads(line)["seconds"] for line in printed[1:]]
    last = json.loads(capsys.readouterr().out)
    assert seconds == sorted(seconds)
    assert last["seconds"] >= seconds[-1]


def test_each_seed_can_start_from_a_policy_of_its_own(tmp_path: Path) -> None:
    common = {
        "env_id": TASK,
        "seeds": [0, 1],
        "eval_interval": 0,
        "eval_episodes": 1,
        "total_timesteps": 10,
        "output_dir": str(tmp_path),
    }
    before = rl_training.train(load_config("sac/pendulum", run_name="before", **common))
    path = str(tmp_path / "before__seed{seed}")
    after = rl_training.train(load_config("sac/pendulum", init_from=path, **common))
    policies = [
        [rl_training.predict_checkpoint(each.run_dir, np.ones(3, np.float32)) for each in results]
        for results in (before, after)
    ]
    np.testing.assert_array_equal(policies[0], policies[1])
    assert policies[0][0] != policies[0][1]


@pytest.mark.parametrize(("name", "number"), [("offline", 21), ("fine_tuning", 26), ("peers", 22)])
def test_shipped_plans_can_be_read_and_name_each_result_once(
    tmp_path: Path, name: str, number: int
) -> None:
    words = ["--plan", str(PLANS / f"{name}.yaml"), "--out", str(tmp_path)]
    arguments = learning.parse_arguments(words)
    runs = plan.read_plan(arguments.plan, arguments)
    assert len(runs) == len({each.path for each in runs}) == number
    assert all(each.arguments.seeds * (1 + 4 * (each.variant.name == "rlpd")) == 5 for each in runs)
