"""FlashSAC's update, compared with an independent implementation."""

from __future__ import annotations

import math
from collections import Counter

import normalized_by_hand as by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import FlashSACAlgorithm
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.flash_sac import REPEAT, RepeatedNoise, flash_sac_loss
from rl_training.errors import ConfigError
from rl_training.types import BUFFERS

ATOMS, ROWS = 11, 6
STYLE = {"order": "residual", "epsilon": 1e-5}


def make_flash_sac(**settings: object) -> FlashSACAlgorithm:
    chosen = {"hidden_sizes": [4, 4], "num_atoms": ATOMS, "learning_rate": 1e-2, **settings}
    return FlashSACAlgorithm(3, 2, chosen, seed=3, planned_updates=100)


def test_losses_targets_and_statistics_agree_with_an_independent_implementation() -> None:
    algorithm, batch = make_flash_sac(), make_batch(rows=ROWS)
    by_hand.disturb(algorithm)
    state, networks = algorithm.state, algorithm.networks()
    noise = draw_noise(algorithm.update_noise(ROWS), algorithm.generator)
    _, metrics = flash_sac_loss(algorithm, state, batch, noise)

    actor = by_hand.perceptron(
        networks["actor"], state["actor"], state["actor_statistics"], **STYLE
    )
    critics, targets = (
        by_hand.perceptrons(networks["critic"], state[name], state["critic_statistics"], **STYLE)
        for name in ("critic", "target_critic")
    )
    head = {"lowest": -10.0, "smooth": True}
    next_outputs = actor(by_hand.numbers(batch.next_obs), training=False)
    next_action, next_log_prob = by_hand.squashed(next_outputs, noise["next_action"], **head)
    inputs, atoms = by_hand.joined(batch, next_action), np.linspace(-5, 5, ATOMS)
    next_logits = [target(inputs, training=True)[ROWS:] for target in targets]
    wanted = by_hand.categorical_targets(next_logits, -0.3 * next_log_prob, batch, atoms)
    found = [by_hand.log_softmax(critic(inputs, training=True)[:ROWS]) for critic in critics]
    loss = np.mean([-(wanted * each).sum(-1).mean() for each in found])
    assert metrics["critic_loss"].item() == pytest.approx(loss, rel=1e-4)
    assert metrics["target_q_mean"].item() == pytest.approx((wanted @ atoms).mean(), rel=1e-4)
    q_mean = np.mean([np.exp(each) @ atoms for each in found])
    assert metrics["q_mean"].item() == pytest.approx(q_mean, rel=1e-4)
    moved = np.stack([critic.moved for critic in critics])
    new = metrics[BUFFERS + "critic_statistics"].numpy()
    np.testing.assert_allclose(new, moved, rtol=1e-4, atol=1e-5)

    both = by_hand.numbers(torch.cat([batch.obs, batch.next_obs]))
    outputs = actor(both, training=True)[:ROWS]
    action, log_prob = by_hand.squashed(outputs, noise["action"], **head)
    taken = np.concatenate([by_hand.numbers(batch.obs), action], axis=-1)
    values = [np.exp(by_hand.log_softmax(c(taken, training=False))) @ atoms for c in critics]
    actor_loss = (0.3 * log_prob - np.minimum(*values)).mean()
    assert metrics["actor_loss"].item() == pytest.approx(actor_loss, rel=1e-4)
    target_entropy = 2 * 0.5 * math.log(2 * math.pi * math.e * 0.15**2)
    alpha_loss = 0.3 * (-log_prob.mean() - target_entropy)
    assert metrics["alpha_loss"].item() == pytest.approx(alpha_loss, rel=1e-4)
    new = metrics[BUFFERS + "actor_statistics"].numpy()
    np.testing.assert_allclose(new, actor.moved, rtol=1e-4, atol=1e-5)


