"""Soft actor-critic (1801.01290, 1812.05905).

Twin critics learn the soft Q-function, the actor maximises it plus its own entropy, and the
temperature is tuned so that the entropy stays at its target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.algorithms.base import Draws
from rl_training.algorithms.functional import squared_errors
from rl_training.algorithms.maximum_entropy import (
    MaximumEntropyAlgorithm,
    MaximumEntropyHyperparameters,
    soft_policy_loss,
    soft_target,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.types import Batch, Metrics, Noise, State


class SACHyperparameters(MaximumEntropyHyperparameters):
    """Networks, optimiser and targets are the paper's; layers start as PyTorch's do."""


class SAC(MaximumEntropyAlgorithm):
    """Soft actor-critic with any number of critics."""

    hyperparameters_type = SACHyperparameters
    hyperparameters: SACHyperparameters
    model: MLPSACModel

    def build_model(self, generator: torch.Generator) -> MLPSACModel:
        return self.hyperparameters.build(MLPSACModel, self.obs_dim, self.action_dim, generator)

    def update_noise(self, batch_size: int) -> Draws:
        return self.action_draws(batch_size)

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        entropy = self.hyperparameters.entropy_in_target
        return sac_critic_loss(self.model, state, batch, noise, entropy_in_target=entropy)

    def policy_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return sac_policy_loss(self.model, state, batch, noise, target_entropy=self.target_entropy)


def sac_loss(
    model: MLPSACModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    target_entropy: float | None,
    entropy_in_target: bool = True,
) -> tuple[Tensor, Metrics]:
    """The sum of SAC's losses, each of which moves only its own parameters, and their metrics.

    `parameters` holds `actor`, `critic`, `target_critic` and `log_alpha`.
    """
    critic_loss, critic_metrics = sac_critic_loss(
        model, parameters, batch, noise, entropy_in_target=entropy_in_target
    )
    policy_loss, policy_metrics = sac_policy_loss(
        model, parameters, batch, noise, target_entropy=target_entropy
    )
    return critic_loss + policy_loss, critic_metrics | policy_metrics


def sac_critic_loss(
    model: MLPSACModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    entropy_in_target: bool = True,
) -> tuple[Tensor, Metrics]:
    """Squared distance of every critic from the soft Bellman target."""
    target = soft_target(model, parameters, batch, noise, entropy=entropy_in_target)
    q = model.q_values(batch.obs, batch.action, critic=parameters["critic"])
    return squared_errors(q, target)


def sac_policy_loss(
    model: MLPSACModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    target_entropy: float | None,
) -> tuple[Tensor, Metrics]:
    """The actor maximises the least of its critics."""
    return soft_policy_loss(
        model,
        parameters,
        batch,
        noise,
        lambda q: q.min(-1).values,
        target_entropy=target_entropy,
    )


SPEC = AlgorithmSpec(
    name="sac",
    title="Soft Actor-Critic",
    reference="arXiv:1801.01290, arXiv:1812.05905",
    algorithm=SAC,
)
