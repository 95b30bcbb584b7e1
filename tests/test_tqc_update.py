"""TQC's update, compared with an independent implementation."""

from __future__ import annotations

import math

import by_hand
import numpy as np
import pytest
import torch
from by_hand import make_batch
from hypothesis import given
from hypothesis import strategies as st

from rl_training.algorithms import TQCAlgorithm
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.functional import quantile_huber_loss
from rl_training.algorithms.tqc import tqc_loss, truncation_weights
from rl_training.errors import ConfigError

CRITICS, QUANTILES, DROPPED = 3, 5, 2


def make_tqc(**settings: object) -> TQCAlgorithm:
    chosen = {
        "hidden_sizes": [8, 8],
        "learning_rate": 1e-2,
        "num_critics": CRITICS,
        "num_quantiles": QUANTILES,
        "top_quantiles_to_drop_per_critic": DROPPED,
        **settings,
    }
    return TQCAlgorithm(3, 2, chosen, seed=3)


def quantile_huber_by_hand(quantiles: list[float], targets: list[float]) -> float:
    """Return the quantile Huber loss, summed over explicit pairs."""
    terms = []
    for number, quantile in enumerate(quantiles):
        level = (number + 0.5) / len(quantiles)
        for target in targets:
            error = target - quantile
            huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
            terms.append(abs(level - (1.0 if error < 0 else 0.0)) * huber)
    return float(np.mean(terms))


def test_losses_and_targets_agree_with_an_independent_implementation() -> None:
    algorithm, batch = make_tqc(), make_batch()
    algorithm.state["log_alpha"].fill_(math.log(0.3))
    algorithm.state["target_critic"].mul_(0.7)
    noise = draw_noise(algorithm.update_noise(2), algorithm.generator)
    _, metrics = tqc_loss(algorithm, algorithm.state, batch, noise)

    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    target_critics = by_hand.members(networks["critic"], state["target_critic"])
    critic_terms, actor_terms, all_targets = [], [], []
    for index in range(2):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_action, next_log_prob = by_hand.squashed_gaussian(
            actor, next_obs, noise["next_action"][index]
        )
        pool = [z for q in target_critics for z in by_hand.forward(q, next_obs, next_action)]
        kept = sorted(pool)[: CRITICS * (QUANTILES - DROPPED)]
        targets = [reward + discount * (z - 0.3 * next_log_prob) for z in kept]
        all_targets += targets
        critic_terms.append(
            np.mean(
                [quantile_huber_by_hand(by_hand.forward(q, obs, action), targets) for q in critics]
            )
        )
        chosen, log_prob = by_hand.squashed_gaussian(actor, obs, noise["action"][index])
        value = np.mean([by_hand.forward(q, obs, chosen) for q in critics])
        actor_terms.append(0.3 * log_prob - value)

    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(all_targets), rel=1e-4)
    assert metrics["critic_loss"].item() == pytest.approx(np.mean(critic_terms), rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(np.mean(actor_terms), rel=1e-4)


@given(st.data())
def test_the_largest_atoms_of_all_critics_are_dropped(data: st.DataObject) -> None:
    atoms = data.draw(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30))
    dropped = data.draw(st.integers(0, len(atoms) - 1))
    weights = truncation_weights(torch.tensor([atoms]), dropped)[0].tolist()
    kept = [atom for atom, weight in zip(atoms, weights, strict=True) if weight > 0]
    assert sorted(kept) == sorted(atoms)[: len(atoms) - dropped]
    assert sum(weights) == pytest.approx(1.0)


def test_atoms_are_pooled_before_truncation() -> None:
    pool = torch.tensor([[1.0, 2.0, 3.0, 10.0, 20.0, 30.0]])  # two critics of three atoms
    assert truncation_weights(pool, 2)[0].tolist() == [0.25, 0.25, 0.25, 0.25, 0.0, 0.0]


def test_quantile_regression_finds_the_quantiles_of_a_sample() -> None:
    samples = torch.randn(1, 2_000) * 0.2
    shares = torch.full((1, 2_000), 1 / 2_000)
    quantiles = torch.zeros(1, 5, requires_grad=True)
    optimizer = torch.optim.Adam([quantiles], lr=0.01)
    for _ in range(600):
        optimizer.zero_grad()
        quantile_huber_loss(quantiles, samples, shares, kappa=0.01).backward()
        optimizer.step()
    expected = torch.quantile(samples[0], torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]))
    torch.testing.assert_close(quantiles.detach()[0], expected, atol=0.02, rtol=0)


def test_q_values_are_the_means_of_the_quantiles() -> None:
    algorithm, batch = make_tqc(), make_batch()
    quantiles = algorithm.model.quantiles(batch.obs, batch.action)
    assert quantiles.shape == (2, CRITICS, QUANTILES)
    q_values = algorithm.model.q_values(batch.obs, batch.action)
    torch.testing.assert_close(q_values, quantiles.mean(-1))


def test_dropping_more_lowers_the_target() -> None:
    batch, means = make_batch(rows=32), []
    for dropped in (0, 2, 4):
        algorithm = make_tqc(top_quantiles_to_drop_per_critic=dropped)
        means.append(algorithm.update(batch).metrics["target_q_mean"].item())
    assert means[0] > means[1] > means[2]


@pytest.mark.parametrize("dropped", [-1, QUANTILES, QUANTILES + 1])
def test_dropping_all_atoms_is_refused(dropped: int) -> None:
    with pytest.raises(ConfigError, match="top_quantiles_to_drop_per_critic"):
        make_tqc(top_quantiles_to_drop_per_critic=dropped)


def test_default_sizes_are_the_papers() -> None:
    papers, given_ones = TQCAlgorithm(3, 2), TQCAlgorithm(3, 2, {"hidden_sizes": [8]})
    assert papers.model.critic.sizes[1:-1] == (512, 512, 512)
    assert papers.model.actor.sizes[1:-1] == (256, 256)
    assert given_ones.model.critic.sizes[1:-1] == given_ones.model.actor.sizes[1:-1] == (8,)
