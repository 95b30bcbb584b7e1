"""What PPO and A2C share: the model, advantages, and the losses of value and entropy.

Both learn from rollouts: from the newest steps of the current policy, which are used once and then
replaced. The advantage of an action is estimated by GAE (1506.02438).
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import final

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws, Objective
from rl_training.algorithms.functional import Adam
from rl_training.algorithms.hyperparameters import RolloutHyperparameters
from rl_training.models.mlp import Network
from rl_training.models.mlp_ppo import MLPPPOModel
from rl_training.types import Batch, Metrics, Noise, State

REWARD_LIMIT = 10.0
"""Scaled rewards are clipped to this, as in OpenAI's Baselines"""


class OnPolicyAlgorithm(Algorithm):
    """A stochastic policy and the value of states, learned together from rollouts."""

    hyperparameters: RolloutHyperparameters
    model: MLPPPOModel

    @abstractmethod
    def policy_loss(
        self, state: State, log_probs: Tensor, advantages: Tensor, batch: Batch
    ) -> tuple[Tensor, Metrics]:
        """Return the loss of the policy, and its metrics, from log-probabilities `(batch,)`."""

    def value_losses(self, values: Tensor, batch: Batch) -> Tensor:
        """Return the squared error of each value, `(batch,)`."""
        assert batch.returns is not None
        return (values - batch.returns).square()

    @final
    def build_model(self, generator: torch.Generator) -> MLPPPOModel:
        settings = self.hyperparameters
        return MLPPPOModel(
            self.plan,
            self.actions,
            settings.hidden_sizes,
            actor_hidden_sizes=settings.actor_hidden_sizes,
            critic_hidden_sizes=settings.critic_hidden_sizes,
            activation=settings.activation,
            initialization=settings.initialization,
            actor_output_scale=settings.actor_output_scale,
            initial_log_std=settings.initial_log_std,
            recurrent=settings.recurrent,
            recurrent_size=settings.recurrent_size,
            generator=generator,
        )

    @final
    def networks(self) -> dict[str, Network]:
        both = {"actor": self.model.actor, "critic": self.model.critic}
        return both if self.model.memory is None else {"memory": self.model.memory, **both}

    @final
    def targets(self) -> dict[str, str]:
        return {}

    @final
    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        """Do nothing: there are no target networks."""

    @final
    def optimizers(self) -> dict[str, Adam]:
        # The objective clips the gradient, jointly for all networks.
        optimizer = dataclasses.replace(self.hyperparameters.optimizer(), max_grad_norm=None)
        return dict.fromkeys(self.networks(), optimizer)

    @final
    def objectives(self, *, update_policy: bool) -> list[Objective]:
        norm = self.hyperparameters.max_grad_norm
        return [Objective(tuple(self.networks()), self.joint_loss, norm)]

    @final
    def update_noise(self, batch_size: int) -> Draws:
        return {}

    def begin_rollout(self, state: State, rollout: Batch) -> tuple[Metrics, Metrics]:
        """Return advantages, returns, log-probabilities and values of a rollout, and metrics.

        A transition after which an episode was truncated is bootstrapped from its own last
        observation; one that terminated is not, since its `discount` is zero.
        """
        settings, model = self.hyperparameters, self.model
        assert rollout.ended is not None
        inputs, next_inputs = rollout.obs, rollout.next_obs
        if rollout.memory is not None:
            # Of a step that ended an episode too: its result is valued by what led to it.
            inputs, memory = self.remember(state, rollout.obs, rollout.memory)
            next_inputs, _ = self.remember(state, rollout.next_obs, memory)
        log_probs, _, values = model.evaluate(
            inputs, rollout.action, actor=state["actor"], critic=state["critic"]
        )
        next_values = model.state_values(next_inputs, critic=state["critic"])
        reward = rollout.reward
        if settings.normalize_rewards:
            reward = reward.clamp(-REWARD_LIMIT, REWARD_LIMIT)
        errors = reward + rollout.discount * next_values - values
        # A lost transition says nothing about its action.
        errors = torch.where(rollout.ended > 1, 0.0, errors)
        decays = settings.gamma * settings.gae_lambda * (rollout.ended == 0)
        by_step = (settings.rollout_steps, -1)
        advantages = discounted_sums(errors.reshape(by_step), decays.reshape(by_step)).reshape(-1)
        returns = advantages + values
        explained = 1 - advantages.var(correction=0) / returns.var(correction=0).clamp(min=1e-8)
        targets = {
            "advantages": advantages,
            "returns": returns,
            "log_probs": log_probs,
            "values": values,
        }
        return targets, {"explained_variance": explained}

    @final
    def joint_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the losses of policy and value minus the entropy, each with its weight."""
        settings, advantages = self.hyperparameters, batch.advantages
        assert advantages is not None
        if settings.normalize_advantages and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            if batch.ended is not None:  # subtracting the mean must not teach a lost action
                advantages = torch.where(batch.ended > 1, 0.0, advantages)
        inputs = batch.obs
        if batch.memory is not None:
            assert batch.ended is not None
            inputs = self.model.rebuild(batch.obs, batch.memory, batch.ended, state["memory"])
        log_probs, entropies, values = self.model.evaluate(
            inputs, batch.action, actor=state["actor"], critic=state["critic"]
        )
        policy_loss, metrics = self.policy_loss(state, log_probs, advantages, batch)
        value_loss, entropy = 0.5 * self.value_losses(values, batch).mean(), entropies.mean()
        loss = (
            policy_loss
            + settings.value_coefficient * value_loss
            - settings.entropy_coefficient * entropy
        )
        return loss, {
            "actor_loss": policy_loss,
            "critic_loss": value_loss,
            "entropy": entropy,
            **metrics,
        }

    @final
    def remember(self, state: State, obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.remember(obs, memory, state["memory"])

    @final
    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.model.actions(self.actor_input(state, obs), actor=state["actor"])

    @final
    def exploration_noise(self, batch_size: int) -> Draws:
        head = self.model.head
        return {"action": Draw(head.noise_kind, (batch_size, head.noise_size(self.action_dim)))}

    @final
    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        inputs = self.actor_input(state, obs)
        return self.model.actions(inputs, noise=noise["action"], actor=state["actor"])

    @final
    def why_deterministic(self) -> None:
        return None


def discounted_sums(values: Tensor, decays: Tensor) -> Tensor:
    """Return `sums` with `sums[t] = values[t] + decays[t] * sums[t + 1]`; the first axis is time.

    Each round doubles the number of steps that a sum spans, so that a long rollout takes a few
    operations instead of a loop over its steps.
    """
    sums, span = values, 1
    while span < len(values):
        later = torch.cat([sums[span:], torch.zeros_like(sums[:span])])
        sums = sums + decays * later
        decays = decays * torch.cat([decays[span:], torch.zeros_like(decays[:span])])
        span *= 2
    return sums
