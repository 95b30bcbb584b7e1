"""Models with an actor and an ensemble of critics, for continuous actions.

`ActorCritic` builds the networks and evaluates the critics. `StochasticActorCritic` has an actor
that is a distribution over actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from rl_training.models.gaussian import LOG_STD_MIN, ActorHeadName, make_head
from rl_training.models.mlp import MLP


class NetworkOptions(TypedDict, total=False):
    """Optional keyword arguments of actor-critic models."""

    actor_hidden_sizes: Sequence[int] | None
    critic_hidden_sizes: Sequence[int] | None
    activation: str
    critic_layer_norm: bool
    initialization: str
    generator: torch.Generator | None


class ActorCritic(nn.Module):
    """An actor on observations, and critics on observations and actions in [-1, 1].

    Every method uses the model's own parameters unless it is given a parameter vector. Losses pass
    a vector to differentiate with respect to one network, or to evaluate a target network.
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

    def q_values(
        self,
        obs: Tensor,
        actions: Tensor,
        *,
        critic: Tensor | None = None,
        subset: Tensor | slice | None = None,
    ) -> Tensor:
        """Return Q-values `(batch, num_critics)`, or only those of a `subset` of the critics."""
        # Several outputs are the quantiles of a distribution, whose mean is the Q-value.
        several = self.critic.sizes[-1] > 1
        outputs = self.critic_outputs(obs, actions, critic, subset, mean_output=several)
        return outputs.squeeze(-1).mT

    def critic_outputs(
        self,
        obs: Tensor,
        actions: Tensor,
        critic: Tensor | None = None,
        subset: Tensor | slice | None = None,
        *,
        mean_output: bool = False,
    ) -> Tensor:
        """Return the outputs `(critics, batch, critic_outputs)`, or their mean as a last axis."""
        vector = self.critic.vector if critic is None else critic
        if subset is not None:
            vector = self.critic.select(vector, subset)
        inputs = torch.cat([obs, actions], dim=-1)
        outputs: Tensor = self.critic(inputs, vector, mean_output=mean_output)
        return outputs


class StochasticActorCritic(ActorCritic):
    """A Gaussian actor, squashed or not, and an ensemble of state-action critics."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_critics: int = 2,
        critic_outputs: int = 1,
        actor_head: ActorHeadName = "squashed_gaussian",
        log_std_min: float = LOG_STD_MIN,
        **options: Unpack[NetworkOptions],
    ) -> None:
        """`log_std_min` applies to the head `gaussian`."""
        self.head = make_head(actor_head, log_std_min)
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
        """Return actions `(batch, action_dim)` in [-1, 1] and their log-probabilities `(batch,)`.

        `noise` is standard normal, `(batch, action_dim)`. It is drawn here if not given.
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
        """Return the most likely actions, or the ones sampled with `noise`."""
        return self.head.actions(self.actor, obs, actor, noise)

    def action_logprobs(
        self, obs: Tensor, actions: Tensor, *, actor: Tensor | None = None
    ) -> Tensor:
        """Return log-probabilities `(batch,)` of given actions, finite with finite gradients."""
        return self.head.log_probs(self.actor, obs, actions, actor)
