"""Hyper-parameters that several algorithms share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import Field, Strict, model_validator

from rl_training.algorithms.functional import Adam
from rl_training.models.actor_critic import ActorCritic
from rl_training.models.categorical import Support
from rl_training.models.mlp import Initialization
from rl_training.models.network_plan import NetworkPlan
from rl_training.models.network_settings import NetworkSettings
from rl_training.models.recurrent import STATES, Recurrence
from rl_training.observations import ObservationSpec
from rl_training.types import Regime, ReturnAfterTruncation, ReturnScaling
from rl_training.validation import StrictModel

MAX_LAYERS = 256
Count = Annotated[int, Field(ge=1, le=10**9)]
Steps = Annotated[int, Field(ge=0, le=10**18)]
Rate = Annotated[float, Field(gt=0)]
UnitInterval = Annotated[float, Field(gt=0, le=1)]
ReturnSteps = Annotated[int, Field(ge=1, le=1000)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
LogStd = Annotated[float, Field(ge=-20, le=0)]
# Only the outer level is not strict: YAML and JSON have lists instead of tuples.
LayerSizes = Annotated[
    tuple[Annotated[int, Field(ge=1, le=65536)], ...], Strict(False), Field(max_length=MAX_LAYERS)
]
Activation = Literal["relu", "tanh", "elu", "gelu", "silu"]
Model = TypeVar("Model", bound=ActorCritic)
Schedule = Literal["constant", "linear", "cosine"]

TRAINED_LEARNING_STARTS = 1_000
"""Environment steps of a trained policy before its first update. With fewer, the first updates see
only a few episodes and the policy gets worse"""


class Hyperparameters(StrictModel):
    """Hyper-parameters of all algorithms: networks, optimizer and minibatches."""

    before: ClassVar[Mapping[str, Any]] = {}
    """Values that reproduce older versions, of settings that did not exist in them"""
    why_undelayed: ClassVar[str | None] = None
    """Why `policy_delay` must be 1, for algorithms that do not support it"""
    symbols: ClassVar[Mapping[str, str]] = {"gamma": "γ", "adam_betas": "β₁, β₂"}
    """The paper's symbols, by setting. A class inherits those of its bases; "" removes one"""

    learning_rate: Rate = 3e-4
    """Learning rate of Adam, wherever no separate one is set"""
    learning_rate_schedule: Schedule = "constant"
    """How all learning rates change over the planned updates: not at all, or down to
    `learning_rate_end_factor` on a line or half a cosine"""
    learning_rate_end_factor: Fraction = 0.0
    """Learning rate at the end of `linear` and `cosine`, as a fraction of the initial one"""
    warmup_steps: Steps = 0
    """Updates over which learning rates first increase linearly from zero; 0: no warmup"""
    adam_betas: Annotated[tuple[Decay, Decay], Strict(False)] = (0.9, 0.999)
    """Decay rates of Adam's first and second moment"""
    adam_epsilon: Rate = 1e-8
    """Added to the square root of Adam's second moment"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of networks, as in AdamW, including biases; 0: none"""
    batch_size: Count = 256
    """Number of transitions in the minibatch of one update"""
    gamma: Fraction = 0.99
    """Discount factor per step"""
    hidden_sizes: LayerSizes = (256, 256)
    """Units of each hidden layer, from input to output"""
    activation: Activation = "relu"
    """Activation function after each hidden layer"""
    initialization: Initialization = "default"
    """Initial parameters of layers: PyTorch's (`default`), or orthogonal, Xavier or LeCun-normal
    weights with zero biases"""
    networks: NetworkSettings | None = None
    """How networks read observations that are not one vector: encoders, shared encoders, and what
    actor and critics see. Not set: the defaults of this section"""
    max_grad_norm: Rate | None = None
    """Largest norm of the gradient of a network; larger ones are scaled down. Not set: no limit"""
    policy_delay: Count = 1
    """The policy is updated at every n-th update of the critics"""

    @property
    def decay(self) -> Schedule:
        """The schedule of the learning rate, with `auto` resolved."""
        return self.learning_rate_schedule

    def optimizer(self, rate: float | None = None, *, scheduled: bool = True) -> Adam:
        """Return the optimizer of a network; `rate` defaults to `learning_rate`."""
        return Adam(
            rate or self.learning_rate,
            self.max_grad_norm,
            scheduled,
            *self.adam_betas,
            self.adam_epsilon,
            self.weight_decay,
        )

    def scalar_optimizer(self, rate: float | None = None) -> Adam:
        """Return the optimizer of a single trained number, without clipping and weight decay."""
        return dataclasses.replace(self.optimizer(rate), max_grad_norm=None, weight_decay=0.0)

    def return_scaling(self) -> ReturnScaling | None:
        """Say how sampled rewards are scaled by returns so far; None if they are not."""
        return None

    def derive(self, **values: Any) -> None:
        """Set defaults that depend on other settings, in a validator; they do not count as set."""
        self.__dict__.update(values)

    def given(self) -> dict[str, Any]:
        """Return the values that were set explicitly; defaults may depend on other settings."""
        return self.model_dump(exclude_unset=True)

    @model_validator(mode="after")
    def _check_policy_delay(self) -> Self:
        if self.why_undelayed and self.policy_delay != 1:
            raise ValueError(
                f"policy_delay = {self.policy_delay}: must be 1, because {self.why_undelayed}"
            )
        return self

    def for_run(self, regime: Regime, *, is_trained: bool) -> Self:
        """Return a copy with `auto` resolved; `is_trained` if the run starts from a policy."""
        return self

    @classmethod
    def upgrade(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that an older version saved, completed to reproduce that version."""
        ignored = {"policy_delay": 1} if cls.why_undelayed else {}
        return {**cls.before, **saved, **ignored}

    @classmethod
    def changes_since(cls, saved: Mapping[str, Any]) -> str | None:
        """Describe how updates differ from those of the version that saved these settings."""
        return None


def is_from_0_1(saved: Mapping[str, Any]) -> bool:
    """Return whether version 0.1 saved these settings; it did not have `initialization`."""
    return "initialization" not in saved


class DistributionHyperparameters(Hyperparameters):
    """Hyper-parameters of critics that may learn the distribution of the return (1707.06887)."""

    symbols: ClassVar[Mapping[str, str]] = {
        "num_atoms": "N",
        "value_min": "V_MIN",
        "value_max": "V_MAX",
    }

    num_atoms: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Number of values in the distribution of the return that critics learn; C51 uses 51, FastTD3
    101. 1: only its mean"""
    value_min: float = -10.0
    """Smallest return of the distribution. Used if `num_atoms` is more than 1"""
    value_max: float = 10.0
    """Largest return of the distribution. Used if `num_atoms` is more than 1"""

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if self.value_min >= self.value_max:
            raise ValueError(
                f"value_min = {self.value_min}: must be less than value_max ({self.value_max})"
            )
        return self

    def support(self) -> Support | None:
        """Return the values that critics give probabilities to; None if they learn the mean."""
        if self.num_atoms == 1:
            return None
        return Support(self.value_min, self.value_max, self.num_atoms)


class ActorCriticHyperparameters(Hyperparameters):
    """Hyper-parameters of algorithms with an actor, critics and target networks."""

    symbols: ClassVar[Mapping[str, str]] = {"tau": "τ"}

    actor_learning_rate: Rate | None = None
    """Learning rate of the actor. Not set: `learning_rate`"""
    critic_learning_rate: Rate | None = None
    """Learning rate of the critics. Not set: `learning_rate`"""
    actor_hidden_sizes: LayerSizes | None = None
    """Units of each hidden layer of the actor. Not set: `hidden_sizes`"""
    critic_hidden_sizes: LayerSizes | None = None
    """Units of each hidden layer of the critics. Not set: `hidden_sizes`"""
    tau: UnitInterval = 0.005
    """Polyak coefficient: fraction by which target networks move toward their networks"""
    num_critics: Count = 2
    """Number of critics, which are trained on the same minibatches"""
    critic_layer_norm: bool = False
    """Use LayerNorm in the hidden layers of the critics"""
    critic_dropout: Decay = 0.0
    """Fraction of the hidden units of the critics that each loss drops at random, also in targets
    and in the loss of the actor (DroQ, 2110.02034); 0: none"""
    actor_layer_norm: bool = False
    """Use LayerNorm in the hidden layers of the actor"""

    def actor_optimizer(self) -> Adam:
        return self.optimizer(self.actor_learning_rate)

    def critic_optimizer(self, *, scheduled: bool = True) -> Adam:
        return self.optimizer(self.critic_learning_rate, scheduled=scheduled)

    def build(
        self,
        model: Callable[..., Model],
        plan: int | ObservationSpec | NetworkPlan,
        action_dim: int,
        generator: torch.Generator,
        **options: Any,
    ) -> Model:
        """Build a model of the configured sizes; `options` are specific to this type of model."""
        return model(
            plan,
            action_dim,
            self.hidden_sizes,
            num_critics=self.num_critics,
            actor_hidden_sizes=self.actor_hidden_sizes,
            critic_hidden_sizes=self.critic_hidden_sizes,
            activation=self.activation,
            critic_layer_norm=self.critic_layer_norm,
            critic_dropout=self.critic_dropout,
            actor_layer_norm=self.actor_layer_norm,
            initialization=self.initialization,
            generator=generator,
            **options,
        )


class OnlineHyperparameters(Hyperparameters):
    """Hyper-parameters of algorithms that train from a replay buffer."""

    symbols: ClassVar[Mapping[str, str]] = {"n_step": "n"}
    default_learning_starts: ClassVar[int] = 5_000

    buffer_capacity: Count = 1_000_000
    """Transitions that the replay buffer holds; when it is full, new ones replace the oldest"""
    learning_starts: Steps | Literal["auto"] = "auto"
    """Environment steps before the first update. Their actions are random, unless the run starts
    from a trained policy. `auto`: {default_learning_starts}, at most 1,000 if the run starts
    from a trained policy, and `batch_size` if the run also uses recorded data"""
    train_frequency: Count = 1
    """Environment steps from one block of updates to the next; with several environments, the
    steps of all of them count"""
    gradient_updates_per_step: Count = 1
    """Number of updates in a block"""
    n_step: ReturnSteps = 1
    """Number of rewards in a target before the value of a later state replaces the rest"""

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
    """Hyper-parameters of algorithms that can combine recorded data and online experience."""

    offline_pretrain_updates: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Updates on recorded data before the first environment step of a `mixed` run; 0: none"""
    offline_batch_ratio: Fraction | Literal["uniform"] = 0.5
    """Fraction of recorded data in the minibatches of a `mixed` run. `uniform`: every recorded
    transition and every online one is equally likely"""


class ChunkedHyperparameters(OnlineHyperparameters):
    """Hyper-parameters of algorithms whose policy can choose several actions at once (2507.07969).

    Critics value chunks, and a target has the rewards of a complete chunk.
    """

    symbols: ClassVar[Mapping[str, str]] = {"action_chunk": "h"}

    action_chunk: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of consecutive actions that the policy chooses at once. They are executed one after
    another, without looking at the observations in between. 1: single actions"""

    @model_validator(mode="after")
    def _check_chunk(self) -> Self:
        if self.action_chunk > 1 and self.n_step > 1:
            raise ValueError(
                f"n_step = {self.n_step}: must be 1 with action_chunk = {self.action_chunk}, whose "
                "targets have the rewards of all steps of a chunk"
            )
        return self


def action_chunk(hyperparameters: Hyperparameters) -> int:
    """Return how many actions the policy chooses at once."""
    if isinstance(hyperparameters, ChunkedHyperparameters):
        return hyperparameters.action_chunk
    return 1


class PrioritizedHyperparameters(OnlineHyperparameters):
    """Hyper-parameters of algorithms that support prioritized replay (1511.05952)."""

    symbols: ClassVar[Mapping[str, str]] = {"priority_exponent": "α", "importance_exponent": "β"}

    prioritized: bool = False
    """Sample transitions by the size of their last error instead of uniformly"""
    priority_exponent: Fraction = 0.6
    """Exponent of priorities: 0 samples uniformly, 1 in proportion to the error. Used if
    `prioritized`"""
    importance_exponent: Fraction = 0.4
    """Exponent of importance weights at the start; it increases linearly to 1 over the run. Used
    if `prioritized`"""


class ReturnHyperparameters(OnlineHyperparameters):
    """Hyper-parameters of algorithms whose batches have the returns of episodes."""

    return_after_truncation: ReturnAfterTruncation = "last_reward"
    """What the unknown rewards after a truncation count as in the return of an episode:
    `last_reward` forever, or `zero`. The first needs `gamma` less than 1"""

    @model_validator(mode="after")
    def _check_endless_return(self) -> Self:
        if self.gamma == 1 and self.return_after_truncation == "last_reward":
            raise ValueError(
                "return_after_truncation = 'last_reward': needs gamma less than 1, since the sum "
                "would be infinite; use return_after_truncation: zero"
            )
        return self


class RolloutHyperparameters(Hyperparameters):
    """Hyper-parameters of algorithms that learn from rollouts: from the newest steps alone."""

    symbols: ClassVar[Mapping[str, str]] = {"gae_lambda": "λ"}
    why_undelayed: ClassVar[str | None] = "policy and value are learned together"

    rollout_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 2048
    """Steps of each environment between two blocks of updates, which learn from all of them"""
    batch_size: Count = 64
    """Number of transitions in the minibatch of one update. A rollout that has fewer is one
    minibatch. With `recurrent`, rounded down to entire sequences"""
    gae_lambda: Fraction = 0.95
    """Decay of later errors of the value in advantages (GAE, 1506.02438): 0 uses one step, 1 all
    steps of the rollout"""
    normalize_advantages: bool = True
    """Subtract the mean of each minibatch's advantages and divide by their standard deviation"""
    normalize_rewards: bool = False
    """Divide rewards by the standard deviation of discounted returns so far, then clip them to
    ±10"""
    value_coefficient: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the loss of the value, which is half its mean squared error"""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy's entropy, which is maximized; 0: no entropy bonus"""
    max_grad_norm: Rate | None = 0.5
    """Largest norm of the joint gradient of policy and value; larger ones are scaled down. Not set:
    no limit"""
    adam_epsilon: Rate = 1e-5
    """Added to the square root of Adam's second moment"""
    hidden_sizes: LayerSizes = (64, 64)
    """Units of each hidden layer, from input to output"""
    actor_hidden_sizes: LayerSizes | None = None
    """Units of each hidden layer of the actor. Not set: `hidden_sizes`"""
    critic_hidden_sizes: LayerSizes | None = None
    """Units of each hidden layer of the value network. Not set: `hidden_sizes`"""
    activation: Activation = "tanh"
    """Activation function after each hidden layer"""
    initialization: Initialization = "orthogonal"
    """Initial parameters of layers: PyTorch's (`default`), or orthogonal, Xavier or LeCun-normal
    weights with zero biases"""
    actor_output_scale: Rate = 0.01
    """Factor of the initial weights of the actor's last layer, so that no action is preferred"""
    initial_log_std: Annotated[float, Field(ge=-20, le=2)] = 0.0
    """Initial log standard deviation of continuous actions, whose range is [-1, 1]"""
    recurrent: Recurrence = "none"
    """Recurrent layer between observations, or their encoder, and the hidden layers of policy and
    value, which share it: `none`, `gru` or `lstm`"""
    recurrent_size: Annotated[int, Field(ge=1, le=65536)] = 64
    """Units of the recurrent layer. Used if `recurrent`"""
    sequence_length: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    """Consecutive steps through which the gradient of a recurrent policy goes back. Minibatches
    are made of such sequences. Must divide `rollout_steps`. Used if `recurrent`"""

    @model_validator(mode="after")
    def _check_sequences(self) -> Self:
        length, steps = self.sequence_steps, self.rollout_steps
        if steps % length:
            possible = range(1, min(length, steps) + 1)
            fitting = max(each for each in possible if steps % each == 0)
            raise ValueError(
                f"sequence_length = {length}: must divide rollout_steps = {steps}; use "
                f"sequence_length: {fitting}, or rollout_steps: {max(1, steps // length) * length}"
            )
        networks = self.networks or NetworkSettings()
        if self.recurrent != "none" and networks.actor_obs != networks.critic_obs:
            raise ValueError(
                f"recurrent = {self.recurrent!r}: networks.actor_obs and networks.critic_obs must "
                "be equal, because policy and value share the recurrent layer"
            )
        if self.batch_size < length:
            raise ValueError(
                f"batch_size = {self.batch_size}: must be at least sequence_length = {length}, "
                "because minibatches of a recurrent policy are made of entire sequences"
            )
        return self

    @model_validator(mode="after")
    def _check_shift(self) -> Self:
        if self.networks is not None and self.networks.random_shift:
            raise ValueError(
                f"networks.random_shift = {self.networks.random_shift}: must be 0, because actions "
                "are compared with the policy that chose them, which has seen unshifted images"
            )
        return self

    @property
    def epochs(self) -> int:
        """How often the updates of a block see each transition of a rollout."""
        return 1

    @property
    def memory_size(self) -> int:
        """Numbers that the policy remembers from step to step of an episode."""
        return STATES[self.recurrent] * self.recurrent_size

    @property
    def sequence_steps(self) -> int:
        """Consecutive steps that stay together in a minibatch."""
        return 1 if self.recurrent == "none" else self.sequence_length

    def minibatch_size(self, rows: int) -> int:
        """Transitions in each minibatch of a rollout: entire sequences, as many as fit."""
        size = min(self.batch_size, rows)
        return size - size % self.sequence_steps

    def return_scaling(self) -> ReturnScaling | None:
        return ReturnScaling(self.gamma) if self.normalize_rewards else None


def memory_size(hyperparameters: Hyperparameters) -> int:
    """Return how many numbers the policy remembers from step to step of an episode."""
    if isinstance(hyperparameters, RolloutHyperparameters):
        return hyperparameters.memory_size
    return 0


def return_after_truncation(hyperparameters: Hyperparameters) -> ReturnAfterTruncation | None:
    """Return how returns count what follows a truncation; None if batches have no returns."""
    if isinstance(hyperparameters, ReturnHyperparameters):
        return hyperparameters.return_after_truncation
    return None


def priority_exponent(hyperparameters: Hyperparameters) -> float | None:
    """Return the exponent of prioritized replay; None if sampling is uniform."""
    if isinstance(hyperparameters, PrioritizedHyperparameters) and hyperparameters.prioritized:
        return hyperparameters.priority_exponent
    return None
