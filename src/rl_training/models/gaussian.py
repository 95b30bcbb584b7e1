"""Actor heads, which turn the outputs of an actor's network into a distribution over actions."""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.models.mlp import MLP

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
ACTION_LIMIT = 1.0 - 1e-6
"""Given actions are clipped to this before atanh, so that actions on the bounds stay finite."""

ActorHeadName = Literal["gaussian", "squashed_gaussian"]


class ActorHead(Protocol):
    """A distribution over actions in [-1, 1].

    `vector` replaces the actor's own parameters if given. `noise` is standard normal,
    `(batch, action_dim)`.
    """

    def outputs(self, action_dim: int) -> int:
        """Return the number of outputs of the actor's network."""
        ...

    def free_parameters(self, action_dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the actor's parameters that belong to no layer."""
        ...

    def actions(
        self, actor: MLP, obs: Tensor, vector: Tensor | None, noise: Tensor | None = None
    ) -> Tensor:
        """Return the most likely actions `(batch, action_dim)`, or ones sampled with `noise`."""
        ...

    def sample(
        self, actor: MLP, obs: Tensor, vector: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return actions `(batch, action_dim)` and their log-probabilities `(batch,)`."""
        ...

    def log_probs(self, actor: MLP, obs: Tensor, actions: Tensor, vector: Tensor | None) -> Tensor:
        """Return log-probabilities `(batch,)` of given actions, finite with finite gradients."""
        ...


class SquashedGaussianHead:
    """The tanh of a Gaussian with state-dependent mean and standard deviation, as in SAC."""

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
    """A Gaussian around the tanh of the outputs, with a state-independent standard deviation.

    It is not squashed; samples are clipped instead. Regression on recorded actions needs this:
    under a squashed Gaussian, an action on a bound is infinitely far from the mean.
    """

    def __init__(self, log_std_min: float = LOG_STD_MIN, *, learned: bool = True) -> None:
        """The standard deviation is one if it is not `learned`."""
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
    """Return the head of that name; `log_std_min` applies to `gaussian` only."""
    return GaussianHead(log_std_min) if name == "gaussian" else SquashedGaussianHead()


def gaussian_log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-density of `mean + std * noise`, per component."""
    return -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)


def squash_log_det(unsquashed: Tensor) -> Tensor:
    """Return `log(1 - tanh(u)^2)`, computed without overflow or cancellation."""
    return 2.0 * (math.log(2.0) - unsquashed - F.softplus(-2.0 * unsquashed))
