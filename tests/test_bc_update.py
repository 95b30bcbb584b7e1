"""BC's update, compared with an independent implementation."""

from __future__ import annotations

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import BCAlgorithm
from rl_training.algorithms.bc import SPEC, bc_loss
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, Batch


def make_bc(**settings: object) -> BCAlgorithm:
    chosen = {"hidden_sizes": [8, 8], "learning_rate": 1e-2, **settings}
    algorithm = BCAlgorithm(3, 2, chosen, seed=3)
    set_log_std(algorithm, [-0.5, 0.3])  # to detect a mix-up of the components
    return algorithm


def log_std(algorithm: BCAlgorithm) -> torch.Tensor:
    return algorithm.model.actor.unflatten(algorithm.state["actor"])["log_std"]


def set_log_std(algorithm: BCAlgorithm, values: list[float]) -> None:
    if algorithm.hyperparameters.objective == "likelihood":
        log_std(algorithm).copy_(torch.tensor(values))


@pytest.mark.parametrize("objective", ["squared_error", "likelihood"])
def test_both_objectives_agree_with_an_independent_implementation(objective: str) -> None:
    algorithm, batch = make_bc(objective=objective), make_batch()
    actor = by_hand.layers(algorithm.model.actor, algorithm.state["actor"])
    std = np.exp([-0.5, 0.3])
    squared_errors, log_probs = [], []
    for index in range(2):
        obs, action, *_ = by_hand.row(batch, index)
        mean = np.tanh(by_hand.forward(actor, obs))
        squared_errors.append((mean - action) ** 2)
        log_probs.append(by_hand.gaussian_log_prob(action, mean, std))

    is_squared = objective == "squared_error"
    expected = np.mean(squared_errors) if is_squared else -np.mean(log_probs)
    loss, metrics = bc_loss(algorithm, algorithm.state, batch, {})
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(expected, rel=1e-4)
    assert metrics["bc_loss"].item() == pytest.approx(np.mean(squared_errors), rel=1e-4)


@pytest.mark.parametrize("objective", ["squared_error", "likelihood"])
def test_only_observations_and_actions_are_used(objective: str) -> None:
    batch = make_batch()
    other = make_batch(seed=1)._replace(obs=batch.obs, action=batch.action)
    first, second = make_bc(objective=objective), make_bc(objective=objective)
    first.update(batch)
    second.update(other)
    assert torch.equal(first.state["actor"], second.state["actor"])


@pytest.mark.parametrize("objective", ["squared_error", "likelihood"])
def test_an_update_changes_only_the_actor_by_its_learning_rate(objective: str) -> None:
    algorithm = make_bc(objective=objective)
    before = copy_state(algorithm)
    result = algorithm.update(make_batch())
    moments = {f"actor.adam_{part}" for part in ("mean", "square", "count")}
    assert changed(before, algorithm) == {"actor", "updates", *moments}
    assert by_hand.largest_step(before, algorithm, "actor") == pytest.approx(1e-2, rel=1e-3)
    assert result.metrics.keys() == {"actor_loss", "bc_loss"}


def test_only_the_likelihood_learns_a_standard_deviation() -> None:
    algorithm = make_bc(objective="likelihood")
    before = log_std(algorithm).clone()
    algorithm.update(make_batch())
    assert (log_std(algorithm) != before).all()
    plain, batch = make_bc(), make_batch()
    assert "log_std" not in plain.model.actor.unflatten(plain.state["actor"])
    squared = (plain.model.actions(batch.obs) - batch.action).square().sum(-1)
    expected = -0.5 * squared - np.log(2 * np.pi)  # two components of standard deviation one
    torch.testing.assert_close(plain.model.action_logprobs(batch.obs, batch.action), expected)


