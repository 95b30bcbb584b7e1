"""An actor beside an ensemble of critics, as every continuous algorithm has them.

An actor that is a distribution over actions, beside an ensemble of critics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from rl_training.models.gaussian import ActorHead, SquashedGaussianHead
from rl_training.models.mlp import MLP


class NetworkOptions(TypedDict, total=False):
    """What can be said of an actor and its critics beside their sizes."""

    actor_hidden_sizes: Sequence[int] | None
    critic_hidden_sizes: Sequence[int] | None
    activation: str
    critic_layer_norm: bool
    initialization: str
    generator: torch.Generator | None


class ActorCritic(nn.Module):
    """A network on observations, and an ensemble on observations and actions in [-1, 1].

    Every method of a model uses its own parameters unless a parameter vector is handed in, which
    is how losses differentiate with respect to one network and how target networks are evaluated.
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int],
        *,
        actor_outputs: int,
        num_critics: int,
        critic_outputs: int = 1,
        actor_free_parameters: Mapping[str, tuple[int, ...]] | None = None,
        **options: Unpack[NetworkOptions],
    ) -> None:
        super().__init__()
        self.obs_dim, self.action_dim, self.num_critics = obs_dim, action_dim, num_critics
        activation, generator = options.get("activation", "relu"), options.get("generator")
        initialization = options.get("initialization", "default")
        actor_sizes = options.get("actor_hidden_sizes")
        critic_sizes = options.get("critic_hidden_sizes")
        self.actor = MLP(
            obs_dim,
            hidden_sizes if actor_sizes is None else actor_sizes,
            actor_outputs,
            activation=activation,
            initialization=initialization,
            free_parameters=actor_free_parameters,
            generator=generator,
        )
        self.critic = MLP(
            obs_dim + action_dim,
            hidden_sizes if critic_sizes is None else critic_sizes,
            critic_outputs,
            ensemble=num_critics,
            activation=activation,
            layer_norm=options.get("critic_layer_norm", False),
            initialization=initialization,
            generator=generator,
        )

    def critic_outputs(
        self,
        obs: Tensor,
        actions: Tensor,
        critic: Tensor | None = None,
        members: Tensor | slice | None = None,
    ) -> Tensor:
        """What the critics, or some of them, say: `(critics, batch, critic_outputs)`."""
        return self._evaluate(obs, actions, critic, members)

    def q_values(
        self,
        obs: Tensor,
        actions: Tensor,
        *,
        critic: Tensor | None = None,
        members: Tensor | slice | None = None,
    ) -> Tensor:
        """Q-values `(batch, num_critics)`, or of the critics that `members` names."""
        # A critic that says more than one number gives the quantiles of a distribution.
        several = self.critic.sizes[-1] > 1
        return self._evaluate(obs, actions, critic, members, mean_output=several).squeeze(-1).mT

    def _evaluate(
        self,
        obs: Tensor,
        actions: Tensor,
        critic: Tensor | None,
        members: Tensor | slice | None,
        *,
        mean_output: bool = False,
    ) -> Tensor:
        vector = self.critic.vector if critic is None else critic
        if members is not None:
            vector = self.critic.members(vector, members)
        inputs = torch.cat([obs, actions], dim=-1)
        outputs: Tensor = self.critic(inputs, vector, mean_output=mean_output)
        return outputs


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
