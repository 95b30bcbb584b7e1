"""Soft actor-critic (1801.01290, 1812.05905), also for discrete actions (1910.07207).

Twin critics learn the soft Q-function. The actor maximizes it plus its own entropy, and the
temperature is tuned to keep the entropy at its target. The soft target and the policy's loss are
in `maximum_entropy.py`, since other algorithms share them. If actions are discrete, the critics
value all of them, and means over the policy's actions are exact instead of sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.algorithms.functional import squared_errors
from rl_training.algorithms.maximum_entropy import (
    MaximumEntropyAlgorithm,
    MaximumEntropyHyperparameters,
    least,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.types import Batch, Metrics, Noise, State


class SACHyperparameters(MaximumEntropyHyperparameters):
    """The paper's networks, optimizer and targets, with PyTorch's layer initialization."""


class SAC(MaximumEntropyAlgorithm):
    """Soft actor-critic with any number of critics."""

    hyperparameters_type = SACHyperparameters
    model: MLPSACModel

    def build_model(self, generator: torch.Generator) -> MLPSACModel:
        sizes = (self.plan, self.action_dim)
        return self.hyperparameters.build(MLPSACModel, *sizes, generator, discrete=self.is_discrete)

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the squared error of every critic with respect to the soft Bellman target."""
        target = self.soft_target(state, batch, noise)
        dropout = noise.get("critic_dropout")
        q = self.model.q_values(batch.obs, batch.action, critic=state["critic"], dropout=dropout)
        return squared_errors(q, target)

    def policy_value(self, q: Tensor) -> Tensor:
        """Return the minimum over the critics."""
        return least(q)


sac_loss = SAC.total_loss
"""The sum of SAC's losses and their metrics: `sac_loss(sac, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="sac",
    title="Soft Actor-Critic",
    reference="arXiv:1801.01290, arXiv:1812.05905, arXiv:1910.07207",
    use_when=(
        "the first choice for continuous actions in an environment; sac/mujoco_fast learned faster "
        "than sac/mujoco (docs/results.md)"
    ),
    algorithm=SAC,
    actions=("continuous", "discrete"),
)
