"""Train an Atari game from pixels, and compare the speed with Stable-Baselines3's DQN.

    python benchmarks/atari.py [--env ALE/Pong-v5] [--steps 1000000] [--target 15]
        [--device cuda] [--folder .bench/atari] [--output FILE] [--only speed|learning]
        [--set KEY=VALUE ...] [--seeds 1 4]

Learning: the config `dqn/atari`, four seeds as one program, until every seed has the steps or the
mean score of an evaluation is at least the target. Called again after an interruption, it continues
the same job. The evaluations of every seed are the learning curve. Speed: steps per second of one
seed and of four, and of Stable-Baselines3 with the same game, wrappers and settings, if it is
installed; each in a process of its own, one after the other. What the host does in a round of all
environments is printed too: `acting` is the time until the actions are known, in which it may wait
for earlier updates, and `update` the time to launch updates. `--set` changes settings of the
config.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "contestants"))

import torch
from contest import ContestantFailed
from gpu import python_with_sb3
from ours_loop import StepsPerSecond
from peers import HOME
from processes import json_lines
from reporting import RESULTS, machine, print_table, warn_if_busy, write_results

import rl_training
from rl_training.callbacks import Stopwatch, TimeShare
from rl_training.checkpoints.run_folder import read_metrics
from rl_training.config_files import load_config
from rl_training.errors import TrainingInterrupted
from rl_training.runtime import workflows

CONFIG = "dqn/atari"
SCORE = "eval/mean_reward"
LEARNING_STARTS, WARM, STEPS = 2_000, 4_000, 12_000
"""Of the measurement of speed: first update, start of the clock, and end"""


def learn(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train to the end, or to the next interruption, and return the curves so far."""
    config = load_config(
        CONFIG,
        arguments.set,
        env_id=arguments.env,
        total_timesteps=arguments.steps,
        device=arguments.device,
        early_stopping={"target_value": arguments.target, "patience": 1_000},
    )
    seeds = config.seeds or [config.seed]
    try:
        job = workflows.run_or_resume(config, seeds, arguments.folder, progress=True)
        state = job.status.state
    except TrainingInterrupted:  # what was measured so far is kept
        state = "interrupted"
    curves = {
        path.parent.name: curve(path) for path in sorted(arguments.folder.rglob("metrics.jsonl"))
    }
    return {"state": state, "config": config.to_mapping(), "curves": curves}


def curve(metrics: Path) -> list[dict[str, float]]:
    """Return the step, score and wall time of every evaluation of a run."""
    return [
        {"step": row["step"], "score": row[SCORE], "seconds": row.get("time/wall_seconds")}
        for row in read_metrics(metrics, SCORE)
    ]


def own_speed(arguments: argparse.Namespace, seeds: int) -> dict[str, Any]:
    """Steps per second of all seeds together, with updates from the start of the clock."""
    with tempfile.TemporaryDirectory() as folder, host_seconds() as seconds:
        callback = RoundTimes(WARM * seeds, STEPS * seeds, seconds)
        config = load_config(
            CONFIG,
            [*arguments.set, f"algo_kwargs.learning_starts={LEARNING_STARTS}"],
            env_id=arguments.env,
            seeds=list(range(seeds)),
            total_timesteps=STEPS,
            device=arguments.device,
            eval_interval=0,
            eval_episodes=1,
            checkpoint_interval=0,
            output_dir=folder,
        )
        rl_training.train(config, callbacks=[callback], progress=False)
    rounds = (STEPS - WARM) / config.num_envs
    return {
        "contestant": "rl_training",
        "seeds": seeds,
        "steps_per_second": callback.rate,
        "milliseconds_per_round": {k: 1e3 * v / rounds for k, v in callback.between().items()},
    }


class RoundTimes(StepsPerSecond):
    """Also measures what the host did between the two step counts."""

    def __init__(self, first: int, last: int, seconds: Counter[str]) -> None:
        super().__init__(first, last, offline=False)
        self._seconds, self._seen = seconds, list[Counter[str]]()

    def _count(self, steps: int) -> None:
        marks = len(self._clock)
        super()._count(steps)
        if len(self._clock) > marks:
            self._seen.append(self._seconds.copy())

    def between(self) -> dict[str, float]:
        """Return the seconds by kind of work, and those of the rest."""
        first, last = self._seen
        start, end = self._clock.values()
        found = {kind: last[kind] - first[kind] for kind in last}
        return found | {"rest": end - start - sum(found.values())}


