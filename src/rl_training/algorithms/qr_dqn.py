"""Quantile regression DQN (1710.10044).

Deep Q-learning with a critic that learns quantiles of the return by quantile regression. The best
action has the largest mean. The parts of Rainbow that DQN has are options here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.deep_q import DeepQAlgorithm, DeepQHyperparameters, RowLosses
from rl_training.algorithms.functional import bootstrapped_target, quantile_huber_losses
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.categorical import Support
from rl_training.types import Batch


class QRDQNHyperparameters(DeepQHyperparameters):
    """The paper's quantiles and targets, with DQN's defaults for low-dimensional observations."""

    symbols: ClassVar[Mapping[str, str]] = {"num_quantiles": "N"}
    why_undelayed: ClassVar[str | None] = "the policy of qr_dqn is its critic"

    double: bool = False
    num_quantiles: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Number of quantiles by which the critic describes the distribution of the return"""


class QRDQN(DeepQAlgorithm):
    """Quantile regression DQN."""

    hyperparameters_type = QRDQNHyperparameters
    hyperparameters: QRDQNHyperparameters

    def distribution(self) -> tuple[int, Support | None]:
        return self.hyperparameters.num_quantiles, None

    def row_losses(self, outputs: Tensor, next_outputs: Tensor, batch: Batch) -> RowLosses:
        """Return the quantile Huber loss, summed over the quantiles as in the paper.

        The priority of a transition is the error of the mean.
        """
        targets = bootstrapped_target(batch.reward[:, None], batch.discount[:, None], next_outputs)
        shares = torch.full_like(targets, 1 / targets.shape[-1])
        losses = quantile_huber_losses(outputs, targets, shares).sum(-1)
        q, target = outputs.mean(-1), targets.mean(-1)
        return RowLosses(losses, q - target, q, target)


qr_dqn_loss = QRDQN.total_loss
"""QR-DQN's only loss and its metrics: `qr_dqn_loss(qr_dqn, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="qr_dqn",
    title="Quantile Regression DQN",
    reference="arXiv:1710.10044",
    use_when="discrete actions with random rewards; compare it with dqn",
    algorithm=QRDQN,
    actions=("discrete",),
)
