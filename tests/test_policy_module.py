"""`Policy.module`: the same policy as a `torch.nn.Module`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import each_algorithm, keywords, tiny_of
from safetensors.torch import load_file

import rl_training
from rl_training import DQN, SAC
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.execution.policy import Policy


def observations(policy: Policy, rows: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return 2 * torch.randn(rows, policy.spaces.obs_dim, generator=generator)


def policy_of(spec: AlgorithmSpec, tmp_path: Path, **changes: Any) -> Policy:
    """Return an untrained policy with normalization, since that is harder to reproduce."""
    config = tiny_of(spec, tmp_path, normalize_observations=True, **changes)
    managed = getattr(rl_training, spec.algorithm.__name__)
    policy: Policy = managed(config["env_id"], **keywords(config)).policy
    assert policy.normalizer is not None
    policy.normalizer.observe(3 * torch.randn(100, policy.spaces.obs_dim) + 1)
    return policy


class Shifted(gym.Env[np.ndarray, Any]):
    """An environment whose actions have asymmetric bounds, or do not start at zero."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, discrete: bool = False) -> None:
        low, high = np.array([3.0, -1.0]), np.array([5.0, 0.25])
        bounded = gym.spaces.Box(low, high, dtype=np.float64)
        self.action_space: gym.Space[Any] = gym.spaces.Discrete(4, start=7) if discrete else bounded

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(2, np.float32), {}


@each_algorithm
@pytest.mark.fast_cases
def test_the_module_gives_the_actions_of_predict_and_can_be_exported(
    spec: AlgorithmSpec, tmp_path: Path
) -> None:
    policy = policy_of(spec, tmp_path)
    obs = observations(policy)
    expected = policy.predict(obs.numpy())
    module = policy.module
    actions = module(obs).numpy(force=True)
    assert actions.dtype == expected.dtype
    np.testing.assert_array_equal(actions, expected)

    batch = torch.export.Dim("batch")
    exported = torch.export.export(module, (obs,), dynamic_shapes=({0: batch},))
    torch.export.save(exported, tmp_path / "policy.pt2")
    restored = torch.export.load(tmp_path / "policy.pt2").module()
    for rows in (3, 9):
        found = restored(obs[:rows]).numpy(force=True)
        np.testing.assert_allclose(found, expected[:rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "rtol"),
    [
        (lambda: SAC(Shifted, hidden_sizes=[16]), 1e-6),
        (lambda: DQN(lambda: Shifted(discrete=True), hidden_sizes=[16, 8]), 0),
        (lambda: DQN(lambda: Shifted(discrete=True), hidden_sizes=[16, 8], dueling=True), 0),
    ],
    ids=["asymmetric bounds", "discrete from 7", "dueling"],
)
def test_actions_are_in_environment_units(make: Any, rtol: float) -> None:
    policy = make().policy
    with torch.no_grad():
        for tensor in policy.algorithm.state.values():
            tensor.mul_(5)  # large enough to reach the bounds
    obs = observations(policy, 50)
    actions = policy.module(obs).numpy(force=True)
    np.testing.assert_allclose(actions, policy.predict(obs.numpy()), rtol=rtol)
    space = make()._env().action_space
    assert all(space.contains(action.astype(space.dtype)) for action in actions)


def test_parameters_have_the_names_of_a_saved_policy(tmp_path: Path) -> None:
    agent = SAC("Pendulum-v1", hidden_sizes=[8, 4], normalize_observations=True)
    saved = load_file(agent.save(tmp_path / "policy") / "model.safetensors")
    module = agent.policy.module
    parameters = dict(module.named_parameters())
    assert parameters.keys() == {name for name in saved if name.startswith("actor.")}
    assert all(torch.equal(parameters[name], saved[name]) for name in parameters)
    buffers = {"obs_shift", "obs_scale", "action_low", "action_high"}
    assert dict(module.named_buffers()).keys() == buffers


def test_changes_of_the_module_and_of_the_policy_do_not_affect_each_other() -> None:
    policy = SAC("Pendulum-v1", hidden_sizes=[8], normalize_observations=True).policy
    obs = observations(policy)
    before, module = policy.predict(obs.numpy()), policy.module
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    module(obs).sum().backward()
    optimizer.step()
    module.double()
    changed = module(obs.double())
    np.testing.assert_array_equal(policy.predict(obs.numpy()), before)
    assert not np.array_equal(changed.numpy(force=True), before)
    kept = policy.module
    with torch.no_grad():
        policy.algorithm.state["actor"].zero_()
    np.testing.assert_array_equal(kept(obs).numpy(force=True), before)


def test_the_module_can_be_copied_pickled_and_loaded(tmp_path: Path) -> None:
    policies = [SAC("Pendulum-v1", hidden_sizes=[8], seed=seed).policy for seed in (0, 1)]
    first, second = (policy.module for policy in policies)
    obs = observations(policies[0])
    for same in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(same(obs), first(obs))
    assert not torch.equal(second(obs), first(obs))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(obs), first(obs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_module_moves_between_devices() -> None:
    policy = SAC("Pendulum-v1", hidden_sizes=[8], normalize_observations=True).policy
    obs = observations(policy)
    before = policy.predict(obs.numpy())
    module = policy.module.to("cuda")
    np.testing.assert_allclose(module(obs.cuda()).numpy(force=True), before, atol=1e-5)
    np.testing.assert_array_equal(policy.predict(obs.numpy()), before)
