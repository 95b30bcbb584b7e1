"""A2C's loss against PPO's, of which it is a special case, and against NumPy."""

from __future__ import annotations

import pytest
import torch
from by_hand import changed, copy_state
from test_ppo_update import SMALL, make_batch

from rl_training.algorithms.a2c import A2C, a2c_loss
from rl_training.algorithms.ppo import PPO, ppo_loss
from rl_training.types import ActionSpec


@pytest.mark.parametrize("choices", [0, 3])
def test_the_gradient_is_that_of_ppo_before_the_policy_has_changed(choices: int) -> None:
    """As in 2205.09123: the ratio of probabilities is one, and nothing is clipped."""
    actions = ActionSpec("discrete", choices) if choices else ActionSpec("continuous", 2)
    shared = {**SMALL, "normalize_advantages": False, "entropy_coefficient": 0.01}
    a2c, ppo = A2C(3, actions, shared, seed=1), PPO(3, actions, shared, seed=1)
    batch = make_batch(choices)
    log_probs = ppo.model.action_logprobs(batch.obs, batch.action).detach()
    batch = batch.with_fields(log_probs=log_probs)
    gradients = []
    for algorithm, loss_of in ((a2c, a2c_loss), (ppo, ppo_loss)):
        leaves = {n: algorithm.state[n].clone().requires_grad_() for n in ("actor", "critic")}
        loss, _ = loss_of(algorithm, {**algorithm.state, **leaves}, batch, {})
        gradients.append(torch.autograd.grad(loss, list(leaves.values())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_the_loss_weighs_log_probabilities_by_advantages() -> None:
    a2c, batch = A2C(3, ActionSpec("continuous", 2), SMALL, seed=2), make_batch()
    _, metrics = a2c_loss(a2c, a2c.state, batch, {})
    log_probs = a2c.model.action_logprobs(batch.obs, batch.action).detach()
    assert batch.advantages is not None
    assert batch.returns is not None
    expected = -sum(a * p for a, p in zip(batch.advantages, log_probs, strict=True)) / len(
        log_probs
    )
    assert float(metrics["actor_loss"]) == pytest.approx(float(expected), rel=1e-5)
    errors = (a2c.model.state_values(batch.obs).detach() - batch.returns) ** 2
    assert float(metrics["critic_loss"]) == pytest.approx(float(errors.mean() / 2), rel=1e-5)


def test_an_update_changes_both_networks() -> None:
    a2c = A2C(3, ActionSpec("continuous", 2), SMALL, seed=0)
    before = copy_state(a2c)
    a2c.update(make_batch())
    assert {"actor", "critic"} < changed(before, a2c)
