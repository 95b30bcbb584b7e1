"""Randomized ensembled double Q-learning (2101.05982).

A large ensemble of critics limits overestimation, which allows many critic updates per environment
step. Each target is the minimum over a small random subset of the critics; the actor maximizes the
mean over all of them. Actor and temperature are updated once per block of critic updates.

DroQ (2110.02034) is this with two critics, which are both in the subset, `critic_dropout` and
`critic_layer_norm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from rl_training.algorithms.base import Draw, Draws
from rl_training.algorithms.functional import random_subset, squared_errors
from rl_training.algorithms.hyperparameters import Count
from rl_training.algorithms.maximum_entropy import (
    MaximumEntropyAlgorithm,
    MaximumEntropyHyperparameters,
    least,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp import Initialization
from rl_training.models.mlp_sac import MLPREDQModel
from rl_training.types import Batch, Metrics, Noise, State


class REDQHyperparameters(MaximumEntropyHyperparameters):
    """The defaults of the authors' code, which sets `target_entropy` per task."""

    symbols: ClassVar[Mapping[str, str]] = {
        "num_critics": "N",
        "subset_size": "M",
        "gradient_updates_per_step": "G",
        "tau": "1 − ρ",
    }
    before: ClassVar[Mapping[str, Any]] = {"initialization": "default"}

    initialization: Initialization = "xavier"
    num_critics: Count = 10
    subset_size: Count = 2
    """Number of randomly selected critics whose smallest value is used in a target"""
    actor_value: Literal["mean", "minimum"] = "mean"
    """What the actor maximizes: the mean of all critics, or the minimum"""
    gradient_updates_per_step: Count = 20
    policy_delay: Count = 20
    """The actor and the temperature are updated at every n-th update of the critics. Not set:
    `gradient_updates_per_step`, which is one policy update per block"""

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


class REDQ(MaximumEntropyAlgorithm):
    """Randomized ensembled double Q-learning."""

    hyperparameters_type = REDQHyperparameters
    hyperparameters: REDQHyperparameters
    model: MLPREDQModel

    def build_model(self, generator: torch.Generator) -> MLPREDQModel:
        return self.hyperparameters.build(MLPREDQModel, self.plan, self.action_dim, generator)

    def update_noise(self, batch_size: int) -> Draws:
        settings = self.hyperparameters
        subset = Draw("uniform", (settings.num_critics,))
        dropout = self.dropout_noise(batch_size, target_critics=settings.subset_size)
        return {**super().update_noise(batch_size), "subset": subset, **dropout}

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the squared error of every critic; the target uses a random subset of them."""
        subset = random_subset(noise["subset"], self.hyperparameters.subset_size)
        target = self.soft_target(state, batch, noise, subset)
        dropout = noise.get("critic_dropout")
        q = self.model.q_values(batch.obs, batch.action, critic=state["critic"], dropout=dropout)
        return squared_errors(q, target, batch.is_offline)

    def policy_value(self, q: Tensor) -> Tensor:
        """Return the mean over all critics, or their minimum."""
        return q.mean(-1) if self.hyperparameters.actor_value == "mean" else least(q)


redq_loss = REDQ.total_loss
"""The sum of REDQ's losses and their metrics: `redq_loss(redq, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="redq",
    title="Randomized Ensembled Double Q-Learning",
    reference="arXiv:2101.05982",
    use_when="few environment steps on a CPU; redq/droq is its faster variant",
    algorithm=REDQ,
)
