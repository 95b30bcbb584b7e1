"""The networks of DQN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_training.models.mlp import ACTIVATIONS, MLP


class MLPDQNModel(nn.Module):
    """Q-values of every choice from an observation.

    With `dueling` (1511.06581) the last hidden layer exists twice, in a stream for the value of
    the state and one for the advantages of the choices, which share the layers before it.
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
        """Inputs, hidden layers and outputs of each network."""
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
        """`(batch, num_actions)`, with the model's own parameters or those handed in by name."""

        def run(name: str, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.networks[name](inputs, vectors[name] if vectors else None)
            return outputs

        if not self.dueling:
            return run("critic", obs)
        features = obs
        if "critic_body" in self.networks:
            features = self._activation(run("critic_body", obs))
            # Two streams send their gradients into the body; scaled, as in the paper, their sum
            # is about as large as one stream's.
            features = scale_gradient(features, 1 / math.sqrt(2))
        value, advantage = run("critic_value", features), run("critic_advantage", features)
        # Only their sum is learned; without the mean each could drift against the other.
        return value + advantage - advantage.mean(-1, keepdim=True)


def scale_gradient(values: Tensor, factor: float) -> Tensor:
    """The same values, bit for bit, whose gradient is multiplied by `factor`."""
    return values.detach() + factor * (values - values.detach())
