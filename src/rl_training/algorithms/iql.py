"""Implicit Q-learning (2110.06169).

The state value is an upper expectile of the critics over the data's actions, so the critics are
never evaluated at actions outside the data. The actor is trained by weighted regression on the
data: a Gaussian, or a softmax if actions are discrete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Draws, Objective
from rl_training.algorithms.functional import (
    Adam,
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
from rl_training.algorithms.maximum_entropy import StochasticAlgorithm
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.actor_critic import LOG_STD_MIN
from rl_training.models.mlp import Network
from rl_training.models.mlp_iql import MLPIQLModel
from rl_training.types import Batch, Metrics, Noise, Regime, State


class IQLHyperparameters(ActorCriticHyperparameters, MixedHyperparameters):
    """The authors' defaults for locomotion, with PyTorch's layer initialization.

    The authors also scale rewards: `reward_normalization: return_range` of the dataset.
    """

    symbols: ClassVar[Mapping[str, str]] = {"expectile": "τ", "beta": "β", "tau": "α"}
    before: ClassVar[Mapping[str, Any]] = {"log_std_min": LOG_STD_MIN}

    learning_rate_schedule: Schedule | Literal["auto"] = "auto"  # type: ignore[assignment]
    """How the learning rate of the actor changes over the planned updates; the other networks have
    a constant one. `auto`: `cosine` if training is offline, else `constant`"""
    log_std_min: LogStd = -5.0
    """Smallest log standard deviation of the policy. It keeps an action component that is constant
    in the data from dominating the loss. Not used if actions are discrete"""
    expectile: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """Expectile of the state value: 0.5 is the mean over the data's actions, near 1 the best one"""
    beta: Annotated[float, Field(ge=0)] = 3.0
    """Inverse temperature: advantages are multiplied by it. 0 imitates all actions equally; larger
    follows the best ones more closely"""
    max_advantage_weight: Rate = 100.0
    """Largest weight of a transition in the loss of the actor; larger weights are clipped"""

    @property
    def decay(self) -> Schedule:
        return "cosine" if self.learning_rate_schedule == "auto" else self.learning_rate_schedule

    def for_run(self, regime: Regime, *, is_trained: bool) -> Self:
        resolved = super().for_run(regime, is_trained=is_trained)
        if self.learning_rate_schedule != "auto":
            return resolved
        schedule = "cosine" if regime == "offline" else "constant"
        return resolved.model_copy(update={"learning_rate_schedule": schedule})


class IQL(StochasticAlgorithm):
    """Implicit Q-learning."""

    hyperparameters_type = IQLHyperparameters
    hyperparameters: IQLHyperparameters
    model: MLPIQLModel

    def build_model(self, generator: torch.Generator) -> MLPIQLModel:
        settings = self.hyperparameters
        return settings.build(
            MLPIQLModel,
            self.plan,
            self.action_dim,
            generator,
            discrete=self.is_discrete,
            log_std_min=settings.log_std_min,
        )

    def networks(self) -> dict[str, Network]:
        return {**super().networks(), "value": self.model.value}

    def optimizers(self) -> dict[str, Adam]:
        settings = self.hyperparameters
        critic = settings.critic_optimizer(scheduled=False)
        return {"critic": critic, "value": critic, "actor": settings.actor_optimizer()}

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        values = Objective(("critic", "value"), self.value_losses)
        policy = Objective(("actor",), self.actor_loss)
        return [values, policy] if update_policy else [values]

    def update_noise(self, batch_size: int) -> Draws:
        return self.dropout_noise(batch_size)

    def value_losses(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the sum of the value's expectile loss and the critics' squared error.

        The value is regressed on the target critics, the critics are regressed on the value.
        """
        target_q = self.least_target_q(state, batch, noise.get("target_dropout"))
        value = self.model.state_values(batch.obs, value=state["value"])
        value_loss = expectile_loss(target_q - value, self.hyperparameters.expectile)

        next_value = self.model.state_values(batch.next_obs, value=state["value"].detach())
        target = bootstrapped_target(batch.reward, batch.discount, next_value)
        dropout = noise.get("critic_dropout")
        q = self.model.q_values(batch.obs, batch.action, critic=state["critic"], dropout=dropout)
        critic_loss, metrics = squared_errors(q, target, batch.is_offline)
        metrics |= {"value_loss": value_loss, "value_mean": value.mean()}
        return critic_loss + value_loss, metrics

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return minus the data's log-likelihood, weighted by `exp(beta * advantage)`."""
        settings = self.hyperparameters
        with torch.no_grad():
            value = self.model.state_values(batch.obs, value=state["value"])
            advantage = self.least_target_q(state, batch, noise.get("policy_dropout")) - value
            weights = advantage_weights(settings.beta * advantage, settings.max_advantage_weight)
        inputs = self.actor_input(state, batch.obs)
        log_probs = self.model.action_logprobs(inputs, batch.action, actor=state["actor"])
        loss = -(weights * log_probs).mean()
        return loss, {
            "actor_loss": loss,
            "advantage_mean": advantage.mean(),
            "advantage_weight_mean": weights.mean(),
        }

    @torch.no_grad()
    def least_target_q(self, state: State, batch: Batch, dropout: Tensor | None = None) -> Tensor:
        """Return the minimum over the target critics for the data's actions, `(batch,)`."""
        q = self.model.q_values(
            batch.obs, batch.action, critic=state["target_critic"], dropout=dropout
        )
        return q.min(-1).values


iql_loss = IQL.total_loss
"""The sum of IQL's losses and their metrics: `iql_loss(iql, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="iql",
    title="Implicit Q-Learning",
    reference="arXiv:2110.06169",
    use_when="the first choice for recorded data: stable, few settings, also with discrete actions",
    algorithm=IQL,
    actions=("continuous", "discrete"),
    regimes=("offline", "online", "mixed"),
)
