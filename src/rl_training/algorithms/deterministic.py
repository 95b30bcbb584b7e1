"""What TD3 and its relatives share: a deterministic actor, and targets of actor and critics."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws, Objective
from rl_training.algorithms.functional import (
    bootstrapped_target,
    polyak_update,
    squared_errors,
)
from rl_training.algorithms.hyperparameters import ActorCriticHyperparameters
from rl_training.algorithms.optimizer import Adam
from rl_training.models.mlp import MLP
from rl_training.models.mlp_td3 import MLPTD3Model
from rl_training.types import Batch, Metrics, Noise, State


class DeterministicHyperparameters(ActorCriticHyperparameters):
    """An actor that explores by noise added to its actions."""

    exploration_noise: Annotated[float, Field(ge=0)] = 0.1
    """Standard deviation, where actions run from -1 to 1"""


class DeterministicAlgorithm(Algorithm):
    """Critics learn the value of a deterministic actor, which climbs the first one's gradient.

    Targets of actor and critics move together, whenever the policy does.
    """

    hyperparameters: DeterministicHyperparameters
    model: MLPTD3Model

    @abstractmethod
    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """How far the critics are from their targets."""

    @abstractmethod
    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """What the actor descends."""

    def build_model(self, generator: torch.Generator) -> MLPTD3Model:
        return self.hyperparameters.build(MLPTD3Model, self.obs_dim, self.action_dim, generator)

    def networks(self) -> dict[str, MLP]:
        return {"actor": self.model.actor, "critic": self.model.critic}

    def targets(self) -> dict[str, str]:
        return {"target_actor": "actor", "target_critic": "critic"}

    def optimizers(self) -> dict[str, Adam]:
        chosen = self.hyperparameters
        return {"critic": chosen.critic_optimizer(), "actor": chosen.actor_optimizer()}

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        critic, actor = (
            Objective(("critic",), self.critic_loss),
            Objective(("actor",), self.actor_loss),
        )
        return [critic, actor] if update_policy else [critic]

    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        if policy_updated:
            for target, source in self.targets().items():
                polyak_update(state[target], state[source], self.hyperparameters.tau)

    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.model.actions(obs, actor=state["actor"])

    def exploration_noise(self, batch_size: int) -> Draws:
        return {"action": Draw("normal", (batch_size, self.action_dim))}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        spread = self.hyperparameters.exploration_noise
        return (self.act(state, obs) + spread * noise["action"]).clamp(-1, 1)


def deterministic_critic_loss(
    model: MLPTD3Model, parameters: State, batch: Batch, disturbance: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Squared distance of every critic from the least target critic's view of the target actor.

    `disturbance` is added to the target actor's actions.
    """
    with torch.no_grad():
        next_action = model.actions(batch.next_obs, actor=parameters["target_actor"])
        if disturbance is not None:
            next_action = (next_action + disturbance).clamp(-1, 1)
        next_q = model.q_values(batch.next_obs, next_action, critic=parameters["target_critic"])
        target = bootstrapped_target(batch.reward, batch.discount, next_q.min(-1).values)

    q = model.q_values(batch.obs, batch.action, critic=parameters["critic"])
    return squared_errors(q, target, batch.is_offline)


def first_critic_values(
    model: MLPTD3Model, parameters: State, obs: Tensor, actions: Tensor
) -> Tensor:
    """What the first critic, whose parameters are left alone, makes of actions: `(batch,)`."""
    critic = parameters["critic"].detach()
    return model.q_values(obs, actions, critic=critic, members=slice(1)).squeeze(-1)


def deterministic_actor_loss(
    model: MLPTD3Model, parameters: State, batch: Batch
) -> tuple[Tensor, Metrics]:
    """The actor climbs the first critic."""
    action = model.actions(batch.obs, actor=parameters["actor"])
    loss = -first_critic_values(model, parameters, batch.obs, action).mean()
    return loss, {"actor_loss": loss}
