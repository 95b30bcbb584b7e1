"""Measure updates on a GPU, compared with a hand-written JAX update, and complete loops.

    python benchmarks/gpu.py [--algo NAME ...] [--repeats 3] [--jax-python PYTHON] [--output FILE]

Updates: milliseconds for one update of several seeds together, for this package and, for SAC, for
`contestants/jax_sac.py`, each in a separate process. Loops: HalfCheetah-v5, repeated because the
environments run on the host and its load varies; and Stable-Baselines3 on the same GPU if it is
installed. Contestants that cannot run (no JAX, no Stable-Baselines3) are noted and left out. Use
`--device cpu` to test the benchmark without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from contest import Contestant, ContestantFailed, run_contest
from peers import CONTESTANTS, HOME
from processes import json_lines
from reporting import RESULTS, machine, print_table, warn_if_busy, write_results

FLOAT32, TF32 = "highest", "high"
OURS, YARDSTICK = "rl_training", "JAX yardstick"


@dataclass(frozen=True)
class Row:
    """The measurements of an algorithm. To add an algorithm, add a row."""

    algo: str
    settings: dict[str, Any] = field(default_factory=dict)
    """`algo_kwargs` that differ from the defaults"""
    update_seeds: tuple[int, ...] = (1, 8)
    precisions: tuple[str, ...] = (FLOAT32,)
    """`highest` is the default, `high` allows TF32"""
    loop_seeds: tuple[int, ...] = ()
    loop_steps: int = 10_000
    """Steps of each seed"""
    yardstick: bool = False
    """Whether to compare with `jax_sac.py`"""


ROWS = [
    Row(
        "sac",
        update_seeds=(1, 8, 32),
        precisions=(FLOAT32, TF32),
        loop_seeds=(1, 8),
        yardstick=True,
    ),
    Row("td3", loop_seeds=(1,)),
    Row("tqc", {"hidden_sizes": [256, 256], "num_critics": 2}),
    # The paper's ten critics and twenty updates per step.
    Row("redq", update_seeds=(1,), loop_seeds=(1,), loop_steps=4_000),
    # The same, with half of each minibatch from recorded rows.
    Row("rlpd", update_seeds=(1,), loop_seeds=(1,), loop_steps=4_000),
    # Offline: data on the device, and each step is an update.
    Row("td3_bc", update_seeds=(), loop_seeds=(1, 8), loop_steps=20_000),
    Row("iql", update_seeds=(), loop_seeds=(1,), loop_steps=20_000),
    Row("awac", update_seeds=(), loop_seeds=(1,), loop_steps=20_000),
    Row("cql", update_seeds=(), loop_seeds=(1,), loop_steps=8_000),
]


def measure_updates(
    row: Row, arguments: argparse.Namespace, notes: list[str]
) -> list[dict[str, Any]]:
    """One entry per contestant, precision and number of seeds."""
    if not row.update_seeds:
        return []
    what = ["--seeds", *map(str, row.update_seeds), "--precision", *row.precisions]
    own = ["--algo", row.algo, "--settings", json.dumps(row.settings), "--device", arguments.device]
    entries = _lines(OURS, sys.executable, "ours_update.py", [*what, *own], notes)
    if not row.yardstick:
        return entries
    python = arguments.jax_python
    if not _has_module(python, "jax"):
        notes.append(f"{YARDSTICK} left out: no jax for {python}")
        return entries
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if arguments.device == "cpu":
        variables["JAX_PLATFORMS"] = "cpu"
    calls = ["--calls", str(arguments.calls)]
    return entries + _lines(YARDSTICK, python, "jax_sac.py", [*what, *calls], notes, variables)


def measure_loops(
    row: Row, arguments: argparse.Namespace, notes: list[str]
) -> list[dict[str, Any]]:
    """Steps per second of all seeds together."""
    if not row.loop_seeds:
        return []
    what = ["--device", arguments.device, "--steps", str(row.loop_steps)]
    what += ["--algo", row.algo, "--settings", json.dumps(row.settings)]
    what += ["--warm", str(min(3_000, row.loop_steps // 2))]
    what += ["--seeds", *map(str, row.loop_seeds * arguments.repeats)]
    what += ["--precision", *row.precisions]
    entries = _lines(OURS, sys.executable, "ours_loop.py", what, notes)
    if row.algo != "sac":
        return entries
    python = python_with_sb3()
    if python is None:
        notes.append("Stable-Baselines3 left out: not installed")
        return entries
    return entries + _sb3_loop(python, arguments.device, notes)


def _lines(
    name: str,
    python: str,
    script: str,
    what: list[str],
    notes: list[str],
    variables: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The measurements of a contestant; adds a note and returns nothing if it failed."""
    print(f"measuring {name}: {script} ...", flush=True)
    try:
        found = json_lines(python, script, what, variables)
    except ContestantFailed as error:
        notes.append(f"{name}, {script}: {error}")
        return []
    return [{"contestant": name, **entry} for entry in found]


