"""The networks of TQC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from rl_training.models.actor_critic import NetworkOptions, StochasticActorCritic
from rl_training.models.network_plan import NetworkPlan
from rl_training.observations import ObservationSpec


class MLPTQCModel(StochasticActorCritic):
    """A squashed-Gaussian actor and critics that output quantiles of the return."""

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_critics: int = 5,
        num_quantiles: int = 25,
        **options: Unpack[NetworkOptions],
    ) -> None:
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            num_critics=num_critics,
            critic_outputs=num_quantiles,
            **options,
        )

    def quantiles(
        self,
        obs: Tensor,
        actions: Tensor,
        *,
        critic: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """Return quantiles `(batch, num_critics, num_quantiles)`, not sorted."""
        return self.critic_outputs(obs, actions, critic, dropout=dropout).transpose(0, 1)
