"""Behavior cloning: supervised learning of the data's actions, of any kind.

The policy is a Gaussian around the actions, a softmax over discrete actions, one softmax for each
of several choices, or one Bernoulli distribution for each of several switches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws, Objective
from rl_training.algorithms.functional import Adam
from rl_training.algorithms.hyperparameters import Count, Fraction, Hyperparameters, LogStd
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.actor_critic import LOG_STD_MIN
from rl_training.models.mlp import Network
from rl_training.models.mlp_bc import MLPBCModel
from rl_training.types import ACTION_KINDS, Batch, Metrics, Noise, State


class BCHyperparameters(Hyperparameters):
    """The defaults of the offline algorithms that it is compared with."""

    before: ClassVar[Mapping[str, Any]] = {"log_std_min": LOG_STD_MIN}
    why_undelayed: ClassVar[str | None] = "bc trains only the policy"

    gamma: Fraction = 0.99
    """Discount factor per step. Training does not use it; `evaluate --ope` does, to estimate the
    policy's value by fitted Q evaluation"""
    policy_delay: Count = 1
    """Always 1, since the policy is the only network"""
    objective: Literal["squared_error", "likelihood"] = "squared_error"
    """`squared_error` of the actions, or minus their Gaussian log-`likelihood`, which also learns a
    standard deviation per action component. Choices always have their `likelihood`"""
    log_std_min: LogStd = -5.0
    """Smallest log standard deviation of the policy. Used with the objective `likelihood`"""


class BC(Algorithm):
    """Behavior cloning."""

    hyperparameters_type = BCHyperparameters
    hyperparameters: BCHyperparameters
    model: MLPBCModel

    def build_model(self, generator: torch.Generator) -> MLPBCModel:
        settings = self.hyperparameters
        return MLPBCModel(
            self.plan,
            self.action_dim,
            settings.hidden_sizes,
            actions=self.actions,
            learned_std=settings.objective == "likelihood",
            log_std_min=settings.log_std_min,
            activation=settings.activation,
            initialization=settings.initialization,
            generator=generator,
        )

    def networks(self) -> dict[str, Network]:
        return {"actor": self.model.actor}

    def targets(self) -> dict[str, str]:
        return {}

    def optimizers(self) -> dict[str, Adam]:
        return {"actor": self.hyperparameters.optimizer()}

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        # There is no objective but the policy's.
        return [Objective(("actor",), self.actor_loss)]

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the squared error, or minus the log-likelihood, of the data's actions."""
        if self.actions.kind != "continuous":
            loss = -self.model.action_logprobs(batch.obs, batch.action, actor=state["actor"]).mean()
            return loss, {"bc_loss": loss, "actor_loss": loss}
        action = self.model.actions(batch.obs, actor=state["actor"])
        squared_error = (action - batch.action).square().mean()
        if self.hyperparameters.objective == "squared_error":
            return squared_error, {"bc_loss": squared_error, "actor_loss": squared_error}
        loss = -self.model.action_logprobs(batch.obs, batch.action, actor=state["actor"]).mean()
        return loss, {"bc_loss": squared_error, "actor_loss": loss}

    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        """Do nothing: there are no target networks."""

    def update_noise(self, batch_size: int) -> Draws:
        return {}

    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.model.actions(obs, actor=state["actor"])

    def exploration_noise(self, batch_size: int) -> Draws:
        head = self.model.head
        return {"action": Draw(head.noise_kind, (batch_size, head.noise_size(self.action_dim)))}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        if not self.model.head.is_distribution:
            return self.act(state, obs)  # no standard deviation was learned
        return self.model.actions(obs, noise=noise["action"], actor=state["actor"])

    def why_deterministic(self) -> str | None:
        if not self.model.head.is_distribution:
            return "with the objective squared_error it learns no standard deviation"
        return None


bc_loss = BC.total_loss
"""BC's only loss and its metrics: `bc_loss(bc, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="bc",
    title="Behavior Cloning",
    reference="Pomerleau 1991",
    use_when="demonstrations of an expert, also without rewards; a baseline for offline methods",
    algorithm=BC,
    regimes=("offline",),
    actions=ACTION_KINDS,
)
