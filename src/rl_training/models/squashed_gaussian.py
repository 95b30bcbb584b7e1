"""An actor that draws from a Gaussian squashed into [-1, 1]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.models.actor_critic import ActorCritic

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
ACTION_LIMIT = 1.0 - 1e-6
"""Given actions are clipped to this before atanh, so that one on the bound stays finite."""


class SquashedGaussianModel(ActorCritic):
    """What the models of SAC and its relatives share; their critics differ."""

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
