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

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.functional import bootstrapped_target, gradients, polyak_update
from rl_training.algorithms.hyperparameters import Count, LayerSizes, OnlineHyperparameters, Rate
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

    def draw_noise(self, batch_size: int, generator: torch.Generator) -> Noise:
        shape = (2, batch_size, self.action_dim)
        drawn = torch.randn(shape, generator=generator, device=self.device)
        return {"next_action": drawn[0], "action": drawn[1]}

    def step(self, state: State, batch: Batch, noise: Noise, *, update_policy: bool) -> Metrics:
        optimizers = self.optimizers()
        if not update_policy:
            optimizers = {"critic": optimizers["critic"]}

        def loss(learned: State) -> tuple[Tensor, Metrics]:
            return sac_loss(
                self.model,
                {**state, **learned},
                batch,
                noise,
                target_entropy=self.target_entropy,
                update_policy=update_policy,
                tune_alpha="log_alpha" in learned,
            )

        found, metrics = gradients(loss, {name: state[name] for name in optimizers})
        factor = self.learning_rate_factor(state)
        for name, optimizer in optimizers.items():
            optimizer.step(state, name, found[name], factor)
        polyak_update(state["target_critic"], state["critic"], self.hyperparameters.tau)
        state["updates"].add_(1)
        return metrics

    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.model.actions(obs, actor=state["actor"])

    def draw_exploration_noise(self, batch_size: int, generator: torch.Generator) -> Noise:
        shape = (batch_size, self.action_dim)
        return {"action": torch.randn(shape, generator=generator, device=self.device)}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: float) -> Tensor:
        return self.model.actions(obs, noise=noise["action"], actor=state["actor"])


def sac_loss(
    model: MLPSACModel,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    target_entropy: float,
    update_policy: bool = True,
    tune_alpha: bool = True,
) -> tuple[Tensor, Metrics]:
    """The sum of SAC's losses, each of which moves only its own parameters, and its metrics.

    `parameters` holds `actor`, `critic`, `target_critic` and `log_alpha`.
    """
    actor, critic, log_alpha = (parameters[name] for name in ("actor", "critic", "log_alpha"))
    alpha = log_alpha.detach().exp()

    with torch.no_grad():
        next_action, next_log_prob = model.sample_actions(
            batch.next_obs, noise=noise["next_action"], actor=actor
        )
        next_q = model.q_values(batch.next_obs, next_action, critic=parameters["target_critic"])
        soft_value = next_q.min(-1).values - alpha * next_log_prob
        target = bootstrapped_target(batch.reward, batch.discount, soft_value)

    q = model.q_values(batch.obs, batch.action, critic=critic)
    critic_loss = 0.5 * (q - target[:, None]).square().mean(0).sum()
    total = critic_loss
    metrics = {"critic_loss": critic_loss, "q_mean": q.mean(), "target_q_mean": target.mean()}

    if update_policy:
        action, log_prob = model.sample_actions(batch.obs, noise=noise["action"], actor=actor)
        # Detached, so that the actor's gradient passes through the critics and leaves them alone.
        value = model.q_values(batch.obs, action, critic=critic.detach()).min(-1).values
        actor_loss = (alpha * log_prob - value).mean()
        total = total + actor_loss
        entropy = -log_prob.detach().mean()
        metrics |= {"actor_loss": actor_loss, "entropy": entropy, "alpha": alpha}
        if tune_alpha:
            alpha_loss = log_alpha * (entropy - target_entropy)
            total = total + alpha_loss
            metrics["alpha_loss"] = alpha_loss

    return total, {name: value.detach() for name, value in metrics.items()}


SPEC = AlgorithmSpec(
    name="sac",
    title="Soft Actor-Critic",
    reference="arXiv:1801.01290, arXiv:1812.05905",
    algorithm=SAC,
)
