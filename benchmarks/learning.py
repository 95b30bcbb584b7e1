"""Measure learning curves of config variants over many seeds, and store them as JSON.

    python benchmarks/learning.py --config sac/mujoco --env HalfCheetah-v5 --seeds 16
        --steps 300000 --eval-interval 25000 --variant float32:float32_precision=highest
        --variant tf32:float32_precision=high [--parallel 2] [--device cuda] [--out FOLDER]
    python benchmarks/learning.py --summary [--out FOLDER] [--against float32]
        [--published FILE.csv --published-method SAC]

A single variant can also be given as --name NAME --set KEY=VALUE ...; together with --variant,
--set applies to all variants. Several variants run in separate processes, `--parallel` at a time,
which share the cores. Each process rewrites FOLDER/ENV__NAME.json after every evaluation of a seed,
so an interrupted run keeps its results. With --first-seed 16 the file is ENV__NAME__from16.json,
and the summary pools it with the other runs of that name. Checkpoints are written to a temporary
folder (set by TMPDIR) and removed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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
from rl_training.checkpoints.run_folder import git_commit, package_versions
from rl_training.config import TrainConfig
from rl_training.config_files import load_config, packaged_configs
from rl_training.envs.cores import available_cores
from rl_training.errors import UserError

SCRIPT = Path(__file__)
NOT_SETTINGS = ("output_dir", "run_name", "seed", "seeds")
"""Config keys that do not affect learning, or that the file stores elsewhere"""

ABSOLUTE_FOLDER = re.compile(r"(?<![\w.:/~])~?/(?:[^\s,'\"\]}]*/)?")


@dataclass(frozen=True)
class Variant:
    """A name, and the settings that differ from the packaged config."""

    name: str
    overrides: tuple[str, ...] = ()
    """As `key=value`"""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.+=@-]*", self.name):
            raise UserError(
                f"variant {self.name!r}: not usable as a file name; use letters, digits, . _ - + ="
            )

    @classmethod
    def parse(cls, text: str, common: Sequence[str] = ()) -> Variant:
        """Parse `NAME:key=value,key=value`; a value may contain commas, as in a list."""
        name, _, settings = text.partition(":")
        own = re.split(r",(?=[\w.]+=)", settings) if settings else []
        return cls(name, (*common, *own))


class CurveRecorder(rl_training.Callback):
    """Collects the evaluations of all seeds, and passes all of them on after each one."""

    def __init__(self, seeds: Sequence[int], keep: Callable[[str, list[dict[str, Any]]], None]):
        """`keep` receives a description of the execution mode, and the rounds so far."""
        self._seeds, self._keep = list(seeds), keep
        self._rounds: dict[int, dict[str, Any]] = {}
        self._began = time.perf_counter()

    def for_seed(self, seed: int) -> CurveRecorder:
        return self  # a round contains all seeds

    def on_evaluation_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        step, seconds = context.position, time.perf_counter() - self._began
        found = self._rounds.setdefault(step, {"step": step, "returns": [None] * len(self._seeds)})
        seed_index = self._seeds.index(context.config.seed)
        found["returns"][seed_index] = context.evaluation.metrics["eval_return_mean"]
        # Including set-up, compilation and evaluations: the time that a user waits.
        found["wall_seconds"] = round(seconds, 2)
        found["steps_per_second"] = round(step * len(self._seeds) / seconds, 1)
        self._keep(context.execution, list(self._rounds.values()))


def learn(variant: Variant, arguments: argparse.Namespace) -> Path:
    """Train the seeds of the variant together, and return the file with their curve."""
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
        "config_fingerprint": fingerprint(config),
        "commit": git_commit(),
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
        raise UserError(
            f"--config {arguments.config!r}: not a packaged config; choose one of: {names}"
        )
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
    """The file of a curve. Runs of one variant with different seeds have different files."""
    seeds = f"__from{first_seed}" if first_seed else ""
    return folder / f"{env.replace('/', '-')}__{name}{seeds}.json"


def options(variant: Variant, arguments: argparse.Namespace) -> list[str]:
    """The command-line arguments that measure only this variant."""
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
    """The command that measures the curve again, on any machine."""
    words = without_folders(options(variant, arguments))
    return shlex.join(["python", f"benchmarks/{SCRIPT.name}", *words])


def differences(packaged: TrainConfig, chosen: TrainConfig) -> dict[str, Any]:
    """The resolved settings that differ from the packaged config, by dotted name."""
    before, after = flat(packaged.to_mapping()), flat(chosen.to_mapping())
    return {
        key: without_folders(value)
        for key, value in after.items()
        if key not in NOT_SETTINGS and (key not in before or before[key] != value)
    }


def fingerprint(config: TrainConfig) -> str:
    """A hash of every resolved setting that affects learning."""
    values = {key: value for key, value in config.to_mapping().items() if key not in NOT_SETTINGS}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def without_folders(value: Any) -> Any:
    """Reduce absolute paths to their last part, because folders depend on the machine."""
    if isinstance(value, list):
        return [without_folders(each) for each in value]
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    return ABSOLUTE_FOLDER.sub("", value) if isinstance(value, str) else value


def learn_in_processes(variants: Sequence[Variant], arguments: argparse.Namespace) -> list[str]:
    """Train each variant in a separate process, so that none inherits the compiled programs, device
    memory or failure of another. Return the names of the variants that failed."""
    shares: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for share in core_shares(arguments.parallel):
        shares.put(share)
    running: list[subprocess.Popen[bytes]] = []

    def take_share() -> None:
        # Processes that this thread starts inherit its cores, and so do their workers.
        if share := shares.get():
            os.sched_setaffinity(0, share)

    def failed(variant: Variant) -> bool:
        words = [str(SCRIPT), *options(variant, arguments), "--out", str(arguments.out)]
        process = subprocess.Popen([sys.executable, *words])
        running.append(process)
        return process.wait() != 0

    # Ends the processes below, which would otherwise continue to train.
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
    """Split the cores of this process into equal shares; empty if the system cannot do that."""
    if not hasattr(os, "sched_getaffinity"):
        return [[]] * parts
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // parts
    return [cores[part * size : (part + 1) * size] for part in range(parts)]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="sac/mujoco")
    parser.add_argument("--env", help="default: as in the config")
    parser.add_argument("--seeds", type=int, default=16, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the lowest seed")
    parser.add_argument("--steps", type=int, help="default: as in the config")
    parser.add_argument("--eval-interval", type=int, default=25_000)
    parser.add_argument("--eval-episodes", type=int, default=10)
    parser.add_argument("--device")
    parser.add_argument("--name", help="name of a single variant")
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
        parser.error("--name is for a single variant; --variant contains the name")
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
            variant_config(variant, arguments)  # report errors before any run starts
        if len(variants) == 1:
            print(f"written to {learn(variants[0], arguments)}")
        elif failed := learn_in_processes(variants, arguments):
            sys.exit(f"failed: {', '.join(failed)}")
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
