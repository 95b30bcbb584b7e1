"""A Gaussian around the actions of a network, with a spread that is the same in every state."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.models.mlp import MLP
from rl_training.models.squashed_gaussian import LOG_STD_MAX, LOG_STD_MIN, gaussian_log_prob


def spread_parameters(action_dim: int) -> dict[str, tuple[int, ...]]:
    """The free parameters that an actor needs for it."""
    return {"log_std": (action_dim,)}


def gaussian_actions(
    actor: MLP, obs: Tensor, vector: Tensor | None, noise: Tensor | None = None
) -> Tensor:
    """The most likely actions `(batch, action_dim)`, or those that the noise picks, in [-1, 1]."""
    mean = torch.tanh(actor(obs, vector))
    if noise is None:
        return mean
    return (mean + _log_std(actor, vector).exp() * noise).clamp(-1, 1)


def gaussian_logprobs(actor: MLP, obs: Tensor, actions: Tensor, vector: Tensor | None) -> Tensor:
    """Log-densities `(batch,)` of given actions."""
    log_std = _log_std(actor, vector)
    noise = (actions - torch.tanh(actor(obs, vector))) * torch.exp(-log_std)
    return gaussian_log_prob(noise, log_std).sum(-1)


def _log_std(actor: MLP, vector: Tensor | None) -> Tensor:
    parameters = actor.unflatten(actor.vector if vector is None else vector)
    if "log_std" not in parameters:
        return parameters["bias_0"].new_zeros(())  # squared errors mean a spread of one
    return parameters["log_std"].clamp(LOG_STD_MIN, LOG_STD_MAX)
