"""The networks of SAC, AWAC and CQL, and those of REDQ and RLPD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from rl_training.models.actor_critic import NetworkOptions, StochasticActorCritic
from rl_training.models.gaussian import LOG_STD_MIN, ActorHeadName, make_head


class MLPSACModel(StochasticActorCritic):
    """A Gaussian actor, squashed or not, and an ensemble of state-action critics."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_critics: int = 2,
        actor_head: ActorHeadName = "squashed_gaussian",
        log_std_min: float = LOG_STD_MIN,
        **options: Unpack[NetworkOptions],
    ) -> None:
        """`log_std_min` applies to the head `gaussian`."""
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            num_critics=num_critics,
            head=make_head(actor_head, log_std_min),
            **options,
        )


class MLPREDQModel(MLPSACModel):
    """SAC's networks with ten critics by default."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_critics: int = 10,
        **options: Unpack[NetworkOptions],
    ) -> None:
        super().__init__(obs_dim, action_dim, hidden_sizes, num_critics=num_critics, **options)
