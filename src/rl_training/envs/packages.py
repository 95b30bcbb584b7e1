"""Packages whose environments are known by their ids, so that no `--import` is needed.

The table is fixed: a config chooses among these packages, as it chooses among the environments of
Gymnasium, but cannot name a module of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass

import gymnasium as gym

from rl_training.envs.snapshots.layers import foreign_code
from rl_training.errors import EnvironmentSetupError, last_line


@dataclass(frozen=True)
class KnownPackage:
    """A package that registers environments when it is imported."""

    prefix: str
    """The beginning of its ids"""
    module: str
    extra: str
    """The extra of rl-training that installs it"""


PANDA_TASKS = ("Reach", "Push", "Slide", "PickAndPlace", "Stack", "Flip")

KNOWN_PACKAGES = (
    KnownPackage("ALE/", "ale_py", "atari"),
    KnownPackage("MiniGrid-", "minigrid", "minigrid"),
    KnownPackage("BabyAI-", "minigrid", "minigrid"),
    *(KnownPackage(f"Panda{task}", "panda_gym", "goals") for task in PANDA_TASKS),
    *(KnownPackage(f"{kind}Maze_", "gymnasium_robotics", "goals") for kind in ("Point", "Ant")),
)


def import_known_package(environment_id: str) -> None:
    """Import the known package that registers this id, if there is one and it is not imported.

    Raises `EnvironmentSetupError` if it is not installed.
    """
    for package in KNOWN_PACKAGES:
        if environment_id.startswith(package.prefix) and environment_id not in gym.registry:
            _import(package, environment_id)


def _import(package: KnownPackage, environment_id: str) -> None:
    advice = f'Run `pip install "rl-training[{package.extra}]"`.'
    if importlib.util.find_spec(package.module) is None:
        raise EnvironmentSetupError(
            f"{environment_id} needs a package: {package.module} is not installed. {advice}"
        )
    with foreign_code(
        lambda error: EnvironmentSetupError(
            f"{environment_id} needs a package: {package.module} cannot be imported "
            f"({last_line(error)}). {advice}"
        )
    ):
        importlib.import_module(package.module)


def keep_emulator_quiet() -> None:
    """Let the Atari emulator print errors only; it would greet every process on stderr."""
    if (ale_py := sys.modules.get("ale_py")) is not None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
