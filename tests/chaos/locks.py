"""R10: the second process in a run folder is refused; a dead process does not keep its lock."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from .processes import Child, descendants, run_command, start_command
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
    workers = _end(first, dies=trial.index // len(KINDS) % 4 != 3)
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
    """Start training and wait until it has made steps."""
    reached = Counter()

    def prepare() -> None:
        without_pictures()
        count_steps_of_commands(reached)

    source = write_config(config, trial.folder / "config.yaml")
    log = trial.folder / "output.txt"
    child = start_command("train", "--config", source, log=log, prepare=prepare)
    until = trial.random().randrange(1, 60)
    require(child.wait_until(lambda: reached.value >= until), "the first process ended early")
    child.send(signal.SIGSTOP)  # it holds the lock for as long as the second one needs
    return child


def _require_refused(first: Child, folder: Path, log: Path) -> None:
    second = run_command("resume", folder, log=log, prepare=without_pictures)
    require_clean(second, 2)
    named = str(first.pid) in second.output
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
    describe=kind_of,
)
