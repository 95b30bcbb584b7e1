"""Ctrl-C and SIGTERM save a checkpoint, also during compilation, and end the program."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Command
from helpers import StopAt, hashes, keywords, metric_rows, tiny

import rl_training
from rl_training import SAC, TrainingInterrupted
from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.envs import VectorEnvironment
from rl_training.errors import ConfigError, TrainingError
from rl_training.evaluation.fitted_q import FittedQ
from rl_training.execution.learner import Learner
from rl_training.execution.policy import Policy
from rl_training.execution.programs import DirectProgram
from rl_training.execution.stoppable import run_stoppable
from rl_training.experiment import ExperimentManager
from rl_training.experiment.overview import RunOverview, list_runs
from rl_training.runtime.sac_trainer import train_sac
from rl_training.runtime.workflows import resume_together
from rl_training.types import TrainResult

pytestmark = pytest.mark.usefixtures("no_pictures")
both_signals = pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name
)


class InterruptAt(Callback):
    """Sends signals to the process at a step of seed 0."""

    def __init__(self, step: int, *numbers: int) -> None:
        self.step, self.numbers = step, numbers or (signal.SIGINT,)

    def on_collect_end(self, context: TrainingContext) -> None:
        if (context.config.seed, context.global_step) == (0, self.step):
            for number in self.numbers:
                signal.raise_signal(number)


# In Python


def entry_points() -> dict[str, Callable[[dict[str, Any], Callback], object]]:
    def resume(config: dict[str, Any], interrupt: Callback) -> object:
        started = rl_training.train(config, callbacks=[StopAt(10)])
        assert isinstance(started, TrainResult)
        return rl_training.resume_training(started.run_dir, callbacks=[interrupt])

    return {
        "train": lambda config, interrupt: rl_training.train(config, callbacks=[interrupt]),
        "resume_training": resume,
        "learn": lambda config, interrupt: SAC("Pendulum-v1", **keywords(config)).learn(
            callbacks=[interrupt]
        ),
        "train_sac": lambda config, interrupt: train_sac(config, callbacks=[interrupt]),
        "ExperimentManager": lambda config, interrupt: ExperimentManager(config).train([interrupt]),
    }


@both_signals
@pytest.mark.parametrize("entry", entry_points())
def test_every_entry_point_saves_and_raises_an_interrupt_with_its_result(
    tmp_path: Path, entry: str, number: int
) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt) as stopped:
        entry_points()[entry](tiny(tmp_path), InterruptAt(50, number))
    interruption = stopped.value
    assert isinstance(interruption, TrainingInterrupted)
    result = interruption.result
    assert interruption.results == [result]
    assert (result.stop_reason, result.metrics["global_step"]) == ("interrupted", 50)
    assert result.checkpoint_path.name == "step_000000050"
    assert str(interruption) == (
        f"stopped at step 50 with a checkpoint in {result.run_dir}; continue with agent.learn(), "
        f"or in a shell: rl-training resume {result.run_dir}"
    )
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_an_interrupt_ends_a_loop_over_seeds(tmp_path: Path) -> None:
    tried = []

    def train_all() -> None:
        for seed in range(3):
            tried.append(seed)
            config = keywords(tiny(tmp_path, seed=seed))
            SAC("Pendulum-v1", **config).learn(callbacks=[InterruptAt(50)])

    with pytest.raises(KeyboardInterrupt):
        train_all()
    assert tried == [0]


def test_an_interrupted_agent_has_a_result_and_continues(tmp_path: Path) -> None:
    uninterrupted = SAC("Pendulum-v1", **keywords(tiny(tmp_path))).learn()
    agent = SAC("Pendulum-v1", **keywords(tiny(tmp_path)))
    with pytest.raises(TrainingInterrupted) as stopped:
        agent.learn(callbacks=[InterruptAt(50)])
    assert agent.result is stopped.value.result
    assert agent.predict([0.1, 0.2, 0.3]).shape == (1,)
    resumed = agent.learn()
    assert hashes(resumed.checkpoint_path) == hashes(uninterrupted.checkpoint_path)
    assert metric_rows(resumed.run_dir) == metric_rows(uninterrupted.run_dir)


def test_a_stop_requested_by_a_callback_returns_its_result(tmp_path: Path) -> None:
    result = rl_training.train(tiny(tmp_path), callbacks=[StopAt(50, "enough")])
    assert isinstance(result, TrainResult)
    assert result.stop_reason == "enough"


def test_an_interrupted_experiment_keeps_its_results_and_resumes(tmp_path: Path) -> None:
    manager = ExperimentManager(tiny(tmp_path, seeds=[0, 1]))
    with pytest.raises(TrainingInterrupted, match=r"of each run; .* resume .*seed0"):
        manager.train([InterruptAt(50)])
    assert [result.stop_reason for result in manager.results] == ["interrupted"] * 2
    assert [result.metrics["global_step"] for result in manager.resume()] == [120, 120]


class InterruptAtEnd(Callback):
    def on_train_end(self, context: TrainingContext) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_after_the_last_step_still_ends_the_program(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted, match="after training finished") as stopped:
        rl_training.train(tiny(tmp_path), callbacks=[InterruptAtEnd()])
    assert stopped.value.result.stop_reason == "total_timesteps"
    assert stopped.value.unfinished == []


def overview_of(run: Path) -> RunOverview:
    return next(each for each in list_runs(run.parent) if each.path == run)


def state_of(result: TrainResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((result.checkpoint_path / "state.json").read_text())
    return found


def progress_of(result: TrainResult) -> dict[str, Any]:
    found: dict[str, Any] = state_of(result)["progress"]
    return found


def assert_same_run(one: TrainResult, other: TrainResult) -> None:
    assert hashes(one.checkpoint_path) == hashes(other.checkpoint_path)
    assert metric_rows(one.run_dir) == metric_rows(other.run_dir)
    assert one.metrics == pytest.approx(other.metrics, nan_ok=True, rel=0, abs=0)


@contextlib.contextmanager
def interrupting(target: type, name: str, call: int, *numbers: int) -> Iterator[None]:
    """Send signals to the process after one call of a method."""
    original, calls = getattr(target, name), itertools.count(1)

    def counted(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if next(calls) == call:
            for number in numbers or (signal.SIGINT,):
                signal.raise_signal(number)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, counted)
        yield


# In a block of updates

BLOCKS = {"gradient_updates_per_step": 20, "train_frequency": 20}
"""Updates 1 to 20 after step 60, 21 to 40 after step 80, and so on to step 120"""


@pytest.mark.parametrize(
    ("update", "number"), [(7, signal.SIGINT), (40, signal.SIGTERM), (73, signal.SIGTERM)]
)
def test_a_block_of_updates_is_left_and_completed_with_the_same_bits(
    tmp_path: Path, update: int, number: int
) -> None:
    settings = {"algo_kwargs": {**BLOCKS, "policy_delay": 3}, "eval_interval": 60}
    uninterrupted = rl_training.train(tiny(tmp_path, **settings))
    assert isinstance(uninterrupted, TrainResult)
    with (
        interrupting(DirectProgram, "__call__", update, number),
        pytest.raises(TrainingInterrupted) as stopped,
    ):
        rl_training.train(tiny(tmp_path, **settings))
    result = stopped.value.result
    progress = progress_of(result)
    assert progress["gradient_steps"] == result.metrics["gradient_steps"] == update
    assert progress["updates_left"] == -update % 20
    assert progress["global_step"] == 60 + (update - 1) // 20 * 20
    assert_same_run(rl_training.resume_training(result.run_dir), uninterrupted)


def test_a_block_can_be_left_again_and_again(tmp_path: Path) -> None:
    config = keywords(tiny(tmp_path, max_updates=75, algo_kwargs=BLOCKS))
    uninterrupted = SAC("Pendulum-v1", **config).learn()
    agent = SAC("Pendulum-v1", **config)
    for made in (7, 12, 65, 70):
        before = 0 if agent.result is None else int(agent.result.metrics["gradient_steps"])
        with (
            interrupting(DirectProgram, "__call__", made - before),
            pytest.raises(TrainingInterrupted),
        ):
            agent.learn()
        assert agent.result is not None
        assert agent.result.metrics["gradient_steps"] == made
        assert agent.result.stop_reason == "interrupted"
    assert_same_run(agent.learn(), uninterrupted)


def test_the_best_checkpoint_of_a_block_that_was_left_has_all_its_updates(tmp_path: Path) -> None:
    settings = {"algo_kwargs": BLOCKS, "eval_interval": 60, "total_timesteps": 100}
    with interrupting(DirectProgram, "__call__", 7), pytest.raises(TrainingInterrupted) as stopped:
        rl_training.train(tiny(tmp_path, **settings))
    left = hashes(stopped.value.result.checkpoint_path)
    resumed = rl_training.resume_training(stopped.value.result.run_dir, callbacks=[StopAt(60)])
    assert resumed.best_checkpoint_path == stopped.value.result.checkpoint_path
    assert hashes(resumed.best_checkpoint_path) != left
    state = json.loads((resumed.best_checkpoint_path / "state.json").read_text())
    assert (state["progress"]["gradient_steps"], state["progress"]["updates_left"]) == (20, 0)


@pytest.mark.parametrize("call", [3, 27])
def test_seeds_leave_a_block_at_the_same_update(tmp_path: Path, call: int) -> None:
    settings = {"seeds": [0, 1], "total_timesteps": 80, "algo_kwargs": BLOCKS}
    uninterrupted = rl_training.train(tiny(tmp_path, **settings))
    assert isinstance(uninterrupted, list)
    manager = ExperimentManager(tiny(tmp_path, **settings))
    with (
        interrupting(DirectProgram, "__call__", call),
        pytest.raises(TrainingInterrupted) as stopped,
    ):
        manager.train()
    made = {each.metrics["gradient_steps"] for each in stopped.value.results}
    assert len(made) == 1
    assert made < {8.0, 16.0, 20.0}
    for one, other in zip(manager.resume(), uninterrupted, strict=True):
        assert_same_run(one, other)


def test_large_blocks_do_not_overlap_with_environments(tmp_path: Path) -> None:
    large = {"gradient_updates_per_step": 300}
    with pytest.raises(ConfigError, match=r"overlap = 'on': 300 updates"):
        rl_training.train(tiny(tmp_path, overlap="on", algo_kwargs=large))
    with pytest.raises(ConfigError, match=r"overlap = 'on': 2,400 updates"):
        rl_training.train(tiny(tmp_path, overlap="on", num_envs=8, algo_kwargs=large))
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_overlaps_with_environments_is_completed(tmp_path: Path) -> None:
    settings = {"overlap": "on", "algo_kwargs": BLOCKS}
    uninterrupted = rl_training.train(tiny(tmp_path, **settings))
    assert isinstance(uninterrupted, TrainResult)
    with interrupting(DirectProgram, "__call__", 7), pytest.raises(TrainingInterrupted) as stopped:
        rl_training.train(tiny(tmp_path, **settings))
    assert progress_of(stopped.value.result)["gradient_steps"] == 20
    assert_same_run(rl_training.resume_training(stopped.value.result.run_dir), uninterrupted)


# In an evaluation


class RequestEvaluation(Callback):
    def on_collect_end(self, context: TrainingContext) -> None:
        if context.global_step == 50:
            context.request_evaluation()


@pytest.mark.parametrize(
    "changes", [{"eval_interval": 50}, {"eval_interval": 0}], ids=["interval", "callback"]
)
def test_an_evaluation_is_given_up_and_repeated_after_a_resume(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config, callbacks = tiny(tmp_path, eval_episodes=3, **changes), [RequestEvaluation()]
    uninterrupted = rl_training.train(config, callbacks=callbacks)
    assert isinstance(uninterrupted, TrainResult)
    with interrupting(Policy, "act", 70), pytest.raises(TrainingInterrupted) as stopped:
        rl_training.train(config, callbacks=callbacks)
    result = stopped.value.result
    progress = progress_of(result)
    assert (progress["global_step"], progress["evaluation_due"]) == (50, True)
    assert not any("eval/mean_reward" in row for row in metric_rows(result.run_dir))
    resumed = rl_training.resume_training(result.run_dir, callbacks=callbacks)
    assert_same_run(resumed, uninterrupted)
    assert [row["step"] for row in metric_rows(resumed.run_dir) if "eval/mean_reward" in row] in (
        [50, 100, 120],
        [50, 120],
    )


@pytest.mark.parametrize("eval_interval", [0, 60], ids=["final", "also periodic"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_run_without_its_last_evaluation_has_finished_and_a_resume_evaluates_it(
    tmp_path: Path, eval_interval: int, when: str
) -> None:
    config = tiny(tmp_path, eval_interval=eval_interval)
    uninterrupted = rl_training.train(config)
    assert isinstance(uninterrupted, TrainResult)
    callbacks = [InterruptAt(120)] if when == "before" else []
    act = 70 + 200 * (eval_interval > 0)
    with interrupting(Policy, "act", act), pytest.raises(TrainingInterrupted) as stopped:
        rl_training.train(config, callbacks=callbacks)
    result = stopped.value.result
    assert (result.stop_reason, result.evaluation_due) == ("total_timesteps", True)
    assert math.isnan(result.metrics["eval_return_mean"])
    assert stopped.value.report() == (
        "training ended at step 120 with a checkpoint, but its last evaluation is missing; "
        f"continue with: rl-training resume {result.run_dir}"
    )
    assert overview_of(result.run_dir).state == "finished"
    with pytest.warns(UserWarning, match="only its last evaluation is repeated"):
        resumed = rl_training.resume_training(result.run_dir)
    assert_same_run(resumed, uninterrupted)
    assert progress_of(resumed) == progress_of(uninterrupted)
    assert state_of(resumed)["evaluation"] == state_of(uninterrupted)["evaluation"]
    assert not resumed.evaluation_due
    assert overview_of(result.run_dir).state == "finished"


def test_an_evaluation_of_one_of_several_seeds_is_given_up(tmp_path: Path) -> None:
    settings = {"seeds": [0, 1], "eval_interval": 50}
    uninterrupted = rl_training.train(tiny(tmp_path, **settings))
    assert isinstance(uninterrupted, list)
    manager = ExperimentManager(tiny(tmp_path, **settings))
    with interrupting(Policy, "act", 300), pytest.raises(TrainingInterrupted) as stopped:
        manager.train()
    due = [progress_of(each)["evaluation_due"] for each in stopped.value.results]
    assert due == [False, True]
    for one, other in zip(manager.resume(), uninterrupted, strict=True):
        assert_same_run(one, other)


def test_a_run_that_stops_early_after_a_signal_has_stopped_early(tmp_path: Path) -> None:
    """A resumed run must not train on where the uninterrupted one stopped."""
    stop = {"metric": "eval_return_mean", "mode": "min", "patience": 1, "target_value": 0.0}

    class InterruptAfterEvaluation(Callback):
        def on_evaluation_end(self, context: TrainingContext) -> None:
            signal.raise_signal(signal.SIGINT)

    config = tiny(tmp_path, eval_interval=50, early_stopping=stop)
    with pytest.raises(TrainingInterrupted) as stopped:
        rl_training.train(config, callbacks=[InterruptAfterEvaluation()])
    assert stopped.value.result.stop_reason == "target_value"
    assert stopped.value.unfinished == []


# A second signal

IN_QUICK_SUCCESSION = [
    (signal.SIGINT, signal.SIGINT),
    (signal.SIGTERM, signal.SIGINT),
    (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGTERM),
]
each_succession = pytest.mark.parametrize(
    "numbers", IN_QUICK_SUCCESSION, ids=lambda each: "+".join(number.name for number in each)
)


@each_succession
def test_a_second_signal_leaves_at_once_and_names_the_last_checkpoint(
    tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    agent = SAC("Pendulum-v1", **keywords(tiny(tmp_path, checkpoint_interval=30)))
    with pytest.raises(TrainingInterrupted) as stopped:
        agent.learn(callbacks=[InterruptAt(50, *numbers)])
    result = stopped.value.result
    (note,) = stopped.value.__notes__
    assert note.startswith("at step 50; the last checkpoint is ")
    assert result.checkpoint_path.name == "step_000000030"
    assert result.metrics["global_step"] == 30
    assert str(result.checkpoint_path) in note
    continued = agent.learn()
    assert (continued.run_dir, continued.metrics["global_step"]) == (result.run_dir, 120)


SYNC = os.fsync


@pytest.mark.parametrize(
    ("numbers", "call"), list(zip(IN_QUICK_SUCCESSION, (1, 3, 6), strict=True))
)
def test_a_second_signal_within_a_save_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...], call: int
) -> None:
    class InterruptNextSave(Callback):
        def on_collect_end(self, context: TrainingContext) -> None:
            if context.global_step == 60:
                calls = itertools.count(1)

                def sync(descriptor: int) -> None:
                    SYNC(descriptor)
                    if next(calls) == call:
                        for number in numbers:
                            signal.raise_signal(number)

                monkeypatch.setattr(os, "fsync", sync)

    agent = SAC("Pendulum-v1", **keywords(tiny(tmp_path, checkpoint_interval=30)))
    with pytest.raises(TrainingInterrupted) as stopped:
        agent.learn(callbacks=[InterruptNextSave()])
    run = stopped.value.result.run_dir
    assert stopped.value.result.checkpoint_path == run / "checkpoints" / "step_000000030"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step_000000000",
        "step_000000030",
    ]
    assert not RunFolder(run).is_locked()
    assert agent.learn().metrics["global_step"] == 120


def test_a_second_signal_within_an_evaluation_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    with (
        interrupting(Policy, "act", 70, signal.SIGTERM, signal.SIGINT),
        pytest.raises(TrainingInterrupted) as stopped,
    ):
        rl_training.train(tiny(tmp_path, eval_interval=50, checkpoint_interval=30))
    assert stopped.value.result.checkpoint_path.name == "step_000000030"


def test_a_second_signal_while_resources_are_closed_reports_what_was_saved(tmp_path: Path) -> None:
    with (
        interrupting(VectorEnvironment, "close", 1, signal.SIGINT),
        pytest.raises(TrainingInterrupted) as stopped,
    ):
        rl_training.train(tiny(tmp_path), callbacks=[InterruptAt(50)])
    assert stopped.value.result.checkpoint_path.name == "step_000000050"


def test_a_signal_while_resources_are_closed_is_not_lost(tmp_path: Path) -> None:
    with (
        interrupting(RunFolder, "unlock", 1, signal.SIGTERM),
        pytest.raises(TrainingInterrupted, match="after training finished") as stopped,
    ):
        rl_training.train(tiny(tmp_path))
    assert stopped.value.result.stop_reason == "total_timesteps"


def test_a_block_is_completed_at_the_same_step_although_its_checkpoint_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error between two renames must not cost the checkpoint that is replaced."""
    config = tiny(tmp_path, total_timesteps=60, algo_kwargs=BLOCKS)
    with interrupting(DirectProgram, "__call__", 7), pytest.raises(TrainingInterrupted) as stopped:
        rl_training.train(config)
    result, rename = stopped.value.result, PlainFolder.rename

    def fail(folder: PlainFolder, name: str, new_name: str, *others: PlainFolder) -> None:
        if name.startswith(".tmp-") and new_name.startswith("step_"):
            raise OSError(5, "Input/output error")
        rename(folder, name, new_name, *others)

    left = hashes(result.checkpoint_path)
    monkeypatch.setattr(PlainFolder, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        rl_training.resume_training(result.run_dir)
    monkeypatch.undo()
    assert hashes(result.checkpoint_path) == left
    # The same after a kill between the two renames.
    result.checkpoint_path.rename(result.checkpoint_path.with_name(".replaced-step_000000060"))
    assert rl_training.resume_training(result.run_dir).metrics["gradient_steps"] == 20
    assert sorted(path.name for path in (result.run_dir / "checkpoints").iterdir()) == [
        "best.json",
        "step_000000000",
        "step_000000060",
    ]


# Several runs


def test_an_interrupt_of_a_group_that_fails_is_not_lost(tmp_path: Path) -> None:
    runs = []
    for seed, step in ((0, 60), (1, 70), (2, 80)):
        result = rl_training.train(tiny(tmp_path, seed=seed), callbacks=[StopAt(step)])
        assert isinstance(result, TrainResult)
        runs.append(result.run_dir)

    class FailAfterSignal(Callback):
        def on_collect_end(self, context: TrainingContext) -> None:
            if context.global_step == 90:
                signal.raise_signal(signal.SIGINT)
                raise TrainingError("not finite")

    with pytest.raises(TrainingInterrupted) as stopped:
        resume_together(runs, callbacks=[FailAfterSignal()])
    assert [each.run_dir for each in stopped.value.results] == runs
    assert [each.metrics["global_step"] for each in stopped.value.unfinished] == [60, 70, 80]
    assert str(stopped.value.__cause__) == "not finite"


def test_an_interrupt_before_the_next_group_reports_every_run(tmp_path: Path) -> None:
    runs = []
    for seed, step in ((0, 60), (1, 70)):
        result = rl_training.train(tiny(tmp_path, seed=seed), callbacks=[StopAt(step)])
        assert isinstance(result, TrainResult)
        runs.append(result.run_dir)
    with interrupting(Learner, "__init__", 2), pytest.raises(TrainingInterrupted) as stopped:
        resume_together(runs)
    assert [each.stop_reason for each in stopped.value.results] == [
        "total_timesteps",
        "interrupted",
    ]
    assert [each.run_dir for each in stopped.value.unfinished] == runs[1:]


def test_an_interruption_can_be_sent_between_processes(tmp_path: Path) -> None:
    result = TrainResult(tmp_path, tmp_path, None, {"global_step": 3.0}, "interrupted")
    copied = pickle.loads(pickle.dumps(TrainingInterrupted([result])))
    assert copied.results == [result]
    assert "at step 3 " in str(copied)


# On the command line


@both_signals
def test_an_interrupt_before_the_run_exists_claims_no_checkpoint(
    rl: Command, work: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr("rl_training.training.run.check_environment", interrupt)
    done = rl("train", "-c", "sac/pendulum", "--total-timesteps", "20000")
    assert (done.code, done.err) == (130, "interrupted\n")
    assert list(work.iterdir()) == []


@both_signals
@pytest.mark.parametrize("ope", [False, True], ids=["episodes", "ope"])
def test_an_interrupted_evaluation_is_reported_in_one_line(
    rl: Command, run_copy: Path, tmp_path: Path, number: int, ope: bool
) -> None:
    ends = np.arange(400) % 100 == 99
    values = {"observations": np.zeros((400, 3)), "actions": np.zeros((400, 1)), "timeouts": ends}
    np.savez(tmp_path / "data.npz", rewards=np.ones(400), terminals=np.zeros(400), **values)
    options = ["--ope", "--dataset", tmp_path / "data.npz"] if ope else ["--episodes", "20"]
    target, name = (FittedQ, "_gradient") if ope else (Policy, "act")
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with interrupting(target, name, 70, number):
        done = rl("evaluate", run_copy, *options)
    assert done.code == 130
    assert done.err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.err
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_the_command_line_says_that_the_last_evaluation_is_missing(rl: Command, work: Path) -> None:
    train = "train", "-c", "sac/pendulum", "--total-timesteps", "20", "--set", "run_name=run"
    with interrupting(Policy, "act", 70, signal.SIGTERM):
        done = rl(*train)
    assert done.code == 130
    assert "finished at step 20 (0 updates), not evaluated" in done.out
    assert "learning curve" not in done.out
    assert done.err.splitlines()[-1] == (
        "training ended at step 20 with a checkpoint, but its last evaluation is missing; "
        "continue with: rl-training resume runs/run"
    )
    resumed = rl("resume", "runs/run")
    assert resumed.code == 0
    assert "finished at step 20 (0 updates), evaluation -" in resumed.out


def test_a_second_signal_on_the_command_line_names_the_last_checkpoint(
    rl: Command, work: Path
) -> None:
    train = "train", "-c", "sac/pendulum", "--total-timesteps", "20", "--set", "run_name=run"
    with interrupting(Policy, "act", 70, signal.SIGTERM, signal.SIGINT):
        done = rl(*train)
    assert done.code == 130
    assert done.err.splitlines()[-2:] == [
        "interrupted",
        "at step 20; the last checkpoint is runs/run/checkpoints/step_000000020; "
        "`rl-training resume runs/run` continues from it",
    ]


def test_help_states_the_exit_code_of_an_interrupted_run(rl: Command) -> None:
    assert "exits with code 130" in " ".join(rl("train", "--help").out.split())


# The compiler


def test_an_action_runs_to_its_end_or_raises_its_error() -> None:
    done: list[int] = []
    assert run_stoppable(lambda: done.append(1), lambda: False)
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        run_stoppable(lambda: 1 / 0, lambda: False)


def test_a_stopped_action_ends_with_its_programs_and_their_unfinished_output(
    tmp_path: Path,
) -> None:
    output, started = tmp_path / "program.so", time.monotonic()
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nsleep 60 & echo $! > "$2".pid; echo part > "$2"; wait\n')
    compiler.chmod(0o755)

    def compile_for_a_minute() -> None:
        subprocess.run([str(compiler), "-o", str(output)], check=True)

    assert not run_stoppable(compile_for_a_minute, output.exists)
    assert time.monotonic() - started < 10
    assert not output.exists()
    program = (tmp_path / "program.so.pid").read_text().strip()
    listed = subprocess.run(["ps", "-o", "stat=", "-p", program], capture_output=True, text=True)
    assert listed.stdout[:1] in ("", "Z")  # ended, though perhaps not yet removed by its parent


def test_compilers_that_wait_for_a_thread_never_start(tmp_path: Path) -> None:
    """PyTorch runs compilers in threads of its own, which Python waits for at exit."""
    inductor = pytest.importorskip("torch._inductor.async_compile")
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\necho started >> "$1"\nsleep 60\n')
    compiler.chmod(0o755)
    log = tmp_path / "log"

    def compile_six_files() -> None:
        command = [str(compiler), str(log)]
        tasks = [
            inductor.AsyncCompile.submit(functools.partial(subprocess.run, command, check=True))
            for _ in range(6)
        ]
        for task in tasks:
            task.result()

    with inductor.config.patch({"compile_threads": 2}):
        inductor.AsyncCompile.pool.cache_clear()
        started = time.monotonic()
        assert not run_stoppable(compile_six_files, log.exists)
        assert time.monotonic() - started < 10
        count = len(log.read_text().splitlines())
        time.sleep(0.5)
        assert len(log.read_text().splitlines()) == count < 6
        assert inductor.AsyncCompile.submit(lambda: 1).result() == 1
        inductor.AsyncCompile.pool().shutdown()
        inductor.AsyncCompile.pool.cache_clear()


@pytest.mark.parametrize("stops", [False, True])
def test_programs_that_are_not_compilers_are_left_alone(stops: bool) -> None:
    """For example a program that another thread starts while the update is compiled."""
    others: list[subprocess.Popen[bytes]] = []
    running = threading.Event()

    def compile_for_a_moment() -> None:
        others.append(subprocess.Popen(["sleep", "30"]))
        running.set()
        until = time.monotonic() + (60 if stops else 0.2)
        while time.monotonic() < until:
            time.sleep(0.01)

    completed = run_stoppable(compile_for_a_moment, lambda: stops and running.is_set())
    assert completed is not stops
    (other,) = others
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.3)
    finally:
        other.kill()
        other.wait()


def test_only_the_output_of_ended_compilers_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may be writing a library to the same cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\necho part > "$2"\nsleep 60\n')
    compiler.chmod(0o755)
    of_another_process = tmp_path / "other.so"

    def link() -> None:
        of_another_process.write_bytes(b"")
        commands = [[str(compiler), "-o", name] for name in ("part.so", "/dev/null")]
        for program in [subprocess.Popen(command, cwd=tmp_path) for command in commands]:
            program.wait()
        while True:
            time.sleep(0.01)

    assert not run_stoppable(link, (tmp_path / "part.so").exists)
    assert {path.name for path in tmp_path.iterdir()} == {"g++", "other.so"}
    assert Path("/dev/null").exists()


def test_a_stopped_trial_of_the_compiler_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps the answers of such trials, and one that was ended looks like "no"."""
    probes = pytest.importorskip("torch._inductor.cpu_vec_isa")
    answers: list[bool] = []

    @functools.cache
    def works() -> bool:
        answers.append(False)
        return False

    monkeypatch.setattr(probes, "rl_training_probe", works, raising=False)
    works()
    running = threading.Event()

    def probe_for_a_minute() -> None:
        running.set()
        while True:
            time.sleep(0.01)

    assert not run_stoppable(probe_for_a_minute, running.is_set)
    works()
    assert len(answers) == 2


def test_a_second_interrupt_ends_the_compiler_too() -> None:
    running = threading.Event()

    def compile_for_a_minute() -> None:
        running.set()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            time.sleep(0.01)

    def stopping() -> bool:
        if running.is_set():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        run_stoppable(compile_for_a_minute, stopping)
    assert "compiler" not in [thread.name for thread in threading.enumerate()]


def test_an_action_in_python_code_is_stopped_too(capfd: pytest.CaptureFixture[str]) -> None:
    running = threading.Event()

    def trace_for_a_minute() -> None:
        running.set()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            pass

    started = time.monotonic()
    assert not run_stoppable(trace_for_a_minute, running.is_set)
    assert time.monotonic() - started < 10
    assert capfd.readouterr() == ("", "")


class Compilation(Callback):
    """Records the steps at which programs are compiled, and may send a signal then."""

    def __init__(self, number: int | None = None) -> None:
        self.started: list[int] = []
        self.ended: list[int] = []
        self.number = number

    def on_compile_start(self, context: TrainingContext) -> None:
        self.started.append(context.global_step)
        if self.number is not None:
            self.timer = threading.Timer(1.0, os.kill, (os.getpid(), self.number))
            self.timer.start()

    def on_compile_end(self, context: TrainingContext) -> None:
        self.ended.append(context.global_step)
        self.close()

    def close(self) -> None:
        if self.number is not None:
            self.timer.cancel()


def test_an_eager_run_compiles_nothing(tmp_path: Path) -> None:
    compilation = Compilation()
    rl_training.train(tiny(tmp_path), callbacks=[compilation])
    assert compilation.started == compilation.ended == []


@pytest.mark.compiled
def test_compilation_that_is_interrupted_is_repeated_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    config = keywords(tiny(tmp_path, compile="on", algo_kwargs={"policy_delay": 2}))
    agent = SAC("Pendulum-v1", **config)
    first, second = Compilation(signal.SIGINT), Compilation()
    with pytest.raises(TrainingInterrupted):
        agent.learn(callbacks=[first])
    assert agent.result is not None
    assert (agent.result.metrics["global_step"], agent.result.metrics["gradient_steps"]) == (40, 0)
    resumed = agent.learn(callbacks=[second])
    assert first.started == second.started == second.ended == [40]
    assert first.ended == []
    uninterrupted = SAC("Pendulum-v1", **config).learn()
    assert hashes(resumed.checkpoint_path) == hashes(uninterrupted.checkpoint_path)
    assert metric_rows(resumed.run_dir) == metric_rows(uninterrupted.run_dir)


def compilers_of(group: int) -> list[str]:
    """Return the processes of a process group other than Python."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pgid=,stat=,comm="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [
        name
        for process_group, state, name in rows
        if int(process_group) == group and "python" not in name and not state.startswith("Z")
    ]


@pytest.mark.faults
@both_signals
def test_a_signal_during_compilation_saves_the_collected_steps(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As in a terminal, Ctrl-C reaches the compiler too. SIGTERM reaches only the command."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "rl_training"]
    settings = "compile=on", "run_name=run", "eval_interval=0", "algo_kwargs.learning_starts=60"
    changes = [part for each in settings for part in ("--set", each)]
    train = [*command, "train", "-c", "sac/pendulum", "--total-timesteps", "100", *changes]
    with subprocess.Popen(
        [*train, "--output-dir", str(tmp_path / "interrupted")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "compile" in line:  # before that, compilers are tried out
                break
        while not (found := compilers_of(process.pid)) and process.poll() is None:
            time.sleep(0.05)
        assert found, "the compiler runs"
        started = time.monotonic()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        took = time.monotonic() - started
    run = tmp_path / "interrupted" / "run"
    assert process.returncode == 130
    assert took < 10
    assert errors.splitlines() == [
        "stopping, with a checkpoint ...",
        f"stopped at step 60 with a checkpoint; continue with: rl-training resume {run}",
    ]
    assert compilers_of(process.pid) == []
    assert (run / "checkpoints" / "step_000000060").is_dir()

    for rest in (
        [*command, "resume", str(run)],
        [*train, "--output-dir", str(tmp_path / "uninterrupted")],
    ):
        subprocess.run(rest, env=environment, check=True, capture_output=True, timeout=300)
    last = "run/checkpoints/step_000000100"
    resumed, uninterrupted = tmp_path / "interrupted" / last, tmp_path / "uninterrupted" / last
    assert hashes(resumed) == hashes(uninterrupted)


def test_a_callback_that_stops_one_run_does_not_stop_the_runs_after_it(tmp_path: Path) -> None:
    """Its reason may be that of a signal."""
    runs = []
    for seed, step in ((0, 50), (1, 60)):
        config = tiny(tmp_path, seed=seed, run_name=f"run{seed}")
        result = rl_training.train(config, callbacks=[StopAt(step)])
        assert isinstance(result, TrainResult)
        runs.append(result.run_dir)

    class StopFirst(StopAt):
        def for_seed(self, seed: int) -> Callback:
            return self if seed == 0 else Callback()

    results = resume_together(runs, callbacks=[StopFirst(70, "interrupted")])
    assert [result.metrics["global_step"] for result in results] == [70, 120]


# At the exit of a command

SLOW_EXIT = """
import atexit, sys, time
from rl_training import __main__, cli

def close():
    print("closing", flush=True)
    time.sleep(float(sys.argv.pop()))

def run_command(command=cli.main):
    atexit.register(close)
    command()

cli.main = run_command
__main__.main()
"""


@contextlib.contextmanager
def slow_exit(seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Start a command whose exit handler takes some seconds, and wait until it runs."""
    command = [sys.executable, "-c", SLOW_EXIT, "--version", str(seconds)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert any("closing" in line for line in process.stdout)
        try:
            yield process
        finally:
            process.kill()


@both_signals
def test_a_signal_at_the_exit_of_a_command_keeps_its_exit_code(number: int) -> None:
    with slow_exit(1.0) as process:
        process.send_signal(number)
        assert process.communicate(timeout=30)[1] == ""
        assert process.returncode == 0


def test_a_second_signal_ends_a_command_that_hangs_at_its_exit() -> None:
    with slow_exit(600.0) as process:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == "interrupted\n"
        assert process.returncode == 130


def test_a_handler_that_is_not_of_python_does_not_break_a_command(
    rl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(signal, "getsignal", lambda _: None)  # as Python reports such a handler
    try:
        outcome = rl("--version")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert outcome.code == 0


# Real processes

RUN = "total_timesteps=100", "run_name=run", "compile=off", "algo_kwargs.learning_starts=20"
LONG_BLOCK = *RUN, "algo_kwargs.gradient_updates_per_step=20000", "eval_interval=0"
LONG_EVALUATION = *RUN, "eval_episodes=3000", "eval_interval=20"
PHASES = {
    "updates": LONG_BLOCK,
    "updates of three seeds": (*LONG_BLOCK, "seeds=[0,1,2]"),
    "updates of workers": (*LONG_BLOCK, "num_envs=2", "vectorization=async"),
    "evaluation": LONG_EVALUATION,
    "evaluation of three seeds": (*LONG_EVALUATION, "seeds=[0,1,2]"),
}

STEPS = {"updates": 21, "updates of three seeds": 21, "updates of workers": 22}
"""Steps of the phases in which updates are made"""


def start_command(
    folder: Path, *settings: str, options: Sequence[str] = ()
) -> subprocess.Popen[str]:
    changes = [part for each in settings for part in ("--set", each)]
    interpreter = [sys.executable, *options, "-m", "rl_training"]
    command = [*interpreter, "train", "-c", "sac/pendulum", *changes]
    return subprocess.Popen(
        [*command, "--output-dir", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(group: int) -> list[str]:
    """Return the processes of a process group that have not ended."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pgid=,stat=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [words for found, state, words in rows if int(found) == group and state[0] != "Z"]


@pytest.mark.faults
@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_a_process_ends_within_ten_seconds_of_a_signal(
    tmp_path: Path, phase: str, signals: int
) -> None:
    with start_command(tmp_path, *PHASES[phase]) as process:
        until = time.monotonic() + 60
        while not any(tmp_path.glob("*/checkpoints/step_000000000")):
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(2)  # 20 steps take much less
        began = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGINT)[:signals]:
            os.killpg(process.pid, number)
            time.sleep(0.0005)
        _, errors = process.communicate(timeout=60)
        took = time.monotonic() - began
    assert (process.returncode, "Traceback" in errors) == (130, False)
    assert took < 10
    assert processes_of(process.pid) == []
    runs = list_runs(tmp_path)
    assert len(runs) == (3 if "seeds" in phase else 1)
    for run in runs:
        assert (run.state, run.detail) == ("stopped", "can be resumed")
        assert str(run.path) in errors
        assert run.step == STEPS.get(phase, 20) or signals == 2
        assert not list(run.path.rglob(".tmp-*"))
        RunFolder(run.path).latest_checkpoint()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("imported", "number"),
    [
        ("typer", signal.SIGINT),
        ("numpy", signal.SIGTERM),
        ("torch._C", signal.SIGINT),
        ("torch.nn", signal.SIGTERM),
        ("rl_training.runtime.workflows", signal.SIGINT),
    ],
)
def test_a_signal_while_the_command_imports_modules_prints_one_line(
    tmp_path: Path, imported: str, number: signal.Signals
) -> None:
    with start_command(tmp_path, *RUN, options=("-X", "importtime")) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.split("|")[-1].strip() == imported:
                break
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, lines) == (130, ["interrupted"])
    assert list(tmp_path.iterdir()) == []
