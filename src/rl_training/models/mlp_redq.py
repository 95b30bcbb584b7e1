"""The networks of REDQ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from rl_training.models.actor_critic import NetworkOptions
from rl_training.models.stochastic_actor_critic import StochasticActorCritic


class MLPREDQModel(StochasticActorCritic):
    """A squashed-Gaussian actor and a large ensemble of state-action critics."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_critics: int = 10,
        **options: Unpack[NetworkOptions],
    ) -> None:
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            num_critics=num_critics,
            **options,
        )
