"""The networks of IQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from rl_training.models.actor_critic import ActorCritic, NetworkOptions
from rl_training.models.gaussian import gaussian_actions, gaussian_logprobs, spread_parameters
from rl_training.models.mlp import MLP


class MLPIQLModel(ActorCritic):
    """A Gaussian actor whose spread is the same in every state, critics, and a value of states."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_critics: int = 2,
        **options: Unpack[NetworkOptions],
    ) -> None:
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            actor_outputs=action_dim,
            actor_free_parameters=spread_parameters(action_dim),
            num_critics=num_critics,
            **options,
        )
        value_sizes = options.get("critic_hidden_sizes")
        self.value = MLP(
            obs_dim,
            hidden_sizes if value_sizes is None else value_sizes,
            1,
            activation=options.get("activation", "relu"),
            layer_norm=options.get("critic_layer_norm", False),
            generator=options.get("generator"),
        )

    def actions(
        self, obs: Tensor, *, noise: Tensor | None = None, actor: Tensor | None = None
    ) -> Tensor:
        """The most likely actions, or those that the noise picks."""
        return gaussian_actions(self.actor, obs, actor, noise)

    def action_logprobs(
        self, obs: Tensor, actions: Tensor, *, actor: Tensor | None = None
    ) -> Tensor:
        """Log-probabilities `(batch,)` of given actions."""
        return gaussian_logprobs(self.actor, obs, actions, actor)

    def state_values(self, obs: Tensor, *, value: Tensor | None = None) -> Tensor:
        """What states are worth, `(batch,)`."""
        values: Tensor = self.value(obs, value)
        return values.squeeze(-1)
