"""TD3+BC's update, compared with an independent implementation."""

from __future__ import annotations

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import TD3BCAlgorithm
from rl_training.algorithms.td3_bc import SPEC, td3_bc_loss
from rl_training.errors import ConfigError
from rl_training.types import Batch, State


def make_td3_bc(**settings: object) -> TD3BCAlgorithm:
    chosen = {"hidden_sizes": [8, 8], "learning_rate": 1e-2, **settings}
    algorithm = TD3BCAlgorithm(3, 2, chosen, seed=3)
    for name in ("target_actor", "target_critic"):
        algorithm.state[name].mul_(0.7)  # to detect a mix-up with the network
    return algorithm


def scale_critics(algorithm: TD3BCAlgorithm, factor: float, shift: float = 0.0) -> None:
    """Change the critics so that Q-values become `factor * Q + shift`."""
    parts = algorithm.model.critic.unflatten(algorithm.state["critic"])
    parts["weight_2"].mul_(factor)
    parts["bias_2"].mul_(factor).add_(shift)


def actor_gradient(algorithm: TD3BCAlgorithm, batch: Batch) -> torch.Tensor:
    def loss(state: State) -> torch.Tensor:
        return algorithm.actor_loss(state, batch, {})[0]

    return by_hand.gradients(loss, algorithm.state, ["actor"])["actor"]


