"""Learning curves of other packages, in the same format: one process per seed, all at once."""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peers import CONTESTANTS, available_python
from reporting import write_json

from curves.data import check_data, data_file, parts_of
from curves.peer_tasks import SCRIPTS, check_peer, peer_task
from curves.processes import INTERRUPTED
from curves.run import (
    CURVE,
    Rounds,
    describe,
    score_scale,
    scores,
    show,
    stored_steps,
    work_folder,
)
from curves.settings import Variant, curve_path, variant_config
from curves.stored import difference, read_stored
from rl_training.config import TrainConfig
from rl_training.data.scores import ReferenceScale
from rl_training.envs.cores import available_cores
from rl_training.errors import UserError

Line = dict[str, Any]


class PeerRounds:
    """The evaluations of all seeds, in the rounds of a learning curve."""

    def __init__(self, seeds: int, scale: ReferenceScale | None) -> None:
        self._seeds, self._scale = seeds, scale
        self.rounds: dict[int, dict[str, Any]] = {}

    def add(self, index: int, line: Line) -> None:
        step = line["step"]
        found = self.rounds.setdefault(step, {"step": step, "returns": [None] * self._seeds})
        found["returns"][index] = line["return"]
        if self._scale is not None:
            found["scores"] = scores(found["returns"], self._scale)
        of_seeds = found.setdefault("seed_seconds", [None] * self._seeds)
        of_seeds[index] = line["seconds"]
        # The seeds run at the same time, so that the slowest one is waited for.
        found["wall_seconds"] = max(each for each in of_seeds if each is not None)
        found["steps_per_second"] = round(step * self._seeds / found["wall_seconds"], 1)

    def in_order(self) -> Rounds:
        return [self.rounds[step] for step in sorted(self.rounds)]


def learn_peer(variant: Variant, arguments: argparse.Namespace) -> Path:
    """Train the seeds with another package, and return the file with their curve.

    With `arguments.work`, each seed that was stopped continues after its last evaluation.
    """
    check_peer(arguments)
    config = variant_config(variant, arguments)
    assert config.seeds is not None
    path = curve_path(arguments.out, str(config.env_id), variant.name, arguments.first_seed)
    if arguments.data is not None:
        check_data(arguments.data_folder, arguments.data_about, str(config.env_id), arguments.data)
    about, scale = describe(variant, arguments, config), score_scale(config, arguments)
    with work_folder(arguments.work, path.stem) as work:
        kept = read_stored(work / CURVE)
        if kept is not None and (reason := difference(kept, about)):
            print(f"stale: {work} is measured again from the beginning: {reason}", flush=True)
            shutil.rmtree(work)
        now = {**about, "execution": "processes", "evaluations": []}
        write_json(work / CURVE, now)
        further, rounds = stored_steps(path, about), PeerRounds(len(config.seeds), scale)
        for index, line in lines_of(peer_commands(config, arguments, work)):
            if "versions" in line:
                now["versions"] = line["versions"]
                continue
            rounds.add(index, line)
            now["evaluations"] = rounds.in_order()
            now["seconds"] = max(each["wall_seconds"] for each in now["evaluations"])
            write_json(work / CURVE, now)
            if line["step"] >= further:
                write_json(path, now)
            show(variant.name, rounds.rounds[line["step"]])
        shutil.rmtree(work, ignore_errors=True)
    return path


def peer_commands(
    config: TrainConfig, arguments: argparse.Namespace, work: Path
) -> list[list[str]]:
    """The process of each seed."""
    assert config.seeds is not None
    package, env = arguments.peer["package"], str(config.env_id)
    wants_gpu = config.device.startswith("cuda") or (
        config.device == "auto" and torch.cuda.is_available()
    )
    common = {
        **peer_task(config, arguments),
        "device": "cuda" if wants_gpu else "cpu",
        "threads": max(1, available_cores() // len(config.seeds)),
        "paths": [
            str(data_file(arguments.data_folder, env, kind))
            for kind in (parts_of(arguments.data) if arguments.data else ())
        ],
    }
    python, script = available_python(package), str(CONTESTANTS / SCRIPTS[package])
    tasks = [{**common, "seed": seed, "folder": str(work / f"seed{seed}")} for seed in config.seeds]
    return [[python, script, json.dumps(task)] for task in tasks]


def lines_of(commands: Sequence[list[str]]) -> Iterator[tuple[int, Line]]:
    """The JSON lines of all processes, with the index of the process, as they are printed."""
    lines: queue.SimpleQueue[tuple[int, Line | None]] = queue.SimpleQueue()
    with _started(commands) as processes:
        for index, process in enumerate(processes):
            threading.Thread(target=_read, args=(index, process, lines.put), daemon=True).start()
        running = len(processes)
        while running:
            index, line = lines.get()
            if line is None:
                running -= 1
            else:
                yield index, line
        codes = [process.wait() for process in processes]
    if any(codes):
        raise UserError(f"processes of seeds failed with the exit codes {codes}; see above")


@contextlib.contextmanager
def _started(commands: Sequence[list[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with this one; they save at each evaluation, so no time is a bad one."""
    processes: list[subprocess.Popen[str]] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(INTERRUPTED))
    try:
        for command in commands:
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        signal.signal(signal.SIGTERM, before)


def _read(
    index: int,
    process: subprocess.Popen[str],
    put: Callable[[tuple[int, Line | None]], None],
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            put((index, json.loads(line)))
    put((index, None))
