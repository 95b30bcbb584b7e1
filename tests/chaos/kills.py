"""R1: kill -9 at random instants. The run resumes, loses at most one interval, and ends equal."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .disk import Operation, watch
from .processes import Child, run_command, start, start_command, start_fresh_command
from .runner import Campaign, Figures, Trial, require
from .runs import (
    INTERVAL,
    OF_FIRST_SEED,
    Config,
    Counter,
    Reference,
    cache,
    digest,
    reference,
    require_clean,
    require_same,
    require_sound,
    run_folders,
    saved_position,
    small,
    train_and_count,
    without_pictures,
    write_config,
)

ASYNC = {"num_envs": 2, "vectorization": "async"}
PRETRAINED = {"offline_pretrain_updates": 100}
KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("online", "sac", {}),
    ("offline", "iql", {}),
    ("mixed", "rlpd", {"algo_kwargs": PRETRAINED}),
    ("async", "td3", ASYNC),
    ("seeds", "sac", {"seeds": [0, 1]}),
    ("discrete", "dqn", {"total_timesteps": 400, "algo_kwargs": {"prioritized": True}}),
    ("async-seeds", "sac", {"seeds": [3, 4], "total_timesteps": 160, **ASYNC}),
    ("mujoco", "td3", {"env_id": "Hopper-v5", "algo_kwargs": {"n_step": 3}}),
]
COMPILED = ("compiled", "sac", {"compile": "on", "total_timesteps": 160})
TRIALS, COMPILED_TRIALS = 200, 4
ATTEMPTS = 6
"""How often a run is trained that finishes before it can be killed"""


def kind_of(trial: Trial) -> tuple[str, str, dict[str, Any]]:
    first_compiled = TRIALS - COMPILED_TRIALS
    return COMPILED if trial.index >= first_compiled else KINDS[trial.index % len(KINDS)]


def config_of(trial: Trial) -> tuple[str, Config]:
    name, algo, changes = kind_of(trial)
    return name, small(algo, trial.folder / "runs", device=trial.device, **changes)


def run(trial: Trial) -> Figures:
    name, config = config_of(trial)
    expected = reference(trial, name, config)
    reached = _train_until_killed(trial, config, expected)
    folders = [folder for folder in run_folders(config) if folder.exists()]
    complete = len(folders) == len(run_folders(config))
    require(complete or reached == 0, f"reached step {reached} without a run folder")
    lost = max((reached - saved_position(folder) for folder in folders), default=reached)
    limit = INTERVAL + config.get("num_envs", 1)
    require(lost <= limit, f"lost {lost} steps; checkpoints are {INTERVAL} steps apart")
    kills = 1 + _finish(trial, config, folders)
    for folder, wanted in zip(run_folders(config), expected.digests, strict=True):
        require_sound(folder)
        if folder in folders or not folders:
            require_same(digest(folder), wanted)
        elif trial.device == "cpu":  # on a GPU, the seeds that train together share a program
            require_same(digest(folder), wanted, ignoring=OF_FIRST_SEED)
    return {"lost_steps": float(lost), "kills": float(kills)}


def _train_until_killed(trial: Trial, config: Config, expected: Reference) -> int:
    """Train and kill; return the step that was reached.

    A run that finished before it could be killed is trained again and killed earlier.
    """
    generator, latest = trial.random(), 1.0
    for number in range(ATTEMPTS):
        reached = Counter(trial.folder / f"reached-{number}")
        moment = latest * generator.random()
        child = _start(trial, config, reached, 1 + int(moment * expected.operations))
        if not _is_targeted(trial):
            _kill(child, child.began + moment * expected.seconds)
        child.wait()
        if child.code == -signal.SIGKILL:
            return reached.value
        require_clean(child, 0)
        shutil.rmtree(config["output_dir"])
        latest *= 0.7
    raise AssertionError(f"finished {ATTEMPTS} times before it was killed")


def _start(trial: Trial, config: Config, reached: Counter, operation: int) -> Child:
    """Train in a process; targeted trials kill it just before this file operation."""
    log = trial.folder / "output.txt"
    if config["compile"] == "on":
        source, options = write_config(config, trial.folder / "config.yaml"), cache(trial)
        return start_fresh_command(
            "train", "--config", source, log=log, reached=reached.path, **options
        )

    def train() -> None:
        without_pictures()
        if _is_targeted(trial):
            _die_at(operation, config)
        train_and_count(config, reached)

    return start(train, log)


def _is_targeted(trial: Trial) -> bool:
    """About half of the trials die at a file operation, the others at an instant."""
    return kind_of(trial) != COMPILED and trial.index // len(KINDS) % 2 == 1


def _die_at(left: int, config: Config) -> None:
    """Kill this process just before one of its file operations."""

    def count(operation: Operation) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(Path(config["output_dir"]), count)


def _kill(child: Child, until: float) -> None:
    while time.monotonic() < until and not child.poll():
        time.sleep(0.0005)
    child.send(signal.SIGKILL)


def _finish(trial: Trial, config: Config, folders: list[Path]) -> int:
    """Continue what exists and train what does not; return the number of further kills."""
    log, generator, kills = trial.folder / "output.txt", trial.random(), 0
    command: Callable[..., Child] = functools.partial(start_command, prepare=without_pictures)
    if config["compile"] == "on":
        command = functools.partial(start_fresh_command, **cache(trial))
    elif folders and generator.random() < 0.3:
        again = start_command("resume", *folders, log=log, prepare=without_pictures)
        time.sleep(generator.uniform(0.0, 0.6))
        again.send(signal.SIGKILL)
        again.wait()
        kills = int(again.code == -signal.SIGKILL)
    if folders:
        resumed = command("resume", *folders, log=log)
        resumed.wait(200)
        require_clean(resumed, 0)
    for index, folder in enumerate(run_folders(config)):
        if folder not in folders:
            _train_again(trial, config, index if folders else None)
            if not folders:
                break
    return kills


def _train_again(trial: Trial, config: Config, index: int | None) -> None:
    """Start a run whose folder did not exist yet: all of the config's, or one seed of several."""
    if index is not None:
        config = {**config, "seeds": [config["seeds"][index]]}
    source = write_config(config, trial.folder / "again.yaml")
    log = trial.folder / "output.txt"
    if config["compile"] == "on":
        child = start_fresh_command("train", "--config", source, log=log, **cache(trial))
        child.wait(200)
    else:
        child = run_command("train", "--config", source, log=log, prepare=without_pictures)
    require_clean(child, 0)


CAMPAIGN = Campaign(
    name="R1",
    title="kill -9 at random instants",
    trials=TRIALS,
    run=run,
    describe=lambda trial: f"{kind_of(trial)[0]}, targeted {_is_targeted(trial)}",
    timeout=300.0,
    compiling=COMPILED_TRIALS,
    on_gpu=True,
    counted=("kills",),
)
