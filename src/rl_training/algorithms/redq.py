"""Randomised ensembled double Q-learning (2101.05982).

Many critic updates per environment step are affordable because a large ensemble keeps the
overestimation in check: each target is the minimum over a few critics drawn afresh, the actor
maximises the mean of all. Actor and temperature move once per block of critic updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor

from rl_training.algorithms.base import Draw, Draws
from rl_training.algorithms.functional import random_subset, squared_errors
from rl_training.algorithms.hyperparameters import Count
from rl_training.algorithms.maximum_entropy import (
    MaximumEntropyAlgorithm,
    MaximumEntropyHyperparameters,
    soft_policy_loss,
    soft_target,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.actor_critic import StochasticActorCritic
from rl_training.models.mlp import Initialization
from rl_training.models.mlp_sac import MLPREDQModel
from rl_training.types import Batch, Metrics, Noise, State


class REDQHyperparameters(MaximumEntropyHyperparameters):
    """Defaults are those of the authors' code, which sets `target_entropy` by task."""

    before: ClassVar[Mapping[str, Any]] = {"initialization": "default"}

    initialization: Initialization = "xavier"
    num_critics: Count = 10
    subset_size: Count = 2
    """Critics whose minimum is a target"""
    gradient_updates_per_step: Count = 20
    policy_delay: Count = 20
    """Where absent, `gradient_updates_per_step`: one policy update per block"""

    @model_validator(mode="after")
    def _one_policy_update_per_block(self) -> REDQHyperparameters:
        if "policy_delay" not in self.model_fields_set:
            self.derive(policy_delay=self.gradient_updates_per_step)
        return self

    @model_validator(mode="after")
    def _check_subset(self) -> REDQHyperparameters:
        if self.subset_size > self.num_critics:
            raise ValueError(
                f"subset_size = {self.subset_size}: must be at most num_critics "
                f"({self.num_critics})"
            )
        return self


class SubsetAlgorithm(MaximumEntropyAlgorithm):
    """Critics with targets from a random subset, and an actor that maximises the mean of all."""

    hyperparameters: REDQHyperparameters

    def update_noise(self, batch_size: int) -> Draws:
        subset = Draw("uniform", (self.hyperparameters.num_critics,))
        return {**self.action_draws(batch_size), "subset": subset}

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        chosen = self.hyperparameters
        return redq_critic_loss(
            self.model,
            state,
            batch,
            noise,
            subset_size=chosen.subset_size,
            entropy_in_target=chosen.entropy_in_target,
        )

    def policy_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return redq_policy_loss(self.model, state, batch, noise, target_entropy=self.target_entropy)


class REDQ(SubsetAlgorithm):
    """Randomised ensembled double Q-learning."""

    hyperparameters_type = REDQHyperparameters
    model: MLPREDQModel

    def build_model(self, generator: torch.Generator) -> MLPREDQModel:
        return self.hyperparameters.build(MLPREDQModel, self.obs_dim, self.action_dim, generator)


def redq_loss(
    model: MLPREDQModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    subset_size: int,
    target_entropy: float | None,
    entropy_in_target: bool = True,
) -> tuple[Tensor, Metrics]:
    """The sum of REDQ's losses, as in an update that moves the policy too."""
    REDQHyperparameters.check(subset_size=subset_size, num_critics=model.num_critics)
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


def redq_critic_loss(
    model: StochasticActorCritic,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    subset_size: int,
    entropy_in_target: bool = True,
) -> tuple[Tensor, Metrics]:
    """Squared distance of every critic from one target, the minimum over a random subset."""
    subset = random_subset(noise["subset"], subset_size)
    target = soft_target(model, parameters, batch, noise, members=subset, entropy=entropy_in_target)
    q = model.q_values(batch.obs, batch.action, critic=parameters["critic"])
    return squared_errors(q, target, batch.is_offline)


def redq_policy_loss(
    model: StochasticActorCritic,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    target_entropy: float | None,
) -> tuple[Tensor, Metrics]:
    """The actor maximises the mean of all critics."""
    return soft_policy_loss(
        model, parameters, batch, noise, lambda q: q.mean(-1), target_entropy=target_entropy
    )


SPEC = AlgorithmSpec(
    name="redq",
    title="Randomized Ensembled Double Q-Learning",
    reference="arXiv:2101.05982",
    algorithm=REDQ,
)
