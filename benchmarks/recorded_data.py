"""Record data with policies of SAC, in three kinds like D4RL's, and print its fingerprints.

    python benchmarks/recorded_data.py [--tasks HalfCheetah-v5 Hopper-v5 Walker2d-v5]
        [--train-steps 1000000] [--steps 100000] [--device cuda] [--data FOLDER] [--list]

For each task, SAC is trained twice with the same seed:

- `expert`: steps of the final policy, with a little noise.
- The second training is the same, and stops at the first evaluation that is at least a third of the
  way from random actions to the expert. `medium`: steps of the policy there. `replay`: all steps
  that were taken until there.

Mixtures, such as `medium-expert`, need no files of their own. A training that was stopped continues
when the same command is given again, and files that exist are kept. What the files contain is
written to benchmarks/results/recorded_data/TASK.json. Tasks can be recorded at the same time, by
one process each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from curves import data
from curves.data import EXPERT, KINDS, MEDIUM, REPLAY, about_file, data_file, read_about
from curves.processes import INTERRUPTED
from curves.settings import code_commit
from reporting import machine, print_table, write_json

from rl_training.checkpoints.run_folder import package_versions
from rl_training.config import TrainConfig
from rl_training.config_files import load_config
from rl_training.data.scores import comparison_scale, reference_scale
from rl_training.errors import TrainingInterrupted, UserError
from rl_training.runtime.workflows import (
    convert_dataset,
    describe_dataset,
    record_dataset,
    run_or_resume,
)
from rl_training.types import TrainResult

TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
MEDIUM_PART = 1 / 3
"""How far the medium policy is on the way from random actions to the expert"""
NOISE = 0.1
COLUMNS = {
    "rows": "rows",
    "episodes": "episodes",
    "return_mean": "mean return",
    "score": "D4RL score",
    "bytes": "MiB",
    "fingerprint": "fingerprint",
}


class Stopped(Exception):
    """A signal ended a training, which has saved itself."""


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK")
    parser.add_argument("--config", default="sac/mujoco", help="how the policies are trained")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-steps", type=int, default=1_000_000)
    parser.add_argument("--eval-interval", type=int, default=5_000)
    parser.add_argument("--eval-episodes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of a recorded policy")
    parser.add_argument("--num-envs", type=int, default=8, help="environments that are recorded")
    parser.add_argument("--device")
    parser.add_argument("--data", type=Path, default=data.FILES, help="folder of the files")
    parser.add_argument("--about", type=Path, default=data.ABOUT, help="folder of descriptions")
    parser.add_argument("--commit", help="commit of this code, where git is not available")
    parser.add_argument("--list", action="store_true", help="only print what is recorded")
    return parser.parse_args(words)


def main() -> None:
    arguments = parse_arguments()
    try:
        for task in arguments.tasks:
            if not arguments.list:
                record(task, arguments)
            show(task, read_about(arguments.about, task))
    except UserError as error:
        sys.exit(str(error))
    except (Stopped, TrainingInterrupted) as stopped:
        reached = str(stopped) if isinstance(stopped, Stopped) else "stopped"
        print(f"{reached}; the same command continues", flush=True)
        sys.exit(INTERRUPTED)


def record(task: str, arguments: argparse.Namespace) -> None:
    """Make the files of a task that are missing, and describe all of them."""
    known, recipe = read_about(arguments.about, task), recipe_of(arguments)
    for kind in KINDS:
        path = data_file(arguments.data, task, kind)
        if path.exists() and known.get(kind, {}).get("recipe") != recipe:
            raise UserError(
                f"{path}: was recorded by other settings, or its description is missing; remove it "
                "to record it again"
            )
    if all(data_file(arguments.data, task, kind).exists() for kind in KINDS):
        return
    expert = trained(task, EXPERT, arguments)
    medium = trained(task, MEDIUM, arguments, target=medium_return(task, expert))
    for kind, result in ((EXPERT, expert), (MEDIUM, medium), (REPLAY, medium)):
        path = data_file(arguments.data, task, kind)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, kind, result, arguments)
            known[kind] = {"recipe": recipe, **origin(result), **contents(task, path)}
            write_json(about_file(arguments.about, task), about(task, known, arguments))


def recipe_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the rows of all kinds depend on, besides the code and the machine."""
    keys = ("config", "seed", "train_steps", "eval_interval", "eval_episodes", "steps", "num_envs")
    return {**{key: getattr(arguments, key) for key in keys}, "noise": NOISE}


