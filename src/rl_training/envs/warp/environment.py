"""Gymnasium's MuJoCo tasks as tensor environments, simulated by MuJoCo Warp."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rl_training.envs.snapshots.mujoco import keep_mujoco_quiet
from rl_training.envs.tensors.random_numbers import mixed, uniform
from rl_training.envs.tensors.simulated import Outcome, SimulatedWorlds
from rl_training.envs.warp.simulator import RANDOMIZED, Simulator
from rl_training.envs.warp.tasks import TASKS, Draws, Facts, Task
from rl_training.errors import EnvironmentSetupError

if TYPE_CHECKING:
    import mujoco

Ranges = Mapping[str, tuple[float, float]]


class WarpEnvironment(SimulatedWorlds):
    """Worlds of one task.

    `randomize` has ranges of factors by which the `mass` of all bodies, the `friction` of all geoms
    or the `gain` of all actuators of a world are multiplied, as `{"mass": [0.8, 1.2]}`. A world
    keeps its factors.
    """

    is_capturable = True

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str,
        *,
        task: Task,
        randomize: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        super().__init__(num_envs, device)
        self._task, self.max_steps = task, task.max_steps
        self._ranges = _checked_ranges(randomize or {})
        model = _load_model(task)
        self._facts = _facts(model, task, self.device)
        self._simulator = Simulator(model, task, num_envs, self.device, tuple(self._ranges))
        self._fields = {name: field.clone() for name, field in self._simulator.fields.items()}
        """Copies of the fields that the task reads. As in MuJoCo, those that follow from positions
        are one substep behind, except in the first state of an episode"""
        size = task.observation(self._fields, self._facts).shape[1]
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,))
        low, high = model.actuator_ctrlrange.astype(np.float32).T
        self.action_space = gym.spaces.Box(low, high)

    def begin_worlds(self) -> None:
        self._randomize()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._randomize()  # by the restored keys

    def simulate(self, actions: Tensor) -> None:
        self._simulator.ctrl.copy_(actions)
        self._simulator.step()

    def outcome(self) -> Outcome:
        before = {name: field.clone() for name, field in self._fields.items()}
        for name, field in self._simulator.fields.items():
            self._fields[name].copy_(field)
        obs = self._task.observation(self._fields, self._facts)
        reward = self._task.reward(before, self._fields, self._simulator.ctrl, self._facts)
        return Outcome(obs, reward, self._task.terminated(self._fields))

    def begin_episodes(self, chosen: Tensor) -> None:
        qpos, qvel = self._task.initial(self._facts, Draws(self.keys, self.episodes))
        state, mask = self._simulator.state, chosen[:, None]
        state["qpos"].copy_(torch.where(mask, qpos, state["qpos"]))
        state["qvel"].copy_(torch.where(mask, qvel, state["qvel"]))
        state["qacc_warmstart"].copy_(torch.where(mask, 0.0, state["qacc_warmstart"]))

    def refresh(self) -> None:
        self._simulator.refresh()

    def first_observations(self, chosen: Tensor) -> Tensor:
        for name, copied in self._fields.items():
            first = self._simulator.fields[name]
            if name in ("cfrc_ext", "qfrc_actuator", "ctrl"):  # nothing acts yet
                first = torch.zeros_like(first)
            of_worlds = chosen.view(-1, *[1] * (first.dim() - 1))
            copied.copy_(torch.where(of_worlds, first, copied))
        return self._task.observation(self._fields, self._facts)

    def state(self) -> dict[str, Tensor]:
        fields = {f"field.{name}": field for name, field in self._fields.items()}
        return {**self._simulator.state, **fields}

    def _randomize(self) -> None:
        """Set the parameters of each world, by its key alone."""
        for index, (what, (low, high)) in enumerate(self._ranges.items()):
            numbers = uniform(mixed(self.keys - 1), torch.full_like(self.keys, index), 1)[:, 0]
            self._simulator.scale(what, low + (high - low) * numbers)


def _checked_ranges(randomize: Mapping[str, Sequence[float]]) -> Ranges:
    ranges = {}
    for what, given in randomize.items():
        if what not in RANDOMIZED:
            raise EnvironmentSetupError(
                f"env_kwargs.randomize: {what!r} cannot be randomized; {', '.join(RANDOMIZED)} can"
            )
        if not isinstance(given, Sequence) or len(given) != 2 or not 0 < given[0] <= given[1]:
            raise EnvironmentSetupError(
                f"env_kwargs.randomize: {what} needs a range of positive factors, such as "
                f"[0.8, 1.2], not {given!r}"
            )
        ranges[what] = (float(given[0]), float(given[1]))
    return ranges


def _load_model(task: Task) -> mujoco.MjModel:
    import mujoco  # an optional package

    keep_mujoco_quiet()
    folder = Path(gym.__file__).parent / "envs" / "mujoco" / "assets"
    model = mujoco.MjModel.from_xml_path(str(folder / task.xml))
    if task.newton:
        model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    return model


def _facts(model: mujoco.MjModel, task: Task, device: torch.device) -> Facts:
    mass, qpos, qvel = (
        torch.tensor(array, dtype=torch.float32, device=device)
        for array in (model.body_mass, model.qpos0, np.zeros(model.nv))
    )
    bodies = {model.body(index).name: index for index in range(model.nbody)}
    return Facts(model.opt.timestep * task.frame_skip, bodies, mass, qpos, qvel)


def _maker(kind: type[Task]) -> Callable[..., WarpEnvironment]:
    def make(
        num_envs: int, device: torch.device | str, *, randomize: Any = None, **settings: Any
    ) -> WarpEnvironment:
        ranges = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        return WarpEnvironment(num_envs, device, task=kind(**ranges), randomize=randomize)

    return make


def __getattr__(name: str) -> Callable[..., WarpEnvironment]:
    if name in TASKS:
        return _maker(TASKS[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
