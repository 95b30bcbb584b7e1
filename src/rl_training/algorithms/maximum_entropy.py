"""Actor-critic algorithms with a stochastic policy, and maximum-entropy ones among them.

`StochasticAlgorithm` is the base of SAC and its variants, AWAC and IQL. `MaximumEntropyAlgorithm`
adds the soft Bellman target, the entropy bonus of the policy and its temperature.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws, Objective
from rl_training.algorithms.functional import Adam, bootstrapped_target, polyak_update
from rl_training.algorithms.hyperparameters import (
    ActorCriticHyperparameters,
    OnlineHyperparameters,
    Rate,
    is_from_0_1,
)
from rl_training.models.actor_critic import StochasticActorCritic
from rl_training.models.mlp import Network
from rl_training.types import Batch, Metrics, Noise, State


class StochasticAlgorithm(Algorithm):
    """Explores with sampled actions, acts with the most likely one; only critics have targets."""

    hyperparameters: ActorCriticHyperparameters
    model: StochasticActorCritic

    def networks(self) -> dict[str, Network]:
        return {"actor": self.model.actor, "critic": self.model.critic}

    def targets(self) -> dict[str, str]:
        return {"target_critic": "critic"}

    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        polyak_update(state["target_critic"], state["critic"], self.hyperparameters.tau)

    @property
    def is_discrete(self) -> bool:
        return self.actions.kind == "discrete"

    def update_noise(self, batch_size: int) -> Draws:
        dropout = self.dropout_noise(batch_size)
        if self.is_discrete:
            return dropout  # means over the actions are exact
        actions = Draw("normal", (batch_size, self.action_dim))
        return {"next_action": actions, "action": actions, **dropout}

    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.model.actions(self.actor_input(state, obs), actor=state["actor"])

    @final
    def exploration_noise(self, batch_size: int) -> Draws:
        head = self.model.head
        return {"action": Draw(head.noise_kind, (batch_size, head.noise_size(self.action_dim)))}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        inputs = self.actor_input(state, obs)
        return self.model.actions(inputs, noise=noise["action"], actor=state["actor"])

    @final
    def why_deterministic(self) -> None:
        return None


class MaximumEntropyHyperparameters(ActorCriticHyperparameters, OnlineHyperparameters):
    """Hyper-parameters of algorithms that reward the policy for its entropy."""

    symbols: ClassVar[Mapping[str, str]] = {"alpha": "α", "target_entropy": "H̄"}

    alpha: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Temperature: weight of the entropy. `auto`: tuned to keep the entropy at `target_entropy`;
    0: no entropy bonus"""
    target_entropy: float | Literal["auto"] = "auto"
    """Entropy of the policy, in nats for actions in [-1, 1], that a tuned temperature aims at.
    `auto`: -1 per action component (RLPD: -0.5); for discrete actions, half of the largest entropy,
    which is the logarithm of their number"""
    initial_alpha: Rate = 1.0
    """Initial temperature if `alpha` is `auto`"""
    alpha_learning_rate: Rate | None = None
    """Learning rate of a tuned temperature. Not set: `learning_rate`"""
    entropy_in_target: bool = True
    """Include the entropy of later actions in the targets of the critics. Needs `n_step` 1, unless
    `alpha` is 0"""

    @model_validator(mode="after")
    def _check_n_step(self) -> MaximumEntropyHyperparameters:
        if self.n_step > 1 and self.entropy_in_target and self.alpha != 0:
            raise ValueError(
                f"n_step = {self.n_step}: replay does not store the entropy of intermediate steps, "
                "so targets would be too low; use n_step: 1, or entropy_in_target: false to leave "
                "entropy out of the critics"
            )
        return self

    @model_validator(mode="after")
    def _check_initial_alpha(self) -> MaximumEntropyHyperparameters:
        default = type(self).model_fields["initial_alpha"].default
        if self.alpha != "auto" and self.initial_alpha not in (default, self.alpha):
            raise ValueError(
                f"initial_alpha = {self.initial_alpha}: needs alpha: auto, but alpha is fixed at "
                f"{self.alpha}"
            )
        return self

    @classmethod
    def upgrade(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        changed = {"entropy_in_target": False} if cls._lacked_entropy(saved) else {}
        return {**super().upgrade(saved), **changed}

    @classmethod
    def changes_since(cls, saved: Mapping[str, Any]) -> str | None:
        if not cls._lacked_entropy(saved):
            return None
        return (
            f"n_step = {saved['n_step']}: targets included the entropy of their last step only; "
            "the run continues with entropy_in_target: false"
        )

    @classmethod
    def _lacked_entropy(cls, saved: Mapping[str, Any]) -> bool:
        """Return whether saved n-step targets were missing the entropy of intermediate steps."""
        default = cls.model_fields["entropy_in_target"].default
        is_soft = saved.get("entropy_in_target", default) and saved.get("alpha") != 0
        return is_from_0_1(saved) and is_soft and saved.get("n_step", 1) > 1


class MaximumEntropyAlgorithm(StochasticAlgorithm):
    """Critics learn the soft Q-function; the actor maximizes it plus its own entropy.

    Targets use the current actor and polyak-averaged critics; there is no target actor.
    """

    hyperparameters: MaximumEntropyHyperparameters
    entropy_per_action: ClassVar[float] = -1.0
    """`target_entropy: auto` is this number for each action component"""
    entropy_of_choices: ClassVar[float] = 0.5
    """`target_entropy: auto` is this fraction of the largest entropy of discrete actions. 0.98, as
    in 1910.07207, keeps the policy close to uniform"""

    @abstractmethod
    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the error of the critics with respect to their targets."""

    @abstractmethod
    def policy_value(self, q: Tensor) -> Tensor:
        """Reduce Q-values `(..., critics)` to the `(...)` that the actor maximizes."""

    def lagrange_multipliers(self) -> dict[str, float]:
        """Return the multipliers that are trained with the critics, and their initial values.

        The state holds their logarithms.
        """
        return {}

    def extra_state(self) -> State:
        settings = self.hyperparameters
        alpha = settings.initial_alpha if settings.alpha == "auto" else settings.alpha
        initial = {"log_alpha": alpha, **self.lagrange_multipliers()}
        logarithms = {k: math.log(v) if v > 0 else -math.inf for k, v in initial.items()}
        return {k: torch.tensor(v, device=self.device) for k, v in logarithms.items()}

    def may_be_not_finite(self) -> frozenset[str]:
        # The logarithm of a temperature that is fixed at 0 is minus infinity.
        constant = {"log_alpha"} if self.hyperparameters.alpha == 0 else set()
        return super().may_be_not_finite() | constant

    def optimizers(self) -> dict[str, Adam]:
        settings = self.hyperparameters
        optimizers = {"critic": settings.critic_optimizer(), "actor": settings.actor_optimizer()}
        if settings.alpha == "auto":
            optimizers["log_alpha"] = settings.scalar_optimizer(settings.alpha_learning_rate)
        return optimizers | {n: settings.scalar_optimizer() for n in self.lagrange_multipliers()}

    @property
    def target_entropy(self) -> float | None:
        """The entropy that the temperature is tuned towards; None if the temperature is fixed."""
        if self.hyperparameters.alpha != "auto":
            return None
        given = self.hyperparameters.target_entropy
        if given != "auto":
            return given
        if self.is_discrete:
            return self.entropy_of_choices * math.log(self.action_dim)
        return self.entropy_per_action * self.action_dim

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        critic = Objective(("critic", *self.lagrange_multipliers()), self.critic_loss)
        if not update_policy:
            return [critic]
        trained = tuple(name for name in self.optimizers() if name not in critic.parameters)
        return [critic, Objective(trained, self.policy_loss)]

    @torch.no_grad()
    def soft_target(
        self, state: State, batch: Batch, noise: Noise, subset: Tensor | None = None
    ) -> Tensor:
        """Return the soft Bellman target `(batch,)`, with the minimum over the target critics.

        `subset` restricts the minimum to the critics with these indices.
        """
        next_value, next_log_prob = self.model.expected_q(
            batch.next_obs,
            least,
            actor_input=self.actor_input(state, batch.next_obs),
            noise=noise.get("next_action"),
            actor=state["actor"],
            critic=state["target_critic"],
            subset=subset,
            dropout=noise.get("target_dropout"),
        )
        if self.hyperparameters.entropy_in_target:
            next_value = next_value - state["log_alpha"].exp() * next_log_prob
        return bootstrapped_target(batch.reward, batch.discount, next_value)

    def policy_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the actor's loss, plus the temperature's if that is tuned."""
        log_alpha = state["log_alpha"]
        alpha = log_alpha.detach().exp()
        value, log_prob = self.model.expected_q(
            batch.obs,
            self.policy_value,
            actor_input=self.actor_input(state, batch.obs),
            noise=noise.get("action"),
            actor=state["actor"],
            # Detached, so that the gradient passes through the critics to the actor only.
            critic=state["critic"].detach(),
            dropout=noise.get("policy_dropout"),
        )
        loss = actor_loss = (alpha * log_prob - value).mean()
        entropy = -log_prob.detach().mean()
        metrics = {"actor_loss": actor_loss, "entropy": entropy, "alpha": alpha}
        if self.target_entropy is not None:
            alpha_loss = log_alpha * (entropy - self.target_entropy)
            loss = loss + alpha_loss
            metrics["alpha_loss"] = alpha_loss
        return loss, metrics


def least(q: Tensor) -> Tensor:
    """Return the minimum over the critics, the last axis."""
    return q.min(-1).values
