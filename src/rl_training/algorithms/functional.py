"""Small pure pieces that several algorithms share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rl_training.torch_internals import is_batched
from rl_training.types import Metrics, State

Loss = Callable[[State], tuple[Tensor, Metrics]]


def gradients(loss: Loss, parameters: State) -> tuple[State, Metrics]:
    """Gradient of `loss(parameters)` with respect to each named vector, and its metrics."""
    if is_transformed(next(iter(parameters.values()))):
        # Inside a compiled or mapped program only the functional transform can be traced.
        found, (_, metrics) = torch.func.grad_and_value(loss, has_aux=True)(parameters)
        return found, metrics
    # Outside one, plain autograd spares each operation a layer of dispatch.
    with torch.enable_grad():
        leaves = {name: vector.detach().requires_grad_() for name, vector in parameters.items()}
        value, metrics = loss(leaves)
    return dict(
        zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True)
    ), metrics


def is_transformed(tensor: Tensor) -> bool:
    """Whether the step is being compiled, or mapped over a population, rather than just run."""
    return torch.compiler.is_compiling() or is_batched(tensor)


def bootstrapped_target(reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """`reward + discount * next_value`, through which no gradient flows."""
    return (reward + discount * next_value).detach()


def squared_errors(
    q: Tensor, target: Tensor, is_offline: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """The loss of critics `(batch, critics)` that share a target `(batch,)`, and its metrics.

    Values of recorded and of live rows are told apart where `is_offline` marks them.
    """
    loss = 0.5 * (q - target[:, None]).square().mean(0).sum()
    metrics = {"critic_loss": loss, "q_mean": q.mean(), "target_q_mean": target.mean()}
    return loss, metrics if is_offline is None else metrics | _by_origin(q.mean(-1), is_offline)


def _by_origin(values: Tensor, is_offline: Tensor) -> Metrics:
    """Means of offline and of online rows, not a number where there are none, and their gap."""
    offline, online = is_offline.to(values.dtype), (~is_offline).to(values.dtype)
    offline_mean = (values * offline).sum() / offline.sum()
    online_mean = (values * online).sum() / online.sum()
    return {
        "q_offline_mean": offline_mean,
        "q_online_mean": online_mean,
        "q_gap": offline_mean - online_mean,
    }


def polyak_update(target: Tensor, source: Tensor, tau: float) -> None:
    """Move `target` towards `source` by the fraction `tau`, in place."""
    target.mul_(1 - tau).add_(source, alpha=tau)


def expectile_loss(errors: Tensor, expectile: float) -> Tensor:
    """Squared errors, of which the positive ones weigh `expectile` and the others the rest."""
    weights = torch.where(errors > 0, expectile, 1 - expectile)
    return (weights * errors.square()).mean()


def advantage_weights(scaled_advantage: Tensor, largest: float) -> Tensor:
    """`exp` of the advantages, at most `largest`."""
    # Clipped before as well, so that nothing overflows on the way.
    return scaled_advantage.clamp(max=math.log(largest)).exp().clamp(max=largest)


def random_subset(uniform: Tensor, size: int) -> Tensor:
    """`size` different indices, each set as likely as any other, from one number for each index."""
    return uniform.argsort()[:size]


def quantile_huber_loss(
    quantiles: Tensor, targets: Tensor, shares: Tensor, kappa: float = 1.0
) -> Tensor:
    """Quantile regression (1710.10044) of `(..., quantiles)` on samples `(..., targets)`.

    A sample counts by its share, of one in all; the mean over quantiles and leading axes.
    """
    number = quantiles.shape[-1]
    levels = (torch.arange(number, device=quantiles.device) + 0.5) / number
    errors = targets[..., None, :] - quantiles[..., None]
    weights = (levels[:, None] - (errors.detach() < 0).float()).abs()
    losses = (weights * huber(errors, kappa) * shares[..., None, :]).sum(-1)
    return losses.mean()


def huber(errors: Tensor, kappa: float = 1.0) -> Tensor:
    """Quadratic within `kappa`, linear beyond."""
    absolute = errors.abs()
    within = absolute.clamp(max=kappa)
    return within * (absolute - 0.5 * within)


def schedule_factor(
    kind: str,
    updates: Tensor,
    planned_updates: int | None,
    warmup_steps: int,
    end_factor: float = 0.0,
) -> Tensor | float:
    """What the learning rate is multiplied by after `updates` of `planned_updates`.

    `linear` and `cosine` end at `end_factor` with the last planned update and stay there.
    """
    factor: Tensor | float = 1.0
    updates = updates.float()
    if kind != "constant" and planned_updates is not None:
        progress = ((updates - warmup_steps) / max(1, planned_updates - warmup_steps)).clamp(0, 1)
        factor = 1 - progress if kind == "linear" else 0.5 * (1 + torch.cos(math.pi * progress))
        if end_factor:
            factor = end_factor + (1 - end_factor) * factor
    if warmup_steps > 0:
        factor = factor * ((updates + 1) / warmup_steps).clamp(max=1)
    return factor
