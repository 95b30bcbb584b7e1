"""Flow Q-learning (2502.02538).

A flow imitates the data's actions. It maps noise to actions with a learned velocity field, so that
it can represent any distribution of actions. The policy maps the same noise to an action in one
step: it is distilled from the flow and maximizes the critics. No gradient passes through the steps
of the flow, and only the policy, which is fast, acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws, Objective
from rl_training.algorithms.functional import (
    Adam,
    bootstrapped_target,
    inverse_scale,
    polyak_update,
    squared_errors,
)
from rl_training.algorithms.hyperparameters import (
    Activation,
    ActorCriticHyperparameters,
    ChunkedHyperparameters,
    Fraction,
    LayerSizes,
    MixedHyperparameters,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp import Initialization, Network
from rl_training.models.mlp_fql import MLPFQLModel
from rl_training.types import Batch, Metrics, Noise, State


class FQLHyperparameters(ActorCriticHyperparameters, MixedHyperparameters, ChunkedHyperparameters):
    """The defaults of the authors' code, who tune `actor_bc_alpha` for each task.

    For new tasks they advise `normalize_q: true` and values from 0.03 to 10.
    """

    symbols: ClassVar[Mapping[str, str]] = {"actor_bc_alpha": "α", "flow_steps": "M"}

    actor_bc_alpha: Annotated[float, Field(ge=0)] = 10.0
    """Weight of the squared distance from the flow's actions in the loss of the actor; larger
    imitates the data more closely"""
    normalize_q: bool = False
    """Divide the critics' value in the loss of the actor by its mean absolute value, so that
    `actor_bc_alpha` does not depend on the scale of rewards"""
    q_aggregation: Literal["mean", "min"] = "mean"
    """How the values of the target critics are combined in a target"""
    flow_steps: Annotated[int, Field(ge=1, le=1000)] = 10
    """Steps of Euler's method from noise to an action of the flow"""
    hidden_sizes: LayerSizes = (512, 512, 512, 512)
    activation: Activation = "gelu"
    initialization: Initialization = "xavier"
    critic_layer_norm: bool = True
    offline_batch_ratio: Fraction | Literal["uniform"] = "uniform"


class FQL(Algorithm):
    """Flow Q-learning."""

    hyperparameters_type = FQLHyperparameters
    hyperparameters: FQLHyperparameters
    model: MLPFQLModel

    def build_model(self, generator: torch.Generator) -> MLPFQLModel:
        return self.hyperparameters.build(MLPFQLModel, self.plan, self.action_dim, generator)

    def networks(self) -> dict[str, Network]:
        model = self.model
        return {"actor": model.actor, "actor_flow": model.flow, "critic": model.critic}

    def targets(self) -> dict[str, str]:
        return {"target_critic": "critic"}

    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        polyak_update(state["target_critic"], state["critic"], self.hyperparameters.tau)

    def optimizers(self) -> dict[str, Adam]:
        settings = self.hyperparameters
        actor = settings.actor_optimizer()
        return {"critic": settings.critic_optimizer(), "actor": actor, "actor_flow": actor}

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        critic = Objective(("critic",), self.critic_loss)
        if not update_policy:
            return [critic]
        flow = Objective(("actor_flow",), self.flow_loss)
        return [critic, flow, Objective(("actor",), self.actor_loss)]

    def update_noise(self, batch_size: int) -> Draws:
        actions = Draw("normal", (batch_size, self.action_dim))
        times = Draw("uniform", (batch_size, 1))
        return {
            "next_action": actions,
            "flow_start": actions,
            "flow_time": times,
            "action": actions,
        }

    def act(self, state: State, obs: Tensor) -> Tensor:
        """Return the policy's actions for noise of zero."""
        return self.model.actions(self.actor_input(state, obs), actor=state["actor"])

    def exploration_noise(self, batch_size: int) -> Draws:
        return {"action": Draw("normal", (batch_size, self.action_dim))}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        inputs = self.actor_input(state, obs)
        return self.model.actions(inputs, noise["action"], actor=state["actor"])

    def why_deterministic(self) -> None:
        return None

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the squared error of every critic with respect to the policy's value."""
        with torch.no_grad():
            inputs = self.actor_input(state, batch.next_obs)
            next_action = self.model.actions(inputs, noise["next_action"], actor=state["actor"])
            next_q = self.model.q_values(batch.next_obs, next_action, critic=state["target_critic"])
            is_mean = self.hyperparameters.q_aggregation == "mean"
            next_value = next_q.mean(-1) if is_mean else next_q.min(-1).values
            target = bootstrapped_target(batch.reward, batch.discount, next_value)
        q = self.model.q_values(batch.obs, batch.action, critic=state["critic"])
        return squared_errors(q, target, batch.is_offline)

    def flow_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the flow-matching loss: at a random time, the velocity from noise to action."""
        start, time, end = noise["flow_start"], noise["flow_time"], batch.action
        velocity = self.model.velocity(
            self.actor_input(state, batch.obs),
            (1 - time) * start + time * end,
            time,
            flow=state["actor_flow"],
        )
        loss = (velocity - (end - start)).square().mean()
        return loss, {"flow_loss": loss}

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return `alpha (mu(s, z) - flow(s, z))^2 - lambda Q(s, mu(s, z))`."""
        settings = self.hyperparameters
        inputs = self.actor_input(state, batch.obs)
        with torch.no_grad():
            imitated = self.model.flow_actions(
                inputs, noise["action"], settings.flow_steps, flow=state["actor_flow"]
            )
        action = self.model.one_step(inputs, noise["action"], actor=state["actor"])
        distillation_loss = (action - imitated).square().mean()
        critic = state["critic"].detach()
        q = self.model.q_values(batch.obs, action.clamp(-1, 1), critic=critic).mean(-1)
        bc_lambda = inverse_scale(q) if settings.normalize_q else torch.ones_like(q[0])
        loss = settings.actor_bc_alpha * distillation_loss - bc_lambda * q.mean()
        return loss, {
            "actor_loss": loss,
            "distillation_loss": distillation_loss,
            "bc_lambda": bc_lambda,
        }


fql_loss = FQL.total_loss
"""The sum of FQL's losses and their metrics: `fql_loss(fql, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="fql",
    title="Flow Q-Learning",
    reference="arXiv:2502.02538",
    use_when="recorded data whose actions have several modes; with action_chunk for long tasks",
    algorithm=FQL,
    regimes=("offline", "mixed", "online"),
)
