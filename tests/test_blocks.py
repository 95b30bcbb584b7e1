"""Blocks of networks, and buffers that a loss updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conformance import assert_agree, make_batches, prepared_learner
from torch import Tensor, nn

from rl_training.algorithms import SACAlgorithm, get_algorithm_spec
from rl_training.execution.learner import Learner
from rl_training.execution.policy import Policy
from rl_training.models.blocks import (
    ConvolutionalResidualBlock,
    InvertedBottleneckBlock,
    ResidualBlock,
    batch_norm,
    batch_statistics,
    dropout,
    initial_statistics,
    renormalized_statistics,
    rms_norm,
    updated_statistics,
)
from rl_training.types import BUFFERS, Batch, Metrics, Noise, SpaceInfo, State


def test_renormalized_batches_are_those_of_the_running_statistics() -> None:
    inputs, running = torch.randn(50, 3) * 2 + 1, torch.tensor([[0.0, 2.0, 0.5], [4.0, 9.0, 1.0]])
    found = batch_statistics(inputs)
    moved = renormalized_statistics(found, running, epsilon=0.0)
    normalized = batch_norm(inputs, moved, epsilon=0.0)
    torch.testing.assert_close(normalized, batch_norm(inputs, running, epsilon=0.0))
    far = torch.tensor([[1e3] * 3, [1e-6] * 3])
    limited = batch_norm(inputs, renormalized_statistics(found, far, epsilon=0.0), epsilon=0.0)
    own = batch_norm(inputs, found, epsilon=0.0)
    torch.testing.assert_close(limited, own * 3 - 5, rtol=1e-4, atol=1e-4)


def test_constant_units_have_finite_gradients_when_they_are_renormalized() -> None:
    inputs = torch.ones(5, 2, requires_grad=True)
    used = renormalized_statistics(batch_statistics(inputs), initial_statistics(2))
    (gradient,) = torch.autograd.grad(batch_norm(inputs, used).square().sum(), inputs)
    assert gradient.isfinite().all()


def test_statistics_of_ensembles_belong_to_their_members() -> None:
    inputs = torch.randn(3, 8, 4)
    found = batch_statistics(inputs)
    assert found.shape == (3, 2, 4)
    for member in range(3):
        alone = batch_norm(inputs[member], batch_statistics(inputs[member]))
        torch.testing.assert_close(batch_norm(inputs, found)[member], alone)
    kept = updated_statistics(found * 0, found, rows=8, momentum=0.5, unbiased=False)
    torch.testing.assert_close(kept, 0.5 * found)


def test_rms_norm_is_that_of_pytorch() -> None:
    inputs = torch.randn(5, 6)
    torch.testing.assert_close(rms_norm(inputs), F.rms_norm(inputs, (6,), eps=1e-6))


def test_residual_blocks_add_to_their_input() -> None:
    inputs = torch.randn(5, 6)
    block = ResidualBlock(6, nn.RMSNorm)
    hidden = block.layer_0(F.relu(F.rms_norm(inputs, (6,), block.normalization_0.weight)))
    hidden = block.layer_1(F.relu(F.rms_norm(hidden, (6,), block.normalization_1.weight)))
    torch.testing.assert_close(block(inputs), inputs + hidden)

    wide = InvertedBottleneckBlock(6)
    assert wide.layer_0.weight.shape == (24, 6)
    hidden = wide.layer_1(F.relu(wide.layer_0(F.layer_norm(inputs, (6,)))))
    torch.testing.assert_close(wide(inputs), inputs + hidden)

    images, deep = torch.randn(2, 3, 5, 5), ConvolutionalResidualBlock(3)
    hidden = deep.convolution_1(deep.convolution_0(images.relu()).relu())
    torch.testing.assert_close(deep(images), images + hidden)


def test_dropout_keeps_the_mean() -> None:
    inputs, uniform = torch.ones(1000, 50), torch.rand(1000, 50)
    outputs = dropout(inputs, uniform, 0.2)
    assert set(outputs.unique().tolist()) == {0.0, 1.25}
    assert torch.equal(outputs == 0, uniform < 0.2)
    assert outputs.mean().item() == pytest.approx(1, abs=0.01)


def test_batch_norm_is_that_of_pytorch() -> None:
    reference, running = nn.BatchNorm1d(4, affine=False, momentum=0.3), initial_statistics(4)
    for _ in range(3):
        inputs = torch.randn(8, 4) * 3 + 1
        found = batch_statistics(inputs)
        torch.testing.assert_close(batch_norm(inputs, found), reference(inputs))
        running = updated_statistics(running, found, rows=8, momentum=0.3)
    expected = torch.stack([reference.running_mean, reference.running_var])
    torch.testing.assert_close(running, expected)
    torch.testing.assert_close(batch_norm(inputs, running), reference.eval()(inputs))


def test_batch_norm_maps_over_seeds() -> None:
    inputs = torch.randn(3, 8, 4)

    def normalized(rows: Tensor) -> Tensor:
        return batch_norm(rows, batch_statistics(rows))

    expected = torch.stack([normalized(rows) for rows in inputs])
    torch.testing.assert_close(torch.func.vmap(normalized)(inputs), expected)


class NormalizedSAC(SACAlgorithm):
    """SAC whose actor and critics see observations that are normalized by running statistics."""

    def buffers(self) -> State:
        return {"seen": initial_statistics(self.obs_dim).to(self.device)}

    def act(self, state: State, obs: Tensor) -> Tensor:  # type: ignore[misc]
        return super().act(state, batch_norm(obs, state["seen"]))

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        found = batch_statistics(batch.obs)
        new = updated_statistics(state["seen"], found, rows=len(batch.obs), momentum=0.1)
        obs, next_obs = (batch_norm(rows, state["seen"]) for rows in (batch.obs, batch.next_obs))
        changed = batch._replace(obs=obs, next_obs=next_obs)
        loss, metrics = super().critic_loss(state, changed, noise)
        return loss, {**metrics, BUFFERS + "seen": new}


def learner_of(seeds: tuple[int, ...], *, compiled: bool = False) -> Learner:
    streams = [make_batches(get_algorithm_spec("sac"), 3, seed=seed) for seed in seeds]
    settings: Any = {"hidden_sizes": [8], "batch_size": 16}
    algorithms = [NormalizedSAC(3, 2, settings, seed=seed) for seed in seeds]
    return prepared_learner(algorithms, streams, seeds, compiled=compiled)


def test_a_loss_updates_buffers() -> None:
    learner = learner_of((3,))
    expected = initial_statistics(3)
    for batch in make_batches(get_algorithm_spec("sac"), 3, seed=3):
        found = batch_statistics(batch.obs)
        expected = updated_statistics(expected, found, rows=16, momentum=0.1)
    learner.update(0, 3)
    torch.testing.assert_close(learner.state["seen"], expected)
    assert not any(name.startswith(BUFFERS) for name in learner.metrics())


def test_buffers_are_mapped_over_seeds() -> None:
    together = learner_of((3, 4))
    together.update(0, 3)
    for index, seed in enumerate((3, 4)):
        alone = learner_of((seed,))
        alone.update(0, 3)
        assert_agree(alone.algorithms[0].state, together.algorithms[index].state)


@pytest.mark.compiled
def test_compiled_updates_change_buffers() -> None:
    slow, fast = (learner_of((3, 4), compiled=on) for on in (False, True))
    slow.update(0, 3)
    fast.update(0, 3)
    assert_agree(slow.state, fast.state)


def test_buffers_are_part_of_a_policy() -> None:
    learner = learner_of((3,))
    learner.update(0, 3)
    low, high = -np.ones(2, np.float32), np.ones(2, np.float32)
    spaces = SpaceInfo(3, 2, action_low=low, action_high=high)
    policy = Policy(learner.algorithms[0], spaces, algorithm_name="sac")
    tensors = policy.tensors()
    assert torch.equal(tensors["buffers.seen"], learner.state["seen"])
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    expected = policy.act(obs)
    module = policy.module
    assert torch.equal(module.seen, learner.state["seen"])
    np.testing.assert_allclose(module(torch.tensor(obs)).detach().numpy(), expected, atol=1e-6)

    other = Policy(NormalizedSAC(3, 2, {"hidden_sizes": [8]}, seed=9), spaces, algorithm_name="sac")
    other.load_tensors(tensors)
    assert np.array_equal(other.act(obs), expected)
    # What starts again leaves the buffers as they are, like the networks.
    other.algorithm.load_state({**other.algorithm.state, **other.algorithm.initial_state()})
    assert np.array_equal(other.act(obs), expected)
