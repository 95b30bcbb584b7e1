"""Compare what this package and d3rlpy learn from the same recorded steps of a random policy.

    python benchmarks/offline_learning.py [--algo NAME ...] [--rows 100000] [--output FILE]

The rows come from the `random` recipe and are written once to an npz file that both read. Networks,
learning rate, batch size and number of updates of both are those of the packaged Pendulum configs,
and so is the main setting of each algorithm if both have it. Returns are means over 20 new
episodes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from contest import ContestantFailed
from peers import PeerMissing, peer_python
from processes import json_lines
from reporting import RESULTS, machine, print_table, write_results

import rl_training
from rl_training.config_files import load_config

EPISODES = 20


@dataclass(frozen=True)
class Row:
    """An algorithm in this package and in d3rlpy."""

    algo: str
    peer: str
    networks: tuple[str, ...]
    """Networks with an encoder option in d3rlpy; an empty name if there is only one"""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of d3rlpy besides learning rates"""


ROWS = [
    Row("bc", "BC", ("",)),
    Row(
        "td3_bc",
        "TD3PlusBC",
        ("actor", "critic"),
        {"alpha": 40.0, "scaled_observations": True},
    ),
    Row("iql", "IQL", ("actor", "critic", "value")),
    Row("awac", "AWAC", ("actor", "critic")),
    Row(
        "cql",
        "CQL",
        ("actor", "critic"),
        {"conservative_weight": 1.0, "alpha_learning_rate": 0.0},
    ),
]


def ours(row: Row, path: Path, seed: int) -> dict[str, float]:
    """Train the packaged config of this package on the rows of the file."""
    with tempfile.TemporaryDirectory() as folder:
        data = {"kind": "npz", "path": str(path)}
        config = load_config(
            f"{row.algo}/pendulum", dataset=data, seed=seed, output_dir=folder, eval_interval=0
        )
        result = rl_training.train(config, progress=False)
        found = rl_training.evaluate_checkpoint(result.run_dir, num_episodes=EPISODES, seed=1_000)
    return {"return_mean": found["eval_return_mean"], "return_std": found["eval_return_std"]}


def theirs(row: Row, path: Path, seed: int) -> dict[str, float]:
    """Train d3rlpy with the same sizes on the same rows."""
    config = load_config(f"{row.algo}/pendulum")
    chosen = config.algo_kwargs
    rate = chosen.learning_rate
    rates = {"learning_rate": rate}
    if "actor" in row.networks:
        actor = getattr(chosen, "actor_learning_rate", None) or rate
        rates = {"actor_learning_rate": actor, "critic_learning_rate": rate}
    task = {
        "algo": row.peer,
        "path": str(path),
        "environment": config.env_id,
        "threads": 1,
        "seed": seed,
        "batch_size": chosen.batch_size,
        "hidden_sizes": list(chosen.hidden_sizes),
        "networks": row.networks,
        "updates": config.total_timesteps,
        "episodes": EPISODES,
        "options": {**rates, **row.options},
    }
    [found] = json_lines(peer_python("d3rlpy"), "d3rlpy_learn.py", [json.dumps(task)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algo", action="append", choices=[row.algo for row in ROWS])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "offline_learning.json")
    arguments = parser.parse_args()
    entries = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.npz"
        record = ["-m", "rl_training", "dataset", "record", "--random", "--env", "Pendulum-v1"]
        options = ["--steps", str(arguments.rows), "--seed", "0", "--out", str(path)]
        subprocess.run([sys.executable, *record, *options], check=True)
        for row in ROWS:
            if arguments.algo and row.algo not in arguments.algo:
                continue
            entry: dict[str, Any] = {
                "algo": row.algo,
                "rl_training": ours(row, path, arguments.seed),
            }
            try:
                entry["d3rlpy"] = theirs(row, path, arguments.seed)
            except (ContestantFailed, PeerMissing) as error:
                entry["missing"] = str(error)
            print(entry, flush=True)
            entries.append(entry)
    print_table(
        f"Mean return on Pendulum-v1 from {arguments.rows:,} random steps",
        ["", "rl_training", "d3rlpy"],
        [
            [entry["algo"], *(_show(entry.get(name)) for name in ("rl_training", "d3rlpy"))]
            for entry in entries
        ],
    )
    about = machine(rows=arguments.rows, seed=arguments.seed, episodes=EPISODES)
    write_results(arguments.output, {"machine": about, "algorithms": entries})


def _show(found: dict[str, float] | None) -> str:
    return "missing" if found is None else f"{found['return_mean']:.0f} ± {found['return_std']:.0f}"


if __name__ == "__main__":
    main()
