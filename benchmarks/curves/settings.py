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

from curves.data import described, with_data
from rl_training.checkpoints.run_folder import git_commit
from rl_training.config import TrainConfig
from rl_training.config_files import load_config, packaged_configs
from rl_training.errors import UserError

SCRIPT = Path(__file__).parent.parent / "learning.py"
NOT_SETTINGS = ("output_dir", "run_name", "seed", "seeds")
"""Config keys that do not affect learning, or that the file stores elsewhere"""

FINAL = "final"
"""Folder in the work folder of a run that others start from: the last checkpoint of each seed"""

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
    """The settings of a curve. They do not say where its data and the policies are from which it
    starts: that depends on the machine."""
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


def placed(config: TrainConfig, arguments: argparse.Namespace) -> TrainConfig:
    """The config with the data and the policies of this machine."""
    if arguments.data is not None:
        data = described(arguments.data_about, str(config.env_id), arguments.data)
        assert data is not None  # checked before
        config = with_data(config, arguments.data_folder, data)
    if arguments.init_from is not None:
        checkpoints = start_folder(arguments, str(config.env_id)) / FINAL / "seed{seed}"
        config = config.with_changes(init_from=str(checkpoints))
    return config


def start_folder(arguments: argparse.Namespace, env: str) -> Path:
    """The work folder of the run that this one starts from."""
    name = curve_path(arguments.out, env, arguments.init_from, arguments.first_seed).stem
    return Path(arguments.work) / name


def request(variant: Variant, arguments: argparse.Namespace, config: TrainConfig) -> dict[str, Any]:
    """What a curve is of, apart from the code: curves with other values are not the same."""
    found = {
        "config": arguments.config,
        "env": config.env_id,
        "name": variant.name,
        "settings": differences(load_config(arguments.config), config),
        "seeds": config.seeds,
        "planned_steps": config.total_timesteps,
        "eval_episodes": config.eval_episodes,
    }
    if arguments.data is not None:
        found["data"] = described(arguments.data_about, str(config.env_id), arguments.data)
    if arguments.peer is not None:
        found["peer"] = arguments.peer
    return found


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
        "data": arguments.data,
        "init-from": arguments.init_from,
        "peer": None if arguments.peer is None else json.dumps(arguments.peer),
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
    given = {"--work": arguments.work, "--commit": arguments.commit}
    if arguments.data is not None:
        given |= {"--data-folder": arguments.data_folder, "--data-about": arguments.data_about}
    for option, value in given.items():
        words += [] if value is None else [option, str(value)]
    return [*words, "--keep"] if arguments.keep else words


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


def fingerprint(config: TrainConfig, data: Mapping[str, Any] | None, start: str | None) -> str:
    """A hash of every resolved setting that affects learning, of the recorded data, and of the
    fingerprint of the run that this one starts from."""
    values = {key: value for key, value in config.to_mapping().items() if key not in NOT_SETTINGS}
    # Added only if there are any, so that others keep their fingerprints.
    values |= {} if data is None else {"data": [part["fingerprint"] for part in data["parts"]]}
    values |= {} if start is None else {"start": start}
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
