"""AWAC's update, compared with an independent implementation."""

from __future__ import annotations

import math

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch
from hypothesis import given
from hypothesis import strategies as st

from rl_training.algorithms import AWACAlgorithm
from rl_training.algorithms.awac import SPEC, awac_loss
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.functional import advantage_weights
from rl_training.errors import ConfigError
from rl_training.types import Batch, Noise, State

CRITIC_METRICS = {"critic_loss", "q_mean", "target_q_mean"}
POLICY_METRICS = {"actor_loss", "advantage_mean", "advantage_weight_mean"}


def make_awac(**settings: object) -> AWACAlgorithm:
    chosen = {"hidden_sizes": [8, 8], "learning_rate": 1e-2, **settings}
    algorithm = AWACAlgorithm(3, 2, chosen, seed=3)
    algorithm.state["target_critic"].mul_(0.7)  # to detect a mix-up with the critic
    return algorithm


def draw(algorithm: AWACAlgorithm, rows: int = 2) -> Noise:
    return draw_noise(algorithm.update_noise(rows), algorithm.generator)


def test_losses_and_targets_agree_with_an_independent_implementation() -> None:
    algorithm, batch = make_awac(awac_lambda=0.5, max_advantage_weight=1.2), make_batch()
    algorithm.state["critic"].mul_(5.0)  # for different advantages
    noise = draw(algorithm)
    total, metrics = awac_loss(algorithm, algorithm.state, batch, noise)

    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    std = by_hand.free_std(networks["actor"], state["actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    target_critics = by_hand.members(networks["critic"], state["target_critic"])
    critic_terms, actor_terms, targets, advantages, weights = [], [], [], [], []
    for index in range(2):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_action = by_hand.gaussian_action(actor, std, next_obs, noise["next_action"][index])
        next_value = min(by_hand.forward(q, next_obs, next_action)[0] for q in target_critics)
        targets.append(reward + discount * next_value)
        q_values = [by_hand.forward(q, obs, action)[0] for q in critics]
        critic_terms.append([(q - targets[-1]) ** 2 for q in q_values])
        own = by_hand.gaussian_action(actor, std, obs, noise["action"][index])
        advantages.append(min(q_values) - min(by_hand.forward(q, obs, own)[0] for q in critics))
        weights.append(min(np.exp(advantages[-1] / 0.5), 1.2))
        log_prob = by_hand.gaussian_log_prob(action, np.tanh(by_hand.forward(actor, obs)), std)
        actor_terms.append(-weights[-1] * log_prob)

    assert targets[0] == pytest.approx(float(batch.reward[0]))  # termination does not bootstrap
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)
    critic_loss = 0.5 * np.mean(critic_terms, axis=0).sum()
    assert metrics["critic_loss"].item() == pytest.approx(critic_loss, rel=1e-4)
    assert metrics["advantage_mean"].item() == pytest.approx(np.mean(advantages), rel=1e-3)
    assert metrics["advantage_weight_mean"].item() == pytest.approx(np.mean(weights), rel=1e-4)
    assert min(weights) < max(weights) == 1.2  # one weight is clipped, one is not
    assert metrics["actor_loss"].item() == pytest.approx(np.mean(actor_terms), rel=1e-4)
    assert total.item() == pytest.approx(critic_loss + np.mean(actor_terms), rel=1e-4)


@pytest.mark.thorough
def test_actions_on_a_bound_do_not_dominate_the_policy() -> None:
    """Of ten equally good actions, nine are near 0.5 and one is 1: the policy learns the mean."""
    generator = torch.Generator().manual_seed(0)
    actions = 0.5 + 0.1 * torch.randn(2_000, 1, generator=generator)
    actions[::10] = 1.0
    obs = torch.zeros(2_000, 3)
    batch = Batch(obs, actions, torch.zeros(2_000), torch.zeros(2_000), obs)
    algorithm = AWACAlgorithm(3, 1, {"hidden_sizes": [16], "learning_rate": 3e-3}, seed=0)
    for _ in range(1_500):
        algorithm.update(batch)
    found = algorithm.act(algorithm.state, obs[:1]).item()
    assert found == pytest.approx(actions.mean().item(), abs=0.02)


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20),
    st.floats(1e-3, 1e6),
)
def test_weights_are_exponential_up_to_the_maximum(scaled: list[float], largest: float) -> None:
    weights = advantage_weights(torch.tensor(scaled), largest).tolist()
    for advantage, weight in zip(scaled, weights, strict=True):
        expected = math.exp(advantage) if advantage < math.log(largest) else largest
        assert weight == pytest.approx(expected, rel=1e-4, abs=1e-30)
        assert 0 <= weight <= largest * (1 + 1e-6)
    order = np.argsort(scaled, kind="stable")
    assert np.all(np.diff(np.array(weights)[order]) >= 0)


