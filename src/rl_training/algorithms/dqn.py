"""Deep Q-learning (Nature 518, 2015) with the options that became standard.

Double Q-learning (1509.06461), dueling streams (1511.06581), n-step returns and prioritised
replay (1511.05952). The target network follows by hard copies or by polyak averaging.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws, Objective
from rl_training.algorithms.functional import bootstrapped_target, huber
from rl_training.algorithms.hyperparameters import (
    Count,
    Fraction,
    LayerSizes,
    PrioritizedHyperparameters,
    Rate,
    UnitInterval,
    is_from_0_1,
)
from rl_training.algorithms.optimizer import Adam
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp import MLP
from rl_training.models.mlp_dqn import MLPDQNModel
from rl_training.types import ROW_ERRORS, Batch, Metrics, Noise, State


class DQNHyperparameters(PrioritizedHyperparameters):
    """Defaults suit small networks on low-dimensional observations."""

    default_learning_starts: ClassVar[int] = 1_000
    why_undelayed: ClassVar[str | None] = "the policy of dqn is its critic"

    learning_rate: Rate = 1e-3
    batch_size: Count = 64
    hidden_sizes: LayerSizes = (128, 128)
    buffer_capacity: Count = 100_000
    max_grad_norm: Rate | None = 10.0
    double: bool = True
    """Whether the online network chooses the action that the target network values"""
    dueling: bool = False
    """Whether state values and advantages are streams of their own"""
    epsilon_start: Fraction = 1.0
    """Share of random actions at first"""
    epsilon_end: Fraction = 0.05
    """Share of random actions from `epsilon_fraction` of the run on"""
    epsilon_fraction: UnitInterval = 0.2
    """The part of the run over which the share falls"""
    target_update_interval: Count = 500
    """Gradient updates between two moves of the target network"""
    tau: UnitInterval = 1.0
    """How far it moves: 1 is a hard copy; less, with an interval of 1, polyak averaging"""

    @model_validator(mode="after")
    def _check_epsilon(self) -> DQNHyperparameters:
        if self.epsilon_end > self.epsilon_start:
            raise ValueError(
                f"epsilon_end = {self.epsilon_end}: must be at most epsilon_start "
                f"({self.epsilon_start})"
            )
        return self

    @classmethod
    def changes_since(cls, saved: Mapping[str, Any]) -> str | None:
        if not (is_from_0_1(saved) and saved.get("dueling")):
            return None
        return (
            "dueling: the gradient is clipped as one now, not that of each stream, and that of the "
            "shared body is scaled by 1/sqrt(2)"
        )


class DQN(Algorithm):
    """Deep Q-learning for discrete actions."""

    hyperparameters_type = DQNHyperparameters
    hyperparameters: DQNHyperparameters
    model: MLPDQNModel

    def build_model(self, generator: torch.Generator) -> MLPDQNModel:
        chosen = self.hyperparameters
        return MLPDQNModel(
            self.obs_dim,
            self.action_dim,
            chosen.hidden_sizes,
            dueling=chosen.dueling,
            activation=chosen.activation,
            initialization=chosen.initialization,
            generator=generator,
        )

    def networks(self) -> dict[str, MLP]:
        return dict(self.model.networks)

    def targets(self) -> dict[str, str]:
        return {target_name(name): name for name in self.networks()}

    def optimizers(self) -> dict[str, Adam]:
        # The objective clips: with dueling streams there are several networks, but one gradient.
        optimizer = dataclasses.replace(self.hyperparameters.optimizer(), max_grad_norm=None)
        return dict.fromkeys(self.networks(), optimizer)

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        # The policy is the critic: there is nothing to delay.
        norm = self.hyperparameters.max_grad_norm
        return [Objective(tuple(self.networks()), self.critic_loss, norm)]

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        chosen = self.hyperparameters
        exponent = self.importance_exponent(state)
        return dqn_loss(self.model, state, batch, double=chosen.double, exponent=exponent)

    def importance_exponent(self, state: State) -> Tensor | float:
        """Rises from its initial value to 1 with the last planned update, if there is a plan."""
        start = self.hyperparameters.importance_exponent
        if self.planned_updates is None:
            return start
        progress = (state["updates"] / max(1, self.planned_updates)).clamp(max=1)
        return start + (1 - start) * progress

    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        chosen = self.hyperparameters
        # By a factor, not a branch, so that one program serves every update.
        due = state["updates"] % chosen.target_update_interval == 0
        factor = torch.where(due, chosen.tau, 0.0)
        for target, source in self.targets().items():
            state[target].copy_(torch.lerp(state[target], state[source], factor))

    def update_noise(self, batch_size: int) -> Draws:
        return {}

    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.model.q_values(obs, state).argmax(-1)

    def exploration_noise(self, batch_size: int) -> Draws:
        return {"choice": Draw("uniform", (2, batch_size))}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        whether, which = noise["choice"]
        any_action = (which * self.action_dim).long().clamp(max=self.action_dim - 1)
        return torch.where(whether < self.epsilon(progress), any_action, self.act(state, obs))

    def epsilon(self, progress: Tensor) -> Tensor:
        """The share of random actions after that part of the run."""
        chosen = self.hyperparameters
        passed = (progress / chosen.epsilon_fraction).clamp(max=1)
        return chosen.epsilon_start + (chosen.epsilon_end - chosen.epsilon_start) * passed


def target_name(network: str) -> str:
    return f"target_{network}"


def dqn_loss(
    model: MLPDQNModel,
    parameters: State,
    batch: Batch,
    *,
    double: bool = True,
    exponent: Tensor | float = 1.0,
) -> tuple[Tensor, Metrics]:
    """Huber loss of the taken actions' values, weighted where rows were not sampled uniformly.

    `parameters` holds the networks and, under `target_*`, their targets. With `double` the
    online network chooses the next action and the target network says what it is worth.
    """
    targets = {name: parameters[target_name(name)] for name in model.networks}
    with torch.no_grad():
        next_q = model.q_values(batch.next_obs, targets)
        chooser = model.q_values(batch.next_obs, parameters) if double else next_q
        next_value = next_q.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
        target = bootstrapped_target(batch.reward, batch.discount, next_value)

    q = model.q_values(batch.obs, parameters).gather(-1, batch.action[:, None]).squeeze(-1)
    errors = q - target
    losses = huber(errors)
    if batch.weights is not None:
        weights = batch.weights**exponent
        losses = losses * (weights / weights.max())
    loss = losses.mean()
    metrics = {"critic_loss": loss, "q_mean": q.mean(), "target_q_mean": target.mean()}
    return loss, metrics | {ROW_ERRORS: errors}


SPEC = AlgorithmSpec(
    name="dqn",
    title="Deep Q-Network",
    reference="doi:10.1038/nature14236, arXiv:1509.06461, arXiv:1511.06581, arXiv:1511.05952",
    algorithm=DQN,
    discrete_actions=True,
)
