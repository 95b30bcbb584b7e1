"""SAC's update, compared with an independent implementation."""

from __future__ import annotations

import math

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import SACAlgorithm
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.sac import sac_loss
from rl_training.errors import ConfigError
from rl_training.models import MLPSACModel
from rl_training.types import ActionSpec, State

OBS_DIM, ACTION_DIM = 3, 2


def make_sac(**settings: object) -> SACAlgorithm:
    chosen = {"hidden_sizes": [8, 8], "learning_rate": 1e-2, **settings}
    return SACAlgorithm(OBS_DIM, ACTION_DIM, chosen, seed=3)


def test_losses_and_targets_agree_with_an_independent_implementation() -> None:
    algorithm, batch = make_sac(), make_batch()
    algorithm.state["log_alpha"].fill_(math.log(0.3))
    algorithm.state["target_critic"].mul_(0.7)  # to detect a mix-up with the critic
    noise = draw_noise(algorithm.update_noise(2), algorithm.generator)
    _, metrics = sac_loss(algorithm, algorithm.state, batch, noise)

    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    target_critics = by_hand.members(networks["critic"], state["target_critic"])
    critic_terms, actor_terms, log_probs, targets = [], [], [], []
    for index in range(2):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_action, next_log_prob = by_hand.squashed_gaussian(
            actor, next_obs, noise["next_action"][index]
        )
        soft_value = min(by_hand.forward(q, next_obs, next_action)[0] for q in target_critics)
        targets.append(reward + discount * (soft_value - 0.3 * next_log_prob))
        q_values = [by_hand.forward(q, obs, action)[0] for q in critics]
        critic_terms.append([(q - targets[-1]) ** 2 for q in q_values])
        chosen, log_prob = by_hand.squashed_gaussian(actor, obs, noise["action"][index])
        log_probs.append(log_prob)
        value = min(by_hand.forward(q, obs, chosen)[0] for q in critics)
        actor_terms.append(0.3 * log_prob - value)

    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)
    assert targets[0] == pytest.approx(float(batch.reward[0]))  # termination does not bootstrap
    expected = 0.5 * np.mean(critic_terms, axis=0).sum()
    assert metrics["critic_loss"].item() == pytest.approx(expected, rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(np.mean(actor_terms), rel=1e-4)
    expected = math.log(0.3) * (-np.mean(log_probs) + ACTION_DIM)
    assert metrics["alpha_loss"].item() == pytest.approx(expected, rel=1e-4)


def test_one_update_is_one_adam_step_on_each_loss() -> None:
    algorithm, batch = make_sac(), make_batch(rows=16)
    noise = draw_noise(algorithm.update_noise(16), torch.Generator().manual_seed(0))
    leaves = {
        name: algorithm.state[name].clone().requires_grad_()
        for name in ("actor", "critic", "log_alpha")
    }
    optimizer = torch.optim.Adam(leaves.values(), lr=1e-2)
    for _ in range(3):
        total, _ = sac_loss(algorithm, {**algorithm.state, **leaves}, batch, noise)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        with torch.no_grad():
            algorithm.step(algorithm.state, batch, noise, update_policy=True)
    for name, leaf in leaves.items():
        torch.testing.assert_close(algorithm.state[name], leaf.detach(), rtol=1e-4, atol=1e-6)


def test_target_critics_follow_by_tau() -> None:
    algorithm = make_sac(tau=0.25)
    before = copy_state(algorithm)
    algorithm.update(make_batch())
    expected = 0.75 * before["target_critic"] + 0.25 * algorithm.state["critic"]
    torch.testing.assert_close(algorithm.state["target_critic"], expected)


@pytest.mark.parametrize(
    ("name", "moved"), [("critic_loss", {"critic"}), ("policy_loss", {"actor", "log_alpha"})]
)
def test_each_loss_has_gradients_only_for_its_own_parameters(name: str, moved: set[str]) -> None:
    algorithm, batch = make_sac(), make_batch()
    noise = draw_noise(algorithm.update_noise(2), algorithm.generator)

    def loss(state: State) -> torch.Tensor:
        return getattr(algorithm, name)(state, batch, noise)[0]

    assert by_hand.reached(loss, algorithm.state, ("actor", "critic", "log_alpha")) == moved


def test_a_delayed_policy_is_unchanged_and_not_logged_between_its_updates() -> None:
    algorithm = make_sac(policy_delay=2)
    before = copy_state(algorithm)
    off = algorithm.update(make_batch(seed=1))
    moved = changed(before, algorithm)
    on = algorithm.update(make_batch())
    assert {"actor_loss", "alpha", "alpha_loss", "entropy"} <= on.metrics.keys()
    assert off.metrics.keys() == {"critic_loss", "q_mean", "target_q_mean"}
    assert {"critic", "target_critic"} <= moved
    assert not {name for name in moved if name.startswith(("actor", "log_alpha"))}
    assert on.num_gradient_steps == off.num_gradient_steps == 1


def test_fixed_alpha_does_not_change_and_is_used_in_the_target() -> None:
    algorithm = make_sac(alpha=0.0)
    result = algorithm.update(make_batch())
    assert algorithm.state["log_alpha"].exp().item() == 0.0
    assert "alpha_loss" not in result.metrics
    assert all(torch.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize(("target_entropy", "direction"), [(50.0, 1), (-50.0, -1)])
def test_temperature_rises_while_entropy_is_below_its_target(
    target_entropy: float, direction: int
) -> None:
    algorithm = make_sac(target_entropy=target_entropy)
    algorithm.update(make_batch(rows=32))
    assert math.copysign(1, algorithm.state["log_alpha"].item()) == direction


def test_separate_learning_rates_and_clipping_apply_to_their_parts() -> None:
    algorithm = make_sac(actor_learning_rate=1e-5, critic_learning_rate=1e-1)
    before = copy_state(algorithm)
    algorithm.update(make_batch())
    moved = {k: (algorithm.state[k] - before[k]).abs().max().item() for k in ("actor", "critic")}
    assert moved["actor"] == pytest.approx(1e-5, rel=0.05)
    assert moved["critic"] == pytest.approx(1e-1, rel=0.05)
    clipped = make_sac(max_grad_norm=1e-3)
    clipped.update(make_batch())
    norm = clipped.state["critic.adam_mean"].norm().item() / 0.1
    assert norm == pytest.approx(1e-3, rel=1e-2)


def test_the_update_counter_exceeds_the_exact_range_of_a_float() -> None:
    algorithm = make_sac(policy_delay=2)
    algorithm.state["updates"].fill_(2**24 + 1)
    algorithm.load_state(copy_state(algorithm))
    assert algorithm.update(make_batch()).metrics.keys() >= {"actor_loss"}
    assert algorithm.state["updates"].item() == 2**24 + 2


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_reach_zero_with_the_last_planned_update(schedule: str) -> None:
    algorithm = SACAlgorithm(
        OBS_DIM,
        ACTION_DIM,
        {"hidden_sizes": [8], "learning_rate_schedule": schedule, "warmup_steps": 2},
        planned_updates=10,
    )
    factors = []
    for _ in range(11):
        factors.append(float(algorithm.learning_rate_factor(algorithm.state)))
        algorithm.update(make_batch())
    assert factors[0] == pytest.approx(0.5)  # warming up
    assert factors[1] == pytest.approx(1.0)
    assert factors[2:] == sorted(factors[2:], reverse=True)
    assert factors[-1] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tau": 0.0}, "tau"),
        ({"gamma": 1.5}, "gamma"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": "automatic"}, "alpha"),
        ({"policy_delay": 0}, "policy_delay"),
        ({"num_critics": 0}, "num_critics"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"hidden_sizes": [0]}, "hidden_sizes"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_sac(**settings)


def test_any_number_of_critics_with_layer_norm() -> None:
    algorithm = make_sac(num_critics=5, critic_layer_norm=True)
    batch = make_batch()
    assert algorithm.model.q_values(batch.obs, batch.action).shape == (2, 5)
    before = copy_state(algorithm)
    algorithm.update(batch)
    scale = algorithm.model.critic.unflatten(algorithm.state["critic"])["scale_0"]
    assert "critic" in changed(before, algorithm)
    assert not torch.equal(scale, torch.ones_like(scale))


def test_log_probabilities_of_sampled_actions_equal_those_of_sampling() -> None:
    generator = torch.Generator().manual_seed(0)
    model = MLPSACModel(OBS_DIM, ACTION_DIM, (16,), generator=generator)
    obs = torch.randn(64, OBS_DIM, generator=generator)
    noise = torch.randn(64, ACTION_DIM, generator=generator)
    actions, log_probs = model.sample_actions(obs, noise=noise)
    assert actions.abs().max() <= 1
    torch.testing.assert_close(model.action_logprobs(obs, actions), log_probs, rtol=1e-3, atol=1e-3)


def test_log_probabilities_integrate_to_one() -> None:
    model = MLPSACModel(1, 1, (16,), generator=torch.Generator().manual_seed(0))
    # Evenly spaced before squashing, to include the mass close to the bounds.
    grid = torch.tanh(torch.linspace(-6, 6, 20_001))[:, None]
    density = model.action_logprobs(torch.ones(len(grid), 1), grid).exp()
    assert torch.trapezoid(density, grid[:, 0]).item() == pytest.approx(1.0, abs=1e-2)


def test_log_probabilities_at_the_bounds_are_finite_with_finite_gradients() -> None:
    model = MLPSACModel(OBS_DIM, ACTION_DIM, (16,))
    actions = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], requires_grad=True)
    log_probs = model.action_logprobs(torch.randn(2, OBS_DIM), actions)
    log_probs.sum().backward()
    assert torch.isfinite(log_probs).all()
    assert torch.isfinite(actions.grad).all()
    assert torch.isfinite(model.actor.vector.grad).all()


def test_the_model_has_the_learned_parameters() -> None:
    algorithm, obs = make_sac(), torch.randn(4, OBS_DIM)
    before = algorithm.act(algorithm.state, obs)
    for seed in range(5):
        algorithm.update(make_batch(seed=seed))
    assert not torch.equal(before, algorithm.act(algorithm.state, obs))
    assert torch.equal(algorithm.model.actions(obs), algorithm.act(algorithm.state, obs))
    assert algorithm.model.actor.vector.data_ptr() == algorithm.state["actor"].data_ptr()


# Discrete actions (1910.07207)

CHOICES = 4


def make_discrete(**settings: object) -> SACAlgorithm:
    chosen = {"hidden_sizes": [8, 8], "learning_rate": 1e-2, **settings}
    algorithm = SACAlgorithm(3, ActionSpec("discrete", CHOICES), chosen, seed=3)
    algorithm.state["target_critic"].mul_(-0.7)
    return algorithm


def test_discrete_losses_agree_with_an_independent_implementation() -> None:
    algorithm = make_discrete(initial_alpha=0.3)
    batch = by_hand.make_batch(rows=6, choices=CHOICES)
    assert algorithm.update_noise(6) == {}
    loss, metrics = sac_loss(algorithm, algorithm.state, batch, {})
    state, networks = algorithm.state, algorithm.networks()
    actor = by_hand.layers(networks["actor"], state["actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    targets = by_hand.members(networks["critic"], state["target_critic"])

    squares, actor_terms, entropies, target_values = [], [], [], []
    for index in range(6):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_log_probs = by_hand.log_softmax(by_hand.forward(actor, next_obs))
        least = np.min([by_hand.forward(critic, next_obs) for critic in targets], axis=0)
        value = (np.exp(next_log_probs) * (least - 0.3 * next_log_probs)).sum()
        target = reward + discount * value
        target_values.append(target)
        q = np.array([by_hand.forward(critic, obs) for critic in critics])
        squares.append(0.5 * ((q[:, int(action)] - target) ** 2).sum())
        log_probs = by_hand.log_softmax(by_hand.forward(actor, obs))
        actor_terms.append((np.exp(log_probs) * (0.3 * log_probs - q.min(0))).sum())
        entropies.append(-(np.exp(log_probs) * log_probs).sum())
    assert metrics["critic_loss"].item() == pytest.approx(np.mean(squares), rel=1e-4)
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(target_values), rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(np.mean(actor_terms), rel=1e-4)
    assert metrics["entropy"].item() == pytest.approx(np.mean(entropies), rel=1e-4)
    goal = 0.5 * np.log(CHOICES)
    alpha_loss = np.log(0.3) * (np.mean(entropies) - goal)
    assert metrics["alpha_loss"].item() == pytest.approx(alpha_loss, rel=1e-3)
    total = np.mean(squares) + np.mean(actor_terms) + alpha_loss
    assert loss.item() == pytest.approx(total, rel=1e-4)


def test_the_gradient_of_a_discrete_policy_is_that_of_the_exact_mean() -> None:
    algorithm, batch = make_discrete(alpha=0.2), by_hand.make_batch(rows=6, choices=CHOICES)
    found = by_hand.gradients(
        lambda state: algorithm.policy_loss(state, batch, {})[0], algorithm.state, ["actor"]
    )["actor"]

    def exact(state: dict[str, torch.Tensor]) -> torch.Tensor:
        log_probs = torch.log_softmax(algorithm.model.actor(batch.obs, state["actor"]), -1)
        q = algorithm.model.critic(batch.obs, state["critic"]).min(0).values
        return (log_probs.exp() * (0.2 * log_probs - q)).sum(-1).mean()

    expected = by_hand.gradients(exact, algorithm.state, ["actor"])["actor"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert by_hand.reached(
        lambda state: algorithm.policy_loss(state, batch, {})[0],
        algorithm.state,
        algorithm.networks(),
    ) == {"actor"}


def test_discrete_actions_are_sampled_with_the_policys_probabilities() -> None:
    algorithm = make_discrete()
    obs = torch.randn(1, 3).expand(20_000, 3)
    draws = algorithm.exploration_noise(20_000)
    assert {name: (draw.kind, draw.shape) for name, draw in draws.items()} == {
        "action": ("uniform", (20_000, 1))
    }
    noise = {"action": torch.rand(20_000, 1)}
    chosen = algorithm.explore(algorithm.state, obs, noise, torch.tensor(0.0))
    expected = torch.softmax(algorithm.model.actor(obs[:1], algorithm.state["actor"]), -1)[0]
    shares = torch.bincount(chosen, minlength=CHOICES) / 20_000
    torch.testing.assert_close(shares, expected, atol=0.02, rtol=0)
    assert algorithm.act(algorithm.state, obs[:1]).item() == expected.argmax().item()


@pytest.mark.parametrize(("given", "expected"), [("auto", 0.5 * np.log(CHOICES)), (0.7, 0.7)])
def test_the_target_entropy_of_discrete_actions(given: object, expected: float) -> None:
    assert make_discrete(target_entropy=given).target_entropy == pytest.approx(expected)
