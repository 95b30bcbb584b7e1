"""R9: SIGINT and SIGTERM in any phase of a run leave a resumable checkpoint within ten seconds.

Every run is resumed. Most go on to the end and must equal the uninterrupted run. Two phases take
minutes even then: the resumed run must make progress and is interrupted again. Their slow versions,
in which only the first process is slowed down, are resumed to the end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gymnasium.envs.classic_control.pendulum import PendulumEnv

from rl_training.checkpoints.format import checkpoint_folders
from rl_training.evaluation.evaluator import Evaluator
from rl_training.execution.learner import Learner
from rl_training.types import ResumeLevel

from .disk import Operation, watch
from .processes import Child, descendants, start_command, start_fresh_command
from .runner import Campaign, Figures, Trial, require
from .runs import (
    Config,
    Counter,
    cache,
    count_steps_of_commands,
    digest,
    reference,
    require_clean,
    require_same,
    require_sound,
    run_folders,
    saved_state,
    small,
    stop_reason,
    without_pictures,
    write_config,
)

LIMIT = 10.0
"""Seconds after the first signal"""
AT_ONCE = 2.0
"""Seconds after the second signal"""
ASYNC = {"num_envs": 2, "vectorization": "async"}
LONG_BLOCK = {"train_frequency": 50, "gradient_updates_per_step": 20_000, "learning_starts": 50}
SLOW_BLOCK = {**LONG_BLOCK, "gradient_updates_per_step": 100}
SLOW_UPDATE, SLOW_STEP = 0.3, 0.02
"""Seconds by which an update, or a step of an environment in an evaluation, is slowed down"""
PHASES: dict[str, dict[str, Any]] = {
    "start": {},
    "training": {},
    "update block": {"total_timesteps": 400, "algo_kwargs": LONG_BLOCK},
    "slow update block": {"total_timesteps": 160, "algo_kwargs": SLOW_BLOCK},
    "saving": {},
    "evaluation": {"eval_episodes": 3000, "eval_interval": 50},
    "slow evaluation": {"eval_episodes": 10, "eval_interval": 50, "total_timesteps": 120},
    "last step": {},
    "worker processes": ASYNC,
    "hung worker": ASYNC,
    "seeds": {"seeds": [0, 1], "total_timesteps": 120},
    "offline": {"algo": "iql"},
    "last save": {},
}
COMPILED = {"compile": "on", "total_timesteps": 120}
COMPILING = 4
TRIALS = 8 * len(PHASES) + COMPILING
TOO_LONG_TO_FINISH = ("update block", "evaluation")
ALWAYS_INTERRUPTED = (
    *TOO_LONG_TO_FINISH,
    "slow update block",
    "slow evaluation",
    "hung worker",
    "compiling",
)
"""In the other phases, a run may finish before the signal comes"""


def phase_of(trial: Trial) -> str:
    if trial.index >= TRIALS - COMPILING:
        return "compiling"
    return list(PHASES)[trial.index % len(PHASES)]


def signals_of(trial: Trial) -> tuple[int, ...]:
    """One signal, or two."""
    generator = trial.random()
    kinds = (signal.SIGINT, signal.SIGTERM)
    count = 1 + (trial.index // len(PHASES)) % 2 if phase_of(trial) != "compiling" else 1
    return tuple(generator.choice(kinds) for _ in range(count))


def config_of(trial: Trial) -> Config:
    phase = phase_of(trial)
    changes = dict(COMPILED if phase == "compiling" else PHASES[phase])
    algo = changes.pop("algo", "sac")
    return small(algo, trial.folder / "runs", device=trial.device, **changes)


def run(trial: Trial) -> Figures:
    config, phase, reached = config_of(trial), phase_of(trial), Counter()
    finishes = phase not in TOO_LONG_TO_FINISH
    expected = reference(trial, phase.replace(" ", "-"), config) if finishes else None
    seconds = expected.seconds if expected else 0.0
    child = _start(trial, config, reached, expected.operations if expected else 0)
    _wait_for(trial, child, config, reached, seconds)
    figures = _interrupt(trial, child)
    folders = [folder for folder in run_folders(config) if folder.exists()]
    codes = [130] if folders else [130, -signal.SIGTERM, -signal.SIGINT]
    if phase in ALWAYS_INTERRUPTED or child.code != 0:
        require_clean(child, *codes)
    if expected is None:
        (folder,) = folders
        _require_progress(trial, folder)
        return figures
    levels = {folder: _saved_level(folder) for folder in folders}
    _resume(trial, child, folders)
    if len(folders) == len(expected.digests):
        for folder, wanted in zip(folders, expected.digests, strict=True):
            if levels[folder] == ResumeLevel.BIT_EXACT:
                require_same(digest(folder), wanted)
            else:
                require(phase == "hung worker", f"continues as {levels[folder]}")
            require(stop_reason(folder) == "total_timesteps", f"says {stop_reason(folder)}")
            require_sound(folder)
    return figures


def _saved_level(folder: Path) -> str:
    """Return how exactly a run continues; a hung worker can take its episode with it."""
    if not checkpoint_folders(folder / "checkpoints"):
        return ResumeLevel.BIT_EXACT.value  # it starts from the beginning
    return str(saved_state(folder)["resume_level"])


def _start(trial: Trial, config: Config, reached: Counter, operations: int) -> Child:
    source = write_config(config, trial.folder / "config.yaml")
    log = trial.folder / "output.txt"
    if phase_of(trial) == "compiling":
        empty = str(trial.folder / "compiled")
        return start_fresh_command(
            "train", "--config", source, log=log, TORCHINDUCTOR_CACHE_DIR=empty
        )

    def prepare() -> None:
        without_pictures()
        count_steps_of_commands(reached)
        if phase_of(trial) in ("saving", "last save"):
            _signal_at_an_operation(trial, config, operations)
        elif phase_of(trial) == "slow update block":
            _slow_updates()
        elif phase_of(trial) == "slow evaluation":
            _slow_steps(reached, config["eval_interval"])

    return start_command("train", "--config", source, log=log, prepare=prepare)


def _slow_updates() -> None:
    """Make every update of this process take longer."""
    real = Learner.update

    def update(*arguments: Any, stopping: Callable[[], bool] | None = None, **options: Any) -> int:
        def slow_stopping() -> bool:
            time.sleep(SLOW_UPDATE)
            return stopping is not None and stopping()

        return real(*arguments, stopping=slow_stopping, **options)

    Learner.update = update  # type: ignore[method-assign]


def _slow_steps(reached: Counter, since: int) -> None:
    """Make the steps of environments take longer once training has reached a step."""
    real = PendulumEnv.step

    def step(self: PendulumEnv, action: Any) -> Any:
        if reached.value >= since:
            time.sleep(SLOW_STEP)
        return real(self, action)

    PendulumEnv.step = step  # type: ignore[method-assign]


def _signal_at_an_operation(trial: Trial, config: Config, operations: int) -> None:
    """Send the first signal to this process just before one of its file operations."""
    last = phase_of(trial) == "last save"
    first = operations - 40 if last else operations // 8
    left = trial.random().randrange(first, operations)

    def count(operation: Operation) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signals_of(trial)[0])

    watch(Path(config["output_dir"]), count)


def _wait_for(trial: Trial, child: Child, config: Config, reached: Counter, seconds: float) -> None:
    """Wait for the instant of the first signal."""
    phase, generator = phase_of(trial), trial.random()
    if phase == "start":
        child.wait_until(lambda: "preparing" in child.output)
        time.sleep(generator.uniform(0.0, 0.3))
    elif phase.endswith("update block"):
        child.wait_until(lambda: reached.value >= 100)
        time.sleep(generator.uniform(0.0, 3.0))
    elif phase.endswith("evaluation"):
        child.wait_until(lambda: reached.value >= 50)
        time.sleep(generator.uniform(0.1, 3.0))
    elif phase == "hung worker":
        child.wait_until(lambda: reached.value >= generator.randrange(20, 100))
        os.kill(generator.choice(descendants(child.pid)).pid, signal.SIGSTOP)
        time.sleep(generator.uniform(0.0, 2.0))
    elif phase == "last step":
        last = config["total_timesteps"] - generator.randrange(2)
        child.wait_until(lambda: reached.value >= last)
        time.sleep(generator.uniform(0.0, 0.02))
    elif phase == "compiling":
        child.wait_until(lambda: "compil" in child.output, 100)
        time.sleep(generator.uniform(0.0, 6.0))
    elif phase in ("saving", "last save"):
        child.wait_until(lambda: "stopping" in child.output)
    else:
        time.sleep(generator.uniform(0.1, max(0.2, seconds)))


def _interrupt(trial: Trial, child: Child) -> Figures:
    """Send the signals of the trial and return the time that it took the process to exit."""
    first, *second = signals_of(trial)
    began = time.monotonic()
    if phase_of(trial) not in ("saving", "last save"):
        child.send(first)
    if not second:
        child.wait(LIMIT * 3)
        seconds = time.monotonic() - began
        require(seconds <= LIMIT, f"took {seconds:.1f} s to exit after a signal")
        return {"exit_seconds": seconds}
    time.sleep(trial.random().uniform(0.0, 0.5))
    child.send(second[0])
    seconds = child.wait(LIMIT * 3)
    require(seconds <= AT_ONCE, f"took {seconds:.1f} s to exit after the second signal")
    return {"second_exit_seconds": seconds}


def _resume(trial: Trial, child: Child, folders: list[Path]) -> None:
    """Resume to the end."""
    if not folders or (child.code == 0 and len(folders) > 1):
        return
    log = trial.folder / "output.txt"
    if phase_of(trial) == "compiling":
        resumed = start_fresh_command("resume", *folders, log=log, **cache(trial))
    else:
        resumed = start_command("resume", *folders, log=log, prepare=without_pictures)
    resumed.wait(150)
    require_clean(resumed, 0)


def _require_progress(trial: Trial, folder: Path) -> None:
    """Resume a run that takes minutes, and interrupt it again once it has gone on."""
    before, evaluations = saved_state(folder)["progress"], Counter()

    def prepare() -> None:
        without_pictures()
        _count_evaluations(evaluations)

    resumed = start_command("resume", folder, log=trial.folder / "output.txt", prepare=prepare)
    resumed.wait_until(lambda: "training in" in resumed.output)
    if phase_of(trial) == "evaluation":
        # The evaluation that was given up is repeated.
        resumed.wait_until(lambda: evaluations.value > 0)
    time.sleep(1.0)
    require(not resumed.poll(), f"cannot be resumed (exit code {resumed.code})")
    resumed.send(signal.SIGTERM)
    seconds = resumed.wait(LIMIT * 3)
    require(seconds <= LIMIT, f"took {seconds:.1f} s to exit after it was resumed")
    require_clean(resumed, 130)
    require_sound(folder)
    after = saved_state(folder)["progress"]
    if phase_of(trial) == "update block":
        made = after["gradient_steps"] - before["gradient_steps"]
        require(made > 0, "the resumed run made no update")
    else:
        require(after["evaluation_due"], "the evaluation that was given up is not due")


def _count_evaluations(count: Counter) -> None:
    """Count the evaluations that begin in this process."""
    real = Evaluator.evaluate

    def evaluate(*arguments: Any, **options: Any) -> Any:
        count.value += 1
        return real(*arguments, **options)

    Evaluator.evaluate = evaluate  # type: ignore[method-assign]


CAMPAIGN = Campaign(
    name="R9",
    title="SIGTERM and SIGINT in every phase",
    trials=TRIALS,
    run=run,
    describe=lambda trial: f"{phase_of(trial)}, {len(signals_of(trial))} signals",
    timeout=200.0,
    timed=True,
    compiling=COMPILING,
    on_gpu=True,
)
