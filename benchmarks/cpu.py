"""Compare the speed of complete training loops on the CPU with other packages, in one run.

    python benchmarks/cpu.py [--row NAME ...] [--chunks 7] [--threads 2] [--output FILE]
                             [--cleanrl FOLDER]

Every contestant is a separate process that really trains. All are started, warmed up and then run
in turns, one chunk of steps each, so that other load on the machine affects all of them equally.
The time of a contestant is its best chunk, and the spread is over its chunks. Compare the ratios:
times depend on the machine. All contestants have the same number of threads. A peer that cannot be
installed or run is reported as missing. CleanRL is no package: its scripts run from a checkout of
vwxyzjn/cleanrl, whose folder is given by `--cleanrl`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from contest import Contest, Contestant, run_contest
from peers import CONTESTANTS, PeerMissing, peer_contestant
from reporting import RESULTS, machine, print_table, warn_if_busy, write_results


@dataclass(frozen=True)
class Row:
    """One comparison: the same task for this package and its peers.

    To add an algorithm, add a row.
    """

    name: str
    algo: str
    environment: str | None
    """None for training on recorded rows"""
    steps_per_chunk: int
    rate: str = "one update per step"
    ours: dict[str, Any] = field(default_factory=dict)
    """`algo_kwargs` of this package"""
    peers: dict[str, str] = field(default_factory=dict)
    """Peer -> the peer's class"""
    peer_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Peer -> further arguments: `options` of the class, `policy_kwargs` of its networks"""
    config: dict[str, Any] = field(default_factory=dict)
    """Further keys of this package's config"""
    num_envs: int = 1
    """Environments that are stepped together, as often as `steps_per_chunk` says"""
    is_large: bool = True
    """Whether layers are large enough for `medium` to make a difference"""
    rows: int | None = None
    """Number of recorded rows"""
    limit: dict[str, int] | None = None
    """Sizes for the time of the matrix products alone"""


