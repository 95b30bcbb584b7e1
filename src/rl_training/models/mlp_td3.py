"""The networks of TD3, DDPG, TD3+BC and ReBRAC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from rl_training.models.actor_critic import ActorCritic, NetworkOptions
from rl_training.models.categorical import Support
from rl_training.models.network_plan import NetworkPlan
from rl_training.observations import ObservationSpec


class MLPTD3Model(ActorCritic):
    """A deterministic actor and an ensemble of state-action critics.

    With a `support`, critics output a distribution of the return, as logits.
    """

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_critics: int = 2,
        support: Support | None = None,
        **options: Unpack[NetworkOptions],
    ) -> None:
        self.support = support
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            actor_outputs=action_dim,
            num_critics=num_critics,
            critic_outputs=1 if support is None else support.size,
            **options,
        )

    def q_values(
        self,
        obs: Tensor,
        actions: Tensor,
        *,
        critic: Tensor | None = None,
        subset: Tensor | slice | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """Return Q-values `(batch, num_critics)`, or only those of a `subset` of the critics."""
        if self.support is None:
            return super().q_values(obs, actions, critic=critic, subset=subset, dropout=dropout)
        logits = self.critic_outputs(obs, actions, critic, subset, dropout=dropout)
        return self.support.mean(logits).mT

    def actions(self, obs: Tensor, *, actor: Tensor | None = None) -> Tensor:
        """Return actions `(batch, action_dim)` in [-1, 1]."""
        return torch.tanh(self.actor(obs, actor))