def _sb3_loop(python: str, device: str, notes: list[str]) -> list[dict[str, Any]]:
    task = {
        "module": "stable_baselines3",
        "algo": "SAC",
        "environment": "HalfCheetah-v5",
        "device": device,
        "steps": 300,
        "threads": torch.get_num_threads(),
        "learning_starts": 100,
        "batch_size": 256,
        "hidden_sizes": [256, 256],
    }
    contest = run_contest([Contestant("sb3", python, CONTESTANTS / "sb3.py", task)], chunks=3)
    notes += [f"{name}: {reason}" for name, reason in contest.failed.items()]
    return [
        {
            "contestant": name,
            "algo": "sac",
            "seeds": 1,
            "device": device,
            "steps_per_second": 1 / min(times),
        }
        for name, times in contest.times.items()
    ]


def python_with_sb3() -> str | None:
    own = HOME / "sb3" / "bin" / "python"
    candidates = [sys.executable, *([str(own)] if own.exists() else [])]
    return next((path for path in candidates if _has_module(path, "stable_baselines3")), None)


def _has_module(python: str, module: str) -> bool:
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is None)"
    return subprocess.run([python, "-c", probe], check=False).returncode == 0


def show_updates(row: Row, entries: list[dict[str, Any]]) -> None:
    """Print a row per contestant and precision, and a row of ratios where both were measured."""
    best = {
        (entry["contestant"], entry["precision"], entry["seeds"]): entry["best_ms"]
        for entry in entries
    }
    seeds, rows = row.update_seeds, []
    for precision in row.precisions:
        for name in (OURS, YARDSTICK) if row.yardstick else (OURS,):
            times = [best.get((name, precision, number)) for number in seeds]
            rows.append([f"{name}, {precision}", *(f"{t:.3f}" if t else "-" for t in times)])
        if row.yardstick:
            pairs = [[best.get((n, precision, s)) for n in (OURS, YARDSTICK)] for s in seeds]
            ratios = [f"{theirs / own:.2f}x" if own and theirs else "-" for own, theirs in pairs]
            rows.append([f"{YARDSTICK} / {OURS}, {precision}", *ratios])
    header = ["ms per update of all seeds together", *(f"seeds: {number}" for number in seeds)]
    print_table(f"{row.algo} update, HalfCheetah's sizes, batch 256", header, rows)


def show_loops(entries: list[dict[str, Any]]) -> None:
    """Print a row per contestant and number of seeds: the median of its runs, and all runs."""
    found: dict[str, list[float]] = {}
    for entry in entries:
        precision = entry.get("precision", FLOAT32)
        name = f"{entry['algo']}, {entry['contestant']}, seeds: {entry['seeds']}, {precision}"
        found.setdefault(name, []).append(entry["steps_per_second"])
    rows = [
        [name, f"{median(rates):,.0f}", ", ".join(f"{rate:,.0f}" for rate in rates)]
        for name, rates in found.items()
    ]
    print_table("Complete loops, HalfCheetah's sizes", ["steps/s", "median", "runs"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algo", action="append", choices=[row.algo for row in ROWS])
    parser.add_argument("--jax-python", default=sys.executable, help="an interpreter that has jax")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--calls", type=int, default=10, help="chunks of 100 updates")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every loop")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device found; use --device cpu to test the benchmark")

    load, notes = warn_if_busy(), list[str]()
    updates, loops = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in ROWS:
        if arguments.algo and row.algo not in arguments.algo:
            continue
        if found := measure_updates(row, arguments, notes):
            show_updates(row, found)
            updates += found
        loops += measure_loops(row, arguments, notes)
    show_loops(loops)
    for note in notes:
        print(f"note: {note}")
    about = machine(device=arguments.device, load_before=load)
    results = {"machine": about, "updates": updates, "loops": loops, "notes": notes}
    write_results(arguments.output, results)


if __name__ == "__main__":
    main()
