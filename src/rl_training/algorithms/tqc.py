"""Truncated quantile critics (2005.04269).

SAC whose critics learn the distribution of the return. The atoms of all target critics are
pooled, and the largest of the pool are dropped: a finer control of overestimation than a minimum.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import Draws
from rl_training.algorithms.functional import bootstrapped_target, quantile_huber_loss
from rl_training.algorithms.hyperparameters import Count, LayerSizes
from rl_training.algorithms.maximum_entropy import (
    MaximumEntropyAlgorithm,
    MaximumEntropyHyperparameters,
    soft_policy_loss,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp_tqc import MLPTQCModel
from rl_training.types import Batch, Metrics, Noise, State


class TQCHyperparameters(MaximumEntropyHyperparameters):
    """Defaults are those of the authors' code, but for `learning_starts`."""

    critic_hidden_sizes: LayerSizes | None = (512, 512, 512)
    """Where absent and `hidden_sizes` is given, those"""
    num_critics: Count = 5
    num_quantiles: Count = 25
    """Quantiles of each critic's distribution of returns"""
    top_quantiles_to_drop_per_critic: Annotated[int, Field(ge=0)] = 2
    """The largest are left out of targets, against overestimation"""

    @model_validator(mode="after")
    def _sizes_for_all_networks(self) -> TQCHyperparameters:
        given = self.model_fields_set
        if "hidden_sizes" in given and "critic_hidden_sizes" not in given:
            self.derive(critic_hidden_sizes=None)
        return self

    @model_validator(mode="after")
    def _check_that_atoms_are_left(self) -> TQCHyperparameters:
        dropped = self.top_quantiles_to_drop_per_critic
        if dropped >= self.num_quantiles:
            raise ValueError(
                f"top_quantiles_to_drop_per_critic = {dropped}: must be less than num_quantiles "
                f"({self.num_quantiles}), or nothing is left to learn from"
            )
        return self


class TQC(MaximumEntropyAlgorithm):
    """Truncated quantile critics."""

    hyperparameters_type = TQCHyperparameters
    hyperparameters: TQCHyperparameters
    model: MLPTQCModel

    def build_model(self, generator: torch.Generator) -> MLPTQCModel:
        chosen = self.hyperparameters
        return chosen.build(
            MLPTQCModel,
            self.obs_dim,
            self.action_dim,
            generator,
            num_quantiles=chosen.num_quantiles,
        )

    def update_noise(self, batch_size: int) -> Draws:
        return self.action_draws(batch_size)

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        chosen = self.hyperparameters
        dropped = chosen.top_quantiles_to_drop_per_critic * chosen.num_critics
        return tqc_critic_loss(
            self.model,
            state,
            batch,
            noise,
            dropped=dropped,
            entropy_in_target=chosen.entropy_in_target,
        )

    def policy_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return tqc_policy_loss(self.model, state, batch, noise, target_entropy=self.target_entropy)


def tqc_loss(
    model: MLPTQCModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    dropped: int,
    target_entropy: float | None,
    entropy_in_target: bool = True,
) -> tuple[Tensor, Metrics]:
    """The sum of TQC's losses; `dropped` is how many atoms of the complete pool are left out."""
    TQCHyperparameters.check(
        top_quantiles_to_drop_per_critic=dropped // model.num_critics,
        num_quantiles=model.critic.sizes[-1],
    )
    critic_loss, critic_metrics = tqc_critic_loss(
        model, parameters, batch, noise, dropped=dropped, entropy_in_target=entropy_in_target
    )
    policy_loss, policy_metrics = tqc_policy_loss(
        model, parameters, batch, noise, target_entropy=target_entropy
    )
    return critic_loss + policy_loss, critic_metrics | policy_metrics


def tqc_critic_loss(
    model: MLPTQCModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    dropped: int,
    entropy_in_target: bool = True,
) -> tuple[Tensor, Metrics]:
    """Quantile regression of every critic on the truncated pool of target atoms."""
    with torch.no_grad():
        next_action, next_log_prob = model.sample_actions(
            batch.next_obs, noise=noise["next_action"], actor=parameters["actor"]
        )
        pool = model.quantiles(batch.next_obs, next_action, critic=parameters["target_critic"])
        pool = pool.flatten(1)
        weights = truncation_weights(pool, dropped)
        atoms = pool
        if entropy_in_target:
            atoms = pool - parameters["log_alpha"].exp() * next_log_prob[:, None]
        targets = bootstrapped_target(batch.reward[:, None], batch.discount[:, None], atoms)

    quantiles = model.quantiles(batch.obs, batch.action, critic=parameters["critic"])
    loss = quantile_huber_loss(quantiles, targets[:, None, :], weights[:, None, :])
    return loss, {
        "critic_loss": loss,
        "q_mean": quantiles.mean(),
        "target_q_mean": (weights * targets).sum(-1).mean(),
    }


def truncation_weights(pool: Tensor, dropped: int) -> Tensor:
    """Equal shares of one for the atoms of each row but the `dropped` largest, which get none.

    By counting the atoms below each rather than by sorting: a sort is a kernel of its own, and a
    slow one for many short rows; comparisons fuse with what comes before and after.
    """
    number = pool.shape[-1]
    order = torch.arange(number, device=pool.device)
    others, own = pool[:, None, :], pool[:, :, None]
    # Of equal atoms the first counts as the smaller. As numbers, since sums of truths are slow.
    comes_first = order[None, :] < order[:, None]
    rank = torch.where(comes_first, (others <= own).float(), (others < own).float()).sum(-1)
    return (rank < number - dropped).float() / (number - dropped)


def tqc_policy_loss(
    model: MLPTQCModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    target_entropy: float | None,
) -> tuple[Tensor, Metrics]:
    """The actor maximises the mean of all atoms of all critics."""
    return soft_policy_loss(
        model, parameters, batch, noise, lambda q: q.mean(-1), target_entropy=target_entropy
    )


SPEC = AlgorithmSpec(
    name="tqc",
    title="Truncated Quantile Critics",
    reference="arXiv:2005.04269",
    algorithm=TQC,
)
