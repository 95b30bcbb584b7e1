"""Adam (1412.6980) on parameter vectors that live in an algorithm's state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.types import State


@dataclass(frozen=True)
class Adam:
    """Steps `state[name]` in place; its moments are `state[name + '.adam_*']`."""

    learning_rate: float
    max_grad_norm: float | None = None
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def initial_state(self, name: str, vector: Tensor) -> State:
        """The moments of one parameter vector, to be merged into the state."""
        return {
            f"{name}.adam_mean": torch.zeros_like(vector),
            f"{name}.adam_square": torch.zeros_like(vector),
            f"{name}.adam_count": torch.zeros((), device=vector.device),
        }

    def step(self, state: State, name: str, gradient: Tensor, factor: Tensor | float = 1.0) -> None:
        """Apply one gradient, with the learning rate multiplied by `factor`."""
        mean, square = state[f"{name}.adam_mean"], state[f"{name}.adam_square"]
        count = state[f"{name}.adam_count"]
        if self.max_grad_norm is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient = gradient * (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        count.add_(1)
        # Only operations that map over a population as they are (lerp_ and addcmul_ do not).
        mean.mul_(self.beta1).add_(gradient, alpha=1 - self.beta1)
        square.mul_(self.beta2).add_(gradient.square(), alpha=1 - self.beta2)
        step_size = factor * self.learning_rate / (1 - self.beta1**count)
        scale = torch.sqrt(1 - self.beta2**count)
        direction = mean / square.sqrt().div_(scale).add_(self.epsilon)
        state[name].sub_(direction.mul_(step_size))
