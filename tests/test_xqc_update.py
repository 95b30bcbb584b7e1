"""XQC's update, compared with an independent implementation."""

from __future__ import annotations

import normalized_by_hand as by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import XQCAlgorithm
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.xqc import xqc_loss
from rl_training.types import BUFFERS

ATOMS, ROWS = 11, 6
STYLE = {"order": "before", "epsilon": 1e-3, "correction": 0}


def make_xqc(**settings: object) -> XQCAlgorithm:
    chosen = {"hidden_sizes": [5, 4], "num_atoms": ATOMS, "learning_rate": 1e-2, **settings}
    return XQCAlgorithm(3, 2, chosen, seed=3, planned_updates=100)


def test_losses_targets_and_statistics_agree_with_an_independent_implementation() -> None:
    algorithm, batch = make_xqc(), make_batch(rows=ROWS)
    by_hand.disturb(algorithm)
    state, networks = algorithm.state, algorithm.networks()
    noise = draw_noise(algorithm.update_noise(ROWS), algorithm.generator)
    _, metrics = xqc_loss(algorithm, state, batch, noise)

    three_steps = {**STYLE, "momentum": 1 - 0.99**3}
    actor = by_hand.perceptron(
        networks["actor"], state["actor"], state["actor_statistics"], **three_steps
    )
    critics, targets = (
        by_hand.perceptrons(networks["critic"], state[name], state["critic_statistics"], **STYLE)
        for name in ("critic", "target_critic")
    )
    next_outputs = actor(by_hand.numbers(batch.next_obs), training=False)
    next_action, next_log_prob = by_hand.squashed(
        next_outputs, noise["next_action"], lowest=-10, smooth=False
    )
    inputs, atoms = by_hand.joined(batch, next_action), np.linspace(-5, 5, ATOMS)
    next_logits = [target(inputs, training=True)[ROWS:] for target in targets]
    wanted = by_hand.categorical_targets(next_logits, -0.3 * next_log_prob, batch, atoms)
    found = [by_hand.log_softmax(critic(inputs, training=True)[:ROWS]) for critic in critics]
    loss = sum(-(wanted * each).sum(-1).mean() for each in found)
    assert metrics["critic_loss"].item() == pytest.approx(loss, rel=1e-4)
    assert metrics["target_q_mean"].item() == pytest.approx((wanted @ atoms).mean(), rel=1e-4)
    moved = np.stack([critic.moved for critic in critics])
    new = metrics[BUFFERS + "critic_statistics"].numpy()
    np.testing.assert_allclose(new, moved, rtol=1e-4, atol=1e-5)

    outputs = actor(by_hand.numbers(batch.obs), training=True)
    action, log_prob = by_hand.squashed(outputs, noise["action"], lowest=-10, smooth=False)
    taken = np.concatenate([by_hand.numbers(batch.obs), action], axis=-1)
    values = [np.exp(by_hand.log_softmax(c(taken, training=False))) @ atoms for c in critics]
    actor_loss = (0.3 * log_prob - np.minimum(*values)).mean()
    assert metrics["actor_loss"].item() == pytest.approx(actor_loss, rel=1e-4)
    alpha_loss = 0.3 * (-log_prob.mean() + 2 / 2)
    assert metrics["alpha_loss"].item() == pytest.approx(alpha_loss, rel=1e-4)
    new = metrics[BUFFERS + "actor_statistics"].numpy()
    np.testing.assert_allclose(new, actor.moved, rtol=1e-4, atol=1e-5)


def test_an_update_restores_the_norms_of_weights_alone() -> None:
    algorithm = make_xqc(policy_delay=1)
    for number in range(3):
        before = copy_state(algorithm)
        algorithm.update(make_batch(rows=ROWS, seed=number))
        assert {"actor", "critic", "target_critic"} <= changed(before, algorithm)
    for name, network in algorithm.networks().items():
        parts = network.unflatten(algorithm.state[name])
        weights = [tensor for part, tensor in parts.items() if part.startswith("weight_")]
        assert len(weights) == 3
        for tensor in weights:
            norms = tensor.norm(dim=-2)
            torch.testing.assert_close(norms, torch.ones_like(norms))
        scale, shift = parts["scale_1"], parts["shift_1"]
        assert not torch.allclose((scale.square() + shift.square()).mean(-1), torch.ones(()))
    target = algorithm.model.critic.unflatten(algorithm.state["target_critic"])["weight_1"]
    assert (target.norm(dim=-2) < 1).any(), "target networks are means, which are not projected"


def test_networks_have_the_papers_sizes() -> None:
    algorithm = XQCAlgorithm(17, 6)
    assert algorithm.model.critic.sizes == (23, 512, 512, 512, 512, 101)
    assert algorithm.model.actor.sizes == (17, 256, 256, 256, 256, 12)
    shapes = algorithm.model.critic.layout.shapes
    assert [name for name in shapes if "bias" in name] == ["bias_4"]
    assert algorithm.target_entropy == -3
    assert float(algorithm.state["log_alpha"].exp()) == pytest.approx(0.01)


def test_a_fixed_temperature_needs_no_initial_one() -> None:
    algorithm = make_xqc(alpha=0.2)
    assert "log_alpha" not in algorithm.optimizers()
    assert float(algorithm.state["log_alpha"].exp()) == pytest.approx(0.2)
    metrics = algorithm.update(make_batch(rows=ROWS)).metrics
    assert "alpha_loss" not in metrics