def test_the_gradient_passes_through_the_statistics_of_the_batch() -> None:
    algorithm, batch = make_flash_sac(), make_batch(rows=ROWS)
    by_hand.disturb(algorithm)
    noise = draw_noise(algorithm.update_noise(ROWS), algorithm.generator)
    double = {k: v.double() if v.is_floating_point() else v for k, v in algorithm.state.items()}
    wide = type(batch)(*(None if part is None else part.double() for part in batch))
    noise = {name: part.double() for name, part in noise.items()}
    for objective in algorithm.objectives(update_policy=True):
        name = objective.parameters[0]
        found, _ = algorithm.differentiate(objective, double, wide, noise)
        direction = torch.randn(double[name].shape, dtype=torch.float64)
        values = []
        for step in (1e-6, -1e-6):
            moved = {**double, name: double[name] + step * direction}
            values.append(objective.loss(moved, wide, noise)[1][f"{name}_loss"].item())
        slope = (values[0] - values[1]) / 2e-6
        assert (found[name] * direction).sum().item() == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_an_update_restores_the_norms_of_weights_and_scales() -> None:
    algorithm = make_flash_sac(policy_delay=2)
    for number in range(4):
        before = copy_state(algorithm)
        algorithm.update(make_batch(rows=ROWS, seed=number))
        expected = {"critic"} | ({"actor"} if number % 2 else set())
        assert changed(before, algorithm) & {"actor", "critic"} == expected
    for name, network in algorithm.networks().items():
        parts = network.unflatten(algorithm.state[name])
        for part, tensor in parts.items():
            if part.startswith("weight_"):
                norms = tensor.norm(dim=-2)
            elif part.startswith("scale_"):
                shift = parts[part.replace("scale", "shift")]
                norms = (tensor.square() + shift.square()).mean(-1)
            elif part == "gain":
                norms = tensor.square().mean(-1)
            else:
                continue
            torch.testing.assert_close(norms, torch.ones_like(norms), msg=f"{name}.{part}")
        biases = parts[f"bias_{len(network.sizes) * 2 - 3}"]
        assert biases.abs().max() > 1e-3, "biases of the last layer are free"


def test_networks_have_the_papers_sizes_and_begin_with_unit_weights() -> None:
    algorithm = FlashSACAlgorithm(17, 6)
    shapes = {name: n.layout.shapes for name, n in algorithm.networks().items()}
    assert [shapes["critic"][f"weight_{i}"] for i in range(6)] == [
        (23, 256), (256, 1024), (1024, 256), (256, 1024), (1024, 256), (256, 101)
    ]  # fmt: skip
    assert [shapes["actor"][f"weight_{i}"] for i in (0, 1, 5)] == [
        (17, 128), (128, 512), (128, 12)
    ]  # fmt: skip
    assert [name for name in shapes["critic"] if "bias" in name] == ["bias_5"]
    weight = algorithm.model.critic.unflatten(algorithm.state["critic"])["weight_1"]
    torch.testing.assert_close(weight.norm(dim=-2), torch.ones(2, 1024))
    assert algorithm.state["critic_statistics"].shape == (2, 2, 23 + 2 * (1024 + 256))


def test_learning_rates_of_the_policy_follow_their_own_updates() -> None:
    algorithm = make_flash_sac(policy_delay=2, learning_rate_schedule="linear")
    algorithm.state["updates"].fill_(80)
    optimizers = algorithm.optimizers()
    assert (optimizers["critic"].delay, optimizers["actor"].delay) == (1, 2)
    critic, actor = (algorithm.learning_rate_factor(algorithm.state, delay) for delay in (1, 2))
    assert float(critic) == pytest.approx(0.5 + 0.5 * 0.2)
    assert float(actor) == pytest.approx(0.5 + 0.5 * 0.6)


def test_noise_is_repeated_as_often_as_the_zeta_distribution_says() -> None:
    memory, draw = RepeatedNoise((3, 2), 16, 2.0), np.random.default_rng(0)
    lengths: Counter[int] = Counter()
    last, run = np.zeros((3, 2)), 0
    for _ in range(20_000):
        noise = {"action": draw.normal(size=(3, 2)).astype(np.float32), REPEAT: draw.random(1)}
        fresh = noise["action"].copy()
        memory(noise)
        if np.array_equal(noise["action"], last):
            run += 1
        else:
            assert np.array_equal(noise["action"], fresh), "new for all environments at once"
            lengths[run] += 1
            last, run = noise["action"].copy(), 1
    total = sum(lengths.values()) - lengths.pop(0)
    weights = {n: n**-2.0 for n in range(1, 17)}
    for number in (1, 2, 3):
        expected = weights[number] / sum(weights.values())
        assert lengths[number] / total == pytest.approx(expected, abs=0.02)
    assert max(lengths) == 16


def test_without_repetition_nothing_is_remembered() -> None:
    assert make_flash_sac(noise_repeat_max=1).exploration_memory(3) is None
    memory = make_flash_sac().exploration_memory(3)
    assert memory is not None
    assert memory.state["noise"].shape == (3, 2)


@pytest.mark.parametrize("sizes", [[8, 4], []])
def test_blocks_of_different_sizes_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="hidden_sizes"):
        make_flash_sac(hidden_sizes=sizes)
