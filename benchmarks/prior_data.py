"""Measure how many environment steps prior data saves: RLPD with 5,000 poor steps, and SAC.

    python benchmarks/prior_data.py [--figure -200] [--seeds 0 1 2] [--output FILE]
    python benchmarks/prior_data.py --curves [--seeds 0 1 2] [--output FILE]

Both use their packaged Pendulum configs and are evaluated on 20 episodes every 250 steps until the
mean return reaches the figure. Prior data comes from the `random` recipe, or from a SAC policy with
noise whose training was stopped long before it could hold the pendulum.

`--curves` measures instead what happens when a policy continues online. Cal-QL learns from 20,000
random steps. Then it continues with this data (`cal_ql`); WSRL (`redq` without data, after 300
steps of the frozen policy) and plain fine-tuning (`sac` without data) continue from its policy,
with its critics. RLPD learns from the data and the environment from the start.
"""

from __future__ import annotations

import argparse
import json
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
OFFLINE_STEPS, OFFLINE_UPDATES = 20_000, 4_000
ONLINE_STEPS, CURVE_INTERVAL = 1_000, 250
NETWORKS = {"hidden_sizes": [64, 64], "num_critics": 5, "critic_layer_norm": True}
CONSERVATIVE = {
    **NETWORKS,
    "batch_size": 128,
    "cql_alpha": 1.0,
    "num_cql_samples": 4,
    "subset_size": 2,
    "actor_learning_rate": 1e-3,
}
CONTINUATIONS: dict[str, dict[str, Any]] = {
    "cal_ql": {"algo": "cal_ql", "algo_kwargs": CONSERVATIVE},
    "wsrl": {
        "algo": "redq",
        "algo_kwargs": {
            **NETWORKS,
            "batch_size": 128,
            "learning_starts": 300,
            "gradient_updates_per_step": 4,
            "actor_value": "minimum",
        },
    },
    "plain fine-tuning": {
        "algo": "sac",
        "algo_kwargs": {**NETWORKS, "batch_size": 128, "learning_starts": 128},
    },
    "rlpd": {
        "algo": "rlpd",
        "algo_kwargs": {
            **NETWORKS,
            "batch_size": 128,
            "learning_starts": 200,
            "gradient_updates_per_step": 4,
        },
    },
}
"""How each method continues; settings that are not named are the algorithm's defaults"""


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


def curve_run(folder: str, seed: int, algo: str, settings: dict[str, Any], **changes: Any) -> Any:
    """Train one run of the curves on Pendulum."""
    config = {
        "algo": algo,
        "env_id": "Pendulum-v1",
        "seed": seed,
        "eval_interval": CURVE_INTERVAL,
        "eval_episodes": 10,
        "checkpoint_interval": 0,
        "output_dir": folder,
        "algo_kwargs": {"learning_rate": 1e-3, **settings},
        **changes,
    }
    return rl_training.train(config, progress=False)


def curve_of(run_dir: Path) -> dict[int, float]:
    """The mean return of each evaluation of a run, by step."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["eval/mean_reward"] for row in rows if "eval/mean_reward" in row}


def curves(seeds: list[int], folder: str) -> list[dict[str, Any]]:
    """The curves of all methods and seeds; step 0 of a continued policy is its offline phase."""
    dataset, rows = {"kind": "random", "size": OFFLINE_STEPS}, []
    for seed in seeds:
        offline = curve_run(
            folder,
            seed,
            "cal_ql",
            CONSERVATIVE,
            total_timesteps=OFFLINE_UPDATES,
            dataset=dataset,
            eval_interval=0,
        )
        start = offline.metrics["eval_return_mean"]
        for name, method in CONTINUATIONS.items():
            keeps_data = name in ("cal_ql", "rlpd")
            data = {"regime": "mixed", "dataset": dataset} if keeps_data else {}
            trained = {} if name == "rlpd" else {"init_from": str(offline.run_dir)}
            result = curve_run(
                folder,
                seed,
                method["algo"],
                method["algo_kwargs"],
                total_timesteps=ONLINE_STEPS,
                **data,
                **trained,
            )
            curve = {**({0: start} if trained else {}), **curve_of(result.run_dir)}
            rows.append({"name": name, "seed": seed, "curve": curve})
            print(rows[-1], flush=True)
    return rows


def measure_curves(seeds: list[int], output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = curves(seeds, folder)
    steps = range(0, ONLINE_STEPS + 1, CURVE_INTERVAL)
    table = []
    for name in CONTINUATIONS:
        own = [row["curve"] for row in rows if row["name"] == name]
        found = [[curve[step] for curve in own if step in curve] for step in steps]
        table.append([name, *(f"{statistics.mean(x):.0f}" if x else "" for x in found)])
    title = f"Mean return on Pendulum-v1 by environment step, {len(seeds)} seeds"
    print_table(title, ["", *map(str, steps)], table)
    write_results(output, {"machine": machine(seeds=seeds), "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", type=float, default=-200.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.curves:
        output = arguments.output or RESULTS / "offline_to_online.json"
        measure_curves(arguments.seeds, output)
        return
    arguments.output = arguments.output or RESULTS / "prior_data.json"
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
