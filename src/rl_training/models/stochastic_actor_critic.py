"""An actor that is a distribution over actions, beside an ensemble of critics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from rl_training.models.actor_critic import ActorCritic, NetworkOptions
from rl_training.models.gaussian import ActorHead, SquashedGaussianHead


class StochasticActorCritic(ActorCritic):
    """What the models of SAC and its relatives, AWAC and IQL share; heads and critics differ."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int],
        *,
        num_critics: int,
        critic_outputs: int = 1,
        head: ActorHead | None = None,
        **options: Unpack[NetworkOptions],
    ) -> None:
        """`head` is SAC's squashed Gaussian where absent."""
        self.head: ActorHead = SquashedGaussianHead() if head is None else head
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            actor_outputs=self.head.outputs(action_dim),
            actor_free_parameters=self.head.free_parameters(action_dim),
            num_critics=num_critics,
            critic_outputs=critic_outputs,
            **options,
        )

    def sample_actions(
        self,
        obs: Tensor,
        deterministic: bool = False,
        *,
        noise: Tensor | None = None,
        actor: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Actions `(batch, action_dim)` in [-1, 1] and their log-probabilities `(batch,)`.

        `noise` is standard normal, `(batch, action_dim)`; drawn here where it is not given.
        """
        shape = (*obs.shape[:-1], self.action_dim)
        if deterministic:
            noise = obs.new_zeros(shape)
        elif noise is None:
            noise = torch.randn(shape, dtype=obs.dtype, device=obs.device)
        return self.head.sample(self.actor, obs, actor, noise)

    def actions(
        self, obs: Tensor, *, noise: Tensor | None = None, actor: Tensor | None = None
    ) -> Tensor:
        """Only the actions: the most likely ones, or those that the noise picks."""
        return self.head.actions(self.actor, obs, actor, noise)

    def action_logprobs(
        self, obs: Tensor, actions: Tensor, *, actor: Tensor | None = None
    ) -> Tensor:
        """Log-probabilities `(batch,)` of given actions, finite with finite gradients."""
        return self.head.log_probs(self.actor, obs, actions, actor)
