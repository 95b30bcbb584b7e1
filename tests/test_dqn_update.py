"""DQN's update, compared with an independent implementation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from by_hand import copy_state, make_batch

from rl_training.algorithms import DQNAlgorithm
from rl_training.algorithms.dqn import dqn_loss
from rl_training.algorithms.functional import projected
from rl_training.errors import ConfigError
from rl_training.models.categorical import Support
from rl_training.models.mlp import MLP

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


# Categorical critics (C51)


def projection_by_hand(atoms: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The loop over atoms of the paper's algorithm 1."""
    low, high, spacing = atoms[0], atoms[-1], atoms[1] - atoms[0]
    found = np.zeros(len(atoms))
    for value, weight in zip(values, weights, strict=True):
        place = (np.clip(value, low, high) - low) / spacing
        lower, upper = int(np.floor(place)), int(np.ceil(place))
        if lower == upper:
            found[lower] += weight
        else:
            found[lower] += weight * (upper - place)
            found[upper] += weight * (place - lower)
    return found


def test_a_projection_worked_out_by_hand() -> None:
    support = Support(-1.0, 2.0, 4)  # atoms -1, 0, 1, 2
    probabilities = torch.tensor([[0.5, 0.25, 0.25]])
    values = torch.tensor([[0.25, -3.0, 1.0]])
    expected = [[0.25, 0.375, 0.125 + 0.25, 0.0]]
    assert projected(probabilities, values, support).tolist() == expected


def test_a_projection_keeps_the_mean_of_values_inside_the_support() -> None:
    support, generator = Support(-2.0, 3.0, 11), torch.Generator().manual_seed(0)
    probabilities = torch.rand(6, 9, generator=generator).softmax(-1)
    values = torch.rand(6, 9, generator=generator) * 5 - 2
    found = projected(probabilities, values, support)
    torch.testing.assert_close(found.sum(-1), torch.ones(6))
    means = (found * support.atoms(found)).sum(-1)
    torch.testing.assert_close(means, (probabilities * values).sum(-1))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def logits_by_hand(algorithm: DQNAlgorithm, obs: np.ndarray, prefix: str = "") -> np.ndarray:
    """Logits `(actions, atoms)`."""
    networks = {
        name: by_hand.layers(network, algorithm.state[prefix + name])
        for name, network in algorithm.networks().items()
    }
    number = algorithm.hyperparameters.num_atoms
    if "critic" in networks:
        return by_hand.forward(networks["critic"], obs).reshape(number, ACTIONS).T
    features = np.maximum(by_hand.forward(networks["critic_body"], obs), 0.0)
    advantage = by_hand.forward(networks["critic_advantage"], features).reshape(number, ACTIONS).T
    value = by_hand.forward(networks["critic_value"], features)
    return value + advantage - advantage.mean(0)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_categorical_losses_agree_with_an_independent_implementation(
    double: bool, dueling: bool
) -> None:
    settings = {"num_atoms": 7, "value_min": -2.0, "value_max": 3.0}
    algorithm = make_dqn(double=double, dueling=dueling, **settings)
    atoms = np.linspace(-2.0, 3.0, 7)
    batch = make_batch(rows=8, choices=ACTIONS)
    loss, metrics = dqn_loss(algorithm, algorithm.state, batch, {})

    terms, divergences, means = [], [], []
    for index in range(8):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        target_logits = logits_by_hand(algorithm, next_obs, "target_")
        selecting = logits_by_hand(algorithm, next_obs) if double else target_logits
        best = np.argmax([softmax(row) @ atoms for row in selecting])
        values = reward + discount * atoms
        target = projection_by_hand(atoms, values, softmax(target_logits[best]))
        predicted = softmax(logits_by_hand(algorithm, obs)[int(action)])
        terms.append(-(target * np.log(predicted)).sum())
        known = target[target > 0]
        divergences.append(terms[-1] + (known * np.log(known)).sum())
        means.append(target @ atoms)
    assert loss.item() == pytest.approx(np.mean(terms), rel=1e-4)
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(means), rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(
        metrics["row_errors"].detach().numpy(), divergences, rtol=1e-3, atol=1e-5
    )


def test_a_categorical_critic_acts_by_its_expected_return() -> None:
    algorithm = make_dqn(num_atoms=7, value_min=-2.0, value_max=3.0)
    obs = torch.randn(5, 3)
    atoms = np.linspace(-2.0, 3.0, 7)
    expected = [
        [softmax(row) @ atoms for row in logits_by_hand(algorithm, one)] for one in obs.numpy()
    ]
    values = algorithm.action_values(algorithm.state, obs)
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert algorithm.act(algorithm.state, obs).tolist() == np.argmax(expected, -1).tolist()


# Noisy networks


