"""Behaviour cloning: supervised learning of the data's actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws, Objective
from rl_training.algorithms.hyperparameters import Hyperparameters, LogStd
from rl_training.algorithms.optimizer import Adam
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.gaussian import LOG_STD_MIN
from rl_training.models.mlp import MLP
from rl_training.models.mlp_bc import MLPBCModel
from rl_training.types import Batch, Metrics, Noise, State


class BCHyperparameters(Hyperparameters):
    """Defaults are those of the offline algorithms that it is compared with."""

    before: ClassVar[Mapping[str, Any]] = {"log_std_min": LOG_STD_MIN}
    why_undelayed: ClassVar[str | None] = "bc learns nothing but the policy"

    objective: Literal["squared_error", "likelihood"] = "squared_error"
    """`likelihood` learns the spread of the actions too, the same in every state"""
    log_std_min: LogStd = -5.0
    """The least logarithm of that spread"""


class BC(Algorithm):
    """Behaviour cloning."""

    hyperparameters_type = BCHyperparameters
    hyperparameters: BCHyperparameters
    model: MLPBCModel

    def build_model(self, generator: torch.Generator) -> MLPBCModel:
        chosen = self.hyperparameters
        return MLPBCModel(
            self.obs_dim,
            self.action_dim,
            chosen.hidden_sizes,
            learned_spread=chosen.objective == "likelihood",
            log_std_min=chosen.log_std_min,
            activation=chosen.activation,
            initialization=chosen.initialization,
            generator=generator,
        )

    def networks(self) -> dict[str, MLP]:
        return {"actor": self.model.actor}

    def targets(self) -> dict[str, str]:
        return {}

    def optimizers(self) -> dict[str, Adam]:
        return {"actor": self.hyperparameters.optimizer()}

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        # The policy is all there is: nothing could go on without it.
        return [Objective(("actor",), self.actor_loss)]

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return bc_actor_loss(self.model, state, batch, objective=self.hyperparameters.objective)

    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        """There are none."""

    def update_noise(self, batch_size: int) -> Draws:
        return {}

    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.model.actions(obs, actor=state["actor"])

    def exploration_noise(self, batch_size: int) -> Draws:
        return {"action": Draw("normal", (batch_size, self.action_dim))}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        if self.hyperparameters.objective == "squared_error":
            return self.act(state, obs)  # no spread was learned
        return self.model.actions(obs, noise=noise["action"], actor=state["actor"])


def bc_loss(
    model: MLPBCModel, parameters: State, batch: Batch, *, objective: str = "squared_error"
) -> tuple[Tensor, Metrics]:
    """BC's only loss, of the actor, `parameters["actor"]`."""
    BCHyperparameters.check(objective=objective)
    return bc_actor_loss(model, parameters, batch, objective=objective)


def bc_actor_loss(
    model: MLPBCModel, parameters: State, batch: Batch, *, objective: str
) -> tuple[Tensor, Metrics]:
    """How far the actor is from the data's actions."""
    action = model.actions(batch.obs, actor=parameters["actor"])
    squared_error = (action - batch.action).square().mean()
    if objective == "squared_error":
        return squared_error, {"bc_loss": squared_error, "actor_loss": squared_error}
    loss = -model.action_logprobs(batch.obs, batch.action, actor=parameters["actor"]).mean()
    return loss, {"bc_loss": squared_error, "actor_loss": loss}


SPEC = AlgorithmSpec(
    name="bc",
    title="Behaviour Cloning",
    reference="Pomerleau 1991",
    algorithm=BC,
    regimes=("offline",),
)
