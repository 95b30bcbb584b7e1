"""What several algorithms share: gradients, targets, losses, target networks and Adam."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.internals import fused_adam_step, is_batched
from rl_training.models.categorical import Support
from rl_training.types import Metrics, State

Loss = Callable[[State], tuple[Tensor, Metrics]]


def gradients(loss: Loss, parameters: State) -> tuple[State, Metrics]:
    """Return the gradient of `loss(parameters)` for each named vector, and its metrics."""
    if is_transformed(next(iter(parameters.values()))):
        # In a compiled or mapped program only the functional transform can be traced.
        found, (_, metrics) = torch.func.grad_and_value(loss, has_aux=True)(parameters)
        return found, metrics
    # Otherwise plain autograd is faster: each operation passes one layer of dispatch less.
    with torch.enable_grad():
        leaves = {name: vector.detach().requires_grad_() for name, vector in parameters.items()}
        value, metrics = loss(leaves)
    found = torch.autograd.grad(value, list(leaves.values()))
    return dict(zip(leaves, found, strict=True)), metrics


def is_transformed(tensor: Tensor) -> bool:
    """Return whether the update is being compiled or mapped over a population."""
    return torch.compiler.is_compiling() or is_batched(tensor)


def bootstrapped_target(reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """Return `reward + discount * next_value`, detached."""
    return (reward + discount * next_value).detach()


def squared_errors(
    q: Tensor, target: Tensor, is_offline: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Return the loss of critics `(batch, critics)` for one target `(batch,)`, and its metrics.

    If `is_offline` is given, metrics include the mean Q-values of offline and of online rows.
    """
    loss = 0.5 * (q - target[:, None]).square().mean(0).sum()
    metrics = {"critic_loss": loss, "q_mean": q.mean(), "target_q_mean": target.mean()}
    return loss, metrics if is_offline is None else metrics | _by_origin(q.mean(-1), is_offline)


METRICS_BY_ORIGIN = ("q_offline_mean", "q_online_mean", "q_gap")
"""Metrics of `squared_errors` that are NaN if a batch has no rows of one origin"""


def _by_origin(values: Tensor, is_offline: Tensor) -> Metrics:
    """Return the means of offline and of online rows (NaN if there are none), and their gap."""
    offline, online = is_offline.to(values.dtype), (~is_offline).to(values.dtype)
    offline_mean = (values * offline).sum() / offline.sum()
    online_mean = (values * online).sum() / online.sum()
    means = offline_mean, online_mean, offline_mean - online_mean
    return dict(zip(METRICS_BY_ORIGIN, means, strict=True))


def inverse_scale(q: Tensor) -> Tensor:
    """Return one divided by the mean absolute value, without a gradient."""
    return 1 / q.detach().abs().mean().clamp(min=1e-6)


def polyak_update(target: Tensor, source: Tensor, tau: float) -> None:
    """Set `target` to `(1 - tau) * target + tau * source`, in place."""
    target.mul_(1 - tau).add_(source, alpha=tau)


def expectile_loss(errors: Tensor, expectile: float) -> Tensor:
    """Return the mean square, with weight `expectile` for positive errors, else one minus that."""
    weights = torch.where(errors > 0, expectile, 1 - expectile)
    return (weights * errors.square()).mean()


def advantage_weights(scaled_advantage: Tensor, largest: float) -> Tensor:
    """Return `exp(scaled_advantage)`, clipped to `largest`."""
    # The exponent is clipped too, so that `exp` does not overflow.
    return scaled_advantage.clamp(max=math.log(largest)).exp().clamp(max=largest)


def random_subset(uniform: Tensor, size: int) -> Tensor:
    """Return `size` distinct random indices, from one uniform number for each index."""
    return uniform.argsort()[:size]


def quantile_huber_loss(
    quantiles: Tensor, targets: Tensor, shares: Tensor, kappa: float = 1.0
) -> Tensor:
    """Return the quantile regression loss (1710.10044), averaged over quantiles and leading axes.

    The arguments are those of `quantile_huber_losses`.
    """
    return quantile_huber_losses(quantiles, targets, shares, kappa).mean()


def quantile_huber_losses(
    quantiles: Tensor, targets: Tensor, shares: Tensor, kappa: float = 1.0
) -> Tensor:
    """Return the quantile regression loss of each quantile, `(..., quantiles)`.

    `quantiles` is `(..., quantiles)`, `targets` are samples `(..., targets)`, and `shares` are
    their weights, which sum to one.
    """
    number = quantiles.shape[-1]
    levels = (torch.arange(number, device=quantiles.device) + 0.5) / number
    errors = targets[..., None, :] - quantiles[..., None]
    weights = (levels[:, None] - (errors.detach() < 0).float()).abs()
    return (weights * huber(errors, kappa) * shares[..., None, :]).sum(-1)


def projected(probabilities: Tensor, values: Tensor, support: Support) -> Tensor:
    """Return a distribution over any values, as one over the atoms of a categorical critic.

    Each value's probability is divided between the two atoms next to it, in proportion to its
    distance from the other one (1707.06887); values beyond the support count as its ends.
    `probabilities` and `values` are `(..., n)`, the result is `(..., atoms)`.
    """
    clamped = values.clamp(support.low, support.high)
    # Dense instead of by index: it can be mapped over seeds, and compiled into one kernel.
    distance = (clamped[..., None, :] - support.atoms(values)[:, None]).abs() / support.spacing
    return (probabilities[..., None, :] * (1 - distance).clamp(0, 1)).sum(-1)


