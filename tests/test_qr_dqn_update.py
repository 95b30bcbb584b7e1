"""QR-DQN's update, compared with an independent implementation."""

from __future__ import annotations

import by_hand
import numpy as np
import pytest
import torch
from by_hand import copy_state, make_batch

from rl_training.algorithms import QRDQNAlgorithm
from rl_training.algorithms.qr_dqn import qr_dqn_loss
from rl_training.errors import ConfigError

ACTIONS, QUANTILES = 4, 5


def make_qr_dqn(**settings: object) -> QRDQNAlgorithm:
    chosen = {"hidden_sizes": [8, 8], "num_quantiles": QUANTILES, **settings}
    algorithm = QRDQNAlgorithm(3, ACTIONS, chosen, seed=3)
    for target in algorithm.targets():
        algorithm.state[target].mul_(-0.7)  # so that the two networks disagree on the best action
    return algorithm


def quantiles_by_hand(algorithm: QRDQNAlgorithm, obs: np.ndarray, prefix: str = "") -> np.ndarray:
    """Quantiles `(actions, quantiles)`."""
    [(name, network)] = algorithm.networks().items()
    layers = by_hand.layers(network, algorithm.state[prefix + name])
    return by_hand.forward(layers, obs).reshape(QUANTILES, ACTIONS).T


@pytest.mark.parametrize("double", [True, False])
def test_losses_and_targets_agree_with_an_independent_implementation(double: bool) -> None:
    algorithm = make_qr_dqn(double=double)
    batch = make_batch(rows=8, choices=ACTIONS)
    batch = batch._replace(reward=batch.reward * 3)  # so that some errors are in the linear part
    loss, metrics = qr_dqn_loss(algorithm, algorithm.state, batch, {})

    terms, targets, errors, disagreements = [], [], [], 0
    for index in range(8):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        following = quantiles_by_hand(algorithm, next_obs, "target_")
        online = quantiles_by_hand(algorithm, next_obs)
        disagreements += int(online.mean(-1).argmax() != following.mean(-1).argmax())
        best = (online if double else following).mean(-1).argmax()
        target = reward + discount * following[best]
        quantiles = quantiles_by_hand(algorithm, obs)[int(action)]
        term = 0.0
        for place, quantile in enumerate(quantiles):
            level = (place + 0.5) / QUANTILES
            for sample in target:
                error = sample - quantile
                huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
                term += abs(level - (error < 0)) * huber / QUANTILES
        terms.append(term)
        targets.append(target.mean())
        errors.append(quantiles.mean() - target.mean())
    assert disagreements > 0
    assert loss.item() == pytest.approx(np.mean(terms), rel=1e-4)
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)
    np.testing.assert_allclose(metrics["row_errors"].detach().numpy(), errors, rtol=1e-3, atol=1e-5)


def test_the_value_of_an_action_is_the_mean_of_its_quantiles() -> None:
    algorithm, obs = make_qr_dqn(), torch.randn(5, 3)
    expected = [quantiles_by_hand(algorithm, one).mean(-1) for one in obs.numpy()]
    values = algorithm.action_values(algorithm.state, obs)
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_the_quantiles_of_a_known_distribution_are_learned() -> None:
    """Rewards of one state are -1, 0, 0.5 or 2, each with the same probability."""
    algorithm = QRDQNAlgorithm(
        1, 1, {"hidden_sizes": [16], "num_quantiles": 4, "learning_rate": 3e-3}, seed=0
    )
    generator = torch.Generator().manual_seed(0)
    outcomes = torch.tensor([-1.0, 0.0, 0.5, 2.0])
    batch = make_batch(rows=256, choices=1)
    still = torch.ones(256, 1)
    for _ in range(800):
        drawn = outcomes[torch.randint(4, (256,), generator=generator)]
        algorithm.update(
            batch._replace(obs=still, next_obs=still, reward=drawn, discount=torch.zeros(256))
        )
    [found] = algorithm.model.outputs(still[:1], algorithm.state)[0]
    # Quantile Huber regression smooths quantiles towards the mean of 0.375.
    assert found.sort().values.tolist() == found.tolist()
    assert found[0] < -0.4
    assert found[-1] > 1.0
    assert found.mean().item() == pytest.approx(0.375, abs=0.15)


def test_only_the_critic_changes_and_its_target_follows_at_the_interval() -> None:
    algorithm = make_qr_dqn(target_update_interval=2)
    for number in (1, 2):
        before = copy_state(algorithm)
        algorithm.update(make_batch(choices=ACTIONS))
        assert not torch.equal(before["critic"], algorithm.state["critic"])
        expected = algorithm.state["critic"] if number == 2 else before["target_critic"]
        assert torch.equal(algorithm.state["target_critic"], expected)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"num_quantiles": 0}, "num_quantiles"),
        ({"num_atoms": 51}, "num_atoms"),
        ({"epsilon_start": 0.1, "epsilon_end": 0.2}, "epsilon_end"),
        ({"policy_delay": 2}, "policy_delay"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_qr_dqn(**settings)
