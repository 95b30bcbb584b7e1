"""CrossQ's update, compared with an independent implementation."""

from __future__ import annotations

import normalized_by_hand as by_hand
import numpy as np
import pytest
import torch
from by_hand import make_batch

from rl_training.algorithms import CrossQAlgorithm
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.crossq import crossq_loss
from rl_training.errors import ConfigError
from rl_training.types import BUFFERS

ROWS = 6
STYLE = {"order": "after", "epsilon": 1e-3, "correction": 0}


def make_crossq(**settings: object) -> CrossQAlgorithm:
    return CrossQAlgorithm(3, 2, {"hidden_sizes": [5, 4], **settings}, seed=3)


@pytest.mark.parametrize("warm", [False, True])
def test_losses_targets_and_statistics_agree_with_an_independent_implementation(
    warm: bool,
) -> None:
    algorithm, batch = make_crossq(renormalization_starts=7), make_batch(rows=ROWS)
    by_hand.disturb(algorithm)
    state, networks = algorithm.state, algorithm.networks()
    for name in ("actor", "critic"):
        state[f"{name}.adam_count"].fill_(7 if warm else 6)
    noise = draw_noise(algorithm.update_noise(ROWS), algorithm.generator)
    _, metrics = crossq_loss(algorithm, state, batch, noise)

    style = {**STYLE, "renormalize": warm}
    actor = by_hand.perceptron(
        networks["actor"], state["actor"], state["actor_statistics"], **style
    )
    critics = by_hand.perceptrons(
        networks["critic"], state["critic"], state["critic_statistics"], **style
    )
    next_outputs = actor(by_hand.numbers(batch.next_obs), training=False)
    next_action, next_log_prob = by_hand.squashed(
        next_outputs, noise["next_action"], lowest=-20, smooth=False
    )
    inputs = by_hand.joined(batch, next_action)
    q = [critic(inputs, training=True)[:, 0] for critic in critics]
    next_value = np.minimum(q[0][ROWS:], q[1][ROWS:]) - 0.3 * next_log_prob
    target = by_hand.numbers(batch.reward) + by_hand.numbers(batch.discount) * next_value
    loss = sum(0.5 * ((each[:ROWS] - target) ** 2).mean() for each in q)
    assert metrics["critic_loss"].item() == pytest.approx(loss, rel=1e-4)
    assert metrics["target_q_mean"].item() == pytest.approx(target.mean(), rel=1e-4)
    moved = np.stack([critic.moved for critic in critics])
    new = metrics[BUFFERS + "critic_statistics"].numpy()
    np.testing.assert_allclose(new, moved, rtol=1e-4, atol=1e-5)

    outputs = actor(by_hand.numbers(batch.obs), training=True)
    action, log_prob = by_hand.squashed(outputs, noise["action"], lowest=-20, smooth=False)
    taken = np.concatenate([by_hand.numbers(batch.obs), action], axis=-1)
    values = [critic(taken, training=False)[:, 0] for critic in critics]
    actor_loss = (0.3 * log_prob - np.minimum(*values)).mean()
    assert metrics["actor_loss"].item() == pytest.approx(actor_loss, rel=1e-4)
    assert metrics["alpha_loss"].item() == pytest.approx(0.3 * (-log_prob.mean() + 2), rel=1e-4)


def test_there_are_no_target_networks() -> None:
    algorithm = make_crossq()
    assert algorithm.targets() == {}
    assert not any("target" in name for name in algorithm.state)
    with pytest.raises(ConfigError, match="no target networks"):
        make_crossq(tau=0.005)


def test_settings_are_the_authors() -> None:
    algorithm = CrossQAlgorithm(17, 6)
    assert algorithm.model.critic.sizes == (23, 2048, 2048, 1)
    assert algorithm.model.actor.sizes == (17, 256, 256, 12)
    betas = {name: (o.beta1, o.beta2) for name, o in algorithm.optimizers().items()}
    assert betas == {"actor": (0.5, 0.999), "critic": (0.5, 0.999), "log_alpha": (0.9, 0.999)}
    assert algorithm.target_entropy == -6


def test_initial_weights_have_the_variance_of_flax() -> None:
    weight = CrossQAlgorithm(17, 6).model.critic
    tensor = weight.unflatten(weight.vector.detach())["weight_1"]
    assert tensor.std().item() == pytest.approx(2048**-0.5, rel=0.01)
    assert tensor.abs().max().item() <= 2 * 2048**-0.5 / 0.8796 + 1e-6
    assert not weight.unflatten(weight.vector.detach())["bias_1"].any()


def test_the_last_update_of_the_warm_up_is_the_setting() -> None:
    algorithm = make_crossq(renormalization_starts=2, policy_delay=1)
    before = [bool(algorithm.renormalizes(algorithm.state, "critic"))]
    for number in range(2):
        algorithm.update(make_batch(rows=ROWS, seed=number))
        before.append(bool(algorithm.renormalizes(algorithm.state, "critic")))
    assert before == [False, False, True]
    assert torch.isfinite(algorithm.update(make_batch(rows=ROWS)).metrics["critic_loss"])
