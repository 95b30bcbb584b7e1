"""CrossQ's, XQC's and FlashSAC's networks and losses in NumPy, in double precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from rl_training.algorithms.base import Algorithm
from rl_training.models.mlp import Network
from rl_training.types import Batch

Named = dict[str, np.ndarray]


def numbers(tensor: torch.Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().double().numpy()
    return found


@dataclass
class Perceptron:
    """One network with batch normalization: `after` or `before` ReLU, or in `residual` blocks."""

    named: Named
    running: np.ndarray
    """Running mean and variance of all normalized units, `(2, units)`"""
    order: str
    epsilon: float
    momentum: float = 0.01
    correction: int = 1
    """1 if running variances are unbiased, else 0"""
    renormalize: bool = False
    new_running: list[np.ndarray] = field(default_factory=list)

    def __call__(self, inputs: np.ndarray, *, training: bool) -> np.ndarray:
        self.new_running, self._used, self._index = [], 0, 0
        layers = sum(name.startswith("weight_") for name in self.named)
        hidden = self.norm(inputs, training)
        if self.order == "residual":
            hidden = self.linear(0, hidden)
            for layer in range(1, layers - 1, 2):
                inner = np.maximum(self.norm(self.linear(layer, hidden), training), 0)
                hidden = hidden + np.maximum(self.norm(self.linear(layer + 1, inner), training), 0)
            size = np.sqrt(np.mean(hidden**2, axis=-1, keepdims=True) + 1e-6)
            hidden = hidden / size * self.named["gain"]
            return self.linear(layers - 1, hidden)
        for layer in range(layers - 1):
            hidden = self.linear(layer, hidden)
            if self.order == "before":
                hidden = np.maximum(self.norm(hidden, training), 0)
            else:
                hidden = self.norm(np.maximum(hidden, 0), training)
        return self.linear(layers - 1, hidden)

    def linear(self, layer: int, inputs: np.ndarray) -> np.ndarray:
        product: np.ndarray = inputs @ self.named[f"weight_{layer}"]
        return product + self.named.get(f"bias_{layer}", 0.0)

    def norm(self, inputs: np.ndarray, training: bool) -> np.ndarray:
        index, first, size = self._index, self._used, inputs.shape[-1]
        self._index, self._used = index + 1, first + size
        mean, variance = running = self.running[:, first : first + size]
        if training:
            own = np.stack([inputs.mean(0), inputs.var(0)])
            seen = np.stack([inputs.mean(0), inputs.var(0, ddof=self.correction)])
            self.new_running.append((1 - self.momentum) * running + self.momentum * seen)
            normalized = (inputs - own[0]) / np.sqrt(own[1] + self.epsilon)
            if self.renormalize:
                ratio = np.sqrt((own[1] + self.epsilon) / (variance + self.epsilon))
                shift = (own[0] - mean) / np.sqrt(variance + self.epsilon)
                ratio, shift = np.clip(ratio, 1 / 3, 3), np.clip(shift, -5, 5)
                # The authors move mean and variance, which is `x * ratio + shift` but for epsilon.
                moved = own[0] - shift * np.sqrt(own[1]) / ratio
                normalized = (inputs - moved) / np.sqrt(own[1] / ratio**2 + self.epsilon)
        else:
            normalized = (inputs - mean) / np.sqrt(variance + self.epsilon)
        return normalized * self.named[f"scale_{index}"] + self.named.get(f"shift_{index}", 0.0)

    @property
    def moved(self) -> np.ndarray:
        """The new running statistics of the last call in training."""
        return np.concatenate(self.new_running, axis=-1)


def perceptron(
    network: Network, vector: torch.Tensor, running: torch.Tensor, **options: object
) -> Perceptron:
    named = {name: numbers(part) for name, part in network.unflatten(vector).items()}
    return Perceptron(named, numbers(running), **options)  # type: ignore[arg-type]


def perceptrons(
    network: Network, vector: torch.Tensor, running: torch.Tensor, **options: object
) -> list[Perceptron]:
    """Return the members of an ensemble."""
    stacked = {name: numbers(part) for name, part in network.unflatten(vector).items()}
    return [
        Perceptron(
            {
                name: part[member].squeeze() if name[0] != "w" else part[member]
                for name, part in stacked.items()
            },
            numbers(running[member]),
            **options,  # type: ignore[arg-type]
        )
        for member in range(network.ensemble or 1)
    ]


def squashed(
    outputs: np.ndarray, noise: torch.Tensor, *, lowest: float, smooth: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return actions and their log-probabilities, with an explicit change of variables."""
    mean, raw = np.split(outputs, 2, axis=-1)
    log_std = lowest + (2 - lowest) * 0.5 * (1 + np.tanh(raw)) if smooth else raw.clip(lowest, 2)
    epsilon = numbers(noise)
    action = np.tanh(mean + np.exp(log_std) * epsilon)
    log_prob = -0.5 * epsilon**2 - log_std - 0.5 * math.log(2 * math.pi)
    return action, (log_prob - np.log(1 - action**2)).sum(-1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    largest = logits.max(-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))


def two_hot(probabilities: np.ndarray, values: np.ndarray, atoms: np.ndarray) -> np.ndarray:
    """Return the projection of one distribution on the atoms, value by value."""
    result, width = np.zeros(len(atoms)), atoms[1] - atoms[0]
    for probability, value in zip(probabilities, values.clip(atoms[0], atoms[-1]), strict=True):
        place = (value - atoms[0]) / width
        lower = min(math.floor(place + 1e-9), len(atoms) - 1)
        upper, share = min(lower + 1, len(atoms) - 1), place - lower
        result[lower] += probability * (1 - share)
        result[upper] += probability * share
    return result


def categorical_targets(
    logits: list[np.ndarray], bonus: np.ndarray, batch: Batch, atoms: np.ndarray
) -> np.ndarray:
    """Return the targets `(batch, atoms)`, from the critic with the least mean in each row."""
    reward, discount = numbers(batch.reward), numbers(batch.discount)
    targets = []
    for row in range(len(reward)):
        chances = [np.exp(log_softmax(each[row])) for each in logits]
        chosen = min(chances, key=lambda chance: float(chance @ atoms))
        values = reward[row] + discount[row] * (atoms + bonus[row])
        targets.append(two_hot(chosen, values, atoms))
    return np.stack(targets)


def joined(batch: Batch, next_action: np.ndarray) -> np.ndarray:
    """Return the critics' inputs for the taken actions, then for the next ones."""
    taken = np.concatenate([numbers(batch.obs), numbers(batch.action)], axis=-1)
    following = np.concatenate([numbers(batch.next_obs), next_action], axis=-1)
    return np.concatenate([taken, following])


def disturb(algorithm: Algorithm, seed: int = 5) -> None:
    """Give all parameters and running statistics values that no formula can ignore."""
    generator = torch.Generator().manual_seed(seed)
    for name in ("actor", "critic", "target_critic"):
        if name in algorithm.state:
            vector = algorithm.state[name]
            vector.add_(0.2 * torch.randn(vector.shape, generator=generator))
    for name in ("actor_statistics", "critic_statistics"):
        running = algorithm.state[name]
        running[..., 0, :] = 0.3 * torch.randn(running[..., 0, :].shape, generator=generator)
        running[..., 1, :] = 0.5 + torch.rand(running[..., 1, :].shape, generator=generator)
    algorithm.state["log_alpha"].fill_(math.log(0.3))
