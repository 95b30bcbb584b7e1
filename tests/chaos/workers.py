"""R8: environment workers die or hang. The run finishes, with the same bits where that is possible.

The last trials use up all restarts: the run then stops with a message and can be resumed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import rl_training
from rl_training.errors import EnvironmentRuntimeError

from . import environments
from .processes import Child, descendants, start
from .runner import Campaign, Figures, Trial, require
from .runs import (
    Config,
    Counter,
    digest,
    reference,
    require_same,
    require_sound,
    run_folders,
    saved_state,
    small,
    train_and_count,
    without_pictures,
)
from .runs import newest as newest_checkpoint

TRIALS, BEYOND_BUDGET = 58, 8
TIMEOUT = 1.0
"""Seconds after which a worker that does not answer is replaced"""
ATTEMPTS = 5
"""How often a run is trained that was not disturbed"""
REPLACED = "it was started again"
"""Part of the warning about each worker that was replaced"""
STOPPED = 3
"""Exit code of a run that ended with a message"""
ASYNC = {"vectorization": "async", "num_envs": 4, "env_timeout": TIMEOUT, "env_restarts": 10}
TASKS: dict[str, tuple[str, Callable[[], Any] | None, dict[str, Any]]] = {
    "pendulum": ("td3", environments.pendulum, {"algo_kwargs": {"n_step": 3}}),
    "cart pole": ("dqn", environments.cart_pole, {}),
    "hopper": ("sac", None, {"env_id": "Hopper-v5"}),
    "seeds": ("sac", environments.pendulum, {"seeds": [0, 1], "num_envs": 2}),
    "opaque": ("sac", environments.opaque, {}),
}
FAULTS = ("killed", "dies in step", "stopped", "dies in reset", "hangs in step", "killed in saves")
KILLED_FROM_OUTSIDE = ("killed", "stopped", "killed in saves")


def task_of(trial: Trial) -> str:
    return "pendulum" if is_beyond_budget(trial) else list(TASKS)[trial.index % len(TASKS)]


def is_beyond_budget(trial: Trial) -> bool:
    return trial.index >= TRIALS - BEYOND_BUDGET


def fault_of(trial: Trial) -> str:
    chosen = FAULTS[trial.index // len(TASKS) % len(FAULTS)]
    if task_of(trial) == "hopper" and chosen not in KILLED_FROM_OUTSIDE:
        return "killed"
    return chosen


def config_of(trial: Trial) -> Config:
    algo, make, changes = TASKS[task_of(trial)]
    config = small(algo, trial.folder / "runs", **{**ASYNC, "total_timesteps": 400, **changes})
    if make is not None:
        config["env_id"] = None
    if fault_of(trial) == "killed in saves":
        config |= {"checkpoint_interval": 4, "total_timesteps": 120}
    if is_beyond_budget(trial):
        config |= {"env_restarts": 2}
    return config


def run(trial: Trial) -> Figures:
    config, task = config_of(trial), task_of(trial)
    name = f"{task}-{config['checkpoint_interval']}-{config['env_restarts']}".replace(" ", "-")
    expected = reference(trial, name, config, train=lambda own: _train(own, task, Counter()))
    restarts, seconds = 0, 0.0
    if is_beyond_budget(trial):
        _check_budget(trial, config)
    else:
        restarts, seconds = _check_that_it_finishes(trial, config)
    for folder, wanted in zip(run_folders(config), expected.digests, strict=True):
        require_sound(folder)
        if task == "opaque":
            require_no_torn_rows(folder)
        else:
            require_same(digest(folder), wanted)
    return {"extra_seconds": max(0.0, seconds - expected.seconds), "restarts": float(restarts)}


def _train(config: Config, task: str, reached: Counter) -> None:
    make = TASKS[task][1]
    without_pictures()
    if make is None:
        train_and_count(config, reached)
    else:
        train_and_count(config, reached, env=make)


def _check_that_it_finishes(trial: Trial, config: Config) -> tuple[int, float]:
    """Train and disturb workers; return how many were started again, and the seconds it took.

    If nothing happened, because the run had ended before or was not yet training, it is repeated.
    """
    generator = trial.random()
    for _ in range(ATTEMPTS):
        child = _start(trial, config, generator)
        if fault_of(trial) in KILLED_FROM_OUTSIDE:
            _disturb(trial, child, generator)
        child.wait()
        seconds = time.monotonic() - child.began
        require(child.code == 0, f"did not finish (exit code {child.code})")
        if restarts := child.output.count(REPLACED):
            break
        shutil.rmtree(config["output_dir"])
        for name in ("events", "begun"):
            (trial.folder / name).unlink(missing_ok=True)
    require(restarts, f"no worker was replaced in {ATTEMPTS} runs")
    if task_of(trial) == "opaque" and "with new episodes" in child.output:
        for folder in run_folders(config):
            level = saved_state(folder)["resume_level"]
            require(level == "statistical", "does not say that episodes were lost")
    return restarts, seconds


def _start(trial: Trial, config: Config, generator: random.Random, times: int = 1) -> Child:
    """Train; some kinds of trial misbehave from inside the environment."""
    fault, reached = fault_of(trial), Counter()
    latest = 12 if fault == "dies in reset" else config["total_timesteps"] * 3 // 4
    moment = generator.randrange(2, latest)

    def train() -> None:
        if fault not in KILLED_FROM_OUTSIDE or is_beyond_budget(trial):
            what = "reset" if fault == "dies in reset" else "step"
            how = "hang" if fault == "hangs in step" else "die"
            environments.misbehave(what, moment, how, trial.folder, times=times)
        try:
            _train(config, task_of(trial), reached)
        except EnvironmentRuntimeError as error:
            print(f"error: {error}", *getattr(error, "__notes__", ()), sep="\n")
            raise SystemExit(STOPPED) from None

    return start(train, trial.folder / "output.txt")


def _disturb(trial: Trial, child: Child, generator: random.Random) -> None:
    """Send signals to random workers at random instants, also while they start."""
    number = signal.SIGSTOP if fault_of(trial) == "stopped" else signal.SIGKILL
    child.wait_until(lambda: descendants(child.pid))
    for _ in range(generator.choice([1, 2, 3])):
        time.sleep(generator.uniform(0.0, 0.3))
        _signal_one(child, generator, number)


def _signal_one(child: Child, generator: random.Random, number: int) -> None:
    workers = [] if child.poll() else descendants(child.pid)
    if workers:
        try:
            os.kill(generator.choice(workers).pid, number)
        except ProcessLookupError:
            return


def _check_budget(trial: Trial, config: Config) -> None:
    """More deaths than restarts: a message, a checkpoint, and the same end after a resume."""
    child = _start(trial, config, trial.random(), times=100_000)
    child.wait()
    require(child.code == STOPPED, f"exit code {child.code}, expected a clean stop")
    require("env_restarts" in child.output, "the message does not name the setting")
    (folder,) = run_folders(config)

    def resume() -> None:
        without_pictures()
        rl_training.resume_training(folder, env=TASKS[task_of(trial)][1])

    resumed = start(resume, trial.folder / "output.txt")
    resumed.wait()
    require(resumed.code == 0, "cannot be resumed")


def require_no_torn_rows(run: Path) -> None:
    """Check that each stored transition leads from a step of an episode to the next one of it."""
    folder = newest_checkpoint(run)
    rows = [
        row for path in sorted(folder.glob("replay-*")) for row in load_file(path)["rows"].tolist()
    ]
    require(rows, "no transition was stored")
    for episode, step, _, reward, _, next_episode, next_step in rows:
        follows = (next_episode, next_step, reward) == (episode, step + 1, step + 1)
        require(follows, f"a torn transition: {(episode, step)} to {(next_episode, next_step)}")


CAMPAIGN = Campaign(
    name="R8",
    title="environment workers die or hang",
    trials=TRIALS,
    run=run,
    describe=lambda trial: (
        f"{task_of(trial)}, {fault_of(trial)}"
        + (", beyond the budget" if is_beyond_budget(trial) else "")
    ),
    counted=("restarts",),
)