def test_lambda_divides_the_advantage() -> None:
    algorithm, batch = make_awac(), make_batch(rows=64)
    noise = draw(algorithm, 64)
    own = algorithm.model.actions(batch.obs, noise=noise["action"])
    q = [algorithm.model.q_values(batch.obs, a).min(-1).values for a in (batch.action, own)]
    for awac_lambda in (0.1, 1.0, 10.0):
        algorithm = make_awac(awac_lambda=awac_lambda)
        _, metrics = algorithm.actor_loss(algorithm.state, batch, noise)
        expected = ((q[0] - q[1]) / awac_lambda).exp().clamp(max=100.0).mean().item()
        assert metrics["advantage_weight_mean"].item() == pytest.approx(expected, rel=1e-4)


def test_the_baseline_of_the_advantage_is_the_policys_own_action() -> None:
    algorithm, batch = make_awac(), make_batch(rows=8)
    noise = draw(algorithm, 8)
    own = algorithm.model.actions(batch.obs, noise=noise["action"]).detach()
    _, metrics = algorithm.actor_loss(algorithm.state, batch._replace(action=own), noise)
    assert metrics["advantage_mean"].item() == 0.0
    assert metrics["advantage_weight_mean"].item() == 1.0
    _, metrics = algorithm.actor_loss(algorithm.state, batch, noise)
    critics = algorithm.model.critic.unflatten(algorithm.state["critic"])
    critics["bias_2"].add_(100.0)  # a constant offset of the values does not change the advantage
    _, shifted = algorithm.actor_loss(algorithm.state, batch, noise)
    expected = metrics["advantage_mean"].item()
    assert shifted["advantage_mean"].item() == pytest.approx(expected, abs=1e-3)


def test_the_target_uses_the_current_policys_next_action() -> None:
    algorithm, batch = make_awac(), make_batch()
    assert algorithm.targets() == {"target_critic": "critic"}
    noise = draw(algorithm)
    _, before = algorithm.critic_loss(algorithm.state, batch, noise)
    algorithm.state["actor"].mul_(3.0)
    _, after = algorithm.critic_loss(algorithm.state, batch, noise)
    assert before["target_q_mean"] != after["target_q_mean"]
    noise["next_action"] = noise["next_action"] + 1.0  # sampled, not the mode
    _, redrawn = algorithm.critic_loss(algorithm.state, batch, noise)
    assert redrawn["target_q_mean"] != after["target_q_mean"]


