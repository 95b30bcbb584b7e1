"""Reinforcement learning with prior data (2302.02948).

REDQ's ensemble and many updates per step, on minibatches of which a half is prior data and a half
is live experience. LayerNorm in the critics bounds what they say of actions that neither half
holds, so the data needs no pessimism of its own and nothing has to be trained in advance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.algorithms.hyperparameters import MixedHyperparameters
from rl_training.algorithms.redq import (
    REDQHyperparameters,
    SubsetAlgorithm,
    redq_critic_loss,
    redq_policy_loss,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.types import Batch, Metrics, Noise, State


class RLPDHyperparameters(REDQHyperparameters, MixedHyperparameters):
    """Defaults are the authors': ten critics, two of them in a target, twenty updates per step.

    For some tasks with sparse rewards they leave entropy out of the targets: `entropy_in_target`.
    """

    critic_layer_norm: bool = True


class RLPD(SubsetAlgorithm):
    """Reinforcement learning with prior data."""

    hyperparameters_type = RLPDHyperparameters
    hyperparameters: RLPDHyperparameters
    model: MLPSACModel
    entropy_per_action = -0.5

    def build_model(self, generator: torch.Generator) -> MLPSACModel:
        return self.hyperparameters.build(MLPSACModel, self.obs_dim, self.action_dim, generator)


def rlpd_loss(
    model: MLPSACModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    subset_size: int,
    target_entropy: float | None,
    entropy_in_target: bool = True,
) -> tuple[Tensor, Metrics]:
    """The sum of RLPD's losses, as in an update that moves the policy too.

    Where the batch says which of its rows are prior data, so do the metrics of the critics.
    """
    RLPDHyperparameters.check(subset_size=subset_size, num_critics=model.num_critics)
    critic_loss, critic_metrics = redq_critic_loss(
        model,
        parameters,
        batch,
        noise,
        subset_size=subset_size,
        entropy_in_target=entropy_in_target,
    )
    policy_loss, policy_metrics = redq_policy_loss(
        model, parameters, batch, noise, target_entropy=target_entropy
    )
    return critic_loss + policy_loss, critic_metrics | policy_metrics


SPEC = AlgorithmSpec(
    name="rlpd",
    title="Reinforcement Learning with Prior Data",
    reference="arXiv:2302.02948",
    algorithm=RLPD,
    regimes=("mixed", "online", "offline"),
)
