"""What DQN and QR-DQN share: Q-values of all actions, exploration, replay and target networks.

Double Q-learning (1509.06461), dueling streams (1511.06581), n-step returns, prioritized replay
(1511.05952) and noisy networks (1706.10295). The target network is updated by hard copies or by
polyak averaging. An algorithm adds what the outputs of the network mean, and their loss.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws, Objective
from rl_training.algorithms.functional import Adam
from rl_training.algorithms.hyperparameters import (
    Count,
    Fraction,
    LayerSizes,
    PrioritizedHyperparameters,
    Rate,
    UnitInterval,
)
from rl_training.models.categorical import Support
from rl_training.models.mlp import Network
from rl_training.models.mlp_dqn import MLPDQNModel
from rl_training.types import ROW_ERRORS, Batch, Metrics, Noise, State


class DeepQHyperparameters(PrioritizedHyperparameters):
    """Defaults for small networks on low-dimensional observations."""

    symbols: ClassVar[Mapping[str, str]] = {
        "epsilon_start": "ε",
        "epsilon_end": "ε",
        "target_update_interval": "C",
        "noisy_std": "σ₀",
    }
    default_learning_starts: ClassVar[int] = 1_000
    why_undelayed: ClassVar[str | None] = "the policy is the critic"

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
    noisy: bool = False
    """Noisy network: explore with learned noise on the weights instead of random actions. With
    `dueling`, the layers that both streams share have no noise"""
    noisy_std: Rate = 0.5
    """Initial size of the noise: its standard deviation is this divided by the square root of the
    number of inputs of a layer. Used if `noisy`"""
    epsilon_start: Fraction = 1.0
    """Probability of a random action at the start of the run. Not used if `noisy`"""
    epsilon_end: Fraction = 0.05
    """Probability of a random action after `epsilon_fraction` of the run. Not used if `noisy`"""
    epsilon_fraction: UnitInterval = 0.2
    """Fraction of the run over which the probability decreases linearly"""
    target_update_interval: Count = 500
    """Updates from one change of the target network to the next"""
    tau: UnitInterval = 1.0
    """How far the target network moves at each change: 1 copies the Q-network, less averages"""

    @model_validator(mode="after")
    def _check_epsilon(self) -> Self:
        if self.epsilon_end > self.epsilon_start:
            raise ValueError(
                f"epsilon_end = {self.epsilon_end}: must be at most epsilon_start "
                f"({self.epsilon_start})"
            )
        return self


class RowLosses(NamedTuple):
    """The loss of each transition and what is logged of it, each `(batch,)`."""

    losses: Tensor
    errors: Tensor
    """By which prioritized replay samples the transitions"""
    q: Tensor
    """Mean of the predicted return"""
    target: Tensor
    """Mean of its target"""


class DeepQAlgorithm(Algorithm):
    """Learns the return of every discrete action, and takes the best one."""

    hyperparameters: DeepQHyperparameters
    model: MLPDQNModel
    plain_actions = "discrete"

    @abstractmethod
    def row_losses(self, outputs: Tensor, next_outputs: Tensor, batch: Batch) -> RowLosses:
        """Compare the outputs for the taken action with those of the next one, `(batch, outputs)`.

        `next_outputs` are the target network's, without a gradient.
        """

    def distribution(self) -> tuple[int, Support | None]:
        """Return the number of outputs per action, and the support of a categorical critic."""
        return 1, None

    def build_model(self, generator: torch.Generator) -> MLPDQNModel:
        settings = self.hyperparameters
        num_outputs, support = self.distribution()
        return MLPDQNModel(
            self.plan,
            self.action_dim,
            settings.hidden_sizes,
            dueling=settings.dueling,
            num_outputs=num_outputs,
            support=support,
            noisy_std=settings.noisy_std if settings.noisy else None,
            activation=settings.activation,
            initialization=settings.initialization,
            generator=generator,
        )

    def networks(self) -> dict[str, Network]:
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
        """Return the loss of the taken actions' returns, weighted for prioritized rows.

        With `double` the online network selects the next action and the target network values it.
        """
        model = self.model
        targets = {name: state[target] for target, name in self.targets().items()}
        with torch.no_grad():
            next_outputs = model.outputs(batch.next_obs, targets, noise.get("target_weights"))
            if self.hyperparameters.double:
                selector = model.q_values(batch.next_obs, state, noise.get("selecting_weights"))
            else:
                selector = model.means(next_outputs)
            next_outputs = taken(next_outputs, selector.argmax(-1))

        outputs = taken(model.outputs(batch.obs, state, noise.get("weights")), batch.action)
        losses, errors, q, target = self.row_losses(outputs, next_outputs, batch)
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
        if not self.hyperparameters.noisy:
            return {}
        # As in the paper: noise is shared by the rows of a minibatch, and each use has its own.
        uses = ["weights", "target_weights"]
        uses += ["selecting_weights"] if self.hyperparameters.double else []
        return dict.fromkeys(uses, Draw("normal", (1, self.model.noise_size)))

    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.action_values(state, obs).argmax(-1)

    def action_values(self, state: State, obs: Tensor) -> Tensor:
        return self.model.q_values(obs, state)

    def why_deterministic(self) -> str:
        noisy = self.hyperparameters.noisy
        how = "its noise on the weights" if noisy else "its random actions (epsilon-greedy)"
        return (
            f"{how} only {'serves' if noisy else 'serve'} to explore in training; the output "
            "q_values lets you choose actions in another way"
        )

    def exploration_noise(self, batch_size: int) -> Draws:
        if self.hyperparameters.noisy:
            return {"weights": Draw("normal", (batch_size, self.model.noise_size))}
        return {"choice": Draw("uniform", (2, batch_size))}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        if self.hyperparameters.noisy:
            return self.model.q_values(obs, state, noise["weights"]).argmax(-1)
        chance, choice = noise["choice"]
        random_action = (choice * self.action_dim).long().clamp(max=self.action_dim - 1)
        return torch.where(chance < self.epsilon(progress), random_action, self.act(state, obs))

    def epsilon(self, progress: Tensor) -> Tensor:
        """Return the probability of a random action at `progress` from 0 to 1."""
        settings = self.hyperparameters
        fraction = (progress / settings.epsilon_fraction).clamp(max=1)
        return settings.epsilon_start + (settings.epsilon_end - settings.epsilon_start) * fraction


def taken(outputs: Tensor, actions: Tensor) -> Tensor:
    """Return the outputs `(batch, outputs)` of one action per row, from those of all actions."""
    index = actions[:, None, None].expand(-1, 1, outputs.shape[-1])
    return outputs.gather(-2, index).squeeze(-2)
