"""TD3's update, compared with an independent implementation."""

from __future__ import annotations

from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import TD3Algorithm
from rl_training.algorithms.td3 import smoothing_noise, td3_loss
from rl_training.errors import ConfigError


def make_td3(**settings: object) -> TD3Algorithm:
    chosen = {"hidden_sizes": [8, 8], "learning_rate": 1e-2, **settings}
    algorithm = TD3Algorithm(3, 2, chosen, seed=3)
    for name in ("target_actor", "target_critic"):
        algorithm.state[name].mul_(0.7)  # to detect a mix-up with the network
    return algorithm


def test_losses_and_targets_agree_with_an_independent_implementation() -> None:
    algorithm, batch = make_td3(policy_noise=0.25, noise_clip=0.4), make_batch()
    noise = {"next_action": torch.tensor([[0.5, -9.0], [4.0, 1.0]])}
    _, metrics = td3_loss(algorithm, algorithm.state, batch, noise)

    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    target_actor = by_hand.layers(networks["actor"], state["target_actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    target_critics = by_hand.members(networks["critic"], state["target_critic"])
    disturbances = np.array([[0.125, -0.4], [0.4, 0.25]])  # scaled by 0.25, clipped at 0.4
    critic_terms, values, targets = [], [], []
    for index in range(2):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_action = np.tanh(by_hand.forward(target_actor, next_obs)) + disturbances[index]
        next_action = np.clip(next_action, -1, 1)
        next_value = min(by_hand.forward(q, next_obs, next_action)[0] for q in target_critics)
        targets.append(reward + discount * next_value)
        q_values = [by_hand.forward(q, obs, action)[0] for q in critics]
        critic_terms.append([(q - targets[-1]) ** 2 for q in q_values])
        values.append(by_hand.forward(critics[0], obs, np.tanh(by_hand.forward(actor, obs)))[0])

    assert targets[0] == pytest.approx(float(batch.reward[0]))  # termination does not bootstrap
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)
    expected = 0.5 * np.mean(critic_terms, axis=0).sum()
    assert metrics["critic_loss"].item() == pytest.approx(expected, rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(-np.mean(values), rel=1e-4)


def test_smoothing_is_scaled_and_then_clipped() -> None:
    standard = torch.tensor([0.5, -9.0, 4.0])
    torch.testing.assert_close(smoothing_noise(standard, 0.2, 0.5), torch.tensor([0.1, -0.5, 0.5]))


def test_target_actions_with_noise_stay_within_bounds() -> None:
    algorithm, batch = make_td3(policy_noise=50.0, noise_clip=50.0), make_batch(rows=64)
    queries = by_hand.watch_q_values(algorithm)
    algorithm.update(batch)
    assert max(actions.abs().max().item() for _, actions in queries) == 1.0


def test_actor_and_targets_are_unchanged_and_not_logged_between_policy_updates() -> None:
    algorithm = make_td3()
    before = copy_state(algorithm)
    off = algorithm.update(make_batch())
    assert changed(before, algorithm) == {
        "critic",
        "critic.adam_mean",
        "critic.adam_square",
        "critic.adam_count",
        "updates",
    }
    assert off.metrics.keys() == {"critic_loss", "q_mean", "target_q_mean"}
    before = copy_state(algorithm)
    on = algorithm.update(make_batch())
    assert {"actor", "target_actor", "target_critic"} <= changed(before, algorithm)
    assert on.metrics.keys() - off.metrics.keys() == {"actor_loss"}


def test_all_targets_follow_by_tau_on_policy_steps() -> None:
    algorithm = make_td3(tau=0.25, policy_delay=1)
    before = copy_state(algorithm)
    algorithm.update(make_batch())
    for name in ("actor", "critic"):
        expected = 0.75 * before[f"target_{name}"] + 0.25 * algorithm.state[name]
        torch.testing.assert_close(algorithm.state[f"target_{name}"], expected)


def test_the_actor_loss_uses_only_the_first_critic() -> None:
    algorithm, batch = make_td3(policy_delay=1), make_batch()
    _, before = algorithm.actor_loss(algorithm.state, batch, {})
    critics = algorithm.state["critic"].view(2, -1)
    critics[1] += 1.0
    _, after = algorithm.actor_loss(algorithm.state, batch, {})
    assert before["actor_loss"] == after["actor_loss"]
    critics[0] += 1.0
    _, moved = algorithm.actor_loss(algorithm.state, batch, {})
    assert moved["actor_loss"] != before["actor_loss"]


def test_default_exploration_noise_is_bounded() -> None:
    algorithm, obs = make_td3(), torch.randn(512, 3)
    noise = {"action": torch.randn(512, 2)}
    best = algorithm.act(algorithm.state, obs)
    tried = algorithm.explore(algorithm.state, obs, noise, torch.tensor(0.5))
    torch.testing.assert_close(tried, (best + 0.1 * noise["action"]).clamp(-1, 1))
    assert (tried - best).std() > 0.05


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"policy_delay": 0}, "policy_delay"),
        ({"exploration_noise": -0.1}, "exploration_noise"),
        ({"policy_noise": -0.1}, "policy_noise"),
        ({"noise_clip": -1.0}, "noise_clip"),
        ({"alpha": 0.1}, "alpha"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_td3(**settings)


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def shared_between_atoms(probabilities: np.ndarray, values: np.ndarray, atoms: np.ndarray) -> Any:
    """Divide each probability between the atoms on both sides of its value, one by one."""
    found, spacing = np.zeros_like(probabilities), atoms[1] - atoms[0]
    for probability, value in zip(probabilities, values, strict=True):
        place = (np.clip(value, atoms[0], atoms[-1]) - atoms[0]) / spacing
        lower = min(int(np.floor(place)), len(atoms) - 2)
        found[lower] += probability * (1 - (place - lower))
        found[lower + 1] += probability * (place - lower)
    return found


def test_categorical_critics_agree_with_an_independent_implementation() -> None:
    settings = {"num_atoms": 5, "value_min": -2.0, "value_max": 2.0, "policy_noise": 0.0}
    algorithm, batch = make_td3(**settings), make_batch()
    noise = {"next_action": torch.zeros(2, 2)}
    _, metrics = td3_loss(algorithm, algorithm.state, batch, noise)

    networks, state, atoms = algorithm.networks(), algorithm.state, np.linspace(-2, 2, 5)
    actor = by_hand.layers(networks["actor"], state["actor"])
    target_actor = by_hand.layers(networks["actor"], state["target_actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    target_critics = by_hand.members(networks["critic"], state["target_critic"])
    losses, targets, values = [], [], []
    for index in range(2):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_action = np.tanh(by_hand.forward(target_actor, next_obs))
        of_critics = [softmax(by_hand.forward(q, next_obs, next_action)) for q in target_critics]
        least = min(of_critics, key=lambda each: each @ atoms)
        target = shared_between_atoms(least, reward + discount * atoms, atoms)
        targets.append(target @ atoms)
        found = [softmax(by_hand.forward(q, obs, action)) for q in critics]
        losses.append([-(target * np.log(each)).sum() for each in found])
        own_action = np.tanh(by_hand.forward(actor, obs))
        values.append(softmax(by_hand.forward(critics[0], obs, own_action)) @ atoms)

    assert metrics["critic_loss"].item() == pytest.approx(np.mean(losses, axis=0).sum(), rel=1e-4)
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(-np.mean(values), rel=1e-4)


def test_a_distribution_needs_a_range() -> None:
    with pytest.raises(ConfigError, match="must be less than value_max"):
        make_td3(num_atoms=5, value_min=2.0, value_max=1.0)
