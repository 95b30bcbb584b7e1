"""benchmarks/learning.py --plan: what is done, what continues, and what is stale."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import learning
import learning_summary as summary
from curves import mathematics, plan, processes, run, stored

from rl_training.algorithms import DQN, SACAlgorithm
from rl_training.config_files import load_config
from rl_training.errors import TrainingInterrupted, UserError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PLAN = """
defaults: {seeds: 2, steps: 90, eval_interval: 30, eval_episodes: 1}
runs:
  - {name: small, config: sac/pendulum, tasks: [Pendulum-v1], set: {learning_starts: 20,
     batch_size: 8}}
"""


@pytest.fixture
def arguments(tmp_path: Path) -> argparse.Namespace:
    (tmp_path / "plan.yaml").write_text(PLAN)
    return parse(tmp_path)


def parse(folder: Path, *more: str) -> argparse.Namespace:
    words = ["--plan", folder / "plan.yaml", "--out", folder / "out", "--work", folder / "work"]
    return learning.parse_arguments([*map(str, words), "--device", "cpu", *more])


def planned(arguments: argparse.Namespace) -> list[plan.PlannedRun]:
    return plan.read_plan(arguments.plan, arguments)


def measure(each: plan.PlannedRun) -> Path:
    return run.learn(each.variant, each.arguments)


class StopAtEvaluation(run.CurveRecorder):
    """Stops a run after a round of evaluations, as a signal does."""

    at = 30

    def on_evaluation_end(self, context: Any) -> None:
        super().on_evaluation_end(context)
        if context.position == self.at:
            context.request_stop("interrupted")


def stop_at_first_evaluation(each: plan.PlannedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a run as an interruption does."""
    train = run.rl_training.train

    def interrupted(*given: Any, **more: Any) -> Any:
        if isinstance(found := train(*given, **more), list):
            raise TrainingInterrupted(found)
        return found  # of the rehearsal

    with monkeypatch.context() as patch:
        patch.setattr(run, "CurveRecorder", StopAtEvaluation)
        patch.setattr(run.rl_training, "train", interrupted)
        with pytest.raises(TrainingInterrupted):
            measure(each)


def returns(path: Path) -> list[list[float]]:
    return [each["returns"] for each in json.loads(path.read_text())["evaluations"]]


def state(each: plan.PlannedRun) -> plan.State:
    return plan.state_of(each, mathematics.cached_mathematics())


