"""The networks of DQN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_training.models.mlp import ACTIVATIONS, MLP, watch_units


class MLPDQNModel(nn.Module):
    """Q-values of all discrete actions for an observation.

    With `dueling` (1511.06581) there is one stream for the state's value and one for the actions'
    advantages. Each has its own last hidden layer, and they share the layers before it.
    """

    def __init__(
        self,
        obs_dim: int,
        num_actions: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        dueling: bool = False,
        activation: str = "relu",
        initialization: str = "default",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.obs_dim, self.num_actions, self.dueling = obs_dim, num_actions, dueling
        self._activation = ACTIVATIONS[activation]

        self.networks: Mapping[str, MLP] = {
            name: MLP(
                inputs,
                hidden,
                outputs,
                activation=activation,
                initialization=initialization,
                generator=generator,
            )
            for name, (inputs, hidden, outputs) in self._sizes(hidden_sizes).items()
        }
        for name, network in self.networks.items():
            self.add_module(name, network)

    def _sizes(self, hidden_sizes: Sequence[int]) -> dict[str, tuple[int, Sequence[int], int]]:
        """Return the inputs, hidden sizes and outputs of each network."""
        if not self.dueling:
            return {"critic": (self.obs_dim, hidden_sizes, self.num_actions)}
        shared, last = hidden_sizes[:-1], hidden_sizes[-1:]
        features = shared[-1] if shared else self.obs_dim
        streams = {
            "critic_value": (features, last, 1),
            "critic_advantage": (features, last, self.num_actions),
        }
        body = {"critic_body": (self.obs_dim, shared[:-1], features)} if shared else {}
        return {**body, **streams}

    def q_values(self, obs: Tensor, vectors: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return Q-values `(batch, num_actions)`; `vectors` replaces the parameters by name."""

        def run(name: str, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.networks[name](inputs, vectors[name] if vectors else None)
            return outputs

        if not self.dueling:
            return run("critic", obs)
        features = obs
        if "critic_body" in self.networks:
            features = self._activation(run("critic_body", obs))
            watch_units(self.networks["critic_body"], features)
            # As in the paper: the body receives the gradients of two streams, and scaling makes
            # their sum about as large as the gradient of one.
            features = scale_gradient(features, 1 / math.sqrt(2))
        value, advantage = run("critic_value", features), run("critic_advantage", features)
        # Only the sum is trained; subtracting the mean determines value and advantage uniquely.
        return value + advantage - advantage.mean(-1, keepdim=True)


def scale_gradient(values: Tensor, factor: float) -> Tensor:
    """Return the same values, bit for bit, with a gradient that is multiplied by `factor`."""
    return values.detach() + factor * (values - values.detach())