def offline_row(
    algo: str,
    peer_class: str,
    networks: tuple[str, ...],
    *,
    steps: int = 200,
    ours: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Row:
    """Updates on the same recorded rows with equal networks, compared with d3rlpy."""
    return Row(
        name=f"{algo}-offline",
        algo=algo,
        environment=None,
        rate="updates alone",
        steps_per_chunk=steps,
        rows=100_000,
        ours={"batch_size": 256, "hidden_sizes": [256, 256], **(ours or {})},
        peers={"d3rlpy offline": peer_class},
        peer_options={"d3rlpy offline": {"networks": networks, "options": options or {}}},
    )


HALFCHEETAH = {"obs_dim": 17, "action_dim": 6, "hidden": 256, "batch": 256, "critics": 2}
LAST_EPSILON = {"exploration_initial_eps": 0.05, "exploration_final_eps": 0.05}

CLEANRL = "cleanrl"


def rollout_row(
    name: str,
    environment: str,
    *,
    num_envs: int,
    rollout_steps: int,
    batch_size: int,
    num_epochs: int,
    cleanrl: dict[str, Any],
    ours: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    normalize: bool = False,
) -> Row:
    """PPO with equal rollouts, minibatches, epochs and networks."""
    rollout = {"n_steps": rollout_steps, "n_epochs": num_epochs}
    own = {"rollout_steps": rollout_steps, "num_epochs": num_epochs, **(ours or {})}
    shared = {"batch_size": batch_size, "hidden_sizes": [64, 64]}
    return Row(
        name=name,
        algo="ppo",
        environment=environment,
        rate=f"environments: {num_envs}, epochs: {num_epochs}, minibatch: {batch_size}",
        steps_per_chunk=2 * rollout_steps,
        num_envs=num_envs,
        is_large=False,
        ours={**shared, **own},
        config=config or {},
        peers={"sb3": "PPO", CLEANRL: "PPO"},
        peer_options={
            "sb3": {"options": rollout, "normalize": normalize},
            CLEANRL: {
                "num_steps": rollout_steps,
                "num_minibatches": num_envs * rollout_steps // batch_size,
                "update_epochs": num_epochs,
                **cleanrl,
            },
        },
    )


# All normalize observations and rewards: CleanRL's script does, and Stable-Baselines3 does with
# the wrapper that RL Zoo uses for these tasks.
MUJOCO = {
    "batch_size": 64,
    "num_epochs": 10,
    "cleanrl": {"script": "ppo_continuous_action.py", "environment": "HalfCheetah-v4"},
    "ours": {"value_clip_range": 0.2, "normalize_rewards": True},
    "config": {"normalize_observations": True},
    "normalize": True,
}

ROWS = [
    Row(
        name="sac-halfcheetah",
        algo="sac",
        environment="HalfCheetah-v5",
        steps_per_chunk=300,
        ours={"learning_starts": 100, "batch_size": 256, "hidden_sizes": [256, 256]},
        peers={"sb3": "SAC", "sbx": "SAC", "d3rlpy": "SAC"},
        limit={**HALFCHEETAH, "actor_outputs": 12, "policy_critics": 2, "policy_delay": 1},
    ),
    Row(
        name="td3-halfcheetah",
        algo="td3",
        environment="HalfCheetah-v5",
        steps_per_chunk=300,
        ours={"learning_starts": 100, "batch_size": 256, "hidden_sizes": [256, 256]},
        peers={"sb3": "TD3", "sbx": "TD3"},
        limit={**HALFCHEETAH, "actor_outputs": 6, "policy_critics": 1, "policy_delay": 2},
    ),
    Row(
        name="tqc-halfcheetah",
        algo="tqc",
        environment="HalfCheetah-v5",
        steps_per_chunk=200,
        # The default sizes of the peers; the paper has five critics of three 512-unit layers.
        ours={
            "learning_starts": 100,
            "batch_size": 256,
            "hidden_sizes": [256, 256],
            "num_critics": 2,
        },
        peers={"sb3-contrib": "TQC", "sbx": "TQC"},
        limit={
            **HALFCHEETAH,
            "quantiles": 25,
            "actor_outputs": 12,
            "policy_critics": 2,
            "policy_delay": 1,
        },
    ),
    Row(
        name="dqn-cartpole",
        algo="dqn",
        environment="CartPole-v1",
        rate="one update in four steps",
        steps_per_chunk=4_000,
        # Stable-Baselines3's defaults, with the final fraction of random actions from the start.
        # Double Q-learning, which it lacks, stays on.
        ours={
            "learning_starts": 100,
            "batch_size": 32,
            "hidden_sizes": [64, 64],
            "train_frequency": 4,
            "buffer_capacity": 1_000_000,
            "target_update_interval": 2_500,
            "epsilon_start": 0.05,
        },
        peers={"sb3": "DQN", "sbx": "DQN"},
        peer_options={peer: {"options": LAST_EPSILON} for peer in ("sb3", "sbx")},
    ),
    rollout_row("ppo-halfcheetah", "HalfCheetah-v5", num_envs=1, rollout_steps=2_048, **MUJOCO),
    rollout_row("ppo-halfcheetah-8", "HalfCheetah-v5", num_envs=8, rollout_steps=256, **MUJOCO),
    rollout_row(
        "ppo-cartpole",
        "CartPole-v1",
        num_envs=8,
        rollout_steps=128,
        batch_size=256,
        num_epochs=4,
        cleanrl={"script": "ppo.py", "environment": "CartPole-v1"},
    ),
    offline_row("td3_bc", "TD3PlusBC", ("actor", "critic"), options={"scaled_observations": True}),
    offline_row("iql", "IQL", ("actor", "critic", "value")),
    offline_row("awac", "AWAC", ("actor", "critic")),
    # This package fixes the weight of the conservative term, so d3rlpy must not tune it either.
    offline_row("cql", "CQL", ("actor", "critic"), steps=50, options={"alpha_learning_rate": 0.0}),
]


def compete(row: Row, threads: int, chunks: int, cleanrl: Path | None = None) -> Contest:
    """Run all available contestants; the others are listed as failed."""
    entries, missing = own_contestants(row, threads), {}
    for peer, algorithm in row.peers.items():
        task = {**_task(row, threads), "algo": algorithm, **row.ours}
        if peer == CLEANRL:
            if cleanrl is None:
                missing[peer] = "needs a checkout: --cleanrl FOLDER"
                continue
            task["source"] = str(cleanrl.resolve())
        try:
            entries.append(peer_contestant(peer, {**task, **row.peer_options.get(peer, {})}))
        except PeerMissing as error:
            print(f"{peer} {error}", flush=True)
            missing[peer] = str(error)
    contest = run_contest(entries, chunks)
    return Contest(contest.times, {**contest.failed, **missing})


def own_contestants(row: Row, threads: int) -> list[Contestant]:
    """This package, eager and compiled, in float32 and `medium` precision, and the limits."""
    python, task = sys.executable, {**_task(row, threads), "algo": row.algo}
    precisions = [("", "auto"), (", medium", "medium")][: 1 + row.is_large]
    entries = [
        Contestant(
            f"rl_training, {name}{suffix}",
            python,
            CONTESTANTS / "ours.py",
            {
                **task,
                "compile": mode,
                "float32_precision": precision,
                "algo_kwargs": row.ours,
                "config": row.config,
            },
        )
        for suffix, precision in precisions
        for name, mode in (("eager", "off"), ("compiled", "on"))
    ]
    if row.limit is not None:
        script, more = CONTESTANTS / "limit.py", {**task, **row.limit}
        less = {name: value for name, value in more.items() if name != "environment"}
        entries.append(Contestant("float32 products alone", python, script, less))
        entries.append(Contestant("float32 products, Adam, env step", python, script, more))
    return entries


def _task(row: Row, threads: int) -> dict[str, Any]:
    task: dict[str, Any] = {"steps": row.steps_per_chunk, "threads": threads}
    if row.num_envs > 1:
        task["num_envs"] = row.num_envs
    if row.environment is not None:
        task["environment"] = row.environment
    if row.rows is not None:
        task["rows"] = row.rows
    return task


def summarize(row: Row, contest: Contest) -> dict[str, Any]:
    """Milliseconds per step of each contestant, and its speed relative to each peer."""
    times = {
        name: [seconds / row.num_envs for seconds in chunks]
        for name, chunks in contest.times.items()
    }
    best = {name: min(chunks) for name, chunks in times.items()}
    peers = [peer for peer in row.peers if peer in best]
    return {
        "row": row.name,
        "environment": row.environment,
        "rate": row.rate,
        "num_envs": row.num_envs,
        "contestants": {
            name: {
                "ms_per_step": 1e3 * best[name],
                "steps_per_second": 1 / best[name],
                "median_ms": 1e3 * statistics.median(chunks),
                "worst_ms": 1e3 * max(chunks),
                "ratio_to": {peer: best[peer] / best[name] for peer in peers},
            }
            for name, chunks in times.items()
        },
        "missing": contest.failed,
    }


def show(summary: dict[str, Any]) -> None:
    measured, missing = summary["contestants"], summary["missing"]
    peers = next((list(entry["ratio_to"]) for entry in measured.values()), [])
    columns = ["ms_per_step", "median_ms", "worst_ms"]
    digits = 3 if summary["num_envs"] > 1 else 2
    rows = [
        [
            name,
            *(f"{entry[column]:.{digits}f}" for column in columns),
            f"{entry['steps_per_second']:.0f}",
            *(f"{entry['ratio_to'][peer]:.2f}x" for peer in peers),
        ]
        for name, entry in measured.items()
    ]
    rows += [[name, "missing", *[""] * (len(peers) + 3)] for name in missing]
    header = ["", "ms/step", "median", "worst", "steps/s", *(f"vs {peer}" for peer in peers)]
    title = f"{summary['row']} ({summary['environment'] or 'recorded rows'}, {summary['rate']})"
    print_table(title, header, rows)
    for name, reason in missing.items():
        print(f"{name}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS])
    parser.add_argument("--chunks", type=int, default=7)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    parser.add_argument("--cleanrl", type=Path, metavar="FOLDER", help="a checkout of CleanRL")
    arguments = parser.parse_args()

    load = warn_if_busy()
    results = []
    for row in ROWS:
        if arguments.row and row.name not in arguments.row:
            continue
        contest = compete(row, arguments.threads, arguments.chunks, arguments.cleanrl)
        results.append(summarize(row, contest))
        show(results[-1])
    described = machine(threads=arguments.threads, load_before=load)
    write_results(arguments.output, {"machine": described, "rows": results})


if __name__ == "__main__":
    main()
