"""The networks of DQN and QR-DQN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_training.models.categorical import Support
from rl_training.models.mlp import ACTIVATIONS, MLP, watch_units


class MLPDQNModel(nn.Module):
    """Q-values of all discrete actions for an observation.

    With several outputs per action, they describe the distribution of the return: probabilities of
    the atoms of a `support`, as logits (1707.06887), or else quantiles (1710.10044). The Q-value is
    its mean.

    With `dueling` (1511.06581) there is one stream for the state's value and one for the actions'
    advantages. Each has its own last hidden layer, and they share the layers before it. With
    `noisy_std` (1706.10295) all layers but those that the streams share have learned noise.
    """

    def __init__(
        self,
        obs_dim: int,
        num_actions: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        dueling: bool = False,
        num_outputs: int = 1,
        support: Support | None = None,
        noisy_std: float | None = None,
        activation: str = "relu",
        initialization: str = "default",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.obs_dim, self.num_actions, self.dueling = obs_dim, num_actions, dueling
        self.num_outputs, self.support = num_outputs, support
        self._activation = ACTIVATIONS[activation]

        self.networks: Mapping[str, MLP] = {
            name: MLP(
                inputs,
                hidden,
                outputs,
                activation=activation,
                initialization=initialization,
                noisy_std=None if name == "critic_body" else noisy_std,
                generator=generator,
            )
            for name, (inputs, hidden, outputs) in self._sizes(hidden_sizes).items()
        }
        for name, network in self.networks.items():
            self.add_module(name, network)

    def _sizes(self, hidden_sizes: Sequence[int]) -> dict[str, tuple[int, Sequence[int], int]]:
        """Return the inputs, hidden sizes and outputs of each network."""
        if not self.dueling:
            return {"critic": (self.obs_dim, hidden_sizes, self.num_outputs * self.num_actions)}
        shared, last = hidden_sizes[:-1], hidden_sizes[-1:]
        features = shared[-1] if shared else self.obs_dim
        streams = {
            "critic_value": (features, last, self.num_outputs),
            "critic_advantage": (features, last, self.num_outputs * self.num_actions),
        }
        body = {"critic_body": (self.obs_dim, shared[:-1], features)} if shared else {}
        return {**body, **streams}

    @property
    def noise_size(self) -> int:
        """How many random numbers the noisy layers need."""
        return sum(network.noise_size for network in self.networks.values())

    def q_values(
        self,
        obs: Tensor,
        vectors: Mapping[str, Tensor] | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Return Q-values `(batch, num_actions)`; the arguments are those of `outputs`."""
        return self.means(self.outputs(obs, vectors, noise))

    def means(self, outputs: Tensor) -> Tensor:
        """Return the means `(...)` of the distributions that `(..., num_outputs)` describe."""
        if self.support is not None:
            return self.support.mean(outputs)
        return outputs.squeeze(-1) if self.num_outputs == 1 else outputs.mean(-1)

    def outputs(
        self,
        obs: Tensor,
        vectors: Mapping[str, Tensor] | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Return outputs `(batch, num_actions, num_outputs)`.

        `vectors` replaces the parameters by name. `noise`, standard normal `(1 or batch,
        noise_size)`, disturbs noisy layers; without it they have their mean weights.
        """
        drawn = self._noise_by_network(noise)

        def run(name: str, inputs: Tensor, actions: int = self.num_actions) -> Tensor:
            vector = vectors[name] if vectors else None
            outputs: Tensor = self.networks[name](inputs, vector, noise=drawn.get(name))
            return outputs.reshape(*outputs.shape[:-1], self.num_outputs, actions)

        if not self.dueling:
            return run("critic", obs).mT
        features = obs
        if "critic_body" in self.networks:
            body = self.networks["critic_body"](obs, vectors["critic_body"] if vectors else None)
            features = self._activation(body)
            watch_units(self.networks["critic_body"], features)
            # As in the paper: the body receives the gradients of two streams, and scaling makes
            # their sum about as large as the gradient of one.
            features = scale_gradient(features, 1 / math.sqrt(2))
        value, advantage = run("critic_value", features, 1), run("critic_advantage", features)
        # Only the sum is trained; subtracting the mean determines value and advantage uniquely.
        return (value + advantage - advantage.mean(-1, keepdim=True)).mT

    def _noise_by_network(self, noise: Tensor | None) -> dict[str, Tensor]:
        if noise is None:
            return {}
        sizes = {name: network.noise_size for name, network in self.networks.items()}
        parts = torch.split(noise, list(sizes.values()), dim=-1)
        return {name: part for name, part in zip(sizes, parts, strict=True) if sizes[name]}


def scale_gradient(values: Tensor, factor: float) -> Tensor:
    """Return the same values, bit for bit, with a gradient that is multiplied by `factor`."""
    return values.detach() + factor * (values - values.detach())