def test_a_run_that_was_stopped_continues_and_ends_equal(
    arguments: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (each,) = planned(arguments)
    assert state(each).kind == plan.OPEN
    stop_at_first_evaluation(each, monkeypatch)
    assert state(each).text == "started: 30 steps evaluated; continues"
    before = json.loads(each.path.read_text())
    each.path.unlink()  # the work folder is enough
    path = measure(each)
    assert state(each).text == "done: 90 steps"
    assert not (arguments.work / path.stem).exists()

    kept = json.loads(path.read_text())
    assert [part["from_evaluation"] for part in kept["sessions"]] == [0, 30]
    assert kept["seconds"] > before["seconds"]
    seconds = [part["wall_seconds"] for part in kept["evaluations"]]
    assert seconds == sorted(seconds)
    (fresh,) = planned(parse(tmp_path, "--out", str(tmp_path / "other")))
    assert returns(path) == returns(measure(fresh))


@pytest.mark.thorough
def test_a_run_that_was_killed_loses_at_most_one_evaluation(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (each,) = planned(arguments)

    class Killed(run.CurveRecorder):
        def on_evaluation_end(self, context: Any) -> None:
            super().on_evaluation_end(context)
            if context.position == 60:
                raise ValueError("no power")  # nothing more is saved

    with monkeypatch.context() as patch:
        patch.setattr(run, "CurveRecorder", Killed)
        with pytest.raises(Exception, match="no power"):
            measure(each)
    assert state(each).kind == plan.STARTED
    path = measure(each)
    assert stored.is_complete(json.loads(path.read_text()))
    assert json.loads(path.read_text())["sessions"][1]["from_evaluation"] >= 30


def test_a_complete_result_is_left_out_and_an_unfinished_one_is_not(
    arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    (each,) = planned(arguments)
    path = measure(each)
    assert plan.measure_plan(arguments.plan, arguments)  # would start a process otherwise
    assert "1 of 1 runs are done" in capsys.readouterr().out
    values = json.loads(path.read_text())
    values["evaluations"][-1]["returns"][1] = None
    path.write_text(json.dumps(values))
    assert state(each).text == "open: 90 steps stored, but its run folders are gone"


@pytest.mark.thorough
def test_a_longer_unfinished_curve_is_kept_until_the_new_one_has_reached_as_far(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (each,) = planned(arguments)
    path = measure(each)
    values = json.loads(path.read_text())
    values["evaluations"].pop()  # up to step 60, from another machine
    path.write_text(json.dumps(values))
    before = path.read_text()
    stop_at_first_evaluation(each, monkeypatch)
    assert path.read_text() == before
    measure(each)
    assert state(each).kind == plan.DONE


def change_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the mathematics of SAC a little."""
    target = SACAlgorithm.critic_loss

    def changed(self: Any, state: Any, batch: Any, noise: Any) -> Any:
        return target(self, state, batch._replace(reward=batch.reward * 1.05), noise)

    monkeypatch.setattr(SACAlgorithm, "critic_loss", changed)


@pytest.mark.thorough
def test_results_of_other_mathematics_are_stale_and_not_continued(
    arguments: argparse.Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (each,) = planned(arguments)
    stop_at_first_evaluation(each, monkeypatch)
    change_target(monkeypatch)
    assert state(each).kind == plan.STALE
    assert "the code computes something else now" in state(each).text
    path = measure(each)
    assert "trained again from the beginning" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["sessions"]) == 1
    assert state(each).kind == plan.DONE
    monkeypatch.undo()
    assert state(each).kind == plan.STALE
    with pytest.raises(UserError, match="no learning curves"):
        summary.print_summary(tmp_path / "out", None, None, "SAC", stored.why_stale())
    assert f"note: {path.name} is stale and left out" in capsys.readouterr().out


def test_a_summary_keeps_results_of_this_code_and_marks_those_that_cannot_be_judged(
    arguments: argparse.Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (each,) = planned(arguments)
    path = measure(each)
    summary.print_summary(tmp_path / "out", None, None, "SAC", stored.why_stale())
    text = capsys.readouterr().out
    assert "small: 2 seeds, 90 steps" in text
    assert "not recorded" not in text
    values = json.loads(path.read_text())
    del values["mathematics"]
    path.write_text(json.dumps(values))
    summary.print_summary(tmp_path / "out", None, None, "SAC", stored.why_stale())
    assert "code not recorded" in capsys.readouterr().out
    assert state(each).kind == plan.STALE


@pytest.mark.parametrize("name", ["td3/mujoco", "redq/hopper", "dqn/rainbow"])
def test_a_rehearsal_gives_the_same_numbers_again(name: str) -> None:
    config = load_config(name)
    first, second = mathematics.mathematics(config), mathematics.mathematics(config)
    assert mathematics.stale(first, second) is None
    assert len(first["numbers"]) > 6
    assert mathematics.stale(json.loads(json.dumps(first)), second) is None


def test_settings_are_compared_too_but_new_ones_are_not_missed() -> None:
    now = {"settings": {"tau": 0.005, "new": 1}, "numbers": {"loss": 1.0}}
    assert mathematics.stale({"settings": {"tau": 0.005}, "numbers": {"loss": 1.0001}}, now) is None
    for settings, numbers, reason in [
        ({"tau": 0.01}, {"loss": 1.0}, r"made with tau = 0.01, which is 0.005 now"),
        ({"old": 2}, {"loss": 1.0}, r"old = 2, which is no longer a setting"),
        ({}, {"loss": 1.05}, r"loss is 1, and was 1.05"),
        ({}, {"loss": 1.0, "q": 2.0}, r"other quantities now \(q\)"),
    ]:
        found = mathematics.stale({"settings": settings, "numbers": numbers}, now)
        assert found is not None
        assert re.search(reason, found)


def test_discrete_actions_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("dqn/cartpole")
    before = mathematics.mathematics(config)
    loss = DQN.critic_loss

    def changed(self: Any, state: Any, batch: Any, noise: Any) -> Any:
        return loss(self, state, batch._replace(reward=-batch.reward), noise)

    monkeypatch.setattr(DQN, "critic_loss", changed)
    assert mathematics.stale(before, mathematics.mathematics(config)) is not None


@pytest.mark.thorough
def test_other_settings_of_the_same_name_are_measured_again(
    arguments: argparse.Namespace,
) -> None:
    measure(planned(arguments)[0])
    arguments.plan.write_text(PLAN.replace("batch_size: 8", "batch_size: 16"))
    (each,) = planned(arguments)
    assert state(each).text.startswith("stale: its settings differ (algo_kwargs.batch_size)")
    arguments.plan.write_text(PLAN.replace("steps: 90", "steps: 120"))
    (each,) = planned(arguments)
    assert "planned_steps = 90, not 120" in state(each).text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("runs:", "run:", ["unknown key run", "defaults, runs"]),
        ("steps: 90", "step: 90", ["defaults: unknown key step"]),
        ("steps: 90", "steps: 0", ["run 1: steps = 0", "at least 1"]),
        ("steps: 90", "steps: [1]", ["run 1: steps = [1]"]),
        ("seeds: 2", "seeds: 1.5", ["run 1: seeds = 1.5"]),
        ("tasks: [Pendulum-v1]", "tasks: Pendulum-v1", ["tasks = 'Pendulum-v1'", "list"]),
        ("tasks: [Pendulum-v1]", "tasks: [Pendulum-v1, Pendulum-v1]", ["two runs would write"]),
        ("sac/pendulum", "sac/nothing", ["run 1, Pendulum-v1", "not a packaged config"]),
        ("sac/pendulum", "iql/pendulum", ["run 1", "iql needs recorded data", "medium-expert"]),
        ("name: small", "name: ../up", ["not usable as a file name"]),
        ("batch_size: 8", "batch: 8", ["run 1, Pendulum-v1", "batch"]),
        ("name: small, ", "", ["run 1: name is missing"]),
        ("runs:", "runs: 3 #", ["runs = 3"]),
    ],
)
def test_mistakes_in_a_plan_are_named_before_anything_starts(
    arguments: argparse.Namespace, old: str, new: str, words: list[str]
) -> None:
    text = PLAN.replace(old, new)
    if new.endswith("#"):
        text = "runs: 3"
    arguments.plan.write_text(text)
    with pytest.raises(UserError) as caught:
        planned(arguments)
    assert all(word in str(caught.value) for word in [str(arguments.plan), *words])


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--plan .*plan\.yaml"):
        planned(parse(tmp_path))


@pytest.mark.faults
def test_a_signal_leaves_a_run_that_continues(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.replace("steps: 90", "steps: 100000"))
    (each,) = planned(parse(tmp_path, "--commit", "abc"))
    kept = each.arguments.work / each.path.stem / run.CURVE
    child = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "learning.py"), *each.words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and child.poll() is None and not each.path.exists():
            time.sleep(0.05)
        child.terminate()
        text, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == processes.INTERRUPTED, text
    assert "the same command continues it" in text
    assert "Traceback" not in text
    values = json.loads(kept.read_text())
    assert values["commit"] == "abc"
    assert values["evaluations"]
    assert state(each).kind == plan.STARTED


@pytest.mark.thorough
def test_the_time_limit_asks_what_runs_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "time.sleep(float(sys.argv[1]))\n"
    )
    monkeypatch.setattr(processes, "SCRIPT", script)
    began = time.monotonic()
    codes = processes.run_processes([["0"], ["600"], ["600"]], 1, seconds=5.0)
    assert codes == [0, processes.INTERRUPTED, processes.NOT_STARTED]
    assert time.monotonic() - began < 60


def test_processes_after_the_time_limit_are_not_started() -> None:
    assert processes.run_processes([["--help"]], 1, seconds=0.0) == [processes.NOT_STARTED]
    assert processes.run_processes([["--help"], ["--unknown"]], 2) == [0, 2]


def test_the_shipped_plan_can_be_read_and_names_each_result_once(tmp_path: Path) -> None:
    words = ["--plan", str(BENCHMARKS / "plans" / "online.yaml"), "--out", str(tmp_path)]
    runs = planned(learning.parse_arguments(words))
    assert len(runs) == len({each.path for each in runs}) == 25
    lengths = {(each.config.algo, each.config.total_timesteps) for each in runs}
    assert lengths == {
        *((algo, 1_000_000) for algo in ("sac", "td3", "tqc", "flash_sac", "xqc", "crossq")),
        ("redq", 125_000),
        ("redq", 300_000),
    }