def categorical_target(
    next_logits: Tensor, reward: Tensor, discount: Tensor, support: Support
) -> Tensor:
    """Return the distribution `(batch, atoms)` of `reward + discount * value(next_obs)`.

    `next_logits` is `(batch, atoms)`.
    """
    atoms = support.atoms(next_logits)
    values = bootstrapped_target(reward[:, None], discount[:, None], atoms)
    return projected(torch.softmax(next_logits, -1), values, support).detach()


def of_least_mean(logits: Tensor, support: Support) -> Tensor:
    """Return the logits `(batch, atoms)` of the critic with the smallest mean in each row.

    `logits` is `(critics, batch, atoms)`.
    """
    index = support.mean(logits).argmin(0)
    return logits.gather(0, index[None, :, None].expand(1, *logits.shape[1:])).squeeze(0)


def cross_entropies(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of predicted distributions, `(...)`; both are `(..., atoms)`."""
    return -(target * torch.log_softmax(logits, -1)).sum(-1)


def huber(errors: Tensor, kappa: float = 1.0) -> Tensor:
    """Return the Huber loss: quadratic up to `kappa`, linear beyond."""
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
    """Return the factor of the learning rate after `updates` of `planned_updates`.

    `linear` and `cosine` reach `end_factor` at the last planned update and stay there.
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


MOMENTS = ("mean", "square", "count")

SMALLEST_MOMENTS = (1e-30, 1e-37)
"""Means and squares of gradients below these count as zero.

Where a gradient stays zero, as in a unit that is no longer active, they would decrease until they
are denormal numbers, and stay denormal: many processors compute much more slowly with these. Steps
with such moments are too small to change a parameter, unless epsilon is tiny too.
"""
TINY_EPSILON = 1e-12
"""Below it, all moments are kept"""


@dataclass(frozen=True)
class Adam:
    """Adam (1412.6980). Updates `state[name]` in place; moments are `state[name + '.adam_*']`."""

    learning_rate: float
    max_grad_norm: float | None = None
    scheduled: bool = True
    """Whether the learning rate follows the run's schedule"""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled weight decay (1711.05101) of all parameters in the vector"""
    delay: int = 1
    """Updates of the run from one step of this optimizer to the next, if the schedule counts its
    own steps alone; 1: it counts all updates"""

    def initial_state(self, name: str, vector: Tensor) -> State:
        """Return the initial moments of one parameter vector, to be merged into the state."""
        return {
            f"{name}.adam_mean": torch.zeros_like(vector),
            f"{name}.adam_square": torch.zeros_like(vector),
            f"{name}.adam_count": torch.zeros((), device=vector.device),
        }

    def step(self, state: State, name: str, gradient: Tensor, factor: Tensor | float = 1.0) -> None:
        """Apply one gradient, with the learning rate multiplied by `factor`."""
        if self.max_grad_norm is not None:
            gradient = clip_norm({name: gradient}, self.max_grad_norm)[name]
        moments = [state[f"{name}.adam_{part}"] for part in MOMENTS]
        moments[2].add_(1)
        if is_transformed(gradient) or not self._fused_step(state[name], gradient, moments, factor):
            self._composed_step(state[name], gradient, moments, factor)
        if self.epsilon >= TINY_EPSILON:
            for moment, smallest in zip(moments[:2], SMALLEST_MOMENTS, strict=True):
                moment.copy_(torch.nn.functional.hardshrink(moment, smallest))

    def step_if(
        self,
        counts: Tensor,
        state: State,
        name: str,
        gradient: Tensor,
        factor: Tensor | float = 1.0,
    ) -> None:
        """Apply one gradient if `counts` is True, without a branch; else change nothing."""
        changed = [state[name], *(state[f"{name}.adam_{part}"] for part in MOMENTS)]
        before = [tensor.clone() for tensor in changed]
        self.step(state, name, gradient, factor)
        for tensor, kept in zip(changed, before, strict=True):
            tensor.copy_(torch.where(counts, tensor, kept))

    def _composed_step(
        self, vector: Tensor, gradient: Tensor, moments: list[Tensor], factor: Tensor | float
    ) -> None:
        """Step with operations that a compiler can fuse and that map over a population."""
        mean, square, count = moments
        mean.add_((gradient - mean) * (1 - self.beta1))
        square.mul_(self.beta2).add_(gradient.square() * (1 - self.beta2))
        correction1, correction2 = _correction(self.beta1, count), _correction(self.beta2, count)
        if self.weight_decay:
            vector.mul_(1 - factor * (self.learning_rate * self.weight_decay))
        step_size = _computed_once(factor * self.learning_rate / correction1)
        denominator = square.sqrt() / _computed_once(correction2.sqrt()) + self.epsilon
        vector.sub_(step_size * mean / denominator)

    def _fused_step(
        self, vector: Tensor, gradient: Tensor, moments: list[Tensor], factor: Tensor | float
    ) -> bool:
        """Step with PyTorch's fused kernel; return False if it is not available."""
        return fused_adam_step(
            vector,
            gradient,
            moments,
            learning_rate=factor * self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay,
        )


def _correction(beta: float, count: Tensor) -> Tensor:
    """Return `1 - beta^count`, computed without cancellation in single precision."""
    return -torch.expm1(count * math.log(beta)) if beta else torch.ones_like(count)


def clip_norm(gradients: State, largest: float) -> State:
    """Return the gradients, scaled down together if their joint norm exceeds `largest`."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    return {name: gradient * factor for name, gradient in gradients.items()}


def _computed_once(number: Tensor) -> Tensor:
    """Return the same number, as the maximum of several equal ones.

    The compiler would inline the formula of the number into the loop over all parameters and
    compute it for each of them. A reduction is computed once, before the loop.
    """
    return number.expand(16).clone().amax()
