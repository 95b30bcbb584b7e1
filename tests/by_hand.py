"""Reference networks and distributions in NumPy: double precision, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch

from rl_training.algorithms.base import Algorithm
from rl_training.models import MLP
from rl_training.types import Batch, Metrics, State

Layers = list[tuple[np.ndarray, np.ndarray]]


def make_batch(
    rows: int = 2, seed: int = 0, *, obs_dim: int = 3, action_dim: int = 2, choices: int = 0
) -> Batch:
    """Return random rows. The first one is terminated. With `choices`, actions are discrete."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    discount = torch.full((rows,), 0.9)
    discount[0] = 0.0
    action = draw(rows, action_dim).tanh()
    if choices:
        action = torch.randint(choices, (rows,), generator=generator)
    return Batch(draw(rows, obs_dim), action, draw(rows), discount, draw(rows, obs_dim))


def copy_state(algorithm: Algorithm) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in algorithm.state.items()}


def changed(before: dict[str, torch.Tensor], algorithm: Algorithm) -> set[str]:
    return {name for name, old in before.items() if not torch.equal(old, algorithm.state[name])}


def largest_step(before: dict[str, torch.Tensor], algorithm: Algorithm, name: str) -> float:
    """Return the largest change of one state tensor. After Adam's first step: the learning rate."""
    return (algorithm.state[name] - before[name]).abs().max().item()


def numbers(metrics: Metrics) -> dict[str, float]:
    return {name: metric.item() for name, metric in metrics.items()}


def gradients(
    loss: Callable[[State], torch.Tensor], state: State, names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss of the state; zero for tensors it does not depend on."""
    leaves = {name: state[name].detach().clone().requires_grad_() for name in names}
    found = torch.autograd.grad(
        loss({**state, **leaves}), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def reached(loss: Callable[[State], torch.Tensor], state: State, names: Iterable[str]) -> set[str]:
    """Return the names of the state tensors with a nonzero gradient."""
    found = gradients(loss, state, names)
    return {name for name, gradient in found.items() if gradient.abs().sum() > 0}


def watch_q_values(algorithm: Algorithm) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a list that collects the observations and actions passed to the critics."""
    queries: list[tuple[torch.Tensor, torch.Tensor]] = []
    q_values = algorithm.model.q_values

    def watch(obs: torch.Tensor, actions: torch.Tensor, **options: object) -> torch.Tensor:
        queries.append((obs, actions))
        return q_values(obs, actions, **options)

    algorithm.model.q_values = watch  # type: ignore[method-assign]
    return queries


def row(batch: Batch, index: int) -> Batch:
    """Return one row of a batch as NumPy scalars and vectors."""
    return Batch(*(field[index].double().numpy() for field in batch[:5]))


def layers(network: MLP, vector: torch.Tensor) -> Layers:
    parts = {k: v.double().numpy() for k, v in network.unflatten(vector).items()}
    count = len(network.sizes) - 1
    return [(parts[f"weight_{i}"], parts[f"bias_{i}"]) for i in range(count)]


def members(network: MLP, vector: torch.Tensor) -> list[Layers]:
    """Return the networks of an ensemble."""
    stacked = layers(network, vector)
    return [[(w[e], b[e, 0]) for w, b in stacked] for e in range(stacked[0][0].shape[0])]


def forward(network: Layers, *inputs: np.ndarray) -> np.ndarray:
    x = np.concatenate(inputs)
    for weight, bias in network[:-1]:
        x = np.maximum(x @ weight + bias, 0.0)
    return x @ network[-1][0] + network[-1][1]


def squashed_gaussian(
    actor: Layers, obs: np.ndarray, noise: torch.Tensor
) -> tuple[np.ndarray, float]:
    """Return an action and its log-probability, with an explicit change of variables."""
    epsilon = noise.double().numpy()
    mean, log_std = np.split(forward(actor, obs), 2)
    log_std = np.clip(log_std, -20, 2)
    action = np.tanh(mean + np.exp(log_std) * epsilon)
    log_prob = -0.5 * epsilon**2 - log_std - 0.5 * math.log(2 * math.pi)
    return action, float((log_prob - np.log(1 - action**2)).sum())


def gaussian_action(
    actor: Layers, std: np.ndarray, obs: np.ndarray, noise: torch.Tensor
) -> np.ndarray:
    """Return a sample around the tanh of the outputs, clipped to the bounds."""
    return np.clip(np.tanh(forward(actor, obs)) + std * noise.double().numpy(), -1, 1)


def gaussian_log_prob(value: np.ndarray, mean: np.ndarray, std: np.ndarray) -> float:
    """Return the log-density of a Gaussian with independent components."""
    density = np.exp(-((value - mean) ** 2) / (2 * std**2)) / np.sqrt(2 * math.pi * std**2)
    return float(np.log(density).sum())


def free_std(actor: MLP, vector: torch.Tensor) -> np.ndarray:
    """Return the standard deviations of an actor with state-independent ones."""
    return np.exp(actor.unflatten(vector)["log_std"].double().numpy())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithms of probabilities."""
    return np.asarray(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