def test_losses_and_targets_agree_with_an_independent_implementation() -> None:
    algorithm = make_td3_bc(policy_noise=0.25, noise_clip=0.4, bc_alpha=1.7)
    batch = make_batch()
    noise = {"next_action": torch.tensor([[0.5, -9.0], [4.0, 1.0]])}
    total, metrics = td3_bc_loss(algorithm, algorithm.state, batch, noise)

    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    target_actor = by_hand.layers(networks["actor"], state["target_actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    target_critics = by_hand.members(networks["critic"], state["target_critic"])
    disturbances = np.array([[0.125, -0.4], [0.4, 0.25]])  # scaled by 0.25, clipped at 0.4
    critic_terms, values, distances, targets = [], [], [], []
    for index in range(2):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_action = np.tanh(by_hand.forward(target_actor, next_obs)) + disturbances[index]
        next_action = np.clip(next_action, -1, 1)
        next_value = min(by_hand.forward(q, next_obs, next_action)[0] for q in target_critics)
        targets.append(reward + discount * next_value)
        q_values = [by_hand.forward(q, obs, action)[0] for q in critics]
        critic_terms.append([(q - targets[-1]) ** 2 for q in q_values])
        chosen = np.tanh(by_hand.forward(actor, obs))
        values.append(by_hand.forward(critics[0], obs, chosen)[0])
        distances.append((chosen - action) ** 2)

    assert targets[0] == pytest.approx(float(batch.reward[0]))  # termination does not bootstrap
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)
    critic_loss = 0.5 * np.mean(critic_terms, axis=0).sum()
    assert metrics["critic_loss"].item() == pytest.approx(critic_loss, rel=1e-4)
    bc_lambda = 1.7 / np.mean(np.abs(values))
    assert metrics["bc_lambda"].item() == pytest.approx(bc_lambda, rel=1e-4)
    assert metrics["bc_loss"].item() == pytest.approx(np.mean(distances), rel=1e-4)
    actor_loss = -bc_lambda * np.mean(values) + np.mean(distances)
    assert metrics["actor_loss"].item() == pytest.approx(actor_loss, rel=1e-4)
    assert total.item() == pytest.approx(critic_loss + actor_loss, rel=1e-4)


def test_lambda_is_divided_by_the_mean_absolute_value() -> None:
    algorithm, batch = make_td3_bc(bc_alpha=2.0), make_batch(rows=64)
    actions = algorithm.act(algorithm.state, batch.obs)
    q = algorithm.model.q_values(batch.obs, actions)[:, 0]
    scale_critics(algorithm, 1.0, shift=-q.mean().item())
    q = q - q.mean()
    assert q.min() < 0 < q.max()
    _, metrics = algorithm.actor_loss(algorithm.state, batch, {})
    expected = 2.0 / q.abs().mean().item()
    assert metrics["bc_lambda"].item() == pytest.approx(expected, rel=1e-3)


def test_lambda_has_no_gradient() -> None:
    algorithm, batch = make_td3_bc(), make_batch(rows=16)
    # With values of one sign, mean(Q) / mean|Q| is constant: with a gradient through lambda, the
    # actor would have none.
    scale_critics(algorithm, 1.0, shift=5.0)
    batch = batch._replace(action=algorithm.act(algorithm.state, batch.obs).clone())
    _, metrics = algorithm.actor_loss(algorithm.state, batch, {})

    def climb(state: State) -> torch.Tensor:
        actions = algorithm.model.actions(batch.obs, actor=state["actor"])
        q = algorithm.model.q_values(batch.obs, actions, critic=state["critic"])[:, 0]
        return -metrics["bc_lambda"].item() * q.mean()

    expected = by_hand.gradients(climb, algorithm.state, ["actor"])["actor"]
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(actor_gradient(algorithm, batch), expected, rtol=1e-4, atol=1e-7)


def test_the_actor_gradient_does_not_depend_on_the_reward_scale() -> None:
    algorithm, batch = make_td3_bc(), make_batch(rows=16)
    before = actor_gradient(algorithm, batch)
    scale_critics(algorithm, 1000.0)
    torch.testing.assert_close(actor_gradient(algorithm, batch), before, rtol=1e-3, atol=1e-6)


def test_with_zero_values_the_actor_only_clones_the_data() -> None:
    algorithm, batch = make_td3_bc(), make_batch(rows=16)
    scale_critics(algorithm, 0.0)

    def clone(state: State) -> torch.Tensor:
        actions = algorithm.model.actions(batch.obs, actor=state["actor"])
        return (actions - batch.action).square().mean()

    expected = by_hand.gradients(clone, algorithm.state, ["actor"])["actor"]
    torch.testing.assert_close(actor_gradient(algorithm, batch), expected)


def test_each_loss_has_gradients_only_for_its_own_parameters() -> None:
    algorithm, batch = make_td3_bc(), make_batch()
    noise = {"next_action": torch.ones(2, 2)}
    names = ("actor", "critic", "target_actor", "target_critic")

    def critic(state: State) -> torch.Tensor:
        return algorithm.critic_loss(state, batch, noise)[0]

    def actor(state: State) -> torch.Tensor:
        return algorithm.actor_loss(state, batch, noise)[0]

    assert by_hand.reached(critic, algorithm.state, names) == {"critic"}
    assert by_hand.reached(actor, algorithm.state, names) == {"actor"}


def test_each_network_uses_its_own_learning_rate() -> None:
    algorithm = make_td3_bc(
        policy_delay=1, actor_learning_rate=1e-3, critic_learning_rate=1e-1, tau=0.25
    )
    before = copy_state(algorithm)
    algorithm.update(make_batch())
    assert by_hand.largest_step(before, algorithm, "actor") == pytest.approx(1e-3, rel=1e-2)
    assert by_hand.largest_step(before, algorithm, "critic") == pytest.approx(1e-1, rel=1e-2)
    for name in ("actor", "critic"):
        expected = 0.75 * before[f"target_{name}"] + 0.25 * algorithm.state[name]
        torch.testing.assert_close(algorithm.state[f"target_{name}"], expected)


def test_actor_and_targets_are_unchanged_and_not_logged_between_policy_updates() -> None:
    algorithm = make_td3_bc()
    before = copy_state(algorithm)
    off = algorithm.update(make_batch())
    moments = {f"critic.adam_{part}" for part in ("mean", "square", "count")}
    assert changed(before, algorithm) == {"critic", "updates", *moments}
    assert off.metrics.keys() == {"critic_loss", "q_mean", "target_q_mean"}
    before = copy_state(algorithm)
    on = algorithm.update(make_batch())
    assert {"actor", "target_actor", "target_critic"} <= changed(before, algorithm)
    assert on.metrics.keys() - off.metrics.keys() == {"actor_loss", "bc_loss", "bc_lambda"}


def test_defaults_are_the_papers() -> None:
    chosen = TD3BCAlgorithm(3, 2).hyperparameters
    assert (chosen.bc_alpha, chosen.policy_delay) == (2.5, 2)
    assert (chosen.policy_noise, chosen.noise_clip) == (0.2, 0.5)
    assert (chosen.learning_rate, chosen.batch_size, chosen.tau) == (3e-4, 256, 0.005)
    assert (chosen.gamma, chosen.hidden_sizes, chosen.num_critics) == (0.99, (256, 256), 2)
    assert SPEC.normalizes_observations
    assert SPEC.regimes[0] == "offline"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"bc_alpha": 0.0}, "bc_alpha"),
        ({"bc_alpha": -2.5}, "bc_alpha"),
        ({"bc_alpha": float("inf")}, "bc_alpha"),
        ({"policy_noise": -0.1}, "policy_noise"),
        ({"noise_clip": -1.0}, "noise_clip"),
        ({"policy_delay": 0}, "policy_delay"),
        ({"beta": 3.0}, "beta"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_td3_bc(**settings)
