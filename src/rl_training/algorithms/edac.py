"""Ensemble-diversified actor-critic (2110.01548), on SAC; without its diversity term it is SAC-N.

The minimum over many critics is a pessimistic value: critics agree on actions that the data
contains, and differ on others. SAC-N needs up to 500 of them, because critics that are trained on
the same targets become similar. EDAC needs ten to fifty: a term in their loss makes the gradients
of their values with respect to the action point in different directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.functional import squared_errors
from rl_training.algorithms.hyperparameters import Count, LayerSizes, MixedHyperparameters
from rl_training.algorithms.sac import SAC, SACHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.types import Batch, Metrics, Noise, State

SMALLEST_NORM = 1e-10
"""Added to the norms of gradients, as in the authors' code"""


class EDACHyperparameters(SACHyperparameters, MixedHyperparameters):
    """The authors' layers and learning rates; they tune `num_critics` and `eta` for each dataset.

    The defaults are those for most HalfCheetah datasets. For Hopper and Walker2d they use 10 to 50
    critics and `eta` from 0 to 5. SAC-N is `eta: 0` with 10 to 500 critics.
    """

    symbols: ClassVar[Mapping[str, str]] = {"num_critics": "N", "eta": "η"}

    eta: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the diversity term, the mean cosine similarity of the gradients of two critics'
    values with respect to the action; 0: no such term, which is SAC-N"""
    num_critics: Count = 10
    hidden_sizes: LayerSizes = (256, 256, 256)

    @model_validator(mode="after")
    def _check_pairs(self) -> EDACHyperparameters:
        if self.eta > 0 and self.num_critics == 1:
            raise ValueError(
                f"eta = {self.eta}: needs num_critics of at least 2, since it compares critics; "
                "use eta: 0 with one critic"
            )
        return self


class EDAC(SAC):
    """Ensemble-diversified actor-critic."""

    hyperparameters_type = EDACHyperparameters
    hyperparameters: EDACHyperparameters

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the Bellman error plus the weighted similarity of the critics' gradients."""
        eta = self.hyperparameters.eta
        target = self.soft_target(state, batch, noise)
        inputs = batch.obs, batch.action
        critic, dropout = state["critic"], noise.get("critic_dropout")
        if eta == 0:
            q = self.model.q_values(*inputs, critic=critic, dropout=dropout)
        else:
            q, slopes = self.model.q_slopes(*inputs, critic=critic, dropout=dropout)
        half_squares, metrics = squared_errors(q, target, batch.is_offline)
        loss = bellman_loss = 2 * half_squares  # published values of `eta` assume the mean square
        if eta > 0:
            similarity = mean_similarity(slopes)
            # Per critic as in the authors' code: the sum over ordered pairs, divided by N - 1.
            loss = bellman_loss + eta * self.hyperparameters.num_critics * similarity
            metrics["gradient_similarity"] = similarity
        return loss, metrics | {"critic_loss": loss, "bellman_loss": bellman_loss}


def mean_similarity(vectors: Tensor) -> Tensor:
    """Return the mean cosine similarity of two different vectors, from `(number, batch, size)`."""
    number = vectors.shape[0]
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    directions = vectors / (lengths + SMALLEST_NORM)
    # The square of a sum is the sum over all pairs, without a matrix of them.
    all_pairs = directions.sum(0).square().sum(-1)
    same = directions.square().sum((0, -1))
    total: Tensor = (all_pairs - same).mean()
    return total / (number * (number - 1))


edac_loss = EDAC.total_loss
"""The sum of EDAC's losses and their metrics: `edac_loss(edac, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="edac",
    title="Ensemble-Diversified Actor-Critic",
    reference="arXiv:2110.01548",
    use_when="recorded data with many different policies in it, such as a replay buffer",
    algorithm=EDAC,
    regimes=("offline", "mixed", "online"),
)
