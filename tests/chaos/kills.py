"""R1: kill -9 at random instants. The run resumes, loses at most one interval, and ends equal."""

from __future__ import annotations

import functools
import os
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


def kind_of(trial: Trial) -> tuple[str, str, dict[str, Any]]:
    first_compiled = TRIALS - COMPILED_TRIALS
    return COMPILED if trial.index >= first_compiled else KINDS[trial.index % len(KINDS)]


def config_of(trial: Trial) -> tuple[str, Config]:
    name, algo, changes = kind_of(trial)
    return name, small(algo, trial.folder / "runs", device=trial.device, **changes)


OF_FIRST_SEED = ("global_streams",)
"""Drawn from the first seed that trains: a seed whose folder did not exist yet trains alone"""


def run(trial: Trial) -> Figures:
    name, config = config_of(trial)
    expected = reference(trial, name, config)
    reached, interval = Counter(), INTERVAL
    child = _start(trial, config, reached)
    _kill(trial, child, expected, reached)
    folders = [folder for folder in run_folders(config) if folder.exists()]
    lost = max((reached.value - saved_position(folder) for folder in folders), default=0)
    limit = interval + config.get("num_envs", 1)
    require(lost <= limit, f"lost {lost} steps; checkpoints are {interval} steps apart")
    _finish(trial, config, folders)
    for folder, wanted in zip(run_folders(config), expected.digests, strict=True):
        require_sound(folder)
        if folder in folders or not folders:
            require_same(digest(folder), wanted)
        elif trial.device == "cpu":  # on a GPU, the seeds that train together share a program
            require_same(digest(folder), wanted, ignoring=OF_FIRST_SEED)
    return {"lost_steps": float(lost)}


def _start(trial: Trial, config: Config, reached: Counter) -> Child:
    log = trial.folder / "output.txt"
    if config["compile"] == "on":
        source = write_config(config, trial.folder / "config.yaml")
        return start_fresh_command("train", "--config", source, log=log, **cache(trial))

    def train() -> None:
        without_pictures()
        if _is_targeted(trial):
            _die_at(trial, config, reached)
        train_and_count(config, reached)

    return start(train, log)


def _is_targeted(trial: Trial) -> bool:
    """Every other trial dies at a file operation, the others at an instant."""
    return trial.index // len(KINDS) % 2 == 1


def _die_at(trial: Trial, config: Config, reached: Counter) -> None:
    """Kill this process just before one of its file operations."""
    operations = reference(trial, kind_of(trial)[0], config).operations
    left = trial.random().randrange(1, operations + 1)

    def count(operation: Operation) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(Path(config["output_dir"]), count)


def _kill(trial: Trial, child: Child, expected: Reference, reached: Counter) -> None:
    """Wait for the death of the process, or kill it at a random instant."""
    if not _is_targeted(trial):
        until = child.began + trial.random().uniform(0.0, expected.seconds)
        while time.monotonic() < until and not child.poll():
            time.sleep(0.0005)
        child.send(signal.SIGKILL)
    child.wait()


def _finish(trial: Trial, config: Config, folders: list[Path]) -> None:
    """Continue what exists and train what does not; sometimes after another kill."""
    log, generator = trial.folder / "output.txt", trial.random()
    command: Callable[..., Child] = functools.partial(start_command, prepare=without_pictures)
    if config["compile"] == "on":
        command = functools.partial(start_fresh_command, **cache(trial))
    elif folders and generator.random() < 0.3:
        again = start_command("resume", *folders, log=log, prepare=without_pictures)
        time.sleep(generator.uniform(0.0, 0.6))
        again.send(signal.SIGKILL)
        again.wait()
    if folders:
        resumed = command("resume", *folders, log=log)
        resumed.wait(200)
        require_clean(resumed, 0)
    for index, folder in enumerate(run_folders(config)):
        if folder not in folders:
            _train_again(trial, config, index if folders else None)
            if not folders:
                return


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
)
