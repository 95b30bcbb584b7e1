"""DQN's update, compared with an independent implementation."""

from __future__ import annotations

import by_hand
import numpy as np
import pytest
import torch
from by_hand import copy_state, make_batch

from rl_training.algorithms import DQNAlgorithm
from rl_training.algorithms.dqn import dqn_loss
from rl_training.errors import ConfigError

ACTIONS = 4


def make_dqn(**settings: object) -> DQNAlgorithm:
    chosen = {"hidden_sizes": [8, 8], "learning_rate": 1e-2, **settings}
    algorithm = DQNAlgorithm(3, ACTIONS, chosen, seed=3)
    for target in algorithm.targets():
        algorithm.state[target].mul_(-0.7)  # so that the two networks disagree on the best action
    return algorithm


def q_by_hand(algorithm: DQNAlgorithm, obs: np.ndarray, prefix: str = "") -> np.ndarray:
    networks = {
        name: by_hand.layers(network, algorithm.state[prefix + name])
        for name, network in algorithm.networks().items()
    }
    if "critic" in networks:
        return by_hand.forward(networks["critic"], obs)
    features = np.maximum(by_hand.forward(networks["critic_body"], obs), 0.0)
    advantage = by_hand.forward(networks["critic_advantage"], features)
    return by_hand.forward(networks["critic_value"], features) + advantage - advantage.mean()


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_losses_and_targets_agree_with_an_independent_implementation(
    double: bool, dueling: bool
) -> None:
    algorithm = make_dqn(dueling=dueling, double=double)
    batch = make_batch(rows=8, choices=ACTIONS)
    batch = batch._replace(reward=batch.reward * 3)  # so that some errors are in the linear part
    loss, metrics = dqn_loss(algorithm, algorithm.state, batch, {})

    terms, targets, disagreements, errors = [], [], 0, []
    for index in range(8):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        online = q_by_hand(algorithm, next_obs)
        target = q_by_hand(algorithm, next_obs, "target_")
        disagreements += int(online.argmax() != target.argmax())
        next_value = target[online.argmax()] if double else target.max()
        targets.append(reward + discount * next_value)
        error = q_by_hand(algorithm, obs)[int(action)] - targets[-1]
        errors.append(error)
        terms.append(0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5)
    assert disagreements > 0
    assert max(map(abs, errors)) > 1 > min(map(abs, errors))
    assert targets[0] == pytest.approx(float(batch.reward[0]))  # termination does not bootstrap
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)
    assert loss.item() == pytest.approx(np.mean(terms), rel=1e-4)
    np.testing.assert_allclose(metrics["row_errors"].detach().numpy(), errors, rtol=1e-3, atol=1e-5)


def test_importance_weights_scale_each_rows_loss() -> None:
    algorithm, batch = make_dqn(importance_exponent=0.5), make_batch(rows=4, choices=ACTIONS)
    weights = torch.tensor([0.5, 2.0, 1.0, 4.0])
    _, plain = dqn_loss(algorithm, algorithm.state, batch, {})
    weighted, _ = dqn_loss(algorithm, algorithm.state, batch._replace(weights=weights), {})
    errors = plain["row_errors"].detach().abs()
    losses = torch.where(errors <= 1, 0.5 * errors.square(), errors - 0.5)
    expected = (losses * weights.sqrt() / 2.0).mean()  # the largest weight becomes 1
    assert weighted.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_importance_exponent_reaches_one_with_the_last_planned_update() -> None:
    algorithm = DQNAlgorithm(
        3, ACTIONS, {"hidden_sizes": [8], "importance_exponent": 0.4}, planned_updates=10
    )
    values = []
    for _ in range(11):
        values.append(algorithm.importance_exponent(algorithm.state).item())
        algorithm.update(make_batch(choices=ACTIONS))
    assert values == pytest.approx([0.4 + 0.06 * number for number in range(11)])


def test_without_planned_updates_the_importance_exponent_is_constant() -> None:
    algorithm = make_dqn(importance_exponent=0.4)
    for _ in range(3):
        algorithm.update(make_batch(choices=ACTIONS))
    assert float(algorithm.importance_exponent(algorithm.state)) == pytest.approx(0.4)


@pytest.mark.parametrize("norm", [0.05, 1e6])
def test_the_gradients_of_the_dueling_streams_are_clipped_together(norm: float) -> None:
    algorithm = make_dqn(dueling=True, max_grad_norm=norm)
    batch = make_batch(rows=8, choices=ACTIONS)
    [objective] = algorithm.objectives(update_policy=True)
    found, _ = algorithm.differentiate(objective, algorithm.state, batch, {})
    plain, _ = algorithm.differentiate(
        objective._replace(max_grad_norm=None), algorithm.state, batch, {}
    )
    total = torch.cat(list(plain.values())).norm()
    factor = min(1.0, norm / float(total))
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient * factor, rtol=1e-4, atol=1e-7)
    # The optimizer does not clip a second time.
    assert all(optimizer.max_grad_norm is None for optimizer in algorithm.optimizers().values())


