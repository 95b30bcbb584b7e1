"""R9: SIGINT and SIGTERM in any phase of a run leave a resumable checkpoint within ten seconds."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from rl_training.checkpoints.loading import find_checkpoint

from .disk import Operation, watch
from .processes import Child, start_command, start_fresh_command
from .runner import Campaign, Figures, Trial, require
from .runs import (
    Config,
    Counter,
    count_steps_of_commands,
    digest,
    reference,
    require_clean,
    require_same,
    require_sound,
    run_folders,
    small,
    stop_reason,
    without_pictures,
    write_config,
)

LIMIT = 10.0
"""Seconds after the first signal"""
AT_ONCE = 2.0
"""Seconds after the second signal"""
LONG_BLOCK = {"train_frequency": 50, "gradient_updates_per_step": 20_000, "learning_starts": 50}
PHASES: dict[str, dict[str, Any]] = {
    "start": {},
    "training": {},
    "update block": {"total_timesteps": 400, "algo_kwargs": LONG_BLOCK},
    "saving": {},
    "evaluation": {"eval_episodes": 3000, "eval_interval": 50},
    "last step": {},
    "worker processes": {"num_envs": 2, "vectorization": "async"},
    "seeds": {"seeds": [0, 1], "total_timesteps": 120},
    "offline": {"algo": "iql"},
    "last save": {},
}
TRIALS, COMPILING = 124, 4
TOO_LONG_TO_FINISH = ("update block", "evaluation", "compiling")


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
    changes = {"compile": "on"} if phase == "compiling" else dict(PHASES[phase])
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
    if expected is None or child.code != 0:
        require_clean(child, *codes)
    for folder in [] if finishes else folders:
        find_checkpoint(folder)
    if folders:
        _resume(trial, child, config, folders)
    if expected and len(folders) == len(expected.digests):
        for folder, wanted in zip(folders, expected.digests, strict=True):
            # The last evaluation is not part of the last checkpoint if a signal came in between.
            ignored = ("progress", "evaluation") if phase.startswith("last") else ()
            require_same(digest(folder), wanted, ignored)
            require(stop_reason(folder) == "total_timesteps", f"says {stop_reason(folder)}")
            require_sound(folder)
    return figures


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

    return start_command("train", "--config", source, log=log, prepare=prepare)


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
    elif phase == "update block":
        child.wait_until(lambda: reached.value >= 100)
        time.sleep(generator.uniform(0.0, 3.0))
    elif phase == "evaluation":
        child.wait_until(lambda: reached.value >= 50)
        time.sleep(generator.uniform(0.0, 3.0))
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


def _resume(trial: Trial, child: Child, config: Config, folders: list[Path]) -> None:
    """Resume to the end, or, if that takes minutes, far enough to see that it works."""
    if phase_of(trial) == "compiling" or (child.code == 0 and len(folders) > 1):
        return
    log = trial.folder / "output.txt"
    resumed = start_command("resume", *folders, log=log, prepare=without_pictures)
    if phase_of(trial) not in TOO_LONG_TO_FINISH:
        resumed.wait()
        require_clean(resumed, 0)
        return
    time.sleep(1.5)
    require(not resumed.poll() or resumed.code == 0, "cannot be resumed")
    resumed.send(signal.SIGKILL)
    resumed.wait()


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
