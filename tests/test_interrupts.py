"""Ctrl-C and SIGTERM save a checkpoint, also during compilation, and end the program."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from helpers import StopAt, hashes, keywords, metric_rows, tiny

import rl_training
from rl_training import SAC, TrainingInterrupted
from rl_training.callbacks import Callback, TrainingContext
from rl_training.execution.stoppable import run_stoppable
from rl_training.experiment import ExperimentManager
from rl_training.runtime.sac_trainer import train_sac
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


def test_a_second_interrupt_leaves_at_once_and_names_the_last_checkpoint(tmp_path: Path) -> None:
    twice = InterruptAt(50, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as stopped:
        rl_training.train(tiny(tmp_path, checkpoint_interval=30), callbacks=[twice])
    assert not isinstance(stopped.value, TrainingInterrupted)
    (note,) = stopped.value.__notes__
    assert note.startswith("at step 50; the last checkpoint is ")
    assert "step_000000030" in note


def test_an_interruption_can_be_sent_between_processes(tmp_path: Path) -> None:
    result = TrainResult(tmp_path, tmp_path, None, {"global_step": 3.0}, "interrupted")
    copied = pickle.loads(pickle.dumps(TrainingInterrupted([result])))
    assert copied.results == [result]
    assert "at step 3 " in str(copied)


# On the command line


def test_an_interrupt_before_the_run_exists_claims_no_checkpoint(
    rl: Command, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("rl_training.training.run.check_environment", interrupt)
    done = rl("train", "-c", "sac/pendulum", "--total-timesteps", "20000")
    assert (done.code, done.err) == (130, "interrupted\n")
    assert list(work.iterdir()) == []


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


def test_an_unfinished_library_in_the_cache_is_deleted_and_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    complete = Path(torch._C.__file__)  # some shared library
    content = complete.read_bytes()
    (tmp_path / "complete.so").write_bytes(content)
    written = threading.Event()

    def link() -> None:
        (tmp_path / "empty.so").write_bytes(b"")
        (tmp_path / "part.so").write_bytes(content[: len(content) // 2])
        (tmp_path / "new.so").write_bytes(content)
        written.set()
        while True:
            time.sleep(0.01)

    assert not run_stoppable(link, written.is_set)
    assert {path.name for path in tmp_path.glob("*.so")} == {"complete.so", "new.so"}


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
        "stopping at the next step, with a checkpoint ...",
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
