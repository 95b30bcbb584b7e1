"""Simulators of other packages, made small: the worlds, and how to break one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rl_training.envs.tensors.adapters import VecEnvWorlds, VectorWorlds, brax_worlds
from rl_training.envs.tensors.adapters.jax_functions import Episodes, JaxWorlds
from rl_training.envs.tensors.contract import TensorSource

LIMIT = 10
"""Steps of an episode"""
WORLDS = 4


@dataclass(frozen=True)
class Simulator:
    package: str
    """The module without which it is skipped"""
    make: Callable[[], tuple[TensorSource, Any]]
    """Returns the source, and the worlds if there is one set of them in a process"""
    break_world: Callable[[Any, int], None] | None = None
    """Puts numbers that are not finite into the state of a world"""
    tells_ends: bool = True
    """Whether it is known what the last step of a truncated episode led to"""
    num_envs: int = WORLDS
    settings: dict[str, Any] = field(default_factory=dict)


@functools.cache
def mjlab(*, auto_reset: bool) -> tuple[TensorSource, Any]:
    import mjlab.tasks  # noqa: F401 - registers the tasks
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.rl import RslRlVecEnvWrapper
    from mjlab.tasks.registry import load_env_cfg

    config = load_env_cfg("Mjlab-Cartpole-Swingup")
    config.scene.num_envs, config.auto_reset = WORLDS, auto_reset
    config.episode_length_s = LIMIT * config.decimation * config.sim.mujoco.timestep
    env = RslRlVecEnvWrapper(ManagerBasedRlEnv(config, device="cpu"), clip_actions=1.0)
    return shared(VecEnvWorlds(env, group=("actor", "critic")))


def shared(worlds: Any) -> tuple[TensorSource, Any]:
    return TensorSource(lambda num_envs, device: worlds, exact=False, evaluated=False), worlds


def break_mjlab(worlds: Any, index: int) -> None:
    worlds._env.unwrapped.sim.data.qpos[index] = torch.nan


@functools.cache
def brax() -> tuple[TensorSource, Any]:
    from brax import envs

    return source_of(envs.get_environment("inverted_pendulum"))


@functools.cache
def playground() -> tuple[TensorSource, Any]:
    from mujoco_playground import registry

    return source_of(registry.load("CartpoleBalance"))


def source_of(env: Any) -> tuple[TensorSource, Any]:
    def make(num_envs: int, device: Any) -> JaxWorlds:
        return brax_worlds(env, num_envs, device, episode_length=LIMIT)

    return TensorSource(make, exact=False), None


def break_jax(worlds: Any, index: int) -> None:
    import jax

    def broken(leaf: Any) -> Any:
        has_worlds = leaf.shape[:1] == (worlds.num_envs,) and leaf.dtype == np.float32
        return leaf.at[index].set(np.nan) if has_worlds else leaf

    state: Episodes = worlds._state
    worlds._state = state._replace(state=jax.tree.map(broken, state.state))


def gymnasium_worlds(mode: gym.vector.AutoresetMode) -> VectorWorlds:
    from gymnasium.wrappers.vector import NumpyToTorch

    options = {"autoreset_mode": mode}
    envs = gym.make_vec(
        "Pendulum-v1", WORLDS, "sync", vector_kwargs=options, max_episode_steps=LIMIT
    )
    return VectorWorlds(NumpyToTorch(envs), "cpu")


@functools.cache
def gymnasium() -> tuple[TensorSource, Any]:
    return shared(gymnasium_worlds(gym.vector.AutoresetMode.DISABLED))


def break_gymnasium(worlds: Any, index: int) -> None:
    worlds._env.unwrapped.envs[index].unwrapped.state[:] = np.nan


@functools.cache
def maniskill() -> tuple[TensorSource, Any]:
    import mani_skill.envs  # noqa: F401 - registers the tasks
    from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

    # Most tasks need a renderer even for their materials; this one does not.
    env = gym.make(
        "FMBAssembly1Easy-v1",
        num_envs=1,
        obs_mode="state",
        sim_backend="physx_cpu",
        render_backend="none",
        max_episode_steps=LIMIT,
    )
    vector = ManiSkillVectorEnv(env)
    return shared(VectorWorlds(vector, vector.device))


GROUPS = {"networks": {"actor_obs": ["actor"], "critic_obs": ["actor", "critic"]}}
SIMULATORS = {
    "mjlab": Simulator(
        "mjlab", functools.partial(mjlab, auto_reset=False), break_mjlab, settings=GROUPS
    ),
    "mjlab-auto-reset": Simulator(
        "mjlab",
        functools.partial(mjlab, auto_reset=True),
        break_mjlab,
        tells_ends=False,
        settings=GROUPS,
    ),
    "brax": Simulator("brax", brax, break_jax),
    "playground": Simulator("mujoco_playground", playground, break_jax),
    "gymnasium": Simulator("array_api_compat", gymnasium, break_gymnasium),
    "maniskill": Simulator("mani_skill", maniskill, num_envs=1),
}
