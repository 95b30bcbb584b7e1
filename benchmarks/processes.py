"""Run scripts of `contestants/` as processes: time them, or read the JSON lines they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contest import ContestantFailed, last_line
from peers import CONTESTANTS


@dataclass(frozen=True)
class Timed:
    """Seconds since the start of a training process."""

    first_update: float
    end: float


def timed_run(
    config: str | dict[str, Any],
    changes: dict[str, Any],
    *,
    cache: str,
    stop_at_first_update: bool = False,
) -> Timed:
    """Train in a separate process, with `cache` as the folder of compiled programs."""
    with tempfile.TemporaryDirectory() as folder:
        task = {
            "config": config,
            "changes": {**changes, "output_dir": folder},
            "stop_at_first_update": stop_at_first_update,
        }
        with tempfile.TemporaryFile("w+") as errors:
            start = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, str(CONTESTANTS / "timed_run.py"), json.dumps(task)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=folder,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
            )
            assert process.stdout is not None
            first_update = None
            try:
                for line in process.stdout:
                    if line.startswith("first_update"):
                        first_update = time.perf_counter() - start
                failed = process.wait() != 0
                end = time.perf_counter() - start
            finally:
                process.kill()  # training must not continue after an interruption
            if failed or first_update is None:
                errors.seek(0)
                raise ContestantFailed(last_line(errors.read()))
    return Timed(first_update, end)


def json_lines(
    python: str, script: str, arguments: Sequence[str], variables: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run a script of `contestants/` and return the JSON objects that it prints, one per line."""
    finished = subprocess.run(
        [python, str(CONTESTANTS / script), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(variables or {})},
    )
    if finished.returncode != 0:
        raise ContestantFailed(last_line(finished.stderr))
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
