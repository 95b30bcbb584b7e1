"""What algorithms with an actor that is a distribution share: how it acts, and critics' targets."""

from __future__ import annotations

from typing import final

from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws
from rl_training.algorithms.functional import polyak_update
from rl_training.algorithms.hyperparameters import ActorCriticHyperparameters
from rl_training.models.actor_critic import StochasticActorCritic
from rl_training.types import Noise, State


class StochasticAlgorithm(Algorithm):
    """The most likely action counts, a sampled one explores; only critics have targets."""

    hyperparameters: ActorCriticHyperparameters
    model: StochasticActorCritic

    @final
    def targets(self) -> dict[str, str]:
        return {"target_critic": "critic"}

    @final
    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        polyak_update(state["target_critic"], state["critic"], self.hyperparameters.tau)

    @final
    def action_draws(self, batch_size: int) -> dict[str, Draw]:
        """What the actions in losses are drawn with."""
        actions = Draw("normal", (batch_size, self.action_dim))
        return {"next_action": actions, "action": actions}

    @final
    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.model.actions(obs, actor=state["actor"])

    @final
    def exploration_noise(self, batch_size: int) -> Draws:
        return {"action": Draw("normal", (batch_size, self.action_dim))}

    @final
    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        return self.model.actions(obs, noise=noise["action"], actor=state["actor"])
