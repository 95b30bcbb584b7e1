"""Conservative Q-learning (2006.04779), on SAC.

The conservative term lowers the Q-values of the policy's actions and raises those of the data's. It
is a soft maximum over random actions and the policy's actions at this and the next state, each
weighted by the inverse of its density, minus the Q-value of the data's action. If actions are
discrete, the soft maximum is over all of them, and the rest is discrete SAC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import Draw, Draws
from rl_training.algorithms.functional import random_subset, squared_errors
from rl_training.algorithms.hyperparameters import (
    Count,
    LayerSizes,
    MixedHyperparameters,
    Rate,
    is_from_0_1,
)
from rl_training.algorithms.sac import SAC, SACHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.types import Batch, Metrics, Noise, State

MAX_CQL_ALPHA = 1e6


class CQLHyperparameters(SACHyperparameters, MixedHyperparameters):
    """The layers, learning rates and weight of the authors' code for locomotion data.

    The authors' code starts with 40,000 updates of behavior cloning, which are omitted here.
    """

    symbols: ClassVar[Mapping[str, str]] = {
        "cql_alpha": "α",
        "cql_target_gap": "τ",
        "num_cql_samples": "N",
        "alpha": "α_SAC",
        "tau": "τ_SAC",
    }
    before: ClassVar[Mapping[str, Any]] = {"alpha_learning_rate": None}

    actor_learning_rate: Rate | None = 1e-4
    alpha_learning_rate: Rate | None = 1e-4
    hidden_sizes: LayerSizes = (256, 256, 256)
    cql_alpha: Annotated[float, Field(ge=0)] = 5.0
    """Weight of the conservative term; 0: none. With `cql_target_gap`, only its initial value"""
    cql_target_gap: Annotated[float, Field(ge=0)] | None = None
    """Tune the weight, as a Lagrange multiplier, so that the conservative term stays below this.
    Not set: the weight is fixed"""
    num_cql_samples: Count = 10
    """Sampled actions per transition of each kind in the conservative term: random, the policy's,
    and the policy's in the next state. Not used if actions are discrete"""
    subset_size: Count | None = None
    """Number of randomly selected critics whose smallest value is used in a target. Not set: all
    critics"""
    entropy_in_target: bool = False

    @classmethod
    def changes_since(cls, saved: Mapping[str, Any]) -> str | None:
        soft = super().changes_since(saved)
        if not is_from_0_1(saved):
            return soft
        bellman = (
            "the Bellman loss is now the mean square, as in CQL's references, instead of half of "
            "it: cql_alpha has half the effect"
        )
        return bellman if soft is None else f"{bellman}; {soft}"

    @model_validator(mode="after")
    def _check_initial_weight(self) -> CQLHyperparameters:
        if self.cql_target_gap is not None and self.cql_alpha == 0:
            raise ValueError(
                "cql_alpha = 0.0: must be greater than 0 if cql_target_gap is given, since the "
                "weight could never grow from 0"
            )
        return self

    @model_validator(mode="after")
    def _check_subset(self) -> CQLHyperparameters:
        if self.subset_size is not None and self.subset_size > self.num_critics:
            raise ValueError(
                f"subset_size = {self.subset_size}: must be at most num_critics "
                f"({self.num_critics})"
            )
        return self


