"""What a curve is measured with: variants of packaged configs, their files and their commands."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.checkpoints.run_folder import git_commit
from rl_training.config import TrainConfig
from rl_training.config_files import load_config, packaged_configs
from rl_training.errors import UserError

SCRIPT = Path(__file__).parent.parent / "learning.py"
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
        # Where run folders are kept, at most the time between two evaluations is lost.
        checkpoint_interval=arguments.eval_interval if arguments.work else 0,
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


def process_options(variant: Variant, arguments: argparse.Namespace) -> list[str]:
    """The arguments of a process that measures this variant for the present one."""
    words = [*options(variant, arguments), "--out", str(arguments.out)]
    for option, value in {"--work": arguments.work, "--commit": arguments.commit}.items():
        words += [] if value is None else [option, str(value)]
    return words


def command_line(variant: Variant, arguments: argparse.Namespace) -> str:
    """The command that measures the curve again, on any machine."""
    words = without_folders(options(variant, arguments))
    return shlex.join(["python", f"benchmarks/{SCRIPT.name}", *words])


def code_commit() -> str | None:
    """The commit of this benchmark's repository, wherever it is called from."""
    with contextlib.chdir(SCRIPT.parent):
        return git_commit()


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


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
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
