"""What is learned in each mode of execution: returns after equally many steps, over several seeds.

    python benchmarks/modes.py [--env HalfCheetah-v5] [--steps 40000] [--seeds 0 1 2 3]
                               [--mode NAME ...] [--jobs N] [--output FILE]

Modes differ in nothing but how updates are executed, so each must learn as well as the first, which
is float32 without a compiler. On a CPU every seed is a process of its own with one thread, `--jobs`
at a time; on a GPU the seeds of a mode are one population.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from processes import json_lines
from reporting import RESULTS, machine, print_table, write_results

EPISODES = 20
CPU = {"device": "cpu", "num_threads": 1}
MODES: dict[str, dict[str, Any]] = {
    "CPU, eager, float32": {**CPU, "compile": "off", "float32_precision": "highest"},
    "CPU, eager, bfloat16 products": {**CPU, "compile": "off", "float32_precision": "medium"},
    "CPU, compiled, float32": {**CPU, "compile": "on", "float32_precision": "highest"},
    "CPU, compiled, bfloat16 products": {**CPU, "compile": "on", "float32_precision": "medium"},
    "GPU, graphs, float32": {"device": "cuda", "compile": "on", "float32_precision": "highest"},
    "GPU, graphs, TF32": {"device": "cuda", "compile": "on", "float32_precision": "high"},
}


def returns(task: dict[str, Any]) -> list[float]:
    """The last mean return of each of the task's seeds, trained in a process of its own."""
    [found] = json_lines(sys.executable, "ours_learn.py", [json.dumps(task)])
    its: list[float] = found["returns"]
    return its


def tasks_of(mode: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    task = {
        "config": arguments.config,
        "env_id": arguments.env,
        "total_timesteps": arguments.steps,
        "eval_interval": arguments.steps,
        "eval_episodes": EPISODES,
        "checkpoint_interval": arguments.steps,
        **MODES[mode],
    }
    if task["device"] == "cuda":
        return [{**task, "seeds": arguments.seeds}]
    return [{**task, "seeds": [seed]} for seed in arguments.seeds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="sac/mujoco")
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--mode", action="append", choices=list(MODES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=RESULTS / "modes.json")
    arguments = parser.parse_args()

    described = machine()
    modes = arguments.mode or [
        mode for mode, task in MODES.items() if task["device"] == "cpu" or "gpu" in described
    ]
    tasks = [(mode, task) for mode in modes for task in tasks_of(mode, arguments)]
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for (mode, _), its in zip(tasks, pool.map(returns, (t for _, t in tasks)), strict=True):
            print(f"{mode}: {', '.join(f'{value:.0f}' for value in its)}", flush=True)
            found[mode] += its
    title = f"{arguments.config}, {arguments.env}, {arguments.steps:,} steps, {EPISODES} episodes"
    rows = [
        [
            mode,
            f"{statistics.mean(its):.0f}",
            f"{statistics.stdev(its) if len(its) > 1 else 0.0:.0f}",
            f"{statistics.median(its):.0f}",
            str(len(its)),
        ]
        for mode, its in found.items()
    ]
    print_table(title, ["", "mean return", "deviation", "median", "seeds"], rows)
    write_results(
        arguments.output,
        {"machine": described, "title": title, "seeds": arguments.seeds, "returns": found},
    )


if __name__ == "__main__":
    main()
