"""What SAC and its relatives share: a Gaussian actor, critics with targets, and a temperature."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import Objective
from rl_training.algorithms.functional import bootstrapped_target
from rl_training.algorithms.hyperparameters import (
    ActorCriticHyperparameters,
    OnlineHyperparameters,
    Rate,
    is_from_0_1,
)
from rl_training.algorithms.optimizer import Adam
from rl_training.algorithms.stochastic import StochasticAlgorithm
from rl_training.models.actor_critic import StochasticActorCritic
from rl_training.models.mlp import MLP
from rl_training.types import Batch, Metrics, Noise, State


class MaximumEntropyHyperparameters(ActorCriticHyperparameters, OnlineHyperparameters):
    """An actor that is paid for its entropy."""

    alpha: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Temperature: a fixed number, or tuned towards `target_entropy`"""
    target_entropy: float | Literal["auto"] = "auto"
    """`auto` is `entropy_per_action` for each action component"""
    initial_alpha: Rate = 1.0
    """Where a tuned temperature starts"""
    alpha_learning_rate: Rate | None = None
    """Where absent, `learning_rate`"""
    entropy_in_target: bool = True
    """Whether critics count the entropy of later actions as reward, or the actor alone does"""

    @model_validator(mode="after")
    def _check_n_step(self) -> MaximumEntropyHyperparameters:
        if self.n_step > 1 and self.entropy_in_target and self.alpha != 0:
            raise ValueError(
                f"n_step = {self.n_step}: the entropy of the steps in between cannot be in the "
                "target, since replay does not hold it, and values would come out too low; use "
                "n_step: 1, or entropy_in_target: false to leave entropy out of the critics"
            )
        return self

    @model_validator(mode="after")
    def _check_initial_alpha(self) -> MaximumEntropyHyperparameters:
        if self.alpha != "auto" and self.initial_alpha not in (1.0, self.alpha):
            raise ValueError(
                f"initial_alpha = {self.initial_alpha}: is where alpha: auto starts, but alpha is "
                f"fixed at {self.alpha}"
            )
        return self

    @classmethod
    def upgrade(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        without = {"entropy_in_target": False} if cls._lacked_entropy(saved) else {}
        return {**super().upgrade(saved), **without}

    @classmethod
    def changes_since(cls, saved: Mapping[str, Any]) -> str | None:
        if not cls._lacked_entropy(saved):
            return None
        return (
            f"n_step = {saved['n_step']}: targets had the entropy of their last step alone; the "
            "run goes on with entropy_in_target: false"
        )

    @classmethod
    def _lacked_entropy(cls, saved: Mapping[str, Any]) -> bool:
        """Whether targets over several steps were to have entropy, and had not all of it."""
        default = cls.model_fields["entropy_in_target"].default
        wanted = saved.get("entropy_in_target", default)
        is_soft = wanted and saved.get("alpha") != 0
        return is_from_0_1(saved) and is_soft and saved.get("n_step", 1) > 1


class MaximumEntropyAlgorithm(StochasticAlgorithm):
    """Critics learn the soft Q-function; the actor maximises it plus its own entropy.

    Targets use the current actor and polyak-averaged critics; there is no target actor.
    """

    hyperparameters: MaximumEntropyHyperparameters
    model: StochasticActorCritic
    entropy_per_action: ClassVar[float] = -1.0
    """What `target_entropy: auto` asks of each action component; a paper may have another"""

    @abstractmethod
    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """How far the critics are from their targets."""

    @abstractmethod
    def policy_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """The actor's loss, plus the temperature's where that is tuned."""

    def lagrange_multipliers(self) -> dict[str, float]:
        """Further scalars that are learned with the critics, as logarithms, and their first values.

        None unless an algorithm says so.
        """
        return {}

    def networks(self) -> dict[str, MLP]:
        return {"actor": self.model.actor, "critic": self.model.critic}

    def extra_state(self) -> State:
        chosen = self.hyperparameters
        alpha = chosen.initial_alpha if chosen.alpha == "auto" else chosen.alpha
        first = {"log_alpha": alpha, **self.lagrange_multipliers()}
        logarithms = {k: math.log(v) if v > 0 else -math.inf for k, v in first.items()}
        return {k: torch.tensor(v, device=self.device) for k, v in logarithms.items()}

    def optimizers(self) -> dict[str, Adam]:
        chosen = self.hyperparameters
        optimizers = {"critic": chosen.critic_optimizer(), "actor": chosen.actor_optimizer()}
        if chosen.alpha == "auto":
            optimizers["log_alpha"] = chosen.scalar_optimizer(chosen.alpha_learning_rate)
        return optimizers | {n: chosen.scalar_optimizer() for n in self.lagrange_multipliers()}

    @property
    def target_entropy(self) -> float | None:
        """What the temperature is tuned towards; None where it is fixed."""
        if self.hyperparameters.alpha != "auto":
            return None
        chosen = self.hyperparameters.target_entropy
        return self.entropy_per_action * self.action_dim if chosen == "auto" else chosen

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        critic = Objective(("critic", *self.lagrange_multipliers()), self.critic_loss)
        if not update_policy:
            return [critic]
        learned = tuple(name for name in self.optimizers() if name not in critic.parameters)
        return [critic, Objective(learned, self.policy_loss)]


@torch.no_grad()
def soft_target(
    model: StochasticActorCritic,
    parameters: State,
    batch: Batch,
    noise: Noise,
    members: Tensor | None = None,
    *,
    entropy: bool = True,
) -> Tensor:
    """The soft Bellman target `(batch,)`: the least of the target critics, or of some of them.

    Without `entropy` it is the plain one, of the same sampled actions.
    """
    next_action, next_log_prob = model.sample_actions(
        batch.next_obs, noise=noise["next_action"], actor=parameters["actor"]
    )
    next_q = model.q_values(
        batch.next_obs, next_action, critic=parameters["target_critic"], members=members
    )
    next_value = next_q.min(-1).values
    if entropy:
        next_value = next_value - parameters["log_alpha"].exp() * next_log_prob
    return bootstrapped_target(batch.reward, batch.discount, next_value)


def soft_policy_loss(
    model: StochasticActorCritic,
    parameters: State,
    batch: Batch,
    noise: Noise,
    value: Callable[[Tensor], Tensor],
    *,
    target_entropy: float | None,
) -> tuple[Tensor, Metrics]:
    """The actor's loss and, where there is a target entropy, the temperature's.

    `value` says what the actor is to maximise: Q-values `(batch, critics)` to one number a row.
    """
    log_alpha = parameters["log_alpha"]
    alpha = log_alpha.detach().exp()
    action, log_prob = model.sample_actions(
        batch.obs, noise=noise["action"], actor=parameters["actor"]
    )
    # Detached, so that the actor's gradient passes through the critics and leaves them alone.
    q = model.q_values(batch.obs, action, critic=parameters["critic"].detach())
    loss = actor_loss = (alpha * log_prob - value(q)).mean()
    entropy = -log_prob.detach().mean()
    metrics = {"actor_loss": actor_loss, "entropy": entropy, "alpha": alpha}
    if target_entropy is not None:
        alpha_loss = log_alpha * (entropy - target_entropy)
        loss = loss + alpha_loss
        metrics["alpha_loss"] = alpha_loss
    return loss, metrics