def trained(
    task: str, kind: str, arguments: argparse.Namespace, *, target: float | None = None
) -> TrainResult:
    """The run whose policy is recorded: a new one, one that continues, or one that has ended."""
    stop = {"target_value": target, "patience": 10**9}
    config: TrainConfig = load_config(
        arguments.config,
        env_id=task,
        total_timesteps=arguments.train_steps,
        # The expert is evaluated to see how good it became, the other to find where to stop.
        eval_interval=arguments.eval_interval
        if target is not None
        else max(arguments.train_steps // 10, 1),
        eval_episodes=arguments.eval_episodes,
        checkpoint_interval=max(arguments.train_steps // 10, 1),
        early_stopping=None if target is None else stop,
        **({} if arguments.device is None else {"device": arguments.device}),
    )
    folder = arguments.data / "runs" / f"{task.replace('/', '-')}__{kind}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    job = run_or_resume(config, [arguments.seed], folder, progress=False)
    if not job.results:
        raise Stopped(f"{task}, {kind}: stopped at step {job.status.step:,}")
    [result] = job.results
    steps, found = result.metrics["global_step"], result.metrics["eval_return_mean"]
    print(f"{task}, {kind}: trained for {steps:,.0f} steps, return {found:.1f}", flush=True)
    if target is not None and result.stop_reason != "target_value":
        print(f"note: {task}: the medium policy is the last one; none reached {target:.1f}")
    return result


def medium_return(task: str, expert: TrainResult) -> float:
    scale = comparison_scale(task)
    low = 0.0 if scale is None else scale.low
    return low + MEDIUM_PART * (expert.metrics["eval_return_mean"] - low)


def write_file(path: Path, kind: str, result: TrainResult, arguments: argparse.Namespace) -> None:
    if kind == REPLAY:
        convert_dataset({"kind": "run", "path": str(result.run_dir)}, path)
        return
    record_dataset(
        path,
        arguments.steps,
        checkpoint=result.run_dir,
        noise=NOISE,
        seed=arguments.seed + KINDS.index(kind),  # other first states in each file
        num_envs=arguments.num_envs,
    )


def origin(result: TrainResult) -> dict[str, Any]:
    """How far the training was, and how good its policy."""
    return {
        "trained_steps": int(result.metrics["global_step"]),
        "policy_return": result.metrics["eval_return_mean"],
        "stop_reason": result.stop_reason,
    }


def contents(task: str, path: Path) -> dict[str, Any]:
    """What a file contains."""
    found, scale = describe_dataset(path), reference_scale(task)
    mean = float(found.returns.mean())
    return {
        "fingerprint": data.data_fingerprint(path),
        "rows": found.steps,
        "episodes": len(found.returns),
        "terminated": found.terminated,
        "return_mean": mean,
        "return_std": float(found.returns.std()),
        "return_low": float(found.returns.min()),
        "return_high": float(found.returns.max()),
        "score": None if scale is None else scale.score(mean),
        "bytes": path.stat().st_size,
    }


def about(task: str, known: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "env": task,
        "machine": machine(),
        "commit": arguments.commit or code_commit(),
        "versions": package_versions(),
        "files": {kind: known[kind] for kind in KINDS if kind in known},
    }


def show(task: str, known: dict[str, Any]) -> None:
    if not known:
        print(f"{task}: nothing is recorded", flush=True)
        return
    rows = [[kind, *(_text(key, known[kind][key]) for key in COLUMNS)] for kind in known]
    print_table(task, ["", *COLUMNS.values()], rows)


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "fingerprint":
        return f"{value:.12}"
    if key == "bytes":
        return f"{value / 2**20:.1f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


if __name__ == "__main__":
    main()
