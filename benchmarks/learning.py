"""What variants of a packaged config learn: many seeds as one program, the curve kept as JSON.

    python benchmarks/learning.py --config sac/mujoco --env HalfCheetah-v5 --seeds 16
        --steps 300000 --eval-interval 25000 --variant float32:float32_precision=highest
        --variant tf32:float32_precision=high [--parallel 2] [--device cuda] [--out FOLDER]
    python benchmarks/learning.py --summary [--out FOLDER] [--against float32]
        [--published FILE.csv --published-method SAC]

One variant may also be given as --name NAME --set KEY=VALUE ...; with --variant, --set is for all
of them. Several variants are processes of their own, `--parallel` at a time, which share the cores.
Each writes FOLDER/ENV__NAME.json anew whenever a seed was evaluated, so that a run that is cut off
keeps what it reached. With --first-seed 16 the file is ENV__NAME__from16.json: the summary pools it
with the other runs of that name. Checkpoints go to a temporary folder (TMPDIR says where) and are
removed.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from learning_summary import print_summary
from reporting import RESULTS, machine, warn_if_busy, write_json

import rl_training
from rl_training.callbacks import TrainingContext
from rl_training.checkpoints.run_folder import package_versions
from rl_training.config import TrainConfig
from rl_training.config_files import load_config, packaged_configs
from rl_training.envs.cores import available_cores
from rl_training.errors import UserError

SCRIPT = Path(__file__)
NOT_SETTINGS = ("output_dir", "run_name", "seed", "seeds")
"""Keys of a config that say nothing about what is learned, or stand elsewhere in the file"""

ABSOLUTE_FOLDER = re.compile(r"(?<![\w.:/~])~?/(?:[^\s,'\"\]}]*/)?")


@dataclass(frozen=True)
class Variant:
    """A name, and the settings that make the difference."""

    name: str
    overrides: tuple[str, ...] = ()
    """As `key=value`"""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.+=@-]*", self.name):
            raise UserError(
                f"variant {self.name!r}: the name becomes a file's; use letters, digits, . _ - + ="
            )

    @classmethod
    def parse(cls, text: str, common: Sequence[str] = ()) -> Variant:
        """`NAME:key=value,key=value`; commas within a value, as in a list, are part of it."""
        name, _, settings = text.partition(":")
        own = re.split(r",(?=[\w.]+=)", settings) if settings else []
        return cls(name, (*common, *own))


class CurveRecorder(rl_training.Callback):
    """Collects the evaluations of all seeds, and hands all of them on after each one."""

    def __init__(self, seeds: Sequence[int], keep: Callable[[str, list[dict[str, Any]]], None]):
        """`keep` gets how updates are executed, and the rounds so far."""
        self._seeds, self._keep = list(seeds), keep
        self._rounds: dict[int, dict[str, Any]] = {}
        self._began = time.perf_counter()

    def for_seed(self, seed: int) -> CurveRecorder:
        return self  # a round is of all seeds

    def on_evaluation_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        step, seconds = context.position, time.perf_counter() - self._began
        found = self._rounds.setdefault(step, {"step": step, "returns": [None] * len(self._seeds)})
        place = self._seeds.index(context.config.seed)
        found["returns"][place] = context.evaluation.metrics["eval_return_mean"]
        # Set-up, compilation and evaluations included: what a user waits for.
        found["wall_seconds"] = round(seconds, 2)
        found["steps_per_second"] = round(step * len(self._seeds) / seconds, 1)
        self._keep(context.execution, list(self._rounds.values()))


def learn(variant: Variant, arguments: argparse.Namespace) -> Path:
    """Train the variant's seeds together; the file that keeps their curve."""
    config = variant_config(variant, arguments)
    assert config.seeds is not None
    path = curve_path(arguments.out, str(config.env_id), variant.name, arguments.first_seed)
    about = {
        "machine": machine(cores=available_cores(), load_before=warn_if_busy()),
        "command": command_line(variant, arguments),
        "config": arguments.config,
        "env": config.env_id,
        "name": variant.name,
        "settings": differences(load_config(arguments.config), config),
        "versions": package_versions(),
        "seeds": config.seeds,
        "planned_steps": config.total_timesteps,
        "eval_episodes": config.eval_episodes,
    }

    def keep(execution: str, rounds: list[dict[str, Any]]) -> None:
        write_json(path, {**about, "execution": execution, "evaluations": rounds})
        newest = rounds[-1]
        if None not in newest["returns"]:
            mean = sum(newest["returns"]) / len(newest["returns"])
            print(
                f"{variant.name}: {newest['step']:,} steps, mean return {mean:.1f}, "
                f"{newest['wall_seconds']:.0f} s, {newest['steps_per_second']:,.0f} steps/s",
                flush=True,
            )

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        recorder = CurveRecorder(config.seeds, keep)
        rl_training.train(load_config(config, output_dir=folder), callbacks=[recorder])
    return path


