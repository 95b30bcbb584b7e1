"""Actor heads: how the outputs of an actor's network become a distribution over actions."""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.models.mlp import MLP

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
ACTION_LIMIT = 1.0 - 1e-6
"""Given actions are clipped to this before atanh, so that one on the bound stays finite."""

ActorHeadName = Literal["gaussian", "squashed_gaussian"]


class ActorHead(Protocol):
    """A distribution over actions in [-1, 1].

    `vector` holds the actor's parameters where they are not its own; `noise` is standard normal,
    `(batch, action_dim)`.
    """

    def outputs(self, action_dim: int) -> int:
        """How many outputs the actor's network has."""
        ...

    def free_parameters(self, action_dim: int) -> dict[str, tuple[int, ...]]:
        """What the actor learns beside its layers."""
        ...

    def actions(
        self, actor: MLP, obs: Tensor, vector: Tensor | None, noise: Tensor | None = None
    ) -> Tensor:
        """The most likely actions `(batch, action_dim)`, or those that the noise picks."""
        ...

    def sample(
        self, actor: MLP, obs: Tensor, vector: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Actions `(batch, action_dim)` and their log-probabilities `(batch,)`."""
        ...

    def log_probs(self, actor: MLP, obs: Tensor, actions: Tensor, vector: Tensor | None) -> Tensor:
        """Log-probabilities `(batch,)` of given actions, finite with finite gradients."""
        ...


class SquashedGaussianHead:
    """The tanh of a Gaussian whose mean and deviation both depend on the state, as in SAC."""

    def outputs(self, action_dim: int) -> int:
        return 2 * action_dim

    def free_parameters(self, action_dim: int) -> dict[str, tuple[int, ...]]:
        return {}

    def actions(
        self, actor: MLP, obs: Tensor, vector: Tensor | None, noise: Tensor | None = None
    ) -> Tensor:
        mean, log_std = self._gaussian(actor, obs, vector)
        return torch.tanh(mean if noise is None else mean + log_std.exp() * noise)

    def sample(
        self, actor: MLP, obs: Tensor, vector: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        mean, log_std = self._gaussian(actor, obs, vector)
        unsquashed = mean + log_std.exp() * noise
        log_prob = gaussian_log_prob(noise, log_std) - squash_log_det(unsquashed)
        return torch.tanh(unsquashed), log_prob.sum(-1)

    def log_probs(self, actor: MLP, obs: Tensor, actions: Tensor, vector: Tensor | None) -> Tensor:
        mean, log_std = self._gaussian(actor, obs, vector)
        unsquashed = torch.atanh(actions.clamp(-ACTION_LIMIT, ACTION_LIMIT))
        noise = (unsquashed - mean) * torch.exp(-log_std)
        return (gaussian_log_prob(noise, log_std) - squash_log_det(unsquashed)).sum(-1)

    def _gaussian(self, actor: MLP, obs: Tensor, vector: Tensor | None) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(obs, vector).chunk(2, dim=-1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)


class GaussianHead:
    """A Gaussian around the tanh of the outputs, with a deviation that is the same in every state.

    It is not squashed: an action on a bound is as likely as its distance from the mean says, and
    samples are clipped. Regression on recorded actions needs that, since under a squashed Gaussian
    an action on a bound lies infinitely far out.
    """

    def __init__(self, log_std_min: float = LOG_STD_MIN, *, learned: bool = True) -> None:
        """Where the deviation is not `learned` it is one."""
        self._log_std_min, self._learned = log_std_min, learned

    def outputs(self, action_dim: int) -> int:
        return action_dim

    def free_parameters(self, action_dim: int) -> dict[str, tuple[int, ...]]:
        return {"log_std": (action_dim,)} if self._learned else {}

    def actions(
        self, actor: MLP, obs: Tensor, vector: Tensor | None, noise: Tensor | None = None
    ) -> Tensor:
        mean = torch.tanh(actor(obs, vector))
        if noise is None:
            return mean
        return (mean + self._log_std(actor, vector).exp() * noise).clamp(-1, 1)

    def sample(
        self, actor: MLP, obs: Tensor, vector: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        mean, log_std = torch.tanh(actor(obs, vector)), self._log_std(actor, vector)
        actions = (mean + log_std.exp() * noise).clamp(-1, 1)
        return actions, gaussian_log_prob(noise, log_std).sum(-1)

    def log_probs(self, actor: MLP, obs: Tensor, actions: Tensor, vector: Tensor | None) -> Tensor:
        log_std = self._log_std(actor, vector)
        noise = (actions - torch.tanh(actor(obs, vector))) * torch.exp(-log_std)
        return gaussian_log_prob(noise, log_std).sum(-1)

    def _log_std(self, actor: MLP, vector: Tensor | None) -> Tensor:
        parameters = actor.unflatten(actor.vector if vector is None else vector)
        if not self._learned:
            return parameters["bias_0"].new_zeros(())
        return parameters["log_std"].clamp(self._log_std_min, LOG_STD_MAX)


def make_head(name: ActorHeadName, log_std_min: float = LOG_STD_MIN) -> ActorHead:
    """The head of that name; only a `gaussian` one has a floor of its own."""
    return GaussianHead(log_std_min) if name == "gaussian" else SquashedGaussianHead()


def gaussian_log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of `mean + std * noise` under the Gaussian that made it, per component."""
    return -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)


def squash_log_det(unsquashed: Tensor) -> Tensor:
    """log(1 - tanh(u)^2) in a form that neither overflows nor cancels."""
    return 2.0 * (math.log(2.0) - unsquashed - F.softplus(-2.0 * unsquashed))
