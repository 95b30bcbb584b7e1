"""Contestants in processes of their own that take turns."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Contestant:
    """A script that trains, and pauses after each chunk of steps until it is told to go on."""

    name: str
    python: str
    script: Path
    task: dict[str, Any]


def run_contest(contestants: list[Contestant], chunks: int) -> dict[str, list[float]]:
    """Seconds per step of every chunk of every contestant, warm-up left out."""
    processes = {entry.name: _start(entry) for entry in contestants}
    try:
        # Two chunks of warm-up each: imports, random actions, first updates, compilation.
        for name, process in processes.items():
            print(f"warming up {name} ...", flush=True)
            _chunk(process)
            _chunk(process)
        times: dict[str, list[float]] = {name: [] for name in processes}
        for _ in range(chunks):
            for name, process in processes.items():
                times[name].append(_chunk(process))
        return times
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _start(entry: Contestant) -> subprocess.Popen[str]:
    threads = str(entry.task["threads"])
    return subprocess.Popen(
        [entry.python, str(entry.script), json.dumps(entry.task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tempfile.mkdtemp(),  # whatever a peer drops
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
    )


def _chunk(process: subprocess.Popen[str]) -> float:
    """Let it run one chunk; the seconds per step that it reports."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("seconds_per_step "):
            return float(line.split()[1])
    raise RuntimeError(f"a contestant ended early: {process.args}")
