"""Advantage-weighted actor-critic (2006.09359).

Critics learn the value of the current policy from data. The actor is trained by regression on the
data's actions, weighted by their advantage over the policy's own actions. The same update is used
online.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.base import Objective
from rl_training.algorithms.functional import (
    Adam,
    advantage_weights,
    bootstrapped_target,
    squared_errors,
)
from rl_training.algorithms.hyperparameters import (
    ActorCriticHyperparameters,
    LogStd,
    MixedHyperparameters,
    Rate,
)
from rl_training.algorithms.maximum_entropy import StochasticAlgorithm
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.actor_critic import LOG_STD_MIN, ActorHeadName
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.types import Batch, Metrics, Noise, State


class AWACHyperparameters(ActorCriticHyperparameters, MixedHyperparameters):
    """The authors' learning rates, discount, targets and minimum standard deviation.

    Differences from the authors' settings: two layers for the policy instead of four; a batch of
    256 instead of 1,024; weights by a clipped `exp` instead of a softmax over the batch;
    `awac_lambda` 1 instead of 2 (0.5 for the hand tasks); a standard deviation that starts at 1
    instead of 0.05 and may exceed 1; PyTorch's initialization of the last layers; no L2 penalty;
    no pretraining of 25,000 updates or more.
    """

    symbols: ClassVar[Mapping[str, str]] = {"awac_lambda": "λ"}
    before: ClassVar[Mapping[str, Any]] = {
        "actor_head": "squashed_gaussian",
        "log_std_min": LOG_STD_MIN,
    }

    actor_head: ActorHeadName = "gaussian"
    """Distribution of actions: `gaussian` has one standard deviation per action component and clips
    samples; `squashed_gaussian` is SAC's, under which actions on a bound are extremely unlikely"""
    log_std_min: LogStd = -6.0
    """Smallest log standard deviation of the policy. Used with the head `gaussian`"""
    awac_lambda: Rate = 1.0
    """Temperature: advantages are divided by it; smaller follows the best actions more closely"""
    max_advantage_weight: Rate = 100.0
    """Largest weight of a transition in the loss of the actor; larger weights are clipped"""


class AWAC(StochasticAlgorithm):
    """Advantage-weighted actor-critic."""

    hyperparameters_type = AWACHyperparameters
    hyperparameters: AWACHyperparameters
    model: MLPSACModel

    def build_model(self, generator: torch.Generator) -> MLPSACModel:
        settings = self.hyperparameters
        return settings.build(
            MLPSACModel,
            self.plan,
            self.action_dim,
            generator,
            actor_head=settings.actor_head,
            log_std_min=settings.log_std_min,
        )

    def optimizers(self) -> dict[str, Adam]:
        settings = self.hyperparameters
        return {"critic": settings.critic_optimizer(), "actor": settings.actor_optimizer()}

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        critic = Objective(("critic",), self.critic_loss)
        policy = Objective(("actor",), self.actor_loss)
        return [critic, policy] if update_policy else [critic]

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the squared error of every critic; the target is for the policy's next action."""
        with torch.no_grad():
            inputs = self.actor_input(state, batch.next_obs)
            next_action = self.model.actions(
                inputs, noise=noise["next_action"], actor=state["actor"]
            )
            next_q = self.model.q_values(
                batch.next_obs,
                next_action,
                critic=state["target_critic"],
                dropout=noise.get("target_dropout"),
            )
            target = bootstrapped_target(batch.reward, batch.discount, next_q.min(-1).values)
        dropout = noise.get("critic_dropout")
        q = self.model.q_values(batch.obs, batch.action, critic=state["critic"], dropout=dropout)
        return squared_errors(q, target, batch.is_offline)

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return minus the data's log-likelihood, weighted by `exp(advantage / lambda)`."""
        model, settings = self.model, self.hyperparameters
        inputs = self.actor_input(state, batch.obs)
        with torch.no_grad():
            own = model.actions(inputs, noise=noise["action"], actor=state["actor"])
            critic, dropout = state["critic"], noise.get("policy_dropout")
            value = model.q_values(batch.obs, own, critic=critic, dropout=dropout)
            q = model.q_values(batch.obs, batch.action, critic=critic, dropout=dropout)
            advantage = q.min(-1).values - value.min(-1).values
            weights = advantage_weights(
                advantage / settings.awac_lambda, settings.max_advantage_weight
            )
        log_probs = model.action_logprobs(inputs, batch.action, actor=state["actor"])
        loss = -(weights * log_probs).mean()
        return loss, {
            "actor_loss": loss,
            "advantage_mean": advantage.mean(),
            "advantage_weight_mean": weights.mean(),
        }


awac_loss = AWAC.total_loss
"""The sum of AWAC's losses and their metrics: `awac_loss(awac, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="awac",
    title="Advantage-Weighted Actor-Critic",
    reference="arXiv:2006.09359",
    use_when="recorded data now, an environment later; actions stay close to the data",
    algorithm=AWAC,
    regimes=("offline", "online", "mixed"),
)
