"""Deep Q-learning (Nature 518, 2015), and with all of its options Rainbow (1710.02298).

With more than one atom, the critic learns the distribution of the return instead of its mean (C51,
1707.06887). The other parts of Rainbow are in `deep_q.py`, since QR-DQN has them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.deep_q import DeepQAlgorithm, DeepQHyperparameters, RowLosses
from rl_training.algorithms.functional import (
    bootstrapped_target,
    categorical_target,
    cross_entropies,
    huber,
)
from rl_training.algorithms.hyperparameters import DistributionHyperparameters, is_from_0_1
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.categorical import Support
from rl_training.types import Batch


class DQNHyperparameters(DeepQHyperparameters, DistributionHyperparameters):
    """Defaults for small networks on low-dimensional observations."""

    why_undelayed: ClassVar[str | None] = "the policy of dqn is its critic"

    @classmethod
    def changes_since(cls, saved: Mapping[str, Any]) -> str | None:
        if not (is_from_0_1(saved) and saved.get("dueling")):
            return None
        return (
            "dueling: the gradients of all streams are now clipped together instead of separately, "
            "and the gradient of the shared body is scaled by 1/sqrt(2)"
        )


class DQN(DeepQAlgorithm):
    """Deep Q-learning for discrete actions."""

    hyperparameters_type = DQNHyperparameters
    hyperparameters: DQNHyperparameters

    def distribution(self) -> tuple[int, Support | None]:
        return self.hyperparameters.num_atoms, self.hyperparameters.support()

    def row_losses(self, outputs: Tensor, next_outputs: Tensor, batch: Batch) -> RowLosses:
        """Return the Huber loss of values, or the cross-entropy of distributions."""
        support = self.model.support
        if support is not None:
            return self.categorical_losses(outputs, next_outputs, batch, support)
        q, next_value = outputs.squeeze(-1), next_outputs.squeeze(-1)
        target = bootstrapped_target(batch.reward, batch.discount, next_value)
        errors = q - target
        return RowLosses(huber(errors), errors, q, target)

    def categorical_losses(
        self, logits: Tensor, next_logits: Tensor, batch: Batch, support: Support
    ) -> RowLosses:
        """Return the cross-entropy of the distributions; their divergence is the priority."""
        target = categorical_target(next_logits, batch.reward, batch.discount, support)
        losses = cross_entropies(logits, target)
        divergence = losses + torch.xlogy(target, target).sum(-1)
        target_mean = (target * support.atoms(target)).sum(-1)
        return RowLosses(losses, divergence, support.mean(logits), target_mean)


dqn_loss = DQN.total_loss
"""DQN's only loss and its metrics: `dqn_loss(dqn, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="dqn",
    title="Deep Q-Network",
    reference="doi:10.1038/nature14236, arXiv:1509.06461, arXiv:1511.06581, arXiv:1511.05952, "
    "arXiv:1707.06887, arXiv:1706.10295, arXiv:1710.02298",
    use_when="discrete actions; dqn/rainbow learns from fewer steps",
    algorithm=DQN,
    actions=("discrete",),
)
