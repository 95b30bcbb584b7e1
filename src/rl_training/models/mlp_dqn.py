"""The networks of DQN and QR-DQN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_training.errors import ConfigError
from rl_training.models.categorical import Support
from rl_training.models.mlp import ACTIVATIONS, MLP, Network, watch_units
from rl_training.models.network_plan import LayerOptions, NetworkPlan
from rl_training.models.networks import EncodedNetwork
from rl_training.observations import ObservationSpec


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
        obs_dim: int | ObservationSpec | NetworkPlan,
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
        plan = NetworkPlan.of(obs_dim)
        self.obs_dim, self.num_actions = plan.observation.size, num_actions
        self.dueling, self._activation = dueling, ACTIVATIONS[activation]
        self.num_outputs, self.support = num_outputs, support
        options: LayerOptions = {
            "activation": activation,
            "initialization": initialization,
            "generator": generator,
        }
        noisy: LayerOptions = {**options, "noisy_std": noisy_std}
        self.networks: Mapping[str, Network] = (
            self._streams(plan, hidden_sizes, options, noisy)
            if dueling
            else {"critic": plan.build("critic", hidden_sizes, self._all_outputs, **noisy)}
        )
        for name, network in self.networks.items():
            self.add_module(name, network)

    def _streams(
        self,
        plan: NetworkPlan,
        hidden_sizes: Sequence[int],
        options: LayerOptions,
        noisy: LayerOptions,
    ) -> dict[str, Network]:
        """Build the streams, and the body that they share if it has layers or an encoder."""
        if plan.custom is not None and plan.custom.defines("critic"):
            raise ConfigError(
                f"dueling = True: needs the built-in critic; remove {plan.custom.name}.critic"
            )
        shared, last = hidden_sizes[:-1], hidden_sizes[-1:]
        body: dict[str, Network] = {}
        if shared:
            body["critic_body"] = plan.build("critic", shared[:-1], shared[-1], **options)
        elif plan.encodes("critic"):
            body["critic_body"] = plan.build("critic", None, 0, **options)
        outputs = {"critic_value": self.num_outputs, "critic_advantage": self._all_outputs}
        if not body:
            return {
                name: plan.build("critic", last, number, **noisy)
                for name, number in outputs.items()
            }
        features = body["critic_body"].sizes[-1]
        return body | {
            name: MLP(features, last, number, **noisy) for name, number in outputs.items()
        }

    @property
    def _all_outputs(self) -> int:
        return self.num_outputs * self.num_actions

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
            body = self.networks["critic_body"]
            features = body(obs, vectors["critic_body"] if vectors else None)
            if not (isinstance(body, EncodedNetwork) and body.head is None):
                features = self._activation(features)
            watch_units(body, features)
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