def test_only_the_gradient_of_the_shared_layers_is_rescaled() -> None:
    algorithm, batch = make_dqn(dueling=True), make_batch(rows=8, choices=ACTIONS)
    found = by_hand.gradients(
        lambda state: dqn_loss(algorithm, state, batch, {})[0],
        algorithm.state,
        algorithm.networks(),
    )
    body, value, advantage = (
        algorithm.networks()[f"critic_{part}"] for part in ("body", "value", "advantage")
    )

    def unscaled(state: dict[str, torch.Tensor]) -> torch.Tensor:
        features = torch.relu(body(batch.obs, state["critic_body"]))
        choices = advantage(features, state["critic_advantage"])
        q = value(features, state["critic_value"]) + choices - choices.mean(-1, keepdim=True)
        chosen = q.gather(-1, batch.action[:, None]).squeeze(-1)
        with torch.no_grad():
            targets = {name: state[f"target_{name}"] for name in algorithm.networks()}
            best = algorithm.model.q_values(batch.next_obs, algorithm.state).argmax(-1)
            following = algorithm.model.q_values(batch.next_obs, targets)
            target = batch.reward + batch.discount * following.gather(-1, best[:, None])[:, 0]
        return torch.nn.functional.huber_loss(chosen, target)

    expected = by_hand.gradients(unscaled, algorithm.state, algorithm.networks())
    expected["critic_body"] = expected["critic_body"] / np.sqrt(2)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def test_a_hard_target_changes_only_at_its_interval() -> None:
    algorithm = make_dqn(target_update_interval=3)
    for number in range(1, 7):
        before = copy_state(algorithm)
        algorithm.update(make_batch(choices=ACTIONS))
        expected = algorithm.state["critic"] if number % 3 == 0 else before["target_critic"]
        assert torch.equal(algorithm.state["target_critic"], expected)


def test_a_polyak_target_follows_at_every_update() -> None:
    algorithm = make_dqn(target_update_interval=1, tau=0.25)
    before = copy_state(algorithm)
    algorithm.update(make_batch(choices=ACTIONS))
    expected = 0.75 * before["target_critic"] + 0.25 * algorithm.state["critic"]
    torch.testing.assert_close(algorithm.state["target_critic"], expected)


def test_epsilon_decays_over_its_fraction_of_the_run() -> None:
    algorithm = make_dqn(epsilon_start=0.9, epsilon_end=0.1, epsilon_fraction=0.5)
    epsilons = [algorithm.epsilon(torch.tensor(p)).item() for p in (0.0, 0.25, 0.5, 1.0)]
    assert epsilons == pytest.approx([0.9, 0.5, 0.1, 0.1])


def test_epsilon_greedy_exploration_is_uniform_over_the_choices() -> None:
    algorithm = make_dqn(epsilon_start=0.5, epsilon_end=0.5)
    obs = torch.randn(1, 3).expand(8_000, 3)
    best = algorithm.act(algorithm.state, obs)[0]
    noise = {"choice": torch.rand(2, 8_000)}
    chosen = algorithm.explore(algorithm.state, obs, noise, torch.tensor(0.3))
    shares = torch.bincount(chosen, minlength=ACTIONS) / 8_000
    expected = torch.full((ACTIONS,), 0.5 / ACTIONS)
    expected[best] += 0.5
    torch.testing.assert_close(shares, expected, atol=0.02, rtol=0)


def test_a_dueling_value_is_shared_by_all_choices() -> None:
    algorithm, obs = make_dqn(dueling=True), torch.randn(5, 3)
    before = algorithm.model.q_values(obs, algorithm.state)
    value = algorithm.model.networks["critic_value"]
    value.unflatten(algorithm.state["critic_value"])["bias_1"].add_(2.0)
    torch.testing.assert_close(algorithm.model.q_values(obs, algorithm.state), before + 2.0)
    advantage = algorithm.model.networks["critic_advantage"]
    advantage.unflatten(algorithm.state["critic_advantage"])["bias_1"].add_(5.0)
    torch.testing.assert_close(algorithm.model.q_values(obs, algorithm.state), before + 2.0)


@pytest.mark.parametrize("sizes", [[8], [8, 8], [8, 8, 8]])
def test_dueling_works_with_any_number_of_layers(sizes: list[int]) -> None:
    algorithm = make_dqn(dueling=True, hidden_sizes=sizes)
    before = copy_state(algorithm)
    algorithm.update(make_batch(choices=ACTIONS))
    for name in algorithm.networks():
        assert not torch.equal(before[name], algorithm.state[name])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"epsilon_start": 0.1, "epsilon_end": 0.2}, "epsilon_end"),
        ({"epsilon_start": 1.5}, "epsilon_start"),
        ({"epsilon_fraction": 0.0}, "epsilon_fraction"),
        ({"target_update_interval": 0}, "target_update_interval"),
        ({"tau": 0.0}, "tau"),
        ({"priority_exponent": -0.1}, "priority_exponent"),
        ({"importance_exponent": 1.1}, "importance_exponent"),
        ({"double": "yes"}, "double"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_dqn(**settings)
