"""Compare returns of the execution modes after equal numbers of steps, over several seeds.

    python benchmarks/modes.py [--env HalfCheetah-v5] [--steps 40000] [--seeds 0 1 2 3]
                               [--mode NAME ...] [--jobs N] [--output FILE]

Modes differ only in how updates are executed, so each must learn as well as the first one, which is
float32 without compilation. On a CPU every seed is a separate process with one thread, `--jobs` at
a time. On a GPU the seeds of a mode are one population.
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
    """Train the seeds of the task in a separate process and return the last mean return of each."""
    [found] = json_lines(sys.executable, "ours_learn.py", [json.dumps(task)])
    last: list[float] = found["returns"]
    return last


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
        outcomes = pool.map(returns, (task for _, task in tasks))
        for (mode, _), values in zip(tasks, outcomes, strict=True):
            print(f"{mode}: {', '.join(f'{value:.0f}' for value in values)}", flush=True)
            found[mode] += values
    title = f"{arguments.config}, {arguments.env}, {arguments.steps:,} steps, {EPISODES} episodes"
    rows = [
        [
            mode,
            f"{statistics.mean(values):.0f}",
            f"{statistics.stdev(values) if len(values) > 1 else 0.0:.0f}",
            f"{statistics.median(values):.0f}",
            str(len(values)),
        ]
        for mode, values in found.items()
    ]
    print_table(title, ["", "mean return", "deviation", "median", "seeds"], rows)
    write_results(
        arguments.output,
        {"machine": described, "title": title, "seeds": arguments.seeds, "returns": found},
    )


if __name__ == "__main__":
    main()
