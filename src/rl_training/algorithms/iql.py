"""Implicit Q-learning (2110.06169).

A value of states is learned as an upper expectile of the critics over the data's own actions, so
no action outside the data is ever asked about. The actor is weighted regression on the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Draws, Objective
from rl_training.algorithms.functional import (
    advantage_weights,
    bootstrapped_target,
    expectile_loss,
    squared_errors,
)
from rl_training.algorithms.hyperparameters import (
    ActorCriticHyperparameters,
    LogStd,
    MixedHyperparameters,
    Rate,
    Schedule,
)
from rl_training.algorithms.optimizer import Adam
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.algorithms.stochastic import StochasticAlgorithm
from rl_training.models.gaussian import LOG_STD_MIN
from rl_training.models.mlp import MLP
from rl_training.models.mlp_iql import MLPIQLModel
from rl_training.types import Batch, Metrics, Noise, Regime, State


class IQLHyperparameters(ActorCriticHyperparameters, MixedHyperparameters):
    """Defaults are the authors' for locomotion, except that layers start as PyTorch's do.

    They scale rewards too: `reward_normalization: return_range` of the data set.
    """

    before: ClassVar[Mapping[str, Any]] = {"log_std_min": LOG_STD_MIN}

    learning_rate_schedule: Schedule | Literal["auto"] = "auto"  # type: ignore[assignment]
    """Of the actor alone: `auto` is `cosine` offline and `constant` in an environment"""
    log_std_min: LogStd = -5.0
    """The least logarithm of the actor's deviation: at less, an action component that never varies
    would outweigh all others"""
    expectile: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """Above one half: how close the value comes to the best of the data's actions"""
    beta: Annotated[float, Field(ge=0)] = 3.0
    """Inverse temperature: it multiplies the advantage"""
    max_advantage_weight: Rate = 100.0
    """Larger weights of an action are cut to this"""

    @property
    def decay(self) -> Schedule:
        return "cosine" if self.learning_rate_schedule == "auto" else self.learning_rate_schedule

    def for_run(self, regime: Regime, *, is_trained: bool) -> Self:
        chosen = super().for_run(regime, is_trained=is_trained)
        if self.learning_rate_schedule != "auto":
            return chosen
        schedule = "cosine" if regime == "offline" else "constant"
        return chosen.model_copy(update={"learning_rate_schedule": schedule})


class IQL(StochasticAlgorithm):
    """Implicit Q-learning."""

    hyperparameters_type = IQLHyperparameters
    hyperparameters: IQLHyperparameters
    model: MLPIQLModel

    def build_model(self, generator: torch.Generator) -> MLPIQLModel:
        chosen = self.hyperparameters
        sizes = (self.obs_dim, self.action_dim)
        return chosen.build(MLPIQLModel, *sizes, generator, log_std_min=chosen.log_std_min)

    def networks(self) -> dict[str, MLP]:
        model = self.model
        return {"actor": model.actor, "critic": model.critic, "value": model.value}

    def optimizers(self) -> dict[str, Adam]:
        chosen = self.hyperparameters
        critic = chosen.critic_optimizer(scheduled=False)
        return {"critic": critic, "value": critic, "actor": chosen.actor_optimizer()}

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        values = Objective(("critic", "value"), self.value_losses)
        policy = Objective(("actor",), self.actor_loss)
        return [values, policy] if update_policy else [values]

    def value_losses(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return iql_value_losses(self.model, state, batch, expectile=self.hyperparameters.expectile)

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        chosen = self.hyperparameters
        return iql_actor_loss(
            self.model,
            state,
            batch,
            beta=chosen.beta,
            max_advantage_weight=chosen.max_advantage_weight,
        )

    def update_noise(self, batch_size: int) -> Draws:
        return {}


def iql_loss(
    model: MLPIQLModel,
    parameters: State,
    batch: Batch,
    *,
    expectile: float,
    beta: float,
    max_advantage_weight: float,
) -> tuple[Tensor, Metrics]:
    """The sum of IQL's losses; `parameters` holds `actor`, `critic`, `value`, `target_critic`."""
    IQLHyperparameters.check(
        expectile=expectile, beta=beta, max_advantage_weight=max_advantage_weight
    )
    value_losses, value_metrics = iql_value_losses(model, parameters, batch, expectile=expectile)
    actor_loss, actor_metrics = iql_actor_loss(
        model, parameters, batch, beta=beta, max_advantage_weight=max_advantage_weight
    )
    return value_losses + actor_loss, value_metrics | actor_metrics


def iql_value_losses(
    model: MLPIQLModel, parameters: State, batch: Batch, *, expectile: float
) -> tuple[Tensor, Metrics]:
    """The value follows an expectile of the target critics, the critics follow the value."""
    target_q = least_target_q(model, parameters, batch)
    value = model.state_values(batch.obs, value=parameters["value"])
    value_loss = expectile_loss(target_q - value, expectile)

    next_value = model.state_values(batch.next_obs, value=parameters["value"].detach())
    target = bootstrapped_target(batch.reward, batch.discount, next_value)
    q = model.q_values(batch.obs, batch.action, critic=parameters["critic"])
    critic_loss, metrics = squared_errors(q, target, batch.is_offline)
    metrics |= {"value_loss": value_loss, "value_mean": value.mean()}
    return critic_loss + value_loss, metrics


def iql_actor_loss(
    model: MLPIQLModel,
    parameters: State,
    batch: Batch,
    *,
    beta: float,
    max_advantage_weight: float,
) -> tuple[Tensor, Metrics]:
    """Likelihood of the data's actions, weighted by `exp(beta * advantage)`."""
    with torch.no_grad():
        value = model.state_values(batch.obs, value=parameters["value"])
        advantage = least_target_q(model, parameters, batch) - value
        weights = advantage_weights(beta * advantage, max_advantage_weight)
    log_probs = model.action_logprobs(batch.obs, batch.action, actor=parameters["actor"])
    loss = -(weights * log_probs).mean()
    return loss, {
        "actor_loss": loss,
        "advantage_mean": advantage.mean(),
        "advantage_weight_mean": weights.mean(),
    }


@torch.no_grad()
def least_target_q(model: MLPIQLModel, parameters: State, batch: Batch) -> Tensor:
    """What the most cautious target critic makes of the data's actions, `(batch,)`."""
    q = model.q_values(batch.obs, batch.action, critic=parameters["target_critic"])
    return q.min(-1).values


SPEC = AlgorithmSpec(
    name="iql",
    title="Implicit Q-Learning",
    reference="arXiv:2110.06169",
    algorithm=IQL,
    regimes=("offline", "online", "mixed"),
)
