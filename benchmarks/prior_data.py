"""Measure how many environment steps prior data saves: RLPD with 5,000 poor steps, and SAC.

    python benchmarks/prior_data.py [--figure -200] [--seeds 0 1 2] [--output FILE]

Both use their packaged Pendulum configs and are evaluated on 20 episodes every 250 steps until the
mean return reaches the figure. Prior data comes from the `random` recipe, or from a SAC policy with
noise whose training was stopped long before it could hold the pendulum.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from reporting import RESULTS, machine, print_table, write_results

import rl_training
from rl_training.config_files import load_config
from rl_training.datasets.opening import build_dataset
from rl_training.envs import environment_factory

PRIOR_STEPS = 5_000


def steps_to(figure: float, config: str, seed: int, folder: str, **changes: Any) -> float:
    """Environment steps until an evaluation reaches the figure; infinity if none does."""
    result = rl_training.train(
        load_config(
            config,
            seed=seed,
            eval_interval=250,
            eval_episodes=20,
            early_stopping={"target_value": figure, "patience": 1000},
            output_dir=folder,
            **changes,
        ),
        progress=False,
    )
    reached = result.stop_reason == "target_value"
    return result.metrics["global_step"] if reached else float("inf")


def prior_data(folder: str) -> dict[str, dict[str, Any]]:
    half = rl_training.train(
        load_config("sac/pendulum", total_timesteps=2_500, output_dir=folder), progress=False
    )
    half_trained = {"kind": "policy", "checkpoint": str(half.run_dir), "noise": 0.3}
    return {
        "random": {"kind": "random", "size": PRIOR_STEPS},
        "half-trained": {**half_trained, "size": PRIOR_STEPS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", type=float, default=-200.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS / "prior_data.json")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        factory = environment_factory("Pendulum-v1", {}, None)
        contests: dict[str, tuple[str, dict[str, Any]]] = {"sac": ("sac/pendulum", {})}
        for kind, section in prior_data(folder).items():
            returns = build_dataset(section, factory=factory).episode_returns.mean()
            name = f"rlpd, {kind} data of {returns:.0f} an episode"
            contests[name] = ("rlpd/pendulum", {"dataset": section})
        for name, (config, changes) in contests.items():
            steps = [
                steps_to(arguments.figure, config, seed, folder, **changes)
                for seed in arguments.seeds
            ]
            rows.append({"name": name, "steps": steps, "median": statistics.median(steps)})
            print(rows[-1], flush=True)
    print_table(
        f"Environment steps on Pendulum-v1 until {arguments.figure:g}",
        ["", *(f"seed {seed}" for seed in arguments.seeds), "median"],
        [[row["name"], *map(_show, [*row["steps"], row["median"]])] for row in rows],
    )
    about = machine(figure=arguments.figure, seeds=arguments.seeds)
    write_results(arguments.output, {"machine": about, "rows": rows})


def _show(steps: float) -> str:
    return f"{steps:,.0f}" if steps < float("inf") else "never"


if __name__ == "__main__":
    main()
