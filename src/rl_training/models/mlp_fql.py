"""The networks of FQL: a one-step policy, the velocity field of a flow, and critics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from rl_training.models.actor_critic import ActorCritic, NetworkOptions
from rl_training.models.mlp import Network
from rl_training.models.network_plan import NetworkPlan
from rl_training.models.networks import EncodedNetwork
from rl_training.observations import ObservationSpec


class MLPFQLModel(ActorCritic):
    """An actor on observations and noise, a flow from noise to the data's actions, and critics.

    The flow is an ordinary differential equation `da/dt = velocity(obs, a, t)`. Its solution from
    standard normal noise at time 0 has the distribution of the data's actions at time 1.
    """

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
        action_dim: int,
        hidden_sizes: Sequence[int] = (512, 512, 512, 512),
        *,
        num_critics: int = 2,
        **options: Unpack[NetworkOptions],
    ) -> None:
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            actor_outputs=action_dim,
            actor_other_inputs=action_dim,
            num_critics=num_critics,
            **options,
        )
        flow_sizes = options.get("actor_hidden_sizes")
        self.flow = NetworkPlan.of(obs_dim).build(
            "actor",
            hidden_sizes if flow_sizes is None else flow_sizes,
            action_dim,
            other_inputs=action_dim + 1,
            activation=options.get("activation", "relu"),
            layer_norm=options.get("actor_layer_norm", False),
            initialization=options.get("initialization", "default"),
            generator=options.get("generator"),
        )

    def one_step(
        self,
        obs: Tensor | Mapping[str, Tensor],
        noise: Tensor | None = None,
        *,
        actor: Tensor | None = None,
    ) -> Tensor:
        """Return the actor's outputs `(batch, action_dim)`, which may be outside of [-1, 1].

        `noise` is standard normal, `(batch, action_dim)`. Without it, it is zero.
        """
        features = _features(self.actor, obs, actor)
        if noise is None:
            noise = features.new_zeros(*features.shape[:-1], self.action_dim)
        return _outputs(self.actor, [features, noise], actor)

    def actions(
        self,
        obs: Tensor | Mapping[str, Tensor],
        noise: Tensor | None = None,
        *,
        actor: Tensor | None = None,
    ) -> Tensor:
        """Return the actor's actions in [-1, 1], for given noise or for zero."""
        return self.one_step(obs, noise, actor=actor).clamp(-1, 1)

    def velocity(
        self, obs: Tensor, actions: Tensor, times: Tensor, *, flow: Tensor | None = None
    ) -> Tensor:
        """Return the velocity of actions `(batch, action_dim)` at times `(batch, 1)` in [0, 1]."""
        return _outputs(self.flow, [_features(self.flow, obs, flow), actions, times], flow)

    def flow_actions(
        self, obs: Tensor, noise: Tensor, steps: int, *, flow: Tensor | None = None
    ) -> Tensor:
        """Return the flow's actions in [-1, 1], with Euler's method in that many steps."""
        features, actions = _features(self.flow, obs, flow), noise
        for step in range(steps):
            times = torch.full_like(noise[..., :1], step / steps)
            actions = actions + _outputs(self.flow, [features, actions, times], flow) / steps
        return actions.clamp(-1, 1)


def _features(network: Network, obs: Any, vector: Tensor | None) -> Tensor:
    """Return what a network takes instead of observations, computed once for several calls."""
    if isinstance(network, EncodedNetwork):
        return network.encode(obs, vector)
    features: Tensor = obs
    return features


def _outputs(network: Network, inputs: Sequence[Tensor], vector: Tensor | None) -> Tensor:
    """Evaluate a network on features and further inputs."""
    joined = torch.cat(list(inputs), dim=-1)
    if isinstance(network, EncodedNetwork):
        return network.decode(joined, vector)
    outputs: Tensor = network(joined, vector)
    return outputs