@contextlib.contextmanager
def host_seconds() -> Iterator[Counter[str]]:
    """Count what a stopwatch measures, by kind also where it adds several up for a GPU."""
    seconds: Counter[str] = Counter()
    add = Stopwatch.add

    def count(self: Stopwatch, share: TimeShare, value: float) -> None:
        seconds[share] += value
        add(self, share, value)

    Stopwatch.add = count  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Stopwatch.add = add  # type: ignore[method-assign]


def sb3_speed(arguments: argparse.Namespace, notes: list[str]) -> list[dict[str, Any]]:
    """The same for Stable-Baselines3, which trains one seed; a note if it cannot."""
    python = python_with_sb3()
    if python is None:
        notes.append("Stable-Baselines3 left out: not installed")
        return []
    try:
        found = json_lines(python, "sb3_atari.py", [json.dumps(sb3_task(arguments))])
    except ContestantFailed as error:
        notes.append(f"Stable-Baselines3: {error}")
        return []
    return [{"contestant": "stable-baselines3", **entry} for entry in found]


def sb3_task(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of the config under the names of Stable-Baselines3."""
    config = load_config(CONFIG, arguments.set)
    own: Any = config.algo_kwargs
    return {
        "env_id": arguments.env,
        "env_kwargs": config.env_kwargs,
        "num_envs": config.num_envs,
        "device": arguments.device,
        "warm": WARM,
        "steps": STEPS,
        "options": {
            "learning_rate": own.learning_rate,
            "buffer_size": own.buffer_capacity,
            "batch_size": own.batch_size,
            "gamma": own.gamma,
            "n_steps": own.n_step,
            # Steps are counted over all environments.
            "train_freq": max(own.train_frequency // config.num_envs, 1),
            "gradient_steps": max(config.num_envs // own.train_frequency, 1),
            "learning_starts": LEARNING_STARTS,
            "target_update_interval": own.target_update_interval * own.train_frequency,
            "optimize_memory_usage": False,  # does not go with n-step returns
        },
    }


def show(results: dict[str, Any]) -> None:
    """Print the last score of every seed, and the speeds."""
    curves = results.get("learning", {}).get("curves", {})
    rows = [
        [name, f"{points[-1]['step']:,.0f}", f"{points[-1]['score']:.1f}"]
        for name, points in curves.items()
        if points
    ]
    if rows:
        print_table(f"{results['environment']}, last evaluation", ["run", "step", "score"], rows)
    speeds = [
        [f"{entry['contestant']}, seeds: {entry['seeds']}", f"{entry['steps_per_second']:,.0f}"]
        for entry in results.get("speed", [])
    ]
    if speeds:
        print_table("Complete loops, all seeds together", ["contestant", "steps/s"], speeds)
    for entry in results.get("speed", []):
        if shares := entry.get("milliseconds_per_round"):
            title = f"Milliseconds per round, seeds: {entry['seeds']}"
            print_table(title, ["host", "ms"], [[k, f"{v:.3f}"] for k, v in shares.items()])
    for note in results["notes"]:
        print(f"note: {note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of each seed")
    parser.add_argument("--target", type=float, default=15.0, help="mean score that ends a run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=HOME / "atari")
    parser.add_argument("--output", type=Path, default=RESULTS / "atari.json")
    parser.add_argument("--only", choices=["speed", "learning"])
    parser.add_argument("--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 4], help="to measure speed")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device found; use --device cpu to test the benchmark")
    notes: list[str] = []
    results: dict[str, Any] = {"environment": arguments.env, "notes": notes}
    results["load_before"] = warn_if_busy()
    if arguments.only != "learning":
        results["speed"] = [own_speed(arguments, seeds) for seeds in arguments.seeds]
        results["speed"] += sb3_speed(arguments, notes)
    if arguments.only != "speed":
        results["learning"] = learn(arguments)
    results["machine"] = machine(cores=os.cpu_count())
    show(results)
    write_results(arguments.output, results)


if __name__ == "__main__":
    main()
