"""IQL's update, compared with an independent implementation."""

from __future__ import annotations

import math

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch
from hypothesis import given
from hypothesis import strategies as st

from rl_training.algorithms import IQLAlgorithm
from rl_training.algorithms.functional import expectile_loss
from rl_training.algorithms.iql import SPEC, iql_loss
from rl_training.config import TrainConfig
from rl_training.config_files import load_config
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, Batch, State

VALUE_METRICS = {"critic_loss", "q_mean", "target_q_mean", "value_loss", "value_mean"}
POLICY_METRICS = {"actor_loss", "advantage_mean", "advantage_weight_mean"}
LEARNED = ("actor", "critic", "value")


def make_iql(planned_updates: int | None = None, **settings: object) -> IQLAlgorithm:
    chosen = {"hidden_sizes": [8, 8], "learning_rate": 1e-2, **settings}
    algorithm = IQLAlgorithm(3, 2, chosen, seed=3, planned_updates=planned_updates)
    algorithm.state["target_critic"].mul_(0.7)  # to detect a mix-up with the critic
    log_std(algorithm).copy_(torch.tensor([-0.5, 0.3]))  # to detect a mix-up of the components
    return algorithm


def log_std(algorithm: IQLAlgorithm) -> torch.Tensor:
    return algorithm.model.actor.unflatten(algorithm.state["actor"])["log_std"]


def shift_advantages(algorithm: IQLAlgorithm, by: float) -> None:
    algorithm.model.critic.unflatten(algorithm.state["target_critic"])["bias_2"].add_(by)


def test_losses_and_targets_agree_with_an_independent_implementation() -> None:
    algorithm = make_iql(expectile=0.8, beta=4.0, max_advantage_weight=1.5)
    batch = make_batch()
    algorithm.state["target_critic"].mul_(3.0)
    algorithm.state["value"].mul_(2.0)
    shift_advantages(algorithm, 0.5)
    total, metrics = iql_loss(algorithm, algorithm.state, batch, {})

    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    std = by_hand.free_std(networks["actor"], state["actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    target_critics = by_hand.members(networks["critic"], state["target_critic"])
    value = by_hand.layers(networks["value"], state["value"])
    critic_terms, value_terms, actor_terms = [], [], []
    all_q, targets, values, advantages, weights = [], [], [], [], []
    for index in range(2):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        targets.append(reward + discount * by_hand.forward(value, next_obs)[0])
        q_values = [by_hand.forward(q, obs, action)[0] for q in critics]
        all_q += q_values
        critic_terms.append([(q - targets[-1]) ** 2 for q in q_values])
        values.append(by_hand.forward(value, obs)[0])
        target_q = min(by_hand.forward(q, obs, action)[0] for q in target_critics)
        advantages.append(target_q - values[-1])
        value_terms.append((0.8 if advantages[-1] > 0 else 0.2) * advantages[-1] ** 2)
        weights.append(min(np.exp(4.0 * advantages[-1]), 1.5))
        mean = np.tanh(by_hand.forward(actor, obs))
        actor_terms.append(-weights[-1] * by_hand.gaussian_log_prob(action, mean, std))

    assert targets[0] == pytest.approx(float(batch.reward[0]))  # termination does not bootstrap
    assert min(advantages) < 0 < max(advantages)  # both sides of the expectile occur
    assert min(weights) < max(weights) == 1.5  # one weight is clipped, one is not
    critic_loss = 0.5 * np.mean(critic_terms, axis=0).sum()
    expected = {
        "critic_loss": critic_loss,
        "q_mean": np.mean(all_q),
        "target_q_mean": np.mean(targets),
        "value_loss": np.mean(value_terms),
        "value_mean": np.mean(values),
        "actor_loss": np.mean(actor_terms),
        "advantage_mean": np.mean(advantages),
        "advantage_weight_mean": np.mean(weights),
    }
    assert by_hand.numbers(metrics) == pytest.approx(expected, rel=1e-4)
    losses = critic_loss + np.mean(value_terms) + np.mean(actor_terms)
    assert total.item() == pytest.approx(losses, rel=1e-4)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20), st.floats(0.01, 0.99))
