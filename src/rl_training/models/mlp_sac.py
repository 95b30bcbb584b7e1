"""A squashed-Gaussian actor and an ensemble of state-action critics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.mlp import MLP

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
ACTION_LIMIT = 1.0 - 1e-6
"""Given actions are clipped to this before atanh, so that one on the bound stays finite."""


class MLPSACModel(nn.Module):
    """Networks of SAC and its relatives, for actions in [-1, 1].

    Every method uses the model's own parameters unless a parameter vector is handed in, which is
    how losses differentiate with respect to one network and how target networks are evaluated.
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        actor_hidden_sizes: Sequence[int] | None = None,
        critic_hidden_sizes: Sequence[int] | None = None,
        num_critics: int = 2,
        activation: str = "relu",
        critic_layer_norm: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.obs_dim, self.action_dim, self.num_critics = obs_dim, action_dim, num_critics
        self.actor = MLP(
            obs_dim,
            hidden_sizes if actor_hidden_sizes is None else actor_hidden_sizes,
            2 * action_dim,
            activation=activation,
            generator=generator,
        )
        self.critic = MLP(
            obs_dim + action_dim,
            hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes,
            1,
            ensemble=num_critics,
            activation=activation,
            layer_norm=critic_layer_norm,
            generator=generator,
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
        mean, log_std = self._gaussian(obs, actor)
        if deterministic:
            noise = torch.zeros_like(mean)
        elif noise is None:
            noise = torch.randn_like(mean)
        unsquashed = mean + log_std.exp() * noise
        log_prob = gaussian_log_prob(noise, log_std) - squash_log_det(unsquashed)
        return torch.tanh(unsquashed), log_prob.sum(-1)

    def actions(
        self, obs: Tensor, *, noise: Tensor | None = None, actor: Tensor | None = None
    ) -> Tensor:
        """Only the actions: the most likely ones, or those that the noise picks."""
        mean, log_std = self._gaussian(obs, actor)
        return torch.tanh(mean if noise is None else mean + log_std.exp() * noise)

    def q_values(self, obs: Tensor, actions: Tensor, *, critic: Tensor | None = None) -> Tensor:
        """Q-values `(batch, num_critics)`."""
        values: Tensor = self.critic(torch.cat([obs, actions], dim=-1), critic)
        return values.squeeze(-1).mT

    def action_logprobs(
        self, obs: Tensor, actions: Tensor, *, actor: Tensor | None = None
    ) -> Tensor:
        """Log-probabilities `(batch,)` of given actions, finite with finite gradients."""
        mean, log_std = self._gaussian(obs, actor)
        unsquashed = torch.atanh(actions.clamp(-ACTION_LIMIT, ACTION_LIMIT))
        noise = (unsquashed - mean) * torch.exp(-log_std)
        return (gaussian_log_prob(noise, log_std) - squash_log_det(unsquashed)).sum(-1)

    def _gaussian(self, obs: Tensor, actor: Tensor | None) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(obs, actor).chunk(2, dim=-1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)


def gaussian_log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of `mean + std * noise` under the Gaussian that made it, per component."""
    return -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)


def squash_log_det(unsquashed: Tensor) -> Tensor:
    """log(1 - tanh(u)^2) in a form that neither overflows nor cancels."""
    return 2.0 * (math.log(2.0) - unsquashed - F.softplus(-2.0 * unsquashed))
