"""Packages whose environments are known by their ids, so that no `--import` is needed.

The table is fixed: a config chooses among these packages, as it chooses among the environments of
Gymnasium, but cannot name a module of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from rl_training.envs.snapshots.layers import foreign_code
from rl_training.envs.tensors.contract import TensorSource
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


@dataclass(frozen=True)
class TensorId:
    """An environment of this package whose worlds are tensors, and its twin in Gymnasium.

    Training steps the tensors. All else that needs one environment uses the twin, which has the
    same spaces and rules, and needs no simulator on a GPU.
    """

    module: str
    name: str
    """The class, or the function, that makes the worlds"""
    twin: str
    package: str | None = None
    """The package that its worlds need, of the extra `warp`"""
    exact: bool = True
    """Whether a run that is resumed goes on with the same bits"""
    newton: bool = False
    """Whether the twin needs MuJoCo's Newton solver instead of that of its file"""

    def source(self, environment_id: str) -> TensorSource:
        """How its worlds are made; raise `EnvironmentSetupError` if a package is missing."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            raise EnvironmentSetupError(
                f"{environment_id} needs a package: {self.package} is not installed. "
                'Run `pip install "rl-training[warp]"`.'
            )
        return TensorSource(getattr(importlib.import_module(self.module), self.name), self.exact)


WARP_TASKS = (
    *("HalfCheetah", "Hopper", "Walker2d", "Ant", "Swimmer"),
    *("Reacher", "Pusher", "InvertedPendulum", "HumanoidNewton"),
)
TENSOR_IDS = {
    f"tensors/{name}-v1": TensorId("rl_training.envs.tensors.classic_control", name, f"{name}-v1")
    for name in ("CartPole", "Pendulum")
} | {
    f"warp/{name}-v5": TensorId(
        "rl_training.envs.warp.environment",
        name,
        f"{name.removesuffix('Newton')}-v5",
        package="mujoco_warp",
        exact=False,
        newton=name.endswith("Newton"),
    )
    for name in WARP_TASKS
}
TRAINING_ONLY = ("randomize",)
"""Keyword arguments of tensor environments that their twins do not have: evaluations do without"""


def gymnasium_id(environment_id: str) -> str:
    """The id of the environment itself, or of the twin of one whose worlds are tensors."""
    found = TENSOR_IDS.get(environment_id)
    return environment_id if found is None else found.twin


def twin_kwargs(environment_id: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments for `gymnasium_id`, without those of tensors alone."""
    if environment_id not in TENSOR_IDS:
        return dict(kwargs)
    return {name: value for name, value in kwargs.items() if name not in TRAINING_ONLY}


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