def test_the_weight_of_an_error_depends_on_its_sign(errors: list[float], expectile: float) -> None:
    given_ones = torch.tensor(errors, dtype=torch.float64)
    by_rows = [(expectile if e > 0 else 1 - expectile) * e * e for e in errors]
    loss = expectile_loss(given_ones, expectile).item()
    assert loss == pytest.approx(np.mean(by_rows), rel=1e-6, abs=1e-9)
    mirrored = expectile_loss(-given_ones, 1 - expectile).item()
    assert loss == pytest.approx(mirrored, rel=1e-6, abs=1e-9)
    half = expectile_loss(given_ones, 0.5).item()
    assert half == pytest.approx(0.5 * np.mean(np.square(errors)), rel=1e-6, abs=1e-9)


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=10),
    st.floats(0.5, 0.9),
    st.floats(0.01, 0.09),
)
def test_the_best_value_increases_with_the_expectile(
    samples: list[float], expectile: float, more: float
) -> None:
    values = torch.tensor(samples, dtype=torch.float64)
    grid = torch.linspace(-10, 10, 2_001, dtype=torch.float64)

    def best(level: float) -> float:
        losses = torch.stack([expectile_loss(values - v, level) for v in grid[::20]])
        coarse = grid[::20][losses.argmin()].item()
        near = grid[(grid - coarse).abs() <= 0.21]
        losses = torch.stack([expectile_loss(values - v, level) for v in near])
        return near[losses.argmin()].item()

    lower, higher = best(expectile), best(expectile + more)
    assert np.mean(samples) - 0.011 <= lower <= higher + 0.011 <= max(samples) + 0.022


def test_beta_multiplies_the_advantage() -> None:
    algorithm, batch = make_iql(), make_batch(rows=64)
    q = algorithm.model.q_values(batch.obs, batch.action, critic=algorithm.state["target_critic"])
    advantage = q.min(-1).values - algorithm.model.state_values(batch.obs)
    for beta in (0.5, 3.0, 10.0):
        algorithm = make_iql(beta=beta)
        _, metrics = algorithm.actor_loss(algorithm.state, batch, {})
        expected = (beta * advantage).exp().clamp(max=100.0).mean().item()
        assert metrics["advantage_weight_mean"].item() == pytest.approx(expected, rel=1e-4)
    greedy, timid = (
        make_iql(beta=beta).update(batch).metrics["advantage_weight_mean"] for beta in (10.0, 0.1)
    )
    assert abs(timid - 1) < 0.2 < abs(greedy - 1)


def test_with_beta_zero_the_update_equals_behavior_cloning() -> None:
    algorithm, batch = make_iql(beta=0.0), make_batch(rows=16)

    def cloning(state: State) -> torch.Tensor:
        return -algorithm.model.action_logprobs(
            batch.obs, batch.action, actor=state["actor"]
        ).mean()

    def loss(state: State) -> torch.Tensor:
        return algorithm.actor_loss(state, batch, {})[0]

    expected = by_hand.gradients(cloning, algorithm.state, ["actor"])["actor"]
    found = by_hand.gradients(loss, algorithm.state, ["actor"])["actor"]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("advantage", [10.0, 1e4, 1e30])
def test_weights_are_clipped_at_100_for_any_advantage(advantage: float) -> None:
    algorithm, batch = make_iql(), make_batch(rows=16)
    shift_advantages(algorithm, advantage)
    metrics = algorithm.update(batch).metrics
    assert metrics["advantage_weight_mean"].item() == pytest.approx(100.0)
    assert torch.isfinite(metrics["actor_loss"])
    assert torch.isfinite(algorithm.state["actor"]).all()


@pytest.mark.parametrize("advantage", [-1e4, -1e30])
def test_bad_actions_have_no_weight(advantage: float) -> None:
    algorithm, batch = make_iql(), make_batch(rows=16)
    shift_advantages(algorithm, advantage)
    metrics = algorithm.update(batch).metrics
    assert metrics["advantage_weight_mean"].item() == 0.0
    assert torch.isfinite(algorithm.state["actor"]).all()


def test_each_loss_has_gradients_only_for_its_own_parameters() -> None:
    algorithm, batch = make_iql(), make_batch()
    names = (*LEARNED, "target_critic")

    def values(state: State) -> torch.Tensor:
        return algorithm.value_losses(state, batch, {})[0]

    def policy(state: State) -> torch.Tensor:
        return algorithm.actor_loss(state, batch, {})[0]

    assert by_hand.reached(values, algorithm.state, names) == {"critic", "value"}
    assert by_hand.reached(policy, algorithm.state, names) == {"actor"}


