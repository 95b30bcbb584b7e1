"""Settings of Adam, schedules and initialization, compared with PyTorch."""

from __future__ import annotations

import math
from typing import Any

import by_hand
import pytest
import torch
from helpers import BUILT_IN, tiny_settings

from rl_training.algorithms import REDQAlgorithm, RLPDAlgorithm, SACAlgorithm
from rl_training.algorithms.functional import Adam, clip_norm, schedule_factor
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models import MLP

EIGHT = {"hidden_sizes": [8, 8], "batch_size": 16}


def take_step(
    optimizer: Adam, state: dict[str, torch.Tensor], gradient: torch.Tensor, mapped: bool
) -> None:
    """Step as for one seed; or as for several, where `state` has a seed axis of length one."""

    def step(state: dict[str, torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        optimizer.step(state, "x", gradient)
        return state["x"]

    if mapped:
        torch.func.vmap(step)(state, gradient.unsqueeze(0))
    else:
        step(state, gradient)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.8, 0.95), (0.0, 0.9), (0.9, 0.0)])
@pytest.mark.parametrize("mapped", [False, True])
def test_settings_have_the_same_meaning_as_in_pytorch(
    weight_decay: float, betas: tuple[float, float], mapped: bool
) -> None:
    ours = Adam(1e-2, None, True, *betas, 1e-3, weight_decay)
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(20, generator=generator)
    theirs = torch.nn.Parameter(vector.clone())
    options = {"lr": 1e-2, "betas": betas, "eps": 1e-3}
    expected = torch.optim.AdamW([theirs], **options, weight_decay=weight_decay)
    state = {"x": vector, **ours.initial_state("x", vector)}
    if mapped:
        state = {name: tensor.unsqueeze(0) for name, tensor in state.items()}
    for _ in range(10):
        gradient = torch.randn(20, generator=generator)
        theirs.grad = gradient.clone()
        expected.step()
        take_step(ours, state, gradient, mapped)
    torch.testing.assert_close(state["x"].view(-1), theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mapped", [False, True])
def test_moments_of_a_gradient_that_stays_zero_become_zero(mapped: bool) -> None:
    """Denormal numbers, which they would be for good otherwise, are slow; parameters are equal."""
    ours = Adam(1e-2, None, True, 0.9, 0.9)
    vector = torch.tensor([1.0, -1.0, 1e-3])
    theirs = torch.nn.Parameter(vector.clone())
    expected = torch.optim.Adam([theirs], lr=1e-2, betas=(0.9, 0.9))
    state = {"x": vector, **ours.initial_state("x", vector)}
    if mapped:
        state = {name: tensor.unsqueeze(0) for name, tensor in state.items()}
    for scale in (1.0, *[0.0] * 1_000):
        gradient = scale * torch.tensor([1.0, -1e-3, 1e3])
        theirs.grad = gradient.clone()
        expected.step()
        take_step(ours, state, gradient, mapped)
    assert (expected.state[theirs]["exp_avg"] != 0).all()
    assert (state["x.adam_mean"] == 0).all()
    assert (state["x.adam_square"] == 0).all()
    torch.testing.assert_close(state["x"].view(-1), theirs.detach(), rtol=1e-6, atol=0)
    take_step(ours, state, torch.full_like(vector, torch.nan), mapped)
    assert state["x.adam_mean"].isnan().all(), "a gradient that is not finite is not hidden"


@pytest.mark.parametrize("scale", [1e-12, 1e-15, 1e-17, 1e-18, 1e-20, 1e-29])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-12, 1e-15, 1e-18, 1e-20])
def test_tiny_gradients_take_the_steps_of_pytorch_with_any_epsilon(
    epsilon: float, scale: float
) -> None:
    ours = Adam(1e-2, epsilon=epsilon)
    vector = torch.zeros(3)
    theirs = torch.nn.Parameter(vector.clone())
    expected = torch.optim.Adam([theirs], lr=1e-2, eps=epsilon)
    state = {"x": vector, **ours.initial_state("x", vector)}
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        gradient = scale * (1 + 0.1 * torch.randn(3, generator=generator))
        theirs.grad = gradient.clone()
        expected.step()
        ours.step(state, "x", gradient)
    torch.testing.assert_close(state["x"], theirs.detach(), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("spec", BUILT_IN, ids=lambda spec: spec.name)
def test_every_algorithm_has_optimizer_settings_for_its_networks(spec: AlgorithmSpec) -> None:
    given = {"adam_betas": [0.8, 0.9], "adam_epsilon": 1e-3, "weight_decay": 0.01}
    algorithm = spec.algorithm(3, 2, tiny_settings(spec, **given))
    optimizers = algorithm.optimizers()
    for name, optimizer in optimizers.items():
        assert optimizer.epsilon == 1e-3
        assert optimizer.weight_decay == (0.01 if name in algorithm.networks() else 0.0)
    for name in algorithm.networks():
        assert (optimizers[name].beta1, optimizers[name].beta2) == (0.8, 0.9)


def test_the_temperature_uses_its_initial_value_and_learning_rate() -> None:
    chosen = {**EIGHT, "initial_alpha": 0.2, "alpha_learning_rate": 0.05}
    algorithm = SACAlgorithm(3, 2, chosen)
    assert algorithm.state["log_alpha"].exp().item() == pytest.approx(0.2)
    before = by_hand.copy_state(algorithm)
    algorithm.update(by_hand.make_batch(rows=16))
    assert by_hand.largest_step(before, algorithm, "log_alpha") == pytest.approx(0.05, rel=1e-3)
    assert by_hand.largest_step(before, algorithm, "actor") == pytest.approx(3e-4, rel=1e-2)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_ends_at_its_end_factor(kind: str) -> None:
    def factor(updates: int, end: float) -> float:
        return float(schedule_factor(kind, torch.tensor(updates), 100, 0, end))

    assert [factor(0, 0.1), factor(50, 0.1)] == pytest.approx([1.0, 0.55])
    assert [factor(100, 0.1), factor(500, 0.1)] == pytest.approx([0.1, 0.1])
    assert factor(100, 0.0) == pytest.approx(0.0, abs=1e-7)


def test_gradients_clipped_together_keep_their_direction() -> None:
    gradients = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    clipped = clip_norm(gradients, 1.0)
    torch.testing.assert_close(clipped["a"], torch.tensor([0.6, 0.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(clipped["b"], torch.tensor([0.8]), atol=1e-5, rtol=0)
    torch.testing.assert_close(clip_norm(gradients, 10.0), gradients)


def layers(network: MLP) -> list[tuple[torch.Tensor, torch.Tensor]]:
    parts = network.unflatten(network.vector.detach())
    return [(parts[f"weight_{i}"], parts[f"bias_{i}"]) for i in range(len(network.sizes) - 1)]


def start(initialization: str, **options: Any) -> MLP:
    generator = torch.Generator().manual_seed(0)
    sizes: Any = (64, (96, 64), 32)
    return MLP(*sizes, initialization=initialization, generator=generator, **options)


@pytest.mark.parametrize("ensemble", [None, 3])
def test_xavier_weights_are_uniform_by_both_sizes_and_biases_zero(ensemble: int | None) -> None:
    for weight, bias in layers(start("xavier", ensemble=ensemble)):
        bound = math.sqrt(6 / (weight.shape[-2] + weight.shape[-1]))
        assert 0.95 * bound < weight.abs().max() <= bound
        assert weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert not bias.any()


@pytest.mark.parametrize("ensemble", [None, 3])
def test_orthogonal_weights_preserve_norms_up_to_the_gain_of_the_activation(
    ensemble: int | None,
) -> None:
    *hidden, output = layers(start("orthogonal", ensemble=ensemble))
    for gain, (weight, bias) in [*((math.sqrt(2), layer) for layer in hidden), (1.0, output)]:
        for matrix in weight.reshape(-1, *weight.shape[-2:]):
            small = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
            identity = gain**2 * torch.eye(len(small))
            torch.testing.assert_close(small @ small.mT, identity, atol=1e-4, rtol=0)
        assert not bias.any()


def test_lecun_weights_have_the_variance_of_their_inputs() -> None:
    for weight, bias in layers(start("lecun", ensemble=8)):
        std = weight.shape[-2] ** -0.5
        assert weight.std().item() == pytest.approx(std, rel=0.05)
        assert weight.abs().max() <= 2 * std / 0.8796
        assert not bias.any()


def test_default_initialization_equals_that_of_pytorch() -> None:
    for weight, bias in layers(start("default")):
        bound = 1 / math.sqrt(weight.shape[-2])
        for part in (weight, bias):
            assert 0.9 * bound < part.abs().max() <= bound
            assert part.std() == pytest.approx(bound / math.sqrt(3), rel=0.2)


def test_the_error_for_an_unknown_initialization_lists_the_choices() -> None:
    with pytest.raises(ValueError, match="orthogonal, xavier"):
        start("zeros")


@pytest.mark.parametrize("spec", BUILT_IN, ids=lambda spec: spec.name)
def test_every_network_of_every_algorithm_uses_the_initialization_setting(
    spec: AlgorithmSpec,
) -> None:
    algorithm = spec.algorithm(3, 2, tiny_settings(spec, initialization="orthogonal"))
    for network in algorithm.networks().values():
        parts = network.unflatten(network.vector.detach())
        biases = [part for name, part in parts.items() if name.startswith("bias_")]
        assert biases
        assert not any(bias.any() for bias in biases)


@pytest.mark.parametrize("kind", [REDQAlgorithm, RLPDAlgorithm])
def test_redq_and_rlpd_are_initialized_as_in_their_reference_code(kind: type) -> None:
    algorithm = kind(3, 2, {**EIGHT, "num_critics": 3})
    assert algorithm.hyperparameters.initialization == "xavier"
    assert not any(bias.any() for _, bias in layers(algorithm.model.critic))
