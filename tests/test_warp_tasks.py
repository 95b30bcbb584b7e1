"""The functions of tasks agree with Gymnasium's own on identical fields; warp is not needed."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_training.envs.packages import TENSOR_IDS
from rl_training.envs.tensors.random_numbers import world_keys
from rl_training.envs.warp.tasks import TASKS, Draws, Facts, Fields, Task

mujoco = pytest.importorskip("mujoco")

each_task = pytest.mark.parametrize("name", list(TASKS))
STEPS = 400


def twin_of(name: str) -> Any:
    return gym.make(TENSOR_IDS[f"warp/{name}-v5"].twin)


def facts_of(environment: Any, dtype: torch.dtype = torch.float64) -> Facts:
    model = environment.unwrapped.model
    return Facts(
        environment.unwrapped.dt,
        {model.body(index).name: index for index in range(model.nbody)},
        torch.tensor(model.body_mass, dtype=dtype),
        torch.tensor(environment.unwrapped.init_qpos, dtype=dtype),
        torch.tensor(environment.unwrapped.init_qvel, dtype=dtype),
    )


def fields_of(task: Task, environment: Any) -> Fields:
    data = environment.unwrapped.data
    return {name: torch.tensor(np.array(getattr(data, name)))[None] for name in task.fields}


@each_task
def test_observations_rewards_and_ends_are_gymnasiums(name: str) -> None:
    environment, task = twin_of(name), TASKS[name]()
    facts, generator = facts_of(environment), np.random.default_rng(0)
    obs, _ = environment.reset(seed=0)
    np.testing.assert_allclose(task.observation(fields_of(task, environment), facts)[0], obs)
    ends = 0
    for _ in range(STEPS):
        before = fields_of(task, environment)
        low, high = environment.action_space.low, environment.action_space.high
        action = generator.uniform(low, high).astype(np.float32)
        obs, reward, terminated, truncated, _ = environment.step(action)
        after = fields_of(task, environment)
        found = task.reward(before, after, torch.tensor(action).double()[None], facts)
        np.testing.assert_allclose(task.observation(after, facts)[0], obs, atol=1e-5)
        np.testing.assert_allclose(found[0], reward, atol=1e-5)
        assert bool(task.terminated(after)[0]) == terminated
        if terminated or truncated:
            ends += 1
            environment.reset()
    assert ends > 0 or name in ("HalfCheetah", "Swimmer", "Ant")


@each_task
def test_time_limit_frame_skip_and_spaces_are_gymnasiums(name: str) -> None:
    environment, task = twin_of(name), TASKS[name]()
    environment.reset(seed=0)
    assert task.max_steps == environment.spec.max_episode_steps
    assert task.frame_skip == environment.unwrapped.frame_skip
    assert environment.unwrapped.fullpath.endswith(task.xml)
    size = task.observation(fields_of(task, environment), facts_of(environment)).shape[1]
    assert (size,) == environment.observation_space.shape


@each_task
def test_first_states_have_gymnasiums_distribution(name: str) -> None:
    environment, task, number = twin_of(name), TASKS[name](), 4_000
    keys = world_keys([0], number, torch.device("cpu"))
    qpos, qvel = task.initial(facts_of(environment, torch.float32), Draws(keys, keys * 0))
    several = []
    for seed in range(400):
        environment.reset(seed=seed)
        data = environment.unwrapped.data
        several.append(np.concatenate([data.qpos, data.qvel]))
    theirs, ours = np.stack(several), torch.cat([qpos, qvel], dim=-1).numpy()
    spread = theirs.std(0)
    np.testing.assert_array_less(np.abs(ours.mean(0) - theirs.mean(0)), 0.25 * spread + 1e-4)
    np.testing.assert_allclose(ours.std(0), spread, rtol=0.15, atol=1e-6)
    assert (ours.min(0) > theirs.min(0) - 3 * spread - 1e-6).all()
    assert (ours.max(0) < theirs.max(0) + 3 * spread + 1e-6).all()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("HalfCheetah", {"forward_reward_weight": 2.0, "ctrl_cost_weight": 0.5}),
        ("Hopper", {"terminate_when_unhealthy": False, "healthy_reward": 3.0}),
        ("Ant", {"include_cfrc_ext_in_observation": False, "main_body": "torso"}),
        ("Reacher", {"reward_dist_weight": 3.0}),
        ("Walker2d", {"exclude_current_positions_from_observation": False}),
    ],
)
def test_settings_mean_what_they_mean_in_gymnasium(name: str, settings: dict[str, Any]) -> None:
    environment, task = gym.make(f"{name}-v5", **settings), TASKS[name](**settings)
    facts, generator = facts_of(environment), np.random.default_rng(1)
    environment.reset(seed=1)
    for _ in range(60):
        before = fields_of(task, environment)
        action = generator.uniform(-1, 1, environment.action_space.shape)
        obs, reward, terminated, truncated, _ = environment.step(action)
        after = fields_of(task, environment)
        found = task.reward(before, after, torch.tensor(action)[None], facts)
        np.testing.assert_allclose(task.observation(after, facts)[0], obs, atol=1e-5)
        np.testing.assert_allclose(found[0], reward, atol=1e-5)
        assert bool(task.terminated(after)[0]) == terminated
        if terminated or truncated:
            environment.reset()
