"""Deep Q-learning (Nature 518, 2015) with its standard extensions.

Double Q-learning (1509.06461), dueling streams (1511.06581), n-step returns and prioritized
replay (1511.05952). The target network is updated by hard copies or by polyak averaging.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws, Objective
from rl_training.algorithms.functional import Adam, bootstrapped_target, huber
from rl_training.algorithms.hyperparameters import (
    Count,
    Fraction,
    LayerSizes,
    PrioritizedHyperparameters,
    Rate,
    UnitInterval,
    is_from_0_1,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp import MLP
from rl_training.models.mlp_dqn import MLPDQNModel
from rl_training.types import ROW_ERRORS, Batch, Metrics, Noise, State


class DQNHyperparameters(PrioritizedHyperparameters):
    """Defaults for small networks on low-dimensional observations."""

    symbols: ClassVar[Mapping[str, str]] = {
        "epsilon_start": "ε",
        "epsilon_end": "ε",
        "target_update_interval": "C",
    }
    default_learning_starts: ClassVar[int] = 1_000
    why_undelayed: ClassVar[str | None] = "the policy of dqn is its critic"

    learning_rate: Rate = 1e-3
    batch_size: Count = 64
    hidden_sizes: LayerSizes = (128, 128)
    buffer_capacity: Count = 100_000
    max_grad_norm: Rate | None = 10.0
    """Largest norm of the gradient of all parameters; larger ones are scaled down. Not set: no
    limit"""
    policy_delay: Count = 1
    """Always 1, since the policy is the Q-network"""
    double: bool = True
    """Double Q-learning: in targets, the Q-network selects the action and the target network values
    it"""
    dueling: bool = False
    """Dueling network: separate last layers for the state's value and the actions' advantages"""
    epsilon_start: Fraction = 1.0
    """Probability of a random action at the start of the run"""
    epsilon_end: Fraction = 0.05
    """Probability of a random action after `epsilon_fraction` of the run"""
    epsilon_fraction: UnitInterval = 0.2
    """Fraction of the run over which the probability decreases linearly"""
    target_update_interval: Count = 500
    """Updates from one change of the target network to the next"""
    tau: UnitInterval = 1.0
    """How far the target network moves at each change: 1 copies the Q-network, less averages"""

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
            "dueling: the gradients of all streams are now clipped together instead of separately, "
            "and the gradient of the shared body is scaled by 1/sqrt(2)"
        )


class DQN(Algorithm):
    """Deep Q-learning for discrete actions."""

    hyperparameters_type = DQNHyperparameters
    hyperparameters: DQNHyperparameters
    plain_actions = "discrete"
    model: MLPDQNModel

    def build_model(self, generator: torch.Generator) -> MLPDQNModel:
        settings = self.hyperparameters
        return MLPDQNModel(
            self.obs_dim,
            self.action_dim,
            settings.hidden_sizes,
            dueling=settings.dueling,
            activation=settings.activation,
            initialization=settings.initialization,
            generator=generator,
        )

    def networks(self) -> dict[str, MLP]:
        return dict(self.model.networks)

    def targets(self) -> dict[str, str]:
        return {f"target_{name}": name for name in self.networks()}

    def optimizers(self) -> dict[str, Adam]:
        # The objective clips the gradient, jointly for all dueling streams.
        optimizer = dataclasses.replace(self.hyperparameters.optimizer(), max_grad_norm=None)
        return dict.fromkeys(self.networks(), optimizer)

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        # The policy is the critic, so it is part of every update.
        norm = self.hyperparameters.max_grad_norm
        return [Objective(tuple(self.networks()), self.critic_loss, norm)]

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the Huber loss of the taken actions' values, weighted for prioritized rows.

        With `double` the online network selects the next action and the target network values it.
        """
        model = self.model
        targets = {name: state[target] for target, name in self.targets().items()}
        with torch.no_grad():
            next_q = model.q_values(batch.next_obs, targets)
            selector = next_q
            if self.hyperparameters.double:
                selector = model.q_values(batch.next_obs, state)
            next_value = next_q.gather(-1, selector.argmax(-1, keepdim=True)).squeeze(-1)
            target = bootstrapped_target(batch.reward, batch.discount, next_value)

        q = model.q_values(batch.obs, state).gather(-1, batch.action[:, None]).squeeze(-1)
        errors = q - target
        losses = huber(errors)
        if batch.weights is not None:
            weights = batch.weights ** self.importance_exponent(state)
            losses = losses * (weights / weights.max())
        loss = losses.mean()
        metrics = {"critic_loss": loss, "q_mean": q.mean(), "target_q_mean": target.mean()}
        return loss, metrics | {ROW_ERRORS: errors}

    def importance_exponent(self, state: State) -> Tensor | float:
        """Return the exponent of the importance weights.

        It increases linearly to 1 at the last planned update; without a plan it is constant.
        """
        start = self.hyperparameters.importance_exponent
        if self.planned_updates is None:
            return start
        progress = (state["updates"] / max(1, self.planned_updates)).clamp(max=1)
        return start + (1 - start) * progress

    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        settings = self.hyperparameters
        # A factor instead of a branch, so that one compiled program serves every update.
        due = state["updates"] % settings.target_update_interval == 0
        factor = torch.where(due, settings.tau, 0.0)
        for target, source in self.targets().items():
            state[target].copy_(torch.lerp(state[target], state[source], factor))

    def update_noise(self, batch_size: int) -> Draws:
        return {}

    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.action_values(state, obs).argmax(-1)

    def action_values(self, state: State, obs: Tensor) -> Tensor:
        return self.model.q_values(obs, state)

    def why_deterministic(self) -> str:
        return (
            "its random actions (epsilon-greedy) only serve to explore in training; the output "
            "q_values lets you choose actions in another way"
        )

    def exploration_noise(self, batch_size: int) -> Draws:
        return {"choice": Draw("uniform", (2, batch_size))}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        chance, choice = noise["choice"]
        random_action = (choice * self.action_dim).long().clamp(max=self.action_dim - 1)
        return torch.where(chance < self.epsilon(progress), random_action, self.act(state, obs))

    def epsilon(self, progress: Tensor) -> Tensor:
        """Return the probability of a random action at `progress` from 0 to 1."""
        settings = self.hyperparameters
        fraction = (progress / settings.epsilon_fraction).clamp(max=1)
        return settings.epsilon_start + (settings.epsilon_end - settings.epsilon_start) * fraction


dqn_loss = DQN.total_loss
"""DQN's only loss and its metrics: `dqn_loss(dqn, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="dqn",
    title="Deep Q-Network",
    reference="doi:10.1038/nature14236, arXiv:1509.06461, arXiv:1511.06581, arXiv:1511.05952",
    algorithm=DQN,
    actions=("discrete",),
)
