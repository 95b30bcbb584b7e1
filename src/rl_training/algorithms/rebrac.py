"""ReBRAC (2305.09836): TD3+BC with separate penalties for the actor and for the critics' targets.

Critics have LayerNorm, networks are deeper and minibatches larger than in TD3+BC. The penalty in a
target is the squared distance of the target actor's action from the data's next action. Where an
episode ends without one, there is no penalty; the authors leave out the last step of an episode
that is truncated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.functional import inverse_scale
from rl_training.algorithms.hyperparameters import Count, LayerSizes, Rate, ReturnSteps
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.algorithms.td3 import TD3, TargetNoiseHyperparameters
from rl_training.types import Batch, Metrics, Noise, State

Weight = Annotated[float, Field(ge=0)]


class ReBRACHyperparameters(TargetNoiseHyperparameters):
    """The paper's hyper-parameters for locomotion; it tunes the two penalties for each dataset."""

    symbols: ClassVar[Mapping[str, str]] = {
        "actor_bc_alpha": "β₁",
        "critic_bc_alpha": "β₂",
        "adam_betas": "",  # would have the same symbols
        "n_step": "n",
    }

    actor_bc_alpha: Weight = 0.01
    """Weight of the squared distance from the data's actions in the loss of the actor; larger
    imitates the data more closely, 0: no penalty"""
    critic_bc_alpha: Weight = 0.01
    """Weight of the squared distance from the data's next actions in the targets of the critics;
    0: no penalty"""
    normalize_q: bool = True
    """Divide the critics' value in the loss of the actor by its mean absolute value, so that
    `actor_bc_alpha` does not depend on the scale of rewards"""
    n_step: ReturnSteps = 1
    """Number of rewards in a target before the value of a later state replaces the rest"""
    learning_rate: Rate = 1e-3
    batch_size: Count = 1024
    hidden_sizes: LayerSizes = (256, 256, 256)
    critic_layer_norm: bool = True


class ReBRAC(TD3):
    """Behavior-regularized actor-critic on TD3, revisited."""

    hyperparameters_type = ReBRACHyperparameters
    hyperparameters: ReBRACHyperparameters

    def next_values(self, state: State, batch: Batch, next_action: Tensor, noise: Noise) -> Tensor:
        """Return the least target critic's value minus the weighted penalty."""
        if batch.next_action is None:
            raise ValueError("rebrac needs batches with next_action: the data's next actions")
        penalty = distances(next_action, batch.next_action)
        values = super().next_values(state, batch, next_action, noise)
        return values - self.hyperparameters.critic_bc_alpha * penalty

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return `alpha (pi - a)^2 - lambda Q`, with the least critic's Q."""
        settings = self.hyperparameters
        action = self.act(state, batch.obs)
        critic, dropout = state["critic"].detach(), noise.get("policy_dropout")
        q = self.model.q_values(batch.obs, action, critic=critic, dropout=dropout).min(-1).values
        bc_lambda = torch.ones_like(q[0])
        if settings.normalize_q:
            bc_lambda = inverse_scale(q)
        bc_loss = distances(action, batch.action).mean()
        loss = settings.actor_bc_alpha * bc_loss - bc_lambda * q.mean()
        return loss, {"actor_loss": loss, "bc_loss": bc_loss, "bc_lambda": bc_lambda}


def distances(actions: Tensor, recorded: Tensor) -> Tensor:
    """Return the squared distance of each action, summed over its components.

    It is 0 where no action is recorded (NaN).
    """
    unknown = recorded.isnan()
    differences = actions - torch.where(unknown, 0.0, recorded)
    return torch.where(unknown, 0.0, differences.square()).sum(-1)


rebrac_loss = ReBRAC.total_loss
"""The sum of ReBRAC's losses and their metrics: `rebrac_loss(rebrac, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="rebrac",
    title="ReBRAC",
    reference="arXiv:2305.09836",
    use_when="recorded data, if two penalties can be tuned: the best published TD3+BC",
    algorithm=ReBRAC,
    regimes=("offline",),
    uses_next_actions=True,
)
