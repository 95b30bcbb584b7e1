"""DDPG's update: TD3 without its extensions."""

from __future__ import annotations

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import DDPGAlgorithm
from rl_training.algorithms.ddpg import ddpg_loss
from rl_training.errors import ConfigError


def make_ddpg(**settings: object) -> DDPGAlgorithm:
    chosen = {"hidden_sizes": [8, 8], "learning_rate": 1e-2, **settings}
    algorithm = DDPGAlgorithm(3, 2, chosen, seed=3)
    for name in ("target_actor", "target_critic"):
        algorithm.state[name].mul_(0.7)  # to detect a mix-up with the network
    return algorithm


def test_losses_and_targets_agree_with_an_independent_implementation() -> None:
    algorithm, batch = make_ddpg(), make_batch()
    _, metrics = ddpg_loss(algorithm, algorithm.state, batch, {})
    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    target_actor = by_hand.layers(networks["actor"], state["target_actor"])
    [critic] = by_hand.members(networks["critic"], state["critic"])
    [target_critic] = by_hand.members(networks["critic"], state["target_critic"])
    errors, values, targets = [], [], []
    for index in range(2):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_action = np.tanh(by_hand.forward(target_actor, next_obs))
        next_value = by_hand.forward(target_critic, next_obs, next_action)[0]
        targets.append(reward + discount * next_value)
        errors.append(by_hand.forward(critic, obs, action)[0] - targets[-1])
        values.append(by_hand.forward(critic, obs, np.tanh(by_hand.forward(actor, obs)))[0])
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)
    assert metrics["critic_loss"].item() == pytest.approx(
        0.5 * np.mean(np.square(errors)), rel=1e-4
    )
    assert metrics["actor_loss"].item() == pytest.approx(-np.mean(values), rel=1e-4)


def test_every_update_changes_the_critic_the_actor_and_both_targets() -> None:
    algorithm, batch = make_ddpg(), make_batch()
    assert algorithm.model.q_values(batch.obs, batch.action).shape == (2, 1)
    for _ in range(2):
        before = copy_state(algorithm)
        result = algorithm.update(batch)
        moved = changed(before, algorithm)
        assert {"actor", "critic", "target_actor", "target_critic"} <= moved
        assert {"actor_loss", "critic_loss"} <= result.metrics.keys()


def test_target_actions_have_no_noise() -> None:
    first, second = make_ddpg(), make_ddpg()
    second.generator.manual_seed(99)
    batch = make_batch()
    first.update(batch)
    second.update(batch)
    assert all(torch.equal(first.state[name], second.state[name]) for name in first.state)


def test_exploration_noise_is_on_by_default() -> None:
    algorithm, obs = make_ddpg(), torch.randn(64, 3)
    noise = {"action": torch.randn(64, 2)}
    tried = algorithm.explore(algorithm.state, obs, noise, torch.tensor(0.0))
    assert not torch.equal(tried, algorithm.act(algorithm.state, obs))


@pytest.mark.parametrize("key", ["policy_noise", "noise_clip"])
def test_td3_settings_are_unknown_to_ddpg(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_ddpg(**{key: 0.1})
