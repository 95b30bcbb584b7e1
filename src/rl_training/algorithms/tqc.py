"""Truncated quantile critics (2005.04269).

SAC with critics that learn the distribution of the return. The atoms of all target critics are
pooled and the largest ones dropped, which controls overestimation more finely than a minimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.functional import bootstrapped_target, quantile_huber_loss
from rl_training.algorithms.hyperparameters import Count, LayerSizes
from rl_training.algorithms.maximum_entropy import (
    MaximumEntropyAlgorithm,
    MaximumEntropyHyperparameters,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp_tqc import MLPTQCModel
from rl_training.types import Batch, Metrics, Noise, State


class TQCHyperparameters(MaximumEntropyHyperparameters):
    """The defaults of the authors' code, except `learning_starts`."""

    symbols: ClassVar[Mapping[str, str]] = {
        "num_critics": "N",
        "num_quantiles": "M",
        "top_quantiles_to_drop_per_critic": "d",
        "tau": "β",
    }

    critic_hidden_sizes: LayerSizes | None = (512, 512, 512)
    """Units of each hidden layer of the critics; if only `hidden_sizes` is given, that is used"""
    num_critics: Count = 5
    num_quantiles: Count = 25
    """Number of quantiles by which each critic describes the distribution of the return"""
    top_quantiles_to_drop_per_critic: Annotated[int, Field(ge=0, le=10**9)] = 2
    """Largest quantiles left out of targets, per critic: more reduce overestimation. 0: none"""

    @model_validator(mode="after")
    def _use_hidden_sizes(self) -> TQCHyperparameters:
        given = self.model_fields_set
        if "hidden_sizes" in given and "critic_hidden_sizes" not in given:
            self.derive(critic_hidden_sizes=None)
        return self

    @model_validator(mode="after")
    def _check_dropped(self) -> TQCHyperparameters:
        dropped = self.top_quantiles_to_drop_per_critic
        if dropped >= self.num_quantiles:
            raise ValueError(
                f"top_quantiles_to_drop_per_critic = {dropped}: must be less than num_quantiles "
                f"({self.num_quantiles}), so that at least one quantile is left"
            )
        return self


class TQC(MaximumEntropyAlgorithm):
    """Truncated quantile critics."""

    hyperparameters_type = TQCHyperparameters
    hyperparameters: TQCHyperparameters
    model: MLPTQCModel

    def build_model(self, generator: torch.Generator) -> MLPTQCModel:
        settings = self.hyperparameters
        return settings.build(
            MLPTQCModel,
            self.plan,
            self.action_dim,
            generator,
            num_quantiles=settings.num_quantiles,
        )

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the quantile loss of every critic on the truncated pool of target atoms."""
        settings = self.hyperparameters
        with torch.no_grad():
            inputs = self.actor_input(state, batch.next_obs)
            next_action, next_log_prob = self.model.sample_actions(
                inputs, noise=noise["next_action"], actor=state["actor"]
            )
            atoms = self.model.quantiles(
                batch.next_obs,
                next_action,
                critic=state["target_critic"],
                dropout=noise.get("target_dropout"),
            ).flatten(1)
            dropped = settings.top_quantiles_to_drop_per_critic * settings.num_critics
            weights = truncation_weights(atoms, dropped)
            if settings.entropy_in_target:
                atoms = atoms - state["log_alpha"].exp() * next_log_prob[:, None]
            targets = bootstrapped_target(batch.reward[:, None], batch.discount[:, None], atoms)

        dropout = noise.get("critic_dropout")
        quantiles = self.model.quantiles(
            batch.obs, batch.action, critic=state["critic"], dropout=dropout
        )
        loss = quantile_huber_loss(quantiles, targets[:, None, :], weights[:, None, :])
        return loss, {
            "critic_loss": loss,
            "q_mean": quantiles.mean(),
            "target_q_mean": (weights * targets).sum(-1).mean(),
        }

    def policy_value(self, q: Tensor) -> Tensor:
        """Return the mean over the critics, each of which is the mean of its atoms."""
        return q.mean(-1)


def truncation_weights(pool: Tensor, dropped: int) -> Tensor:
    """Return equal weights with sum one in each row, but zero for the `dropped` largest atoms.

    The rank of an atom is computed by counting smaller ones. Sorting takes a separate kernel, which
    is slow for many short rows; comparisons are fused with neighbouring operations.
    """
    number = pool.shape[-1]
    order = torch.arange(number, device=pool.device)
    others, own = pool[:, None, :], pool[:, :, None]
    # Of equal atoms the first ranks lower. Floats, because sums of booleans are slow.
    comes_first = order[None, :] < order[:, None]
    rank = torch.where(comes_first, (others <= own).float(), (others < own).float()).sum(-1)
    return (rank < number - dropped).float() / (number - dropped)


tqc_loss = TQC.total_loss
"""The sum of TQC's losses and their metrics: `tqc_loss(tqc, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="tqc",
    title="Truncated Quantile Critics",
    reference="arXiv:2005.04269",
    use_when="if SAC's critics overestimate, such as on Hopper and Humanoid",
    algorithm=TQC,
)
