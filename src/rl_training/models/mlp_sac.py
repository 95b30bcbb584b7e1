"""The networks of SAC, AWAC and CQL, and those of REDQ and RLPD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from rl_training.models.actor_critic import NetworkOptions, StochasticActorCritic
from rl_training.models.network_plan import NetworkPlan
from rl_training.observations import ObservationSpec


class MLPSACModel(StochasticActorCritic):
    """A Gaussian actor, squashed or not, and twin critics by default."""


class MLPREDQModel(MLPSACModel):
    """SAC's networks with ten critics by default."""

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_critics: int = 10,
        **options: Unpack[NetworkOptions],
    ) -> None:
        super().__init__(obs_dim, action_dim, hidden_sizes, num_critics=num_critics, **options)
