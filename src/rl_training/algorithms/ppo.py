"""Proximal policy optimization (1707.06347).

Several epochs of minibatches improve the policy on one rollout. The objective is clipped where the
probability of an action has changed much, so that there is nothing to gain from going further. The
details follow "The 37 Implementation Details of Proximal Policy Optimization" (ICLR blog track,
2022); `docs/algorithms/ppo.md` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.hyperparameters import Count, Rate, RolloutHyperparameters
from rl_training.algorithms.on_policy import OnPolicyAlgorithm
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.types import ACTION_KINDS, BUFFERS, Batch, Metrics, State

STOPPED = "stopped"
"""Whether the policy has changed so much that the rest of the updates on a rollout is left out"""

KL_TOLERANCE = 1.5
"""As in OpenAI's Spinning Up and Stable-Baselines3, updates stop above `target_kl` times this"""


class PPOHyperparameters(RolloutHyperparameters):
    """The defaults of Stable-Baselines3, most of which are the paper's for MuJoCo.

    As in OpenAI's Baselines, the loss of the value is half its squared error, so that it weighs
    half as much as in Stable-Baselines3.
    """

    symbols: ClassVar[Mapping[str, str]] = {
        "clip_range": "ε",
        "rollout_steps": "T",
        "num_epochs": "K",
        "value_coefficient": "c₁",
        "entropy_coefficient": "c₂",
    }

    num_epochs: Count = 10
    """How often the updates see each transition of a rollout"""
    clip_range: Rate = 0.2
    """Largest change of an action's probability, as a fraction, that the objective rewards"""
    value_clip_range: Rate | None = None
    """Largest change of a value that its loss rewards, in the units of returns. Not set: no
    limit"""
    target_kl: Rate | None = None
    """The rest of the updates on a rollout is left out if the policy's divergence from the one that
    collected it exceeds 1.5 times this. Not set: no limit"""

    @property
    def epochs(self) -> int:
        return self.num_epochs


class PPO(OnPolicyAlgorithm):
    """Proximal policy optimization with a clipped objective."""

    hyperparameters_type = PPOHyperparameters
    hyperparameters: PPOHyperparameters

    def extra_state(self) -> State:
        if self.hyperparameters.target_kl is None:
            return {}
        return {STOPPED: torch.zeros((), dtype=torch.bool, device=self.device)}

    def begin_rollout(self, state: State, rollout: Batch) -> tuple[Metrics, Metrics]:
        if STOPPED in state:
            state[STOPPED].fill_(False)
        return super().begin_rollout(state, rollout)

    def policy_loss(
        self, state: State, log_probs: Tensor, advantages: Tensor, batch: Batch
    ) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate loss of the policy."""
        epsilon = self.hyperparameters.clip_range
        assert batch.log_probs is not None
        log_ratio = log_probs - batch.log_probs
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        # An estimate of the divergence that is never negative (http://joschu.net/blog/kl-approx).
        divergence = (ratio - 1 - log_ratio).detach().mean()
        is_clipped = (ratio - 1).abs() > epsilon
        metrics = {
            "approximate_kl": divergence,
            "clip_fraction": is_clipped.to(ratio.dtype).mean(),
        }
        if self.hyperparameters.target_kl is not None:
            is_far = divergence > KL_TOLERANCE * self.hyperparameters.target_kl
            metrics[BUFFERS + STOPPED] = state[STOPPED] | is_far
        return loss, metrics

    def update_counts(self, state: State, found: State) -> Tensor | None:
        return ~found[STOPPED] if STOPPED in found else None

    def value_losses(self, values: Tensor, batch: Batch) -> Tensor:
        """Return squared errors, or those of clipped values where they are larger."""
        losses, limit = super().value_losses(values, batch), self.hyperparameters.value_clip_range
        if limit is None:
            return losses
        assert batch.values is not None
        clipped = batch.values + (values - batch.values).clamp(-limit, limit)
        return torch.maximum(losses, super().value_losses(clipped, batch))


ppo_loss = PPO.total_loss
"""PPO's loss and its metrics: `ppo_loss(ppo, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="ppo",
    title="Proximal Policy Optimization",
    reference="arXiv:1707.06347, arXiv:1506.02438",
    use_when="fast simulators with thousands of environments, any kind of action; needs many steps",
    algorithm=PPO,
    actions=ACTION_KINDS,
)
