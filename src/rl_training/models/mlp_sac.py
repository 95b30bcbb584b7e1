"""The networks of SAC, AWAC, CQL and RLPD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from rl_training.models.actor_critic import NetworkOptions
from rl_training.models.squashed_gaussian import SquashedGaussianModel


class MLPSACModel(SquashedGaussianModel):
    """A squashed-Gaussian actor and an ensemble of state-action critics."""

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
            actor_outputs=2 * action_dim,
            num_critics=num_critics,
            **options,
        )