def variant_config(variant: Variant, arguments: argparse.Namespace) -> TrainConfig:
    if arguments.config not in packaged_configs():
        names = ", ".join(packaged_configs())
        raise UserError(f"--config {arguments.config!r}: not a packaged config; they are: {names}")
    given = {
        "env_id": arguments.env,
        "total_timesteps": arguments.steps,
        "eval_interval": arguments.eval_interval,
        "eval_episodes": arguments.eval_episodes,
        "device": arguments.device,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    return load_config(
        arguments.config,
        variant.overrides,
        **changes,
        seeds=[arguments.first_seed + index for index in range(arguments.seeds)],
        checkpoint_interval=0,
    )


def curve_path(folder: Path, env: str, name: str, first_seed: int = 0) -> Path:
    """Runs of one variant with other seeds lie side by side."""
    seeds = f"__from{first_seed}" if first_seed else ""
    return folder / f"{env.replace('/', '-')}__{name}{seeds}.json"


def options(variant: Variant, arguments: argparse.Namespace) -> list[str]:
    """The words of the command line that make this variant's curve alone."""
    given = {
        "config": arguments.config,
        "env": arguments.env,
        "seeds": arguments.seeds,
        "first-seed": arguments.first_seed or None,
        "steps": arguments.steps,
        "eval-interval": arguments.eval_interval,
        "eval-episodes": arguments.eval_episodes,
        "device": arguments.device,
        "name": variant.name,
    }
    words = []
    for option, value in given.items():
        words += [] if value is None else [f"--{option}", str(value)]
    for override in variant.overrides:
        words += ["--set", override]
    return words


def command_line(variant: Variant, arguments: argparse.Namespace) -> str:
    """How the curve can be made again, on any machine."""
    words = without_folders(options(variant, arguments))
    return shlex.join(["python", f"benchmarks/{SCRIPT.name}", *words])


def differences(packaged: TrainConfig, chosen: TrainConfig) -> dict[str, Any]:
    """The resolved settings that are not the packaged config's, by dotted name."""
    before, after = flat(packaged.to_mapping()), flat(chosen.to_mapping())
    return {
        key: without_folders(value)
        for key, value in after.items()
        if key not in NOT_SETTINGS and (key not in before or before[key] != value)
    }


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def without_folders(value: Any) -> Any:
    """Absolute paths cut down to their last name: folders are of one machine."""
    if isinstance(value, list):
        return [without_folders(each) for each in value]
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    return ABSOLUTE_FOLDER.sub("", value) if isinstance(value, str) else value


def learn_in_processes(variants: Sequence[Variant], arguments: argparse.Namespace) -> list[str]:
    """Each variant in a process of its own, so that none inherits another's compiled programs,
    device memory or failure. The names of those that failed."""
    shares: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for share in core_shares(arguments.parallel):
        shares.put(share)
    running: list[subprocess.Popen[bytes]] = []

    def take_share() -> None:
        # A thread's cores are inherited by the processes that it starts, and their workers.
        if share := shares.get():
            os.sched_setaffinity(0, share)

    def failed(variant: Variant) -> bool:
        words = [str(SCRIPT), *options(variant, arguments), "--out", str(arguments.out)]
        process = subprocess.Popen([sys.executable, *words])
        running.append(process)
        return process.wait() != 0

    # Ends the processes below instead of leaving them to train on alone.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    pool = ThreadPoolExecutor(arguments.parallel, initializer=take_share)
    try:
        outcomes = list(pool.map(failed, variants))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()  # no effect on one that has ended
    return [variant.name for variant, bad in zip(variants, outcomes, strict=True) if bad]


def core_shares(parts: int) -> list[list[int]]:
    """This process's cores in so many equal shares; empty ones where they cannot be shared out."""
    if not hasattr(os, "sched_getaffinity"):
        return [[]] * parts
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // parts
    return [cores[part * size : (part + 1) * size] for part in range(parts)]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="sac/mujoco")
    parser.add_argument("--env", help="by default the config's")
    parser.add_argument("--seeds", type=int, default=16, help="how many")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it")
    parser.add_argument("--steps", type=int, help="by default the config's")
    parser.add_argument("--eval-interval", type=int, default=25_000)
    parser.add_argument("--eval-episodes", type=int, default=10)
    parser.add_argument("--device")
    parser.add_argument("--name", help="of a single variant")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--variant", action="append", metavar="NAME:KEY=VALUE,...")
    parser.add_argument("--parallel", type=int, default=1, help="variants at a time")
    parser.add_argument("--out", type=Path, default=RESULTS / "learning")
    parser.add_argument("--summary", action="store_true", help="print the curves in --out")
    parser.add_argument("--against", metavar="NAME", help="the variant to compare with")
    parser.add_argument("--published", type=Path, metavar="FILE.csv")
    parser.add_argument("--published-method", default="SAC")
    arguments = parser.parse_args(words)
    if arguments.variant and arguments.name:
        parser.error("--name is for a single variant; with --variant the name is in it")
    if arguments.parallel < 1 or arguments.seeds < 1:
        parser.error("--parallel and --seeds: at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    try:
        if arguments.summary:
            print_summary(
                arguments.out, arguments.against, arguments.published, arguments.published_method
            )
            return
        texts = arguments.variant or [arguments.name or "packaged"]
        variants = [Variant.parse(text, arguments.set) for text in texts]
        if len({variant.name for variant in variants}) < len(variants):
            raise UserError("--variant: each name may be given once, because it names a file")
        for variant in variants:
            variant_config(variant, arguments)  # refused before any of them takes its time
        if len(variants) == 1:
            print(f"written to {learn(variants[0], arguments)}")
        elif failed := learn_in_processes(variants, arguments):
            sys.exit(f"failed: {', '.join(failed)}")
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
