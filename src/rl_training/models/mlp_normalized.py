"""The networks of CrossQ, XQC and FlashSAC."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from rl_training.models.actor_critic import (
    LOG_STD_MIN,
    NetworkOptions,
    SquashedGaussianHead,
    StochasticActorCritic,
)
from rl_training.models.categorical import Support
from rl_training.models.network_plan import NetworkPlan
from rl_training.models.normalized import Normalization, NormalizedNetwork, normalized_part
from rl_training.observations import ObservationSpec


class NormalizedActorCritic(StochasticActorCritic):
    """A squashed-Gaussian actor and critics with batch normalization.

    With a `support`, the critics are categorical. Methods that take no statistics use the model's
    own running ones.
    """

    head: SquashedGaussianHead

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        normalization: Normalization,
        num_critics: int = 2,
        support: Support | None = None,
        log_std_min: float = LOG_STD_MIN,
        smooth_log_std: bool = False,
        **options: Unpack[NetworkOptions],
    ) -> None:
        self.support = support
        options["make"] = functools.partial(NormalizedNetwork, normalization=normalization)
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            num_critics=num_critics,
            critic_outputs=1 if support is None else support.size,
            head=SquashedGaussianHead(log_std_min, smooth=smooth_log_std),
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
        statistics: Tensor | None = None,
    ) -> Tensor:
        """Return Q-values `(batch, num_critics)`, with running statistics."""
        assert subset is None, "statistics are those of all critics"
        assert dropout is None, "its layers have no dropout"
        inputs = torch.cat([obs, actions], dim=-1)
        network, features, vector = normalized_part(self.critic, inputs, critic)
        return self.means(network(features, vector, statistics=statistics)).mT

    def critic_in_training(
        self,
        obs: Tensor,
        actions: Tensor,
        critic: Tensor,
        statistics: Tensor,
        *,
        momentum: float,
        renormalize: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs `(critics, batch, outputs)` and new running statistics.

        All rows are normalized together, by the statistics of this batch.
        """
        inputs = torch.cat([obs, actions], dim=-1)
        network, features, vector = normalized_part(self.critic, inputs, critic)
        return network.in_training(
            features, vector, statistics, momentum=momentum, renormalize=renormalize
        )

    def means(self, outputs: Tensor) -> Tensor:
        """Return the Q-values `(...)` that outputs `(..., outputs)` of critics stand for."""
        return outputs.squeeze(-1) if self.support is None else self.support.mean(outputs)

    def actor_outputs(self, inputs: Tensor, actor: Tensor, statistics: Tensor) -> Tensor:
        """Return the outputs of the actor, with running statistics."""
        network, features, vector = normalized_part(self.actor, inputs, actor)
        outputs: Tensor = network(features, vector, statistics=statistics)
        return outputs

    def actor_in_training(
        self,
        inputs: Tensor,
        actor: Tensor,
        statistics: Tensor,
        *,
        momentum: float,
        renormalize: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the actor for a batch, and new running statistics."""
        network, features, vector = normalized_part(self.actor, inputs, actor)
        return network.in_training(
            features, vector, statistics, momentum=momentum, renormalize=renormalize
        )