class CQL(SAC):
    """Conservative Q-learning."""

    hyperparameters_type = CQLHyperparameters
    hyperparameters: CQLHyperparameters

    def lagrange_multipliers(self) -> dict[str, float]:
        settings = self.hyperparameters
        return {} if settings.cql_target_gap is None else {"log_cql_alpha": settings.cql_alpha}

    def update_noise(self, batch_size: int) -> Draws:
        settings, subset = self.hyperparameters, {}
        if settings.subset_size is not None:
            subset = {
                "subset": Draw("uniform", (settings.num_critics,)),
                **self.dropout_noise(batch_size, target_critics=settings.subset_size),
            }
        if self.is_discrete:
            return {**super().update_noise(batch_size), **subset}
        shape = (self.hyperparameters.num_cql_samples, batch_size, self.action_dim)
        return {
            **super().update_noise(batch_size),
            "random_actions": Draw("uniform", shape),
            "current_actions": Draw("normal", shape),
            "next_actions": Draw("normal", shape),
            **subset,
        }

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the Bellman error plus the weighted conservative gap."""
        settings = self.hyperparameters
        subset = None
        if settings.subset_size is not None:
            subset = random_subset(noise["subset"], settings.subset_size)
        target = self.soft_target(state, batch, noise, subset)
        dropout = noise.get("critic_dropout")
        q = self.model.q_values(batch.obs, batch.action, critic=state["critic"], dropout=dropout)
        half_squares, metrics = squared_errors(q, target, batch.is_offline)
        bellman_loss = 2 * half_squares  # published values of `cql_alpha` assume the mean square
        soft_maximum, more = self.soft_maximum(state, batch, noise)
        gap = (soft_maximum - q).mean(0)
        metrics |= {"cql_gap": gap.mean(), "bellman_loss": bellman_loss, **more}
        if settings.cql_target_gap is None:
            loss = bellman_loss + settings.cql_alpha * gap.sum()
            return loss, metrics | {"critic_loss": loss}

        # The critics minimize the weighted gap; the weight grows while the gap exceeds its target.
        log_weight = state["log_cql_alpha"]
        weight = log_weight.detach().exp().clamp(max=MAX_CQL_ALPHA)
        excess = (gap - settings.cql_target_gap).sum()
        loss = bellman_loss + weight * excess
        # At its maximum the weight can only decrease.
        capped = log_weight.detach() >= math.log(MAX_CQL_ALPHA)
        climb = torch.where(capped, excess.detach().clamp(max=0), excess.detach())
        metrics |= {"critic_loss": loss, "cql_alpha": weight}
        return loss - log_weight * weight * climb, metrics

    def soft_maximum(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the log-sum-exp of the Q-values of all or sampled actions, and its metrics.

        It is `(batch, critics)`. Each sample is weighted by the inverse of its density. Without
        these importance weights the sum would depend on how actions are sampled.
        """
        dropout = noise.get("critic_dropout")
        if self.is_discrete:
            values = self.model.all_q_values(batch.obs, critic=state["critic"], dropout=dropout)
            return values.logsumexp(-2), {}
        with torch.no_grad():
            random_actions = noise["random_actions"] * 2 - 1
            random_density = torch.full_like(random_actions[..., 0], -math.log(2) * self.action_dim)
            obs, next_obs = (self.actor_input(state, o) for o in (batch.obs, batch.next_obs))
            current, current_density = self.model.sample_actions(
                obs, noise=noise["current_actions"], actor=state["actor"]
            )
            following, following_density = self.model.sample_actions(
                next_obs, noise=noise["next_actions"], actor=state["actor"]
            )
            actions = torch.cat([random_actions, current, following])
            log_density = torch.cat([random_density, current_density, following_density])

        samples, rows = log_density.shape
        obs = batch.obs.expand(samples, rows, -1)
        if dropout is not None:  # one mask for all actions in a state, as for the data's action
            dropout = dropout.unsqueeze(1).expand(-1, samples, -1, -1).flatten(1, 2)
        q = self.model.q_values(
            obs.flatten(0, 1), actions.flatten(0, 1), critic=state["critic"], dropout=dropout
        )
        q, metrics = self.sampled_values(q.view(samples, rows, -1), batch)
        return torch.logsumexp(q - log_density[..., None], dim=0), metrics

    def sampled_values(self, q: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the values that the soft maximum is taken of, and metrics of them.

        `q`, `(samples, batch, critics)`, are the Q-values of random actions, of the policy's, and
        of the policy's in the next state, `num_cql_samples` of each.
        """
        return q, {}


cql_loss = CQL.total_loss
"""The sum of CQL's losses and their metrics: `cql_loss(cql, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="cql",
    title="Conservative Q-Learning",
    reference="arXiv:2006.04779",
    use_when="recorded data of mixed quality, also with discrete actions; slower than IQL",
    algorithm=CQL,
    actions=("continuous", "discrete"),
    regimes=("offline", "online", "mixed"),
)
