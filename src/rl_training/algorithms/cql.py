"""Conservative Q-learning (2006.04779), on SAC.

Critics are pushed down on actions that a policy would like and up on the data's own: a soft
maximum over random actions and the policy's at this and the next state, each weighted by its
density, minus the value of the action that was taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import Draw, Draws
from rl_training.algorithms.functional import squared_errors
from rl_training.algorithms.hyperparameters import (
    Count,
    LayerSizes,
    MixedHyperparameters,
    Rate,
    is_from_0_1,
)
from rl_training.algorithms.maximum_entropy import (
    MaximumEntropyAlgorithm,
    MaximumEntropyHyperparameters,
    soft_target,
)
from rl_training.algorithms.sac import sac_policy_loss
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.types import Batch, Metrics, Noise, State

MAX_CQL_ALPHA = 1e6


class CQLHyperparameters(MaximumEntropyHyperparameters, MixedHyperparameters):
    """Layers, rates and weight are those of the authors' code for locomotion data.

    It clones the data's actions for 40,000 updates first, which is left out here.
    """

    before: ClassVar[Mapping[str, Any]] = {"alpha_learning_rate": None}

    actor_learning_rate: Rate | None = 1e-4
    alpha_learning_rate: Rate | None = 1e-4
    hidden_sizes: LayerSizes = (256, 256, 256)
    cql_alpha: Annotated[float, Field(ge=0)] = 5.0
    """Weight of the conservative term; its first value where there is a `cql_target_gap`"""
    cql_target_gap: Annotated[float, Field(ge=0)] | None = None
    """Tune the weight (as a Lagrange multiplier) so that the term stays below this"""
    num_cql_samples: Count = 10
    """Actions of each of the three kinds"""
    entropy_in_target: bool = False

    @classmethod
    def changes_since(cls, saved: Mapping[str, Any]) -> str | None:
        soft = super().changes_since(saved)
        if not is_from_0_1(saved):
            return soft
        bellman = (
            "the Bellman loss is the mean square now, as in CQL's references, where it was half of "
            "it: cql_alpha counts half as much"
        )
        return bellman if soft is None else f"{bellman}; {soft}"

    @model_validator(mode="after")
    def _check_that_the_weight_can_grow(self) -> CQLHyperparameters:
        if self.cql_target_gap is not None and self.cql_alpha == 0:
            raise ValueError(
                "cql_alpha = 0.0: must be greater than 0 where there is a cql_target_gap, "
                "or the weight could never grow"
            )
        return self


class CQL(MaximumEntropyAlgorithm):
    """Conservative Q-learning."""

    hyperparameters_type = CQLHyperparameters
    hyperparameters: CQLHyperparameters
    model: MLPSACModel

    def build_model(self, generator: torch.Generator) -> MLPSACModel:
        return self.hyperparameters.build(MLPSACModel, self.obs_dim, self.action_dim, generator)

    def lagrange_multipliers(self) -> dict[str, float]:
        chosen = self.hyperparameters
        return {} if chosen.cql_target_gap is None else {"log_cql_alpha": chosen.cql_alpha}

    def update_noise(self, batch_size: int) -> Draws:
        shape = (self.hyperparameters.num_cql_samples, batch_size, self.action_dim)
        return {
            **self.action_draws(batch_size),
            "random_actions": Draw("uniform", shape),
            "current_actions": Draw("normal", shape),
            "next_actions": Draw("normal", shape),
        }

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        chosen = self.hyperparameters
        return cql_critic_loss(
            self.model,
            state,
            batch,
            noise,
            cql_alpha=chosen.cql_alpha,
            cql_target_gap=chosen.cql_target_gap,
            entropy_in_target=chosen.entropy_in_target,
        )

    def policy_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return sac_policy_loss(self.model, state, batch, noise, target_entropy=self.target_entropy)


def cql_loss(
    model: MLPSACModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    target_entropy: float | None,
    cql_alpha: float,
    cql_target_gap: float | None = None,
    entropy_in_target: bool = False,
) -> tuple[Tensor, Metrics]:
    """The sum of CQL's losses; `parameters` holds SAC's and, with a gap, `log_cql_alpha`."""
    CQLHyperparameters.check(cql_alpha=cql_alpha, cql_target_gap=cql_target_gap)
    critic_loss, critic_metrics = cql_critic_loss(
        model,
        parameters,
        batch,
        noise,
        cql_alpha=cql_alpha,
        cql_target_gap=cql_target_gap,
        entropy_in_target=entropy_in_target,
    )
    policy_loss, policy_metrics = sac_policy_loss(
        model, parameters, batch, noise, target_entropy=target_entropy
    )
    return critic_loss + policy_loss, critic_metrics | policy_metrics


def cql_critic_loss(
    model: MLPSACModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    cql_alpha: float,
    cql_target_gap: float | None,
    entropy_in_target: bool,
) -> tuple[Tensor, Metrics]:
    """The Bellman error plus the weighted gap between what is liked and what was done."""
    target = soft_target(model, parameters, batch, noise, entropy=entropy_in_target)
    q = model.q_values(batch.obs, batch.action, critic=parameters["critic"])
    half_squares, metrics = squared_errors(q, target, batch.is_offline)
    bellman_loss = 2 * half_squares  # the mean square, on which published `cql_alpha` values rest
    gap = (soft_maximum(model, parameters, batch, noise) - q).mean(0)
    metrics |= {"cql_gap": gap.mean(), "bellman_loss": bellman_loss}
    if cql_target_gap is None:
        loss = bellman_loss + cql_alpha * gap.sum()
        return loss, metrics | {"critic_loss": loss}

    # The critics descend the weighted gap, the weight climbs while it is above its target.
    log_weight = parameters["log_cql_alpha"]
    weight = log_weight.detach().exp().clamp(max=MAX_CQL_ALPHA)
    excess = (gap - cql_target_gap).sum()
    loss = bellman_loss + weight * excess
    # At its cap it stops, but it can always come down.
    capped = log_weight.detach() >= math.log(MAX_CQL_ALPHA)
    climb = torch.where(capped, excess.detach().clamp(max=0), excess.detach())
    metrics |= {"critic_loss": loss, "cql_alpha": weight}
    return loss - log_weight * weight * climb, metrics


def soft_maximum(model: MLPSACModel, parameters: State, batch: Batch, noise: Noise) -> Tensor:
    """log-sum-exp over sampled actions, `(batch, critics)`.

    Each sample is weighted by the inverse of the density it came from: without that the sum would
    follow the sampler instead of the critics.
    """
    with torch.no_grad():
        random_actions = noise["random_actions"] * 2 - 1
        random_density = torch.full_like(random_actions[..., 0], -math.log(2) * model.action_dim)
        current, current_density = model.sample_actions(
            batch.obs, noise=noise["current_actions"], actor=parameters["actor"]
        )
        following, following_density = model.sample_actions(
            batch.next_obs, noise=noise["next_actions"], actor=parameters["actor"]
        )
        actions = torch.cat([random_actions, current, following])
        log_density = torch.cat([random_density, current_density, following_density])

    samples, rows = log_density.shape
    obs = batch.obs.expand(samples, rows, -1)
    q = model.q_values(obs.flatten(0, 1), actions.flatten(0, 1), critic=parameters["critic"])
    return torch.logsumexp(q.view(samples, rows, -1) - log_density[..., None], dim=0)


SPEC = AlgorithmSpec(
    name="cql",
    title="Conservative Q-Learning",
    reference="arXiv:2006.04779",
    algorithm=CQL,
    regimes=("offline", "online", "mixed"),
)
