"""Soft actor-critic (1801.01290, 1812.05905).

Twin critics learn the soft Q-function, the actor maximises it plus its own entropy, and the
temperature is tuned so that the entropy stays at its target. Targets use the current actor and
polyak-averaged critics; there is no target actor.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Objective
from rl_training.algorithms.functional import bootstrapped_target, polyak_update
from rl_training.algorithms.hyperparameters import Count, LayerSizes, OnlineHyperparameters, Rate
from rl_training.algorithms.noise import Draw, Draws
from rl_training.algorithms.optimizer import Adam
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp import MLP
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.types import Batch, Metrics, Noise, State


class SACHyperparameters(OnlineHyperparameters):
    """Defaults are the paper's for MuJoCo."""

    actor_learning_rate: Rate | None = None
    critic_learning_rate: Rate | None = None
    actor_hidden_sizes: LayerSizes | None = None
    critic_hidden_sizes: LayerSizes | None = None
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    alpha: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Temperature: a fixed number, or tuned towards `target_entropy`"""
    target_entropy: float | Literal["auto"] = "auto"
    """`auto` is minus the number of action components"""
    num_critics: Count = 2
    critic_layer_norm: bool = False


class SAC(Algorithm):
    """Soft actor-critic with any number of critics."""

    hyperparameters_type = SACHyperparameters
    hyperparameters: SACHyperparameters
    model: MLPSACModel

    def build_model(self, generator: torch.Generator) -> MLPSACModel:
        chosen = self.hyperparameters
        return MLPSACModel(
            self.obs_dim,
            self.action_dim,
            chosen.hidden_sizes,
            actor_hidden_sizes=chosen.actor_hidden_sizes,
            critic_hidden_sizes=chosen.critic_hidden_sizes,
            num_critics=chosen.num_critics,
            activation=chosen.activation,
            critic_layer_norm=chosen.critic_layer_norm,
            generator=generator,
        )

    def networks(self) -> dict[str, MLP]:
        return {"actor": self.model.actor, "critic": self.model.critic}

    def initial_state(self) -> State:
        alpha = self.hyperparameters.alpha
        log_alpha = 0.0 if alpha == "auto" else math.log(alpha) if alpha > 0 else -math.inf
        state = {name: network.vector.data for name, network in self.networks().items()}
        state["log_alpha"] = torch.tensor(log_alpha, device=self.device)
        for name, optimizer in self.optimizers().items():
            state.update(optimizer.initial_state(name, state[name]))
        state["target_critic"] = state["critic"].clone()
        return state

    def optimizers(self) -> dict[str, Adam]:
        """One optimiser for each part of the state that follows a gradient."""
        chosen = self.hyperparameters
        clip = chosen.max_grad_norm
        optimizers = {
            "critic": Adam(chosen.critic_learning_rate or chosen.learning_rate, clip),
            "actor": Adam(chosen.actor_learning_rate or chosen.learning_rate, clip),
        }
        if chosen.alpha == "auto":
            optimizers["log_alpha"] = Adam(chosen.learning_rate)
        return optimizers

    @property
    def target_entropy(self) -> float:
        chosen = self.hyperparameters.target_entropy
        return -float(self.action_dim) if chosen == "auto" else chosen

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        critic = Objective(("critic",), self.critic_loss)
        if not update_policy:
            return [critic]
        learned = tuple(name for name in self.optimizers() if name != "critic")
        return [critic, Objective(learned, self.policy_loss)]

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return sac_critic_loss(self.model, state, batch, noise)

    def policy_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        target_entropy = self.target_entropy if self.hyperparameters.alpha == "auto" else None
        return sac_policy_loss(self.model, state, batch, noise, target_entropy=target_entropy)

    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        polyak_update(state["target_critic"], state["critic"], self.hyperparameters.tau)

    def update_noise(self, batch_size: int) -> Draws:
        actions = Draw("normal", (batch_size, self.action_dim))
        return {"next_action": actions, "action": actions}

    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.model.actions(obs, actor=state["actor"])

    def exploration_noise(self, batch_size: int) -> Draws:
        return {"action": Draw("normal", (batch_size, self.action_dim))}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        return self.model.actions(obs, noise=noise["action"], actor=state["actor"])


def sac_loss(
    model: MLPSACModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    target_entropy: float | None,
) -> tuple[Tensor, Metrics]:
    """The sum of SAC's losses, each of which moves only its own parameters, and their metrics.

    `parameters` holds `actor`, `critic`, `target_critic` and `log_alpha`.
    """
    critic_loss, critic_metrics = sac_critic_loss(model, parameters, batch, noise)
    policy_loss, policy_metrics = sac_policy_loss(
        model, parameters, batch, noise, target_entropy=target_entropy
    )
    return critic_loss + policy_loss, critic_metrics | policy_metrics


def sac_critic_loss(
    model: MLPSACModel, parameters: State, batch: Batch, noise: Noise
) -> tuple[Tensor, Metrics]:
    """Squared distance of every critic from the soft Bellman target."""
    with torch.no_grad():
        next_action, next_log_prob = model.sample_actions(
            batch.next_obs, noise=noise["next_action"], actor=parameters["actor"]
        )
        next_q = model.q_values(batch.next_obs, next_action, critic=parameters["target_critic"])
        soft_value = next_q.min(-1).values - parameters["log_alpha"].exp() * next_log_prob
        target = bootstrapped_target(batch.reward, batch.discount, soft_value)

    q = model.q_values(batch.obs, batch.action, critic=parameters["critic"])
    loss = 0.5 * (q - target[:, None]).square().mean(0).sum()
    return loss, {"critic_loss": loss, "q_mean": q.mean(), "target_q_mean": target.mean()}


def sac_policy_loss(
    model: MLPSACModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    target_entropy: float | None,
) -> tuple[Tensor, Metrics]:
    """The actor's loss and, where there is a target entropy, the temperature's."""
    log_alpha = parameters["log_alpha"]
    alpha = log_alpha.detach().exp()
    action, log_prob = model.sample_actions(
        batch.obs, noise=noise["action"], actor=parameters["actor"]
    )
    # Detached, so that the actor's gradient passes through the critics and leaves them alone.
    critic = parameters["critic"].detach()
    value = model.q_values(batch.obs, action, critic=critic).min(-1).values
    loss = actor_loss = (alpha * log_prob - value).mean()
    entropy = -log_prob.detach().mean()
    metrics = {"actor_loss": actor_loss, "entropy": entropy, "alpha": alpha}
    if target_entropy is not None:
        alpha_loss = log_alpha * (entropy - target_entropy)
        loss = loss + alpha_loss
        metrics["alpha_loss"] = alpha_loss
    return loss, metrics


SPEC = AlgorithmSpec(
    name="sac",
    title="Soft Actor-Critic",
    reference="arXiv:1801.01290, arXiv:1812.05905",
    algorithm=SAC,
)
