"""Hyper-parameters that several algorithms share, under the same names everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, Strict

from rl_training.algorithms.optimizer import Adam
from rl_training.models.actor_critic import ActorCritic
from rl_training.validation import StrictModel, validate

Count = Annotated[int, Field(ge=1, le=10**9)]
Rate = Annotated[float, Field(gt=0)]
UnitInterval = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# Not strict at the outer level alone: YAML and JSON have lists where Python has tuples.
LayerSizes = Annotated[tuple[Annotated[int, Field(ge=1, le=65536)], ...], Strict(False)]
Activation = Literal["relu", "tanh", "elu", "gelu", "silu"]
Model = TypeVar("Model", bound=ActorCritic)
Schedule = Literal["constant", "linear", "cosine"]


class Hyperparameters(StrictModel):
    """What every algorithm has: networks, an optimiser, and minibatches."""

    learning_rate: Rate = 3e-4
    learning_rate_schedule: Schedule = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Gradient steps over which the learning rate rises linearly from zero"""
    batch_size: Count = 256
    gamma: Fraction = 0.99
    hidden_sizes: LayerSizes = (256, 256)
    activation: Activation = "relu"
    max_grad_norm: Rate | None = None
    policy_delay: Count = 1
    """Critic updates per policy update"""

    @classmethod
    def check(cls, **values: Any) -> None:
        """Refuse what the learner's constructor refuses, for a loss that is called by hand."""
        if not torch.compiler.is_compiling():  # then it is the learner's, which has been checked
            validate(cls, values)

    def derive(self, **values: Any) -> None:
        """Defaults that follow other settings, for validators; they do not count as given."""
        self.__dict__.update(values)

    def given(self) -> dict[str, Any]:
        """What was set rather than left to its default, which may follow what is set later."""
        return self.model_dump(exclude_unset=True)


class ActorCriticHyperparameters(Hyperparameters):
    """What algorithms with an actor, critics and target networks have."""

    actor_learning_rate: Rate | None = None
    """Where absent, `learning_rate`; likewise for the critics and for the sizes"""
    critic_learning_rate: Rate | None = None
    actor_hidden_sizes: LayerSizes | None = None
    critic_hidden_sizes: LayerSizes | None = None
    tau: UnitInterval = 0.005
    """How far target networks move at each update"""
    num_critics: Count = 2
    critic_layer_norm: bool = False

    def actor_optimizer(self) -> Adam:
        return Adam(self.actor_learning_rate or self.learning_rate, self.max_grad_norm)

    def critic_optimizer(self, *, scheduled: bool = True) -> Adam:
        rate = self.critic_learning_rate or self.learning_rate
        return Adam(rate, self.max_grad_norm, scheduled)

    def build(
        self,
        model: Callable[..., Model],
        obs_dim: int,
        action_dim: int,
        generator: torch.Generator,
        **more: Any,
    ) -> Model:
        """An actor and its critics of the chosen sizes; `more` is for this kind of model alone."""
        return model(
            obs_dim,
            action_dim,
            self.hidden_sizes,
            num_critics=self.num_critics,
            actor_hidden_sizes=self.actor_hidden_sizes,
            critic_hidden_sizes=self.critic_hidden_sizes,
            activation=self.activation,
            critic_layer_norm=self.critic_layer_norm,
            generator=generator,
            **more,
        )


class OnlineHyperparameters(Hyperparameters):
    """What algorithms that learn from a replay buffer have as well."""

    buffer_capacity: Count = 1_000_000
    learning_starts: Annotated[int, Field(ge=0)] = 5_000
    """Environment steps before the first update; random ones, unless the policy is trained"""
    train_frequency: Count = 1
    """Environment steps between blocks of updates, whatever the number of environments"""
    gradient_updates_per_step: Count = 1
    """Updates in one block"""
    n_step: Annotated[int, Field(ge=1, le=1000)] = 1


class MixedHyperparameters(OnlineHyperparameters):
    """What algorithms have that can learn from recorded data and live experience together."""

    offline_pretrain_updates: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Updates on recorded data alone, before the first environment step"""
    offline_batch_ratio: Fraction = 0.5
    """Share of recorded data in every minibatch"""


class PrioritizedHyperparameters(OnlineHyperparameters):
    """What algorithms have that can learn from rows sampled by their error (1511.05952)."""

    prioritized: bool = False
    priority_exponent: Fraction = 0.6
    """0 samples uniformly, 1 in proportion to the error"""
    importance_exponent: Fraction = 0.4
    """How far weights make up for the sampling at first; it rises to 1 over the run"""


def priority_exponent(hyperparameters: Hyperparameters) -> float | None:
    """How strongly sampling follows the rows' errors; None where it is uniform."""
    if isinstance(hyperparameters, PrioritizedHyperparameters) and hyperparameters.prioritized:
        return hyperparameters.priority_exponent
    return None
