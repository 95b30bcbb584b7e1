"""Compare SAC, TD3 and TQC in two tasks, with several seeds each, and write a report.

    python examples/compare_algorithms.py

trains 18 runs and writes comparison/report.html, in about twenty minutes on two cores. To see it
at work first, `--steps 1_000 --out short` takes two minutes. The tasks, the number of steps and the
number of seeds are options.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import rl_training
from rl_training.config_files import load_config
from rl_training.errors import TrainingInterrupted, UserError

ALGORITHMS = ("sac", "td3", "tqc")
STEPS = {"Pendulum-v1": 8_000, "InvertedDoublePendulum-v5": 20_000}
"""The tasks, and how long each is trained"""
OTHER_STEPS = 100_000
"""How long any other task is trained"""
EVALUATIONS = 20


def main() -> None:
    arguments = parse_arguments()
    if arguments.out.exists():
        raise UserError(f"{arguments.out} exists; delete it, or choose another folder with --out")
    for task in arguments.tasks:
        for algorithm in ALGORITHMS:
            steps = arguments.steps or STEPS.get(task, OTHER_STEPS)
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
    title = f"{', '.join(map(str.upper, ALGORITHMS))} on {' and '.join(arguments.tasks)}"
    page = rl_training.write_report(arguments.out, arguments.out / "report.html", title=title)
    print(f"report: {page}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(STEPS), help="Gymnasium ids")
    parser.add_argument("--steps", type=int, help="steps of every run, instead of the task's own")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="folder to write")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (UserError, TrainingInterrupted) as error:
        sys.exit(str(error))
