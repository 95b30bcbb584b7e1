"""The networks of DQN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_training.errors import ConfigError
from rl_training.models.mlp import ACTIVATIONS, MLP, Network, watch_units
from rl_training.models.network_plan import LayerOptions, NetworkPlan
from rl_training.models.networks import EncodedNetwork
from rl_training.observations import ObservationSpec


class MLPDQNModel(nn.Module):
    """Q-values of all discrete actions for an observation.

    With `dueling` (1511.06581) there is one stream for the state's value and one for the actions'
    advantages. Each has its own last hidden layer, and they share the layers before it.
    """

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
        num_actions: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        dueling: bool = False,
        activation: str = "relu",
        initialization: str = "default",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        plan = NetworkPlan.of(obs_dim)
        self.obs_dim, self.num_actions = plan.observation.size, num_actions
        self.dueling, self._activation = dueling, ACTIVATIONS[activation]
        options: LayerOptions = {
            "activation": activation,
            "initialization": initialization,
            "generator": generator,
        }
        self.networks: Mapping[str, Network] = (
            self._streams(plan, hidden_sizes, options)
            if dueling
            else {"critic": plan.build("critic", hidden_sizes, num_actions, **options)}
        )
        for name, network in self.networks.items():
            self.add_module(name, network)

    def _streams(
        self, plan: NetworkPlan, hidden_sizes: Sequence[int], options: LayerOptions
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
        features = body["critic_body"].sizes[-1] if body else self.obs_dim
        return {
            **body,
            "critic_value": MLP(features, last, 1, **options),
            "critic_advantage": MLP(features, last, self.num_actions, **options),
        }

    def q_values(self, obs: Tensor, vectors: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return Q-values `(batch, num_actions)`; `vectors` replaces the parameters by name."""

        def run(name: str, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.networks[name](inputs, vectors[name] if vectors else None)
            return outputs

        if not self.dueling:
            return run("critic", obs)
        features = obs
        if "critic_body" in self.networks:
            features = run("critic_body", obs)
            body = self.networks["critic_body"]
            if not (isinstance(body, EncodedNetwork) and body.head is None):
                features = self._activation(features)
            watch_units(body, features)
            # As in the paper: the body receives the gradients of two streams, and scaling makes
            # their sum about as large as the gradient of one.
            features = scale_gradient(features, 1 / math.sqrt(2))
        value, advantage = run("critic_value", features), run("critic_advantage", features)
        # Only the sum is trained; subtracting the mean determines value and advantage uniquely.
        return value + advantage - advantage.mean(-1, keepdim=True)


def scale_gradient(values: Tensor, factor: float) -> Tensor:
    """Return the same values, bit for bit, with a gradient that is multiplied by `factor`."""
    return values.detach() + factor * (values - values.detach())