def test_the_value_loss_uses_the_target_critics_and_not_the_rewards() -> None:
    algorithm, batch = make_iql(), make_batch(rows=16)

    def gradients(batch: Batch) -> State:
        return by_hand.gradients(
            lambda state: algorithm.value_losses(state, batch, {})[0],
            algorithm.state,
            ["critic", "value"],
        )

    before = gradients(batch)
    rewarded = gradients(batch._replace(reward=batch.reward + 10))
    assert torch.equal(before["value"], rewarded["value"])
    assert not torch.equal(before["critic"], rewarded["critic"])
    shift_advantages(algorithm, 1.0)
    shifted = gradients(batch)
    assert torch.equal(before["critic"], shifted["critic"])
    assert not torch.equal(before["value"], shifted["value"])


def test_critics_are_evaluated_only_at_actions_of_the_data() -> None:
    algorithm, batch = make_iql(), make_batch(rows=8)
    queries = by_hand.watch_q_values(algorithm)
    algorithm.update(batch)
    assert queries
    assert all(obs is batch.obs and actions is batch.action for obs, actions in queries)


def test_the_schedule_applies_only_to_the_actor() -> None:
    halfway = make_iql(planned_updates=10)
    halfway.state["updates"].fill_(5)
    before = copy_state(halfway)
    halfway.update(make_batch())
    assert by_hand.largest_step(before, halfway, "actor") == pytest.approx(0.5e-2, rel=1e-2)
    for name in ("critic", "value"):
        assert by_hand.largest_step(before, halfway, name) == pytest.approx(1e-2, rel=1e-2)

    done = make_iql(planned_updates=10)
    done.state["updates"].fill_(10)
    before = copy_state(done)
    done.update(make_batch())
    assert by_hand.largest_step(before, done, "actor") == pytest.approx(0.0, abs=1e-8)
    for name in ("critic", "value"):
        assert by_hand.largest_step(before, done, name) == pytest.approx(1e-2, rel=1e-2)


def test_each_network_uses_its_own_learning_rate() -> None:
    algorithm = make_iql(actor_learning_rate=1e-3, critic_learning_rate=1e-1)
    before = copy_state(algorithm)
    algorithm.update(make_batch())
    assert by_hand.largest_step(before, algorithm, "actor") == pytest.approx(1e-3, rel=1e-2)
    for name in ("critic", "value"):
        assert by_hand.largest_step(before, algorithm, name) == pytest.approx(1e-1, rel=1e-2)


def test_the_standard_deviation_is_learned_and_independent_of_the_state() -> None:
    algorithm, obs = make_iql(), 0.1 * torch.randn(8, 3)
    assert log_std(algorithm).shape == (2,)
    before = log_std(algorithm).clone()
    algorithm.update(make_batch())
    assert (log_std(algorithm) != before).all()

    log_std(algorithm).copy_(torch.tensor([0.1, 0.2]).log())
    noise = {"action": torch.full((8, 2), 2.0)}
    explored = algorithm.explore(algorithm.state, obs, noise, torch.tensor(0.5))
    spread = explored - algorithm.act(algorithm.state, obs)
    torch.testing.assert_close(spread, torch.tensor([0.2, 0.4]).expand(8, 2))
    noise = {"action": torch.full((8, 2), 50.0)}
    assert algorithm.explore(algorithm.state, obs, noise, torch.tensor(0.5)).max() == 1.0


def test_a_delayed_policy_is_unchanged_and_not_logged_between_its_updates() -> None:
    algorithm = make_iql(policy_delay=2, tau=0.25)
    before = copy_state(algorithm)
    off = algorithm.update(make_batch(seed=1))
    moved = changed(before, algorithm)
    assert {"critic", "value", "target_critic"} <= moved
    assert not {name for name in moved if name.startswith("actor")}
    assert off.metrics.keys() == VALUE_METRICS
    expected = 0.75 * before["target_critic"] + 0.25 * algorithm.state["critic"]
    torch.testing.assert_close(algorithm.state["target_critic"], expected)
    before = copy_state(algorithm)
    on = algorithm.update(make_batch())
    assert {*LEARNED, "target_critic"} <= changed(before, algorithm)
    assert on.metrics.keys() == VALUE_METRICS | POLICY_METRICS