def test_the_likelihood_learns_the_standard_deviation_of_the_actions() -> None:
    algorithm = make_bc(objective="likelihood", hidden_sizes=[])
    obs = torch.zeros(2_000, 3)
    actions = torch.tensor([0.4, -0.2]) + torch.randn(2_000, 2) * torch.tensor([0.1, 0.3])
    batch = make_batch(rows=2_000)._replace(obs=obs, action=actions)
    for _ in range(400):
        algorithm.update(batch)
    mean = algorithm.act(algorithm.state, obs[:1])[0]
    torch.testing.assert_close(mean, actions.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(log_std(algorithm).exp(), actions.std(0), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("objective", "expected"), [("squared_error", [0.0, 0.0]), ("likelihood", [0.2, 0.4])]
)
def test_exploration_uses_the_learned_standard_deviation(objective: str, expected: list) -> None:
    algorithm, obs = make_bc(objective=objective), 0.1 * torch.randn(4, 3)
    set_log_std(algorithm, [float(np.log(0.1)), float(np.log(0.2))])
    noise = {"action": torch.full((4, 2), 2.0)}
    difference = algorithm.explore(algorithm.state, obs, noise, torch.tensor(0.5)) - algorithm.act(
        algorithm.state, obs
    )
    torch.testing.assert_close(difference, torch.tensor(expected).expand(4, 2))


def test_the_default_loss_is_the_squared_error() -> None:
    chosen = BCAlgorithm(3, 2).hyperparameters
    assert chosen.objective == "squared_error"
    assert (chosen.learning_rate, chosen.batch_size) == (3e-4, 256)
    assert chosen.hidden_sizes == (256, 256)
    assert SPEC.regimes == ("offline",)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"objective": "absolute_error"}, "objective"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"policy_delay": 0}, "policy_delay"),
        ({"tau": 0.005}, "tau"),
        ({"critic_learning_rate": 1e-3}, "critic_learning_rate"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_bc(**settings)


# Choices


def make_choosing(actions: ActionSpec) -> BCAlgorithm:
    return BCAlgorithm(3, actions, {"hidden_sizes": [8]}, seed=3)


def logits_of(algorithm: BCAlgorithm, obs: np.ndarray) -> np.ndarray:
    network = algorithm.networks()["actor"]
    return by_hand.forward(by_hand.layers(network, algorithm.state["actor"]), obs)


def choosing_batch(actions: torch.Tensor) -> Batch:
    return by_hand.make_batch(rows=len(actions))._replace(action=actions)


def test_the_loss_of_discrete_actions_is_the_cross_entropy() -> None:
    algorithm, batch = make_choosing(ActionSpec("discrete", 4)), by_hand.make_batch(6, choices=4)
    loss, metrics = bc_loss(algorithm, algorithm.state, batch, {})
    terms = [
        -by_hand.log_softmax(logits_of(algorithm, one))[int(action)]
        for one, action in zip(batch.obs.double().numpy(), batch.action, strict=True)
    ]
    assert loss.item() == pytest.approx(np.mean(terms), rel=1e-5)
    assert metrics["bc_loss"].item() == metrics["actor_loss"].item() == loss.item()


def test_the_loss_of_several_choices_is_the_sum_over_them() -> None:
    algorithm = make_choosing(ActionSpec("multi_discrete", 2, (3, 2)))
    batch = choosing_batch(torch.tensor([[0, 1], [2, 0], [1, 1]]))
    loss, _ = bc_loss(algorithm, algorithm.state, batch, {})
    terms = []
    for one, (first, second) in zip(batch.obs.double().numpy(), batch.action, strict=True):
        logits = logits_of(algorithm, one)
        chosen = by_hand.log_softmax(logits[:3])[first], by_hand.log_softmax(logits[3:])[second]
        terms.append(-sum(chosen))
    assert loss.item() == pytest.approx(np.mean(terms), rel=1e-5)


def test_the_loss_of_switches_is_that_of_bernoulli_distributions() -> None:
    algorithm = make_choosing(ActionSpec("multi_binary", 3))
    batch = choosing_batch(torch.tensor([[0, 1, 1], [1, 0, 0]]))
    loss, _ = bc_loss(algorithm, algorithm.state, batch, {})
    terms = []
    for one, switches in zip(batch.obs.double().numpy(), batch.action.numpy(), strict=True):
        on = 1 / (1 + np.exp(-logits_of(algorithm, one)))
        terms.append(-(switches * np.log(on) + (1 - switches) * np.log(1 - on)).sum())
    assert loss.item() == pytest.approx(np.mean(terms), rel=1e-5)


@pytest.mark.parametrize(
    "actions",
    [
        ActionSpec("discrete", 3),
        ActionSpec("multi_discrete", 2, (3, 2)),
        ActionSpec("multi_binary", 2),
    ],
    ids=lambda actions: actions.kind,
)
def test_choices_are_sampled_with_the_policys_probabilities(actions: ActionSpec) -> None:
    algorithm, rows = make_choosing(actions), 20_000
    obs = torch.randn(1, 3)
    noise = {"action": torch.rand(algorithm.exploration_noise(rows)["action"].shape)}
    chosen = algorithm.explore(algorithm.state, obs.expand(rows, 3), noise, torch.tensor(0.0))
    logits = torch.from_numpy(logits_of(algorithm, obs[0].double().numpy()))
    columns = chosen[:, None] if actions.kind == "discrete" else chosen
    if actions.kind == "multi_binary":
        expected = [torch.stack([1 - on, on]) for on in torch.sigmoid(logits)]
    else:
        expected = [part.softmax(-1) for part in logits.split(list(actions.num_choices))]
    best = algorithm.act(algorithm.state, obs).reshape(-1)
    for column, probabilities, most_likely in zip(columns.T, expected, best, strict=True):
        shares = torch.bincount(column, minlength=len(probabilities)).double() / rows
        torch.testing.assert_close(shares, probabilities, atol=0.02, rtol=0)
        assert most_likely == probabilities.argmax()


def test_a_policy_of_choices_is_a_distribution() -> None:
    assert make_choosing(ActionSpec("discrete", 3)).why_deterministic() is None
