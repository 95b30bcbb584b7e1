"""R10: the second process in a run folder is refused; a dead process does not keep its lock."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from helpers import StopAt

import rl_training

from .processes import Child, descendants, run_command, start, start_command
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
    without_pictures,
    write_config,
)

KINDS: dict[str, dict[str, Any]] = {
    "one process": {},
    "worker processes": {"num_envs": 2, "vectorization": "async"},
    "seeds": {"seeds": [0, 1], "total_timesteps": 160},
    "seeds in worker processes": {
        "seeds": [0, 1],
        "num_envs": 2,
        "vectorization": "async",
        "total_timesteps": 120,
    },
}
TRIALS = 40


def kind_of(trial: Trial) -> str:
    return list(KINDS)[trial.index % len(KINDS)]


def run(trial: Trial) -> Figures:
    config = small("sac", trial.folder / "runs", **KINDS[kind_of(trial)])
    expected = reference(trial, kind_of(trial).replace(" ", "-"), config)
    generator, log = trial.random(), trial.folder / "output.txt"
    first, folders = _start(trial, config), run_folders(config)
    time.sleep(generator.uniform(0.0, 0.15))
    _require_refused(first, generator.choice(folders), trial.folder / "second.txt")
    workers = _end(first, dies=trial.index // len(KINDS) % 4 != 2)
    began = time.monotonic()
    done = run_command("resume", *folders, log=log, prepare=without_pictures)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    require_clean(done, 0)
    for folder, wanted in zip(folders, expected.digests, strict=True):
        require_same(digest(folder), wanted)
        require_sound(folder)
    return {"workers_alive": float(len(workers)), "seconds_to_finish": time.monotonic() - began}


def _start(trial: Trial, config: Config) -> Child:
    """Train or resume in a process, wait until it has made steps, and halt it."""
    reached, log = Counter(), trial.folder / "output.txt"

    def prepare() -> None:
        without_pictures()
        count_steps_of_commands(reached)

    command: list[object] = [
        "train",
        "--config",
        write_config(config, trial.folder / "config.yaml"),
    ]
    if is_resumed(trial):
        # Its workers start when it already has the lock.
        _stop_early(config, log)
        command = ["resume", *run_folders(config)]
    child = start_command(*command, log=log, prepare=prepare)
    until = trial.random().randrange(20, 60)
    require(child.wait_until(lambda: reached.value >= until), "the first process ended early")
    child.send(signal.SIGSTOP)  # it holds the lock for as long as the second one needs
    return child


def is_resumed(trial: Trial) -> bool:
    return trial.index // len(KINDS) % 2 == 1


def _stop_early(config: Config, log: Path) -> None:
    def train() -> None:
        without_pictures()
        rl_training.train(config, callbacks=[StopAt(10)])

    child = start(train, log)
    child.wait()
    require_clean(child, 0)


def _require_refused(first: Child, folder: Path, log: Path) -> None:
    second = run_command("resume", folder, log=log, prepare=without_pictures)
    require_clean(second, 2)
    named = re.search(rf"\bprocess {first.pid}\b", second.output)
    require(named, f"the message does not name process {first.pid}: {second.output}")


def _end(first: Child, *, dies: bool) -> list[int]:
    """End the first process. If it dies, its workers survive it; return their numbers."""
    if not dies:
        first.send(signal.SIGTERM)
        first.send(signal.SIGCONT)
        first.wait()
        require_clean(first, 130)
        return []
    workers = [each.pid for each in descendants(first.pid)]
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # it cannot notice that its parent has died
    first.send(signal.SIGKILL)
    first.wait()
    return workers


CAMPAIGN = Campaign(
    name="R10",
    title="two processes on one run folder",
    trials=TRIALS,
    run=run,
    describe=lambda trial: f"{kind_of(trial)}, {'resumed' if is_resumed(trial) else 'new'}",
)
