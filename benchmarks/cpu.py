"""Steps per second of whole training loops on the CPU, against peers, in one run.

    python benchmarks/cpu.py [--row NAME ...] [--chunks 7] [--threads 2] [--output FILE]

Every contestant is a process of its own that trains for real. They are all started, warmed up
and then run in turns, one chunk of steps each, so that whatever else the machine does strikes all
alike; a contestant's time is its best chunk, the spread is over its chunks. What counts are the
ratios: times belong to one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from contest import Contestant, run_contest
from peers import peer_python


@dataclass(frozen=True)
class Row:
    """One comparison: the same task for this package and for its peers.

    Later algorithms add a row of their own and nothing else.
    """

    name: str
    algo: str
    environment: str
    steps_per_chunk: int
    ours: dict[str, object] = field(default_factory=dict)
    """`algo_kwargs` of this package"""
    peers: dict[str, str] = field(default_factory=dict)
    """Peer environment -> the peer's class"""
    limit: dict[str, int] | None = None
    """Sizes for the time of the matrix products alone"""


ROWS = [
    Row(
        name="sac-halfcheetah",
        algo="sac",
        environment="HalfCheetah-v5",
        steps_per_chunk=300,
        ours={"learning_starts": 100, "batch_size": 256, "hidden_sizes": [256, 256]},
        peers={"sb3": "SAC"},
        limit={"obs_dim": 17, "action_dim": 6, "hidden": 256, "batch": 256, "critics": 2},
    ),
]


def contestants(row: Row, threads: int) -> list[Contestant]:
    """This package eager and compiled, the peers, and the products alone."""
    folder = Path(__file__).parent / "contestants"
    chunk = {"steps": row.steps_per_chunk, "threads": threads}
    entries = []
    for mode in ("off", "on"):
        task = {
            **chunk,
            "algo": row.algo,
            "environment": row.environment,
            "compile": mode,
            "algo_kwargs": row.ours,
        }
        name = "rl_training, compiled" if mode == "on" else "rl_training, eager"
        entries.append(Contestant(name, sys.executable, folder / "ours.py", task))
    for peer, algorithm in row.peers.items():
        task = {**chunk, "algo": algorithm, "environment": row.environment, **row.ours}
        entries.append(Contestant(peer, peer_python(peer), folder / f"{peer}.py", task))
    if row.limit is not None:
        name = "matrix products alone"
        entries.append(
            Contestant(name, sys.executable, folder / "limit.py", {**chunk, **row.limit})
        )
    return entries


def summarise(row: Row, times: dict[str, list[float]]) -> dict[str, object]:
    """Milliseconds per step of each contestant, and its speed relative to each peer."""
    best = {name: min(chunks) for name, chunks in times.items()}
    return {
        "row": row.name,
        "environment": row.environment,
        "contestants": {
            name: {
                "ms_per_step": 1e3 * best[name],
                "steps_per_second": 1 / best[name],
                "median_ms": 1e3 * statistics.median(chunks),
                "worst_ms": 1e3 * max(chunks),
                "ratio_to": {peer: best[peer] / best[name] for peer in row.peers},
            }
            for name, chunks in times.items()
        },
    }


def show(summary: dict[str, object], peers: list[str]) -> None:
    print(f"\n{summary['row']} ({summary['environment']}, one update per step)")
    header = "".join(f"{'vs ' + peer:>12}" for peer in peers)
    print(f"{'':<24}{'ms/step':>9}{'median':>9}{'worst':>9}{'steps/s':>9}{header}")
    for name, entry in summary["contestants"].items():  # type: ignore[attr-defined]
        ratios = "".join(f"{entry['ratio_to'][peer]:>11.2f}x" for peer in peers)
        print(
            f"{name:<24}{entry['ms_per_step']:>9.2f}{entry['median_ms']:>9.2f}"
            f"{entry['worst_ms']:>9.2f}{entry['steps_per_second']:>9.0f}{ratios}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS])
    parser.add_argument("--chunks", type=int, default=7)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cpu.json"))
    arguments = parser.parse_args()

    results = []
    for row in ROWS:
        if arguments.row and row.name not in arguments.row:
            continue
        times = run_contest(contestants(row, arguments.threads), arguments.chunks)
        results.append(summarise(row, times))
        show(results[-1], list(row.peers))
    machine = {"processor": processor(), "threads": arguments.threads, "python": sys.version}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"machine": machine, "rows": results}, indent=1) + "\n")
    print(f"\nwritten to {arguments.output} ({machine['processor']}, {arguments.threads} threads)")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


if __name__ == "__main__":
    main()
