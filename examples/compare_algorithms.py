"""Compare SAC, TD3 and TQC in two tasks, with several seeds each, and write a report.

    python examples/compare_algorithms.py --seeds 3 --out comparison

trains 18 runs and writes comparison/report.html. That takes about twenty minutes on one core of a
current CPU; --steps makes it shorter or longer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rl_training
from rl_training.config_files import load_config

ALGORITHMS = ("sac", "td3", "tqc")
STEPS = {"Pendulum-v1": 5_000, "InvertedDoublePendulum-v5": 8_000}
"""The tasks, and how long each is trained"""
EVALUATIONS = 20


def main() -> None:
    arguments = parse_arguments()
    for task, default_steps in STEPS.items():
        for algorithm in ALGORITHMS:
            steps = arguments.steps or default_steps
            config = load_config(
                f"{algorithm}/pendulum",
                env_id=task,
                total_timesteps=steps,
                eval_interval=max(1, steps // EVALUATIONS),
                seeds=list(range(arguments.seeds)),
                output_dir=str(arguments.out),
            )
            rl_training.train(config, progress=True)
    print(rl_training.compare(arguments.out).table())
    title = f"{', '.join(map(str.upper, ALGORITHMS))} on {' and '.join(STEPS)}"
    page = rl_training.write_report(arguments.out, arguments.out / "report.html", title=title)
    print(f"report: {page}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, help="steps of every run, instead of the task's own")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="folder to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
