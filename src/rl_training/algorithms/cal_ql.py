"""Calibrated Q-learning (2303.05479): CQL that prepares a policy for fine-tuning online.

CQL can push the Q-values of the policy's actions far below any real return. Online, every new
action then looks better than the policy's, which unlearns what it knew. Cal-QL pushes them down no
further than the value of the policy that made the data, which the return of the recorded episode
estimates. Everything else is CQL, offline and online.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.cql import CQL, CQLHyperparameters
from rl_training.algorithms.hyperparameters import ReturnHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.types import Batch, Metrics


class CalQLHyperparameters(CQLHyperparameters, ReturnHyperparameters):
    """CQL's, whose weight and learning rates are those of the authors' code for AntMaze.

    There, the authors also tune the weight (`cql_target_gap: 0.8`), use a maximum over ten next
    actions in targets, which is omitted here, and two layers for the actor and four for critics.
    """

    symbols: ClassVar[Mapping[str, str]] = {"return_after_truncation": ""}


class CalQL(CQL):
    """Calibrated Q-learning."""

    hyperparameters_type = CalQLHyperparameters
    hyperparameters: CalQLHyperparameters

    def sampled_values(self, q: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the Q-values, where those of the policy's actions are at least the return."""
        if batch.returns is None:
            raise ValueError("cal_ql needs batches with returns: those of the data's episodes")
        number = self.hyperparameters.num_cql_samples
        random_values, policy_values = q[:number], q[number:]
        bound = batch.returns[:, None]
        bound_rate = (policy_values < bound).to(q.dtype).mean()
        calibrated = torch.maximum(policy_values, bound)
        return torch.cat([random_values, calibrated]), {"bound_rate": bound_rate}


cal_ql_loss = CalQL.total_loss
"""The sum of Cal-QL's losses and their metrics: `cal_ql_loss(cal_ql, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="cal_ql",
    title="Calibrated Q-Learning",
    reference="arXiv:2303.05479",
    use_when="recorded data first, then fine-tuning online: values start at a usable scale",
    algorithm=CalQL,
    regimes=("offline", "mixed", "online"),
)
