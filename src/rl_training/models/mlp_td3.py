"""The networks of TD3, DDPG, TD3+BC and ReBRAC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from rl_training.models.actor_critic import ActorCritic, NetworkOptions
from rl_training.models.network_plan import NetworkPlan
from rl_training.observations import ObservationSpec


class MLPTD3Model(ActorCritic):
    """A deterministic actor and an ensemble of state-action critics."""

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
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
            num_critics=num_critics,
            **options,
        )

    def actions(self, obs: Tensor, *, actor: Tensor | None = None) -> Tensor:
        """Return actions `(batch, action_dim)` in [-1, 1]."""
        return torch.tanh(self.actor(obs, actor))
