"""What TD3 and its relatives share: a deterministic actor, and targets of actor and critics."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws, Objective
from rl_training.algorithms.functional import (
    Adam,
    bootstrapped_target,
    polyak_update,
    squared_errors,
)
from rl_training.algorithms.hyperparameters import ActorCriticHyperparameters
from rl_training.models.categorical import Support
from rl_training.models.mlp import Network
from rl_training.models.mlp_td3 import MLPTD3Model
from rl_training.types import Batch, Metrics, Noise, State


class DeterministicHyperparameters(ActorCriticHyperparameters):
    """Hyper-parameters of algorithms that explore with noise added to a deterministic action."""

    exploration_noise: Annotated[float, Field(ge=0)] = 0.1
    """Standard deviation of the Gaussian noise on actions in the environment, for actions in
    [-1, 1]; 0: no noise"""


class DeterministicAlgorithm(Algorithm):
    """Critics learn the value of a deterministic actor, which maximizes the first critic.

    The targets of actor and critics move together, whenever the policy is updated.
    """

    hyperparameters: DeterministicHyperparameters
    model: MLPTD3Model

    def build_model(self, generator: torch.Generator) -> MLPTD3Model:
        return self.hyperparameters.build(
            MLPTD3Model, self.plan, self.action_dim, generator, support=self.support()
        )

    def support(self) -> Support | None:
        """Return the values of categorical critics; None if critics learn only the mean."""
        return None

    def networks(self) -> dict[str, Network]:
        return {"actor": self.model.actor, "critic": self.model.critic}

    def targets(self) -> dict[str, str]:
        return {"target_actor": "actor", "target_critic": "critic"}

    def optimizers(self) -> dict[str, Adam]:
        settings = self.hyperparameters
        return {"critic": settings.critic_optimizer(), "actor": settings.actor_optimizer()}

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        critic = Objective(("critic",), self.critic_loss)
        actor = Objective(("actor",), self.actor_loss)
        return [critic, actor] if update_policy else [critic]

    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        if policy_updated:
            for target, source in self.targets().items():
                polyak_update(state[target], state[source], self.hyperparameters.tau)

    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.model.actions(self.actor_input(state, obs), actor=state["actor"])

    def exploration_noise(self, batch_size: int) -> Draws:
        return {"action": Draw("normal", (batch_size, self.action_dim))}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        std = self.hyperparameters.exploration_noise
        return (self.act(state, obs) + std * noise["action"]).clamp(-1, 1)

    def target_actions(self, state: State, next_obs: Tensor, noise: Noise) -> Tensor:
        """Return the target actor's actions `(batch, action_dim)`."""
        inputs = self.actor_input(state, next_obs)
        return self.model.actions(inputs, actor=state["target_actor"])

    def target_critic(self, state: State) -> Tensor:
        """Return the parameters of the target critics.

        A shared encoder has no target: as in DrQ-v2, it is the current one in targets too.
        """
        return self.model.with_current_encoder(state["target_critic"], state["critic"])

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the squared error of every critic; all have the same target."""
        with torch.no_grad():
            next_action = self.target_actions(state, batch.next_obs, noise)
            next_value = self.next_values(state, batch, next_action, noise)
            target = bootstrapped_target(batch.reward, batch.discount, next_value)

        dropout = noise.get("critic_dropout")
        q = self.model.q_values(batch.obs, batch.action, critic=state["critic"], dropout=dropout)
        return squared_errors(q, target, batch.is_offline)

    def next_values(self, state: State, batch: Batch, next_action: Tensor, noise: Noise) -> Tensor:
        """Return the value `(batch,)` of `next_action` in targets: the least target critic's."""
        critic, dropout = self.target_critic(state), noise.get("target_dropout")
        next_q = self.model.q_values(batch.next_obs, next_action, critic=critic, dropout=dropout)
        return next_q.min(-1).values

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return minus the first critic's value of the actor's actions."""
        action = self.act(state, batch.obs)
        loss = -self.first_critic_values(state, batch.obs, action, noise).mean()
        return loss, {"actor_loss": loss}

    def first_critic_values(
        self, state: State, obs: Tensor, actions: Tensor, noise: Noise
    ) -> Tensor:
        """Return the first critic's values `(batch,)`, without a gradient to its parameters."""
        critic, dropout = state["critic"].detach(), noise.get("policy_dropout")
        first = slice(1)
        q = self.model.q_values(
            obs,
            actions,
            critic=critic,
            subset=first,
            dropout=None if dropout is None else dropout[first],
        )
        return q.squeeze(-1)