@pytest.mark.thorough
def test_a_constant_action_component_does_not_dominate_the_loss() -> None:
    """Without a lower bound, its standard deviation would shrink and its gradient grow."""
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(256, 3, generator=generator)
    actions = torch.stack([0.5 * torch.tanh(obs[:, 0]), torch.full((256,), 0.3)], dim=-1)
    batch = make_batch(rows=256)._replace(obs=obs, action=actions)
    algorithm = IQLAlgorithm(3, 2, {"hidden_sizes": [32, 32], "learning_rate": 1e-2}, seed=0)
    for _ in range(2_000):
        algorithm.update(batch)
    log_std = algorithm.model.head._log_std(algorithm.model.actor, algorithm.state["actor"])
    assert log_std.min().item() == pytest.approx(-5.0)
    errors = (algorithm.act(algorithm.state, obs) - actions).abs().mean(0)
    assert errors.max() < 0.03


def test_the_actor_schedule_is_used_only_for_offline_runs() -> None:
    schedules = {
        regime: TrainConfig(
            algo="iql", regime=regime, dataset={"kind": "random", "size": 10}
        ).hyperparameters.learning_rate_schedule
        for regime in ("offline", "online", "mixed")
    }
    assert schedules == {"offline": "cosine", "online": "constant", "mixed": "constant"}
    linear = TrainConfig(
        algo="iql",
        regime="mixed",
        dataset={"kind": "random", "size": 10},
        algo_kwargs={"learning_rate_schedule": "linear"},
    )
    assert linear.hyperparameters.learning_rate_schedule == "linear"
    assert load_config("iql/mujoco", ["regime=mixed"]).hyperparameters.decay == "constant"


def test_the_packaged_config_scales_rewards_as_in_the_paper() -> None:
    [section] = load_config("iql/mujoco").dataset_sections
    assert section.reward_normalization == "return_range"


def test_defaults_are_the_papers() -> None:
    chosen = IQLAlgorithm(3, 2).hyperparameters
    assert (chosen.expectile, chosen.beta, chosen.max_advantage_weight) == (0.7, 3.0, 100.0)
    assert (chosen.learning_rate, chosen.batch_size, chosen.tau) == (3e-4, 256, 0.005)
    assert (chosen.gamma, chosen.hidden_sizes, chosen.num_critics) == (0.99, (256, 256), 2)
    assert (chosen.learning_rate_schedule, chosen.policy_delay) == ("auto", 1)
    assert SPEC.regimes[0] == "offline"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"expectile": 0.0}, "expectile"),
        ({"expectile": 1.0}, "expectile"),
        ({"expectile": 1.5}, "expectile"),
        ({"beta": -1.0}, "beta"),
        ({"beta": math.inf}, "beta"),
        ({"max_advantage_weight": 0.0}, "max_advantage_weight"),
        ({"max_advantage_weight": -100.0}, "max_advantage_weight"),
        ({"tau": 0.0}, "tau"),
        ({"learning_rate_schedule": "step"}, "learning_rate_schedule"),
        ({"alpha": 0.2}, "alpha"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_iql(**settings)


def test_discrete_losses_agree_with_an_independent_implementation() -> None:
    settings = {"hidden_sizes": [8], "expectile": 0.8, "beta": 2.0}
    algorithm = IQLAlgorithm(3, ActionSpec("discrete", 4), settings, seed=3)
    algorithm.state["target_critic"].mul_(-0.7)
    batch = by_hand.make_batch(rows=6, choices=4)
    _, metrics = iql_loss(algorithm, algorithm.state, batch, {})
    state, networks = algorithm.state, algorithm.networks()
    actor = by_hand.layers(networks["actor"], state["actor"])
    values = by_hand.layers(networks["value"], state["value"])
    critics = by_hand.members(networks["critic"], state["critic"])
    targets = by_hand.members(networks["critic"], state["target_critic"])

    value_terms, critic_terms, actor_terms = [], [], []
    for index in range(6):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        chosen = int(action)
        least = min(by_hand.forward(critic, obs)[chosen] for critic in targets)
        advantage = least - by_hand.forward(values, obs)[0]
        value_terms.append((0.8 if advantage > 0 else 0.2) * advantage**2)
        target = reward + discount * by_hand.forward(values, next_obs)[0]
        critic_terms.append(
            sum(0.5 * (by_hand.forward(critic, obs)[chosen] - target) ** 2 for critic in critics)
        )
        log_probs = by_hand.log_softmax(by_hand.forward(actor, obs))
        actor_terms.append(-min(np.exp(2.0 * advantage), 100.0) * log_probs[chosen])
    assert metrics["value_loss"].item() == pytest.approx(np.mean(value_terms), rel=1e-4)
    assert metrics["critic_loss"].item() == pytest.approx(np.mean(critic_terms), rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(np.mean(actor_terms), rel=1e-4)
