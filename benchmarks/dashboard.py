"""How long the dashboard takes to read and send 200 runs of a million steps.

    python benchmarks/dashboard.py [--runs 200] [--rows 1000]

Writes made-up runs to a temporary folder. Then measures the first refresh until everything is read,
a refresh without a change, one after a new row in one run, and one after a new evaluation in every
tenth run. A page asks every two seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from made_up_runs import evaluation_row, write_run

from rl_training.report import live
from rl_training.report.live import LiveRuns
from rl_training.report.versions import Changes

STEPS = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rows", type=int, default=1_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), arguments.runs, arguments.rows)


def measure(root: Path, runs: int, rows: int) -> None:
    import torch  # noqa: F401 (not part of what is measured)

    folders = make_runs(root, runs, rows)
    size = sum((folder / "metrics.jsonl").stat().st_size for folder in folders)
    print(f"{runs} runs, {rows:,} rows each, {size / 2**20:.0f} MiB of metrics")
    live.LEAST_SECONDS = live.MOST_SECONDS = 0.0
    watched = LiveRuns(root)
    began, began_computing = time.perf_counter(), time.process_time()
    refreshes, version = 0, ""
    while True:
        changes = watched.changes(version)
        version, refreshes = changes.version, refreshes + 1
        if not is_reading(watched):
            break
    seconds, computing = time.perf_counter() - began, time.process_time() - began_computing
    print(f"first time, {refreshes} refreshes: {seconds:.1f} s ({computing:.1f} s of a core)")
    everything = watched.changes("")
    print(f"everything: {size_of(everything)}")
    version = timed("nothing changed", watched, version)
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": STEPS + 1, "time/wall_seconds": 2_001.0}) + "\n")
    version = timed("one row in one run", watched, version)
    for folder in folders[::10]:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(evaluation_row(STEPS + 10_000, 3_000.0))
    version = timed("an evaluation in every tenth run", watched, version)
    for folder in folders:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(evaluation_row(STEPS + 20_000, 3_000.0))
    timed("an evaluation in every run", watched, version)


def make_runs(root: Path, runs: int, rows: int) -> list[Path]:
    tasks = ("Hopper-v5", "Walker2d-v5", "HalfCheetah-v5", "Ant-v5", "Humanoid-v5")
    algorithms = ("sac", "td3", "tqc", "redq")
    made = []
    for number in range(runs):
        seed, place = divmod(number, len(tasks) * len(algorithms))
        task, algorithm = tasks[place % len(tasks)], algorithms[place // len(tasks)]
        made.append(
            write_run(
                root / f"{algorithm}__{task}__seed{seed}",
                algorithm=algorithm,
                environment=task,
                seed=seed,
                steps=STEPS,
                rows=rows,
                evaluations=100,
            )
        )
    return made


def is_reading(watched: LiveRuns) -> bool:
    return any(not run.tail.is_complete for run in watched._runs.values())


def timed(what: str, watched: LiveRuns, version: str) -> str:
    began, began_computing = time.perf_counter(), time.process_time()
    changes = watched.changes(version)
    seconds = time.perf_counter() - began
    computing = time.process_time() - began_computing
    sent = "nothing sent" if changes.version == version else size_of(changes)
    print(f"{what}: {1000 * seconds:.0f} ms ({1000 * computing:.0f} ms of a core), {sent}")
    return changes.version


def size_of(changes: Changes) -> str:
    return f"{len(changes.body) / 1000:.0f} kB ({len(changes.compressed) / 1000:.0f} kB compressed)"


if __name__ == "__main__":
    main()