@pytest.mark.parametrize("advantage", [10.0, 1e4, 1e30])
def test_weights_are_clipped_for_any_advantage(
    advantage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, batch = make_awac(), make_batch(rows=16)

    def q_values(obs: torch.Tensor, actions: torch.Tensor, **options: object) -> torch.Tensor:
        level = advantage if actions is batch.action else 0.0
        return torch.full((len(obs), 2), level)

    monkeypatch.setattr(algorithm.model, "q_values", q_values)
    noise = draw(algorithm, 16)
    found = by_hand.gradients(
        lambda state: algorithm.actor_loss(state, batch, noise)[0], algorithm.state, ["actor"]
    )
    assert torch.isfinite(found["actor"]).all()
    _, metrics = algorithm.actor_loss(algorithm.state, batch, noise)
    assert metrics["advantage_weight_mean"].item() == pytest.approx(100.0)


def test_weights_have_no_gradient() -> None:
    algorithm, batch = make_awac(awac_lambda=0.1), make_batch(rows=16)
    noise = draw(algorithm, 16)
    model = algorithm.model
    own = model.actions(batch.obs, noise=noise["action"])
    q = [model.q_values(batch.obs, a).min(-1).values for a in (batch.action, own)]
    weights = ((q[0] - q[1]) / 0.1).exp().clamp(max=100.0).detach()

    def regression(state: State) -> torch.Tensor:
        log_probs = model.action_logprobs(batch.obs, batch.action, actor=state["actor"])
        return -(weights * log_probs).mean()

    def loss(state: State) -> torch.Tensor:
        return algorithm.actor_loss(state, batch, noise)[0]

    expected = by_hand.gradients(regression, algorithm.state, ["actor"])["actor"]
    found = by_hand.gradients(loss, algorithm.state, ["actor"])["actor"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_each_loss_has_gradients_only_for_its_own_parameters() -> None:
    algorithm, batch = make_awac(), make_batch()
    noise, names = draw(algorithm), ("actor", "critic", "target_critic")

    def critic(state: State) -> torch.Tensor:
        return algorithm.critic_loss(state, batch, noise)[0]

    def policy(state: State) -> torch.Tensor:
        return algorithm.actor_loss(state, batch, noise)[0]

    assert by_hand.reached(critic, algorithm.state, names) == {"critic"}
    assert by_hand.reached(policy, algorithm.state, names) == {"actor"}


def test_each_network_uses_its_own_learning_rate() -> None:
    algorithm = make_awac(actor_learning_rate=1e-3, critic_learning_rate=1e-1)
    before = copy_state(algorithm)
    algorithm.update(make_batch())
    assert by_hand.largest_step(before, algorithm, "actor") == pytest.approx(1e-3, rel=1e-2)
    assert by_hand.largest_step(before, algorithm, "critic") == pytest.approx(1e-1, rel=1e-2)


def test_a_delayed_policy_is_unchanged_and_not_logged_between_its_updates() -> None:
    algorithm = make_awac(policy_delay=2, tau=0.25)
    before = copy_state(algorithm)
    off = algorithm.update(make_batch(seed=1))
    moved = changed(before, algorithm)
    assert {"critic", "target_critic"} <= moved
    assert not {name for name in moved if name.startswith("actor")}
    assert off.metrics.keys() == CRITIC_METRICS
    expected = 0.75 * before["target_critic"] + 0.25 * algorithm.state["critic"]
    torch.testing.assert_close(algorithm.state["target_critic"], expected)
    before = copy_state(algorithm)
    on = algorithm.update(make_batch())
    assert {"actor", "critic", "target_critic"} <= changed(before, algorithm)
    assert on.metrics.keys() == CRITIC_METRICS | POLICY_METRICS


def test_actions_on_the_bounds_give_finite_updates() -> None:
    algorithm = make_awac()
    for seed in range(50):
        batch = make_batch(rows=16, seed=seed)
        result = algorithm.update(batch._replace(action=batch.action.sign()))
        assert all(torch.isfinite(metric) for metric in result.metrics.values())
    assert all(torch.isfinite(tensor).all() for tensor in algorithm.state.values())
    on_the_bound = torch.full((16, 2), 1.0)
    log_probs = algorithm.model.action_logprobs(make_batch(rows=16).obs, on_the_bound)
    assert torch.isfinite(log_probs).all()


def test_defaults_are_the_documented_ones() -> None:
    chosen = AWACAlgorithm(3, 2).hyperparameters
    assert (chosen.awac_lambda, chosen.max_advantage_weight) == (1.0, 100.0)
    assert (chosen.learning_rate, chosen.tau, chosen.gamma) == (3e-4, 0.005, 0.99)
    assert (chosen.num_critics, chosen.policy_delay) == (2, 1)
    assert SPEC.regimes == ("offline", "online", "mixed")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"awac_lambda": 0.0}, "awac_lambda"),
        ({"awac_lambda": -1.0}, "awac_lambda"),
        ({"max_advantage_weight": 0.0}, "max_advantage_weight"),
        ({"max_advantage_weight": math.inf}, "max_advantage_weight"),
        ({"num_critics": 0}, "num_critics"),
        ({"policy_delay": 0}, "policy_delay"),
        ({"beta": 3.0}, "beta"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_awac(**settings)
