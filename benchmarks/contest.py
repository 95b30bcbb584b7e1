"""Run contestants in separate processes that take turns."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class ContestantFailed(Exception):
    """A contestant exited early; the message is the last line of its error output."""


@dataclass(frozen=True)
class Contestant:
    """A script that trains, and waits after each chunk of steps for a signal to continue."""

    name: str
    python: str
    script: Path
    task: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the process"""


@dataclass(frozen=True)
class Contest:
    """The outcome of a contest."""

    times: dict[str, list[float]]
    """Seconds per step of every chunk, without warm-up"""
    failed: dict[str, str]
    """Contestants without times, and why they failed"""


def run_contest(contestants: Sequence[Contestant], chunks: int) -> Contest:
    """Run the contestants in turns. One that fails drops out; the others continue."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        running = [_Running(entry, Path(folder)) for entry in contestants]
        contest = Contest({}, {})
        try:
            # Two chunks of warm-up for each: imports, random actions, first updates, compilation.
            for process in running:
                print(f"warming up {process.name} ...", flush=True)
                process.run_chunks(2, contest, counted=False)
            for _ in range(chunks):
                for process in running:
                    process.run_chunks(1, contest)
        finally:
            for process in running:
                process.end()
    return contest


class _Running:
    """The process of a contestant."""

    def __init__(self, entry: Contestant, folder: Path) -> None:
        self.name = entry.name
        own = Path(tempfile.mkdtemp(dir=folder))  # for files that a peer leaves behind
        self._errors = own / "stderr.txt"
        threads = str(entry.task["threads"])
        limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [entry.python, str(entry.script), json.dumps(entry.task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=own,
                env={**os.environ, **limits, **entry.variables},
            )

    def run_chunks(self, number: int, contest: Contest, *, counted: bool = True) -> None:
        """Run this number of chunks and record their times, or that the contestant failed."""
        if self.name in contest.failed:
            return
        try:
            times = [self._chunk() for _ in range(number)]
        except ContestantFailed as error:
            print(f"{self.name} failed: {error}", flush=True)
            contest.failed[self.name] = str(error)
            contest.times.pop(self.name, None)
        else:
            contest.times.setdefault(self.name, []).extend(times if counted else [])

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _chunk(self) -> float:
        """Run one chunk and return the seconds per step that the contestant reports."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        for line in self._process.stdout:
            if line.startswith("seconds_per_step "):
                return float(line.split()[1])
        raise ContestantFailed(last_line(self._errors.read_text()))


def last_line(text: str) -> str:
    """The last line of the output of a process, usually its exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "exited without a message"
