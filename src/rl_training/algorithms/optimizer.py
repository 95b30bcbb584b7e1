"""Adam (1412.6980) for parameter vectors in an algorithm's state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.algorithms.functional import is_transformed
from rl_training.internals import fused_adam_step
from rl_training.types import State


@dataclass(frozen=True)
class Adam:
    """Updates `state[name]` in place; the moments are `state[name + '.adam_*']`."""

    learning_rate: float
    max_grad_norm: float | None = None
    scheduled: bool = True
    """Whether the learning rate follows the run's schedule"""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled weight decay (1711.05101) of all parameters in the vector"""

    def initial_state(self, name: str, vector: Tensor) -> State:
        """Return the initial moments of one parameter vector, to be merged into the state."""
        return {
            f"{name}.adam_mean": torch.zeros_like(vector),
            f"{name}.adam_square": torch.zeros_like(vector),
            f"{name}.adam_count": torch.zeros((), device=vector.device),
        }

    def step(self, state: State, name: str, gradient: Tensor, factor: Tensor | float = 1.0) -> None:
        """Apply one gradient, with the learning rate multiplied by `factor`."""
        if self.max_grad_norm is not None:
            gradient = clip_norm({name: gradient}, self.max_grad_norm)[name]
        moments = [state[f"{name}.adam_{part}"] for part in ("mean", "square", "count")]
        moments[2].add_(1)
        if is_transformed(gradient) or not self._fused_step(state[name], gradient, moments, factor):
            self._composed_step(state[name], gradient, moments, factor)

    def _composed_step(
        self, vector: Tensor, gradient: Tensor, moments: list[Tensor], factor: Tensor | float
    ) -> None:
        """Step with operations that a compiler can fuse and that map over a population."""
        mean, square, count = moments
        mean.add_((gradient - mean) * (1 - self.beta1))
        square.mul_(self.beta2).add_(gradient.square() * (1 - self.beta2))
        correction1, correction2 = _correction(self.beta1, count), _correction(self.beta2, count)
        if self.weight_decay:
            vector.mul_(1 - factor * (self.learning_rate * self.weight_decay))
        step_size = _computed_once(factor * self.learning_rate / correction1)
        denominator = square.sqrt() / _computed_once(correction2.sqrt()) + self.epsilon
        vector.sub_(step_size * mean / denominator)

    def _fused_step(
        self, vector: Tensor, gradient: Tensor, moments: list[Tensor], factor: Tensor | float
    ) -> bool:
        """Step with PyTorch's fused kernel; return False if it is not available."""
        return fused_adam_step(
            vector,
            gradient,
            moments,
            learning_rate=factor * self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay,
        )


def _correction(beta: float, count: Tensor) -> Tensor:
    """Return `1 - beta^count`, computed without cancellation in single precision."""
    return -torch.expm1(count * math.log(beta)) if beta else torch.ones_like(count)


def clip_norm(gradients: State, largest: float) -> State:
    """Return the gradients, scaled down together if their joint norm exceeds `largest`."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    return {name: gradient * factor for name, gradient in gradients.items()}


def _computed_once(number: Tensor) -> Tensor:
    """Return the same number, as the maximum of several equal ones.

    The compiler would inline the formula of the number into the loop over all parameters and
    compute it for each of them. A reduction is computed once, before the loop.
    """
    return number.expand(16).clone().amax()
