"""Small sweeps, and processes that run and kill them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

TINY = {
    "env_id": "Pendulum-v1",
    "total_timesteps": 600,
    "eval_interval": 200,
    "eval_episodes": 2,
    "checkpoint_interval": 100,
    "learning_starts": 100,
    "hidden_sizes": [16],
    "batch_size": 16,
}
GRID = {
    "base": "sac/pendulum",
    "set": TINY,
    "grid": {"learning_rate": [1e-4, 3e-4, 1e-3, 3e-3], "tau": [0.005, 0.01, 0.02]},
    "seeds": [0],
    "max_failures": 100,
}
RANDOM = {
    "base": "sac/pendulum",
    "set": TINY,
    "search": {"learning_rate": {"log": [1e-4, 3e-3]}, "tau": {"choice": [0.005, 0.01, 0.02]}},
    "sampler": "random",
    "trials": 12,
    "seeds": [0],
    "max_failures": 100,
}
LIMIT_SECONDS = 400


def sweep_file(folder: Path, values: dict[str, Any], **changes: Any) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({**values, **changes}))
    return path


def start_sweep(file: Path, output: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rl_training", "sweep", str(file), "--output-dir", str(output)]
    log = (file.parent / "sweep.log").open("ab")
    return subprocess.Popen(
        [*command, *options], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )


def run_sweep_command(file: Path, output: Path, *options: str) -> str:
    """Run a sweep to its end; return what it printed."""
    process = start_sweep(file, output, *options)
    code = process.wait(LIMIT_SECONDS)
    printed = (file.parent / "sweep.log").read_text()
    assert code == 0, printed
    return printed


def run_with_kills(
    start: Callable[[], subprocess.Popen[bytes]],
    disturb: Callable[[random.Random, subprocess.Popen[bytes]], None],
    *,
    seed: int,
    times: int,
) -> None:
    """Run a sweep that is disturbed at random moments and started again until it ends."""
    chance, process = random.Random(seed), start()
    deadline, left = time.monotonic() + LIMIT_SECONDS, times
    while True:
        assert time.monotonic() < deadline, "the sweep did not end"
        try:
            code = process.wait(chance.uniform(0.5, 4.0) if left else 1.0)
        except subprocess.TimeoutExpired:
            if left:
                left -= 1
                disturb(chance, process)
            continue
        if code == 0:
            return
        process = start()


def kill_something_local(chance: random.Random, process: subprocess.Popen[bytes]) -> None:
    """Kill a worker, or now and then the process that started it."""
    workers = [each.pid for each in children(process.pid, "sweep-worker")]
    kill(chance.choice([*workers, *workers, process.pid]))


def children(process: int, name: str) -> list[psutil.Process]:
    try:
        found = psutil.Process(process).children(recursive=True)
        return [each for each in found if any(name in word for word in each.cmdline())]
    except psutil.Error:
        return []


def kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def table(output: Path) -> Any:
    return json.loads((output / "results.json").read_text())


def final_bits(output: Path) -> dict[str, str]:
    """The hash of every learned tensor and metric of each run's last checkpoint."""
    hashes = {}
    for run in sorted((output / "trials").glob("*/*__seed*")):
        last = max((run / "checkpoints").glob("step_*"))
        for name in ("model.safetensors", "learner.safetensors"):
            digest = hashlib.sha256((last / name).read_bytes()).hexdigest()
            hashes[f"{run.parent.name}/{run.name}/{last.name}/{name}"] = digest
    return hashes


def evaluations(output: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and return of every evaluation of each run; a repeated row would be a repeated run."""
    found = {}
    for run in sorted((output / "trials").glob("*/*__seed*")):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        key = "eval/mean_reward"
        found[f"{run.parent.name}/{run.name}"] = [
            (row["step"], row[key]) for row in rows if key in row
        ]
    return found


def require_same(output: Path, reference: Path) -> None:
    """Every trial once, with the bits that it has alone, and no evaluation made twice."""
    assert table(output) == table(reference)
    assert final_bits(output) == final_bits(reference)
    assert evaluations(output) == evaluations(reference)


def kill_seeds() -> list[int]:
    """Seeds of the random kills; `make chaos-sweeps` tries ten."""
    return [int(seed) for seed in os.environ.get("RL_TRAINING_KILL_SEEDS", "0").split(",")]
