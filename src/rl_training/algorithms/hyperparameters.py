"""Hyper-parameters that several algorithms share, under the same names everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import Field, Strict, model_validator

from rl_training.algorithms.optimizer import Adam
from rl_training.models.actor_critic import ActorCritic
from rl_training.models.mlp import Initialization
from rl_training.types import Regime
from rl_training.validation import StrictModel, validate

Count = Annotated[int, Field(ge=1, le=10**9)]
Rate = Annotated[float, Field(gt=0)]
UnitInterval = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
LogStd = Annotated[float, Field(ge=-20, le=0)]
# Not strict at the outer level alone: YAML and JSON have lists where Python has tuples.
LayerSizes = Annotated[tuple[Annotated[int, Field(ge=1, le=65536)], ...], Strict(False)]
Activation = Literal["relu", "tanh", "elu", "gelu", "silu"]
Model = TypeVar("Model", bound=ActorCritic)
Schedule = Literal["constant", "linear", "cosine"]

TRAINED_LEARNING_STARTS = 1_000
"""Steps that a trained policy takes before its first update. With fewer, a handful of episodes is
all that updates see, and policies became worse at first"""


class Hyperparameters(StrictModel):
    """What every algorithm has: networks, an optimiser, and minibatches."""

    before: ClassVar[Mapping[str, Any]] = {}
    """What older versions did before a setting existed, where that is not its default"""
    why_undelayed: ClassVar[str | None] = None
    """Why there is no policy to delay, for algorithms that have none"""

    learning_rate: Rate = 3e-4
    """Of Adam, for every network that has no rate of its own"""
    learning_rate_schedule: Schedule = "constant"
    """How the learning rate decays over the run"""
    learning_rate_end_factor: Fraction = 0.0
    """The share of the learning rate that `linear` and `cosine` end at"""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Gradient steps over which the learning rate rises linearly from zero"""
    adam_betas: Annotated[tuple[Decay, Decay], Strict(False)] = (0.9, 0.999)
    """Decay rates of Adam's moments"""
    adam_epsilon: Rate = 1e-8
    """Added to the root of Adam's second moment"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of networks, decoupled from the gradient as in AdamW; biases decay too"""
    batch_size: Count = 256
    """Transitions in a minibatch"""
    gamma: Fraction = 0.99
    """Discount of a later reward, per step"""
    hidden_sizes: LayerSizes = (256, 256)
    """Units of each hidden layer"""
    activation: Activation = "relu"
    """Between layers"""
    initialization: Initialization = "default"
    """Of layers: PyTorch's own, or orthogonal or Xavier-uniform weights with zero biases"""
    max_grad_norm: Rate | None = None
    """Gradients of a larger norm are scaled down to it; where absent, none are"""
    policy_delay: Count = 1
    """Critic updates per policy update"""

    @property
    def decay(self) -> Schedule:
        """How the learning rate decays."""
        return self.learning_rate_schedule

    def optimizer(self, rate: float | None = None, *, scheduled: bool = True) -> Adam:
        """For the parameters of a network; `rate` is `learning_rate` where absent."""
        return Adam(
            rate or self.learning_rate,
            self.max_grad_norm,
            scheduled,
            *self.adam_betas,
            self.adam_epsilon,
            self.weight_decay,
        )

    def scalar_optimizer(self, rate: float | None = None) -> Adam:
        """For a single learned number, which is neither clipped nor decayed."""
        return dataclasses.replace(self.optimizer(rate), max_grad_norm=None, weight_decay=0.0)

    @classmethod
    def check(cls, **values: Any) -> None:
        """Refuse what the learner's constructor refuses, for a loss that is called by hand."""
        if not torch.compiler.is_compiling():  # a compiler could not trace it
            validate(cls, values)

    def derive(self, **values: Any) -> None:
        """Defaults that follow other settings, for validators; they do not count as given."""
        self.__dict__.update(values)

    def given(self) -> dict[str, Any]:
        """What was set rather than left to its default, which may follow what is set later."""
        return self.model_dump(exclude_unset=True)

    @model_validator(mode="after")
    def _check_policy_delay(self) -> Self:
        if self.why_undelayed and self.policy_delay != 1:
            raise ValueError(
                f"policy_delay = {self.policy_delay}: must be 1, since {self.why_undelayed}"
            )
        return self

    def for_run(self, regime: Regime, *, is_trained: bool) -> Self:
        """With `auto` settings resolved for a run; `is_trained` if it starts from a policy."""
        return self

    @classmethod
    def upgrade(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that an older version saved, with those that it lacked as it behaved."""
        ignored = {"policy_delay": 1} if cls.why_undelayed else {}
        return {**cls.before, **saved, **ignored}

    @classmethod
    def changes_since(cls, saved: Mapping[str, Any]) -> str | None:
        """What is computed otherwise than by the version that saved these settings, if anything."""
        return None


def is_from_0_1(saved: Mapping[str, Any]) -> bool:
    """Whether version 0.1 saved these settings: all are saved, and it had no `initialization`."""
    return "initialization" not in saved


class ActorCriticHyperparameters(Hyperparameters):
    """What algorithms with an actor, critics and target networks have."""

    actor_learning_rate: Rate | None = None
    """Where absent, `learning_rate`"""
    critic_learning_rate: Rate | None = None
    """Where absent, `learning_rate`"""
    actor_hidden_sizes: LayerSizes | None = None
    """Where absent, `hidden_sizes`"""
    critic_hidden_sizes: LayerSizes | None = None
    """Where absent, `hidden_sizes`"""
    tau: UnitInterval = 0.005
    """How far target networks move at each update"""
    num_critics: Count = 2
    """Critics, each with networks of its own"""
    critic_layer_norm: bool = False
    """Whether critics normalise their hidden layers"""

    def actor_optimizer(self) -> Adam:
        return self.optimizer(self.actor_learning_rate)

    def critic_optimizer(self, *, scheduled: bool = True) -> Adam:
        return self.optimizer(self.critic_learning_rate, scheduled=scheduled)

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
            initialization=self.initialization,
            generator=generator,
            **more,
        )


class OnlineHyperparameters(Hyperparameters):
    """What algorithms that learn from a replay buffer have as well."""

    default_learning_starts: ClassVar[int] = 5_000

    buffer_capacity: Count = 1_000_000
    """Transitions that the replay buffer holds; the oldest give way"""
    learning_starts: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Environment steps before the first update; random ones, unless the policy is trained.

    `auto` is the algorithm's own number, 5,000 unless it has another, where a run starts from
    nothing; 1,000 at most where it starts from a trained policy; and one minibatch where it has
    recorded data as well
    """
    train_frequency: Count = 1
    """Environment steps between blocks of updates, whatever the number of environments"""
    gradient_updates_per_step: Count = 1
    """Updates in one block"""
    n_step: Annotated[int, Field(ge=1, le=1000)] = 1
    """Rewards that a target sums up before it bootstraps"""

    def for_run(self, regime: Regime, *, is_trained: bool) -> Self:
        if self.learning_starts != "auto":
            return self
        steps = self.default_learning_starts
        if regime == "mixed":
            steps = self.batch_size
        elif is_trained:
            steps = min(steps, TRAINED_LEARNING_STARTS)
        return self.model_copy(update={"learning_starts": steps})


class MixedHyperparameters(OnlineHyperparameters):
    """What algorithms have that can learn from recorded data and live experience together."""

    offline_pretrain_updates: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Updates on recorded data alone, before the first environment step"""
    offline_batch_ratio: Fraction | Literal["uniform"] = 0.5
    """Share of recorded data in every minibatch.

    `uniform` samples recorded data and live steps as if they were in one buffer
    """


class PrioritizedHyperparameters(OnlineHyperparameters):
    """What algorithms have that can learn from rows sampled by their error (1511.05952)."""

    prioritized: bool = False
    """Whether rows are sampled by their error rather than uniformly"""
    priority_exponent: Fraction = 0.6
    """0 samples uniformly, 1 in proportion to the error"""
    importance_exponent: Fraction = 0.4
    """How far weights make up for the sampling at first; it rises to 1 over the run"""


def priority_exponent(hyperparameters: Hyperparameters) -> float | None:
    """How strongly sampling follows the rows' errors; None where it is uniform."""
    if isinstance(hyperparameters, PrioritizedHyperparameters) and hyperparameters.prioritized:
        return hyperparameters.priority_exponent
    return None
