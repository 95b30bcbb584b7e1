"""Advantage-weighted actor-critic (2006.09359).

Critics learn the value of the current policy from data; the actor is regression on the data's
actions, weighted by how much better than the policy's own they are. The same update goes on online.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_training.algorithms.base import Draws, Objective
from rl_training.algorithms.functional import (
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
from rl_training.algorithms.optimizer import Adam
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.algorithms.stochastic import StochasticAlgorithm
from rl_training.models.gaussian import LOG_STD_MIN, ActorHeadName
from rl_training.models.mlp import MLP
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.types import Batch, Metrics, Noise, State


class AWACHyperparameters(ActorCriticHyperparameters, MixedHyperparameters):
    """Learning rates, discount, targets and the floor of the deviation are the authors'.

    Not theirs are two layers for the policy instead of four, a batch of 256 instead of 1,024,
    weights by a clipped `exp` instead of a softmax over the batch, `awac_lambda` 1 instead of 2
    (0.5 for the hand's tasks), a deviation that starts at 1 instead of 0.05 and may exceed 1, last
    layers that start as PyTorch's do, no L2 penalty, and no pretraining of 25,000 updates or more.
    """

    before: ClassVar[Mapping[str, Any]] = {
        "actor_head": "squashed_gaussian",
        "log_std_min": LOG_STD_MIN,
    }

    actor_head: ActorHeadName = "gaussian"
    """Not squashed, since actions on a bound would pull a squashed Gaussian far beyond it"""
    log_std_min: LogStd = -6.0
    """The least logarithm of the deviation of the head `gaussian`"""
    awac_lambda: Rate = 1.0
    """Temperature: it divides the advantage"""
    max_advantage_weight: Rate = 100.0
    """Larger weights of an action are cut to this"""


class AWAC(StochasticAlgorithm):
    """Advantage-weighted actor-critic."""

    hyperparameters_type = AWACHyperparameters
    hyperparameters: AWACHyperparameters
    model: MLPSACModel

    def build_model(self, generator: torch.Generator) -> MLPSACModel:
        chosen = self.hyperparameters
        return chosen.build(
            MLPSACModel,
            self.obs_dim,
            self.action_dim,
            generator,
            actor_head=chosen.actor_head,
            log_std_min=chosen.log_std_min,
        )

    def networks(self) -> dict[str, MLP]:
        return {"actor": self.model.actor, "critic": self.model.critic}

    def optimizers(self) -> dict[str, Adam]:
        chosen = self.hyperparameters
        return {"critic": chosen.critic_optimizer(), "actor": chosen.actor_optimizer()}

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        critic = Objective(("critic",), self.critic_loss)
        policy = Objective(("actor",), self.actor_loss)
        return [critic, policy] if update_policy else [critic]

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return awac_critic_loss(self.model, state, batch, noise)

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        chosen = self.hyperparameters
        return awac_actor_loss(
            self.model,
            state,
            batch,
            noise,
            awac_lambda=chosen.awac_lambda,
            max_advantage_weight=chosen.max_advantage_weight,
        )

    def update_noise(self, batch_size: int) -> Draws:
        return self.action_draws(batch_size)


def awac_loss(
    model: MLPSACModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    awac_lambda: float,
    max_advantage_weight: float,
) -> tuple[Tensor, Metrics]:
    """The sum of AWAC's losses; `parameters` holds `actor`, `critic` and `target_critic`."""
    AWACHyperparameters.check(awac_lambda=awac_lambda, max_advantage_weight=max_advantage_weight)
    critic_loss, critic_metrics = awac_critic_loss(model, parameters, batch, noise)
    actor_loss, actor_metrics = awac_actor_loss(
        model,
        parameters,
        batch,
        noise,
        awac_lambda=awac_lambda,
        max_advantage_weight=max_advantage_weight,
    )
    return critic_loss + actor_loss, critic_metrics | actor_metrics


def awac_critic_loss(
    model: MLPSACModel, parameters: State, batch: Batch, noise: Noise
) -> tuple[Tensor, Metrics]:
    """Squared distance of every critic from the value of the current policy's next action."""
    with torch.no_grad():
        next_action = model.actions(
            batch.next_obs, noise=noise["next_action"], actor=parameters["actor"]
        )
        next_q = model.q_values(batch.next_obs, next_action, critic=parameters["target_critic"])
        target = bootstrapped_target(batch.reward, batch.discount, next_q.min(-1).values)
    q = model.q_values(batch.obs, batch.action, critic=parameters["critic"])
    return squared_errors(q, target, batch.is_offline)


def awac_actor_loss(
    model: MLPSACModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    awac_lambda: float,
    max_advantage_weight: float,
) -> tuple[Tensor, Metrics]:
    """Likelihood of the data's actions, weighted by `exp(advantage / lambda)`."""
    with torch.no_grad():
        own = model.actions(batch.obs, noise=noise["action"], actor=parameters["actor"])
        critic = parameters["critic"]
        value = model.q_values(batch.obs, own, critic=critic).min(-1).values
        advantage = model.q_values(batch.obs, batch.action, critic=critic).min(-1).values - value
        weights = advantage_weights(advantage / awac_lambda, max_advantage_weight)
    log_probs = model.action_logprobs(batch.obs, batch.action, actor=parameters["actor"])
    loss = -(weights * log_probs).mean()
    return loss, {
        "actor_loss": loss,
        "advantage_mean": advantage.mean(),
        "advantage_weight_mean": weights.mean(),
    }


SPEC = AlgorithmSpec(
    name="awac",
    title="Advantage-Weighted Actor-Critic",
    reference="arXiv:2006.09359",
    algorithm=AWAC,
    regimes=("offline", "online", "mixed"),
)