def noisy_by_hand(network: MLP, vector: torch.Tensor, inputs: np.ndarray, noise: np.ndarray) -> Any:
    """One row through a noisy network whose weights are put together as in the paper."""
    parts = {name: part.numpy() for name, part in network.unflatten(vector).items()}
    scaled = np.sign(noise) * np.sqrt(np.abs(noise))
    first = 0
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(network.sizes)):
        of_inputs, of_outputs = np.split(scaled[first : first + fan_in + fan_out], [fan_in])
        first += fan_in + fan_out
        disturbed = parts[f"noise_weight_{layer}"] * np.outer(of_inputs, of_outputs)
        bias = parts[f"bias_{layer}"] + parts[f"noise_bias_{layer}"] * of_outputs
        inputs = inputs @ (parts[f"weight_{layer}"] + disturbed) + bias
        if layer < len(network.sizes) - 2:
            inputs = np.maximum(inputs, 0.0)
    return inputs


def test_a_noisy_network_agrees_with_an_independent_implementation() -> None:
    algorithm = make_dqn(noisy=True)
    [network] = algorithm.networks().values()
    assert algorithm.model.noise_size == 3 + 8 + 8 + 8 + 8 + ACTIONS
    obs, noise = torch.randn(5, 3), torch.randn(5, algorithm.model.noise_size)
    for rows in (noise, noise[:1]):
        found = algorithm.model.q_values(obs, algorithm.state, rows)
        for row in range(5):
            drawn = rows[row % len(rows)].numpy()
            expected = noisy_by_hand(network, algorithm.state["critic"], obs[row].numpy(), drawn)
            np.testing.assert_allclose(found[row].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_the_noise_starts_at_its_size_and_without_it_the_weights_are_the_mean_ones() -> None:
    noisy, plain = make_dqn(noisy=True, noisy_std=0.3), make_dqn()
    parts = noisy.networks()["critic"].unflatten(noisy.state["critic"])
    for layer, fan_in in enumerate((3, 8, 8)):
        for part in ("weight", "bias"):
            sizes = parts[f"noise_{part}_{layer}"]
            torch.testing.assert_close(sizes, torch.full_like(sizes, 0.3 / math.sqrt(fan_in)))
    obs = torch.randn(5, 3)
    assert torch.equal(noisy.action_values(noisy.state, obs), plain.action_values(plain.state, obs))


def test_each_use_of_a_noisy_network_has_its_own_noise() -> None:
    algorithm, batch = make_dqn(noisy=True), make_batch(rows=8, choices=ACTIONS)
    draws = algorithm.update_noise(8)
    assert set(draws) == {"weights", "target_weights", "selecting_weights"}
    noise = {name: torch.randn(draw.shape) for name, draw in draws.items()}
    loss, metrics = dqn_loss(algorithm, algorithm.state, batch, noise)
    targets = {"critic": algorithm.state["target_critic"]}
    q = algorithm.model.q_values
    best = q(batch.next_obs, algorithm.state, noise["selecting_weights"]).argmax(-1)
    following = q(batch.next_obs, targets, noise["target_weights"]).gather(-1, best[:, None])[:, 0]
    target = batch.reward + batch.discount * following
    now = q(batch.obs, algorithm.state, noise["weights"]).gather(-1, batch.action[:, None])[:, 0]
    expected = torch.nn.functional.huber_loss(now, target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["target_q_mean"], target.mean())


def test_a_noisy_network_explores_with_its_noise_alone() -> None:
    algorithm = make_dqn(noisy=True, noisy_std=3.0, epsilon_start=1.0, epsilon_end=1.0)
    obs = torch.randn(1, 3).expand(200, 3)
    noise = {"weights": torch.randn(200, algorithm.model.noise_size)}
    chosen = algorithm.explore(algorithm.state, obs, noise, torch.tensor(0.0))
    assert len(set(chosen.tolist())) > 1  # every environment has its own noise
    calm = {"weights": torch.zeros(200, algorithm.model.noise_size)}
    best = algorithm.act(algorithm.state, obs)
    assert torch.equal(algorithm.explore(algorithm.state, obs, calm, torch.tensor(0.0)), best)


def test_the_shared_layers_of_noisy_dueling_streams_have_no_noise() -> None:
    algorithm = make_dqn(noisy=True, dueling=True)
    sizes = {name: network.noise_size for name, network in algorithm.networks().items()}
    assert sizes == {"critic_body": 0, "critic_value": 25, "critic_advantage": 28}
    before = copy_state(algorithm)
    algorithm.update(make_batch(choices=ACTIONS))
    for name in ("critic_value", "critic_advantage"):
        network = algorithm.networks()[name]
        old, new = (network.unflatten(state[name]) for state in (before, algorithm.state))
        for part in ("noise_weight_0", "noise_bias_1"):
            assert not torch.equal(old[part], new[part])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"value_min": 2.0, "value_max": 1.0}, "value_min"),
        ({"num_atoms": 0}, "num_atoms"),
        ({"noisy_std": -1.0}, "noisy_std"),
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
