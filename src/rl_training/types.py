"""Types that all modules share: batches, states, spaces and results.

PyTorch is imported for type checkers only, so that commands that do not need it start fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from rl_training.observations import NumberTypes, ObservationSpec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

State = dict[str, "Tensor"]
"""All learned tensors of an algorithm by name: parameters, target networks, Adam's moments, ..."""

Metrics = dict[str, "Tensor"]
"""Detached scalars. Reading one synchronizes the device, so they are read only for logging."""

Noise = dict[str, "Tensor"]
"""Random numbers of one update. Drawn outside it, so that all execution modes use the same ones."""


class Batch(NamedTuple):
    """A minibatch of transitions, one per row.

    `reward` is the n-step return and `discount` is `gamma**n * (1 - terminated)`. The target of any
    algorithm is therefore `reward + discount * value(next_obs)`. With action chunks, an action is
    the actions of n steps side by side.
    """

    obs: Tensor
    """`(batch, obs_dim)`: rows as `ObservationSpec` describes them"""
    action: Tensor
    """`(batch, action_dim)` in [-1, 1]; indices from 0, `(batch,)` for discrete actions and
    `(batch, action_dim)` if there are several choices"""
    reward: Tensor
    """`(batch,)`"""
    discount: Tensor
    """`(batch,)`"""
    next_obs: Tensor
    """`(batch, obs_dim)`; `(batch, 0)` in a minibatch of a rollout, whose targets are known"""
    weights: Tensor | None = None
    """`(batch,)`: importance-sampling weights; None if rows are sampled uniformly"""
    indices: Tensor | None = None
    """`(batch,)`: index of each row in its source, if the source samples by priority"""
    is_offline: Tensor | None = None
    """`(batch,)`: whether each row is recorded data; None if all rows have the same source"""
    next_action: Tensor | None = None
    """`(batch, action_dim)`: the recorded action at `next_obs`; NaN where the episode has none,
    because it ends there. None unless the algorithm asks for it (`uses_next_actions`)"""
    returns: Tensor | None = None
    """`(batch,)`: the discounted sum of rewards from `obs` to the end of the episode. None unless
    the algorithm asks for it (`ReturnHyperparameters`). Of a rollout: what the value is trained
    towards"""
    ended: Tensor | None = None
    """`(batch,)`: 1 if the episode ended after the transition, 2 if the transition was lost, else
    0. Like the fields below, None unless the algorithm learns from rollouts"""
    advantages: Tensor | None = None
    """`(batch,)`: estimated advantages of the actions"""
    log_probs: Tensor | None = None
    """`(batch,)`: log-probabilities of the actions under the policy that chose them"""
    values: Tensor | None = None
    """`(batch,)`: values of `obs` before the first update on the rollout"""

    def with_fields(self, **fields: Tensor) -> Batch:
        """Return a batch with some fields replaced.

        Unlike the result of `_replace`, PyTorch 2.11 can return it from a compiled program.
        """
        return Batch(**{**self._asdict(), **fields})


class ReturnScaling(NamedTuple):
    """How sampled rewards are divided by the size of discounted returns so far."""

    gamma: float
    """Discount factor of the returns"""
    largest: float | None = None
    """Limit of the largest scaled return so far; None: only their standard deviation counts"""


BUFFERS = "buffers."
"""Prefix of the names under which a loss returns new values of buffers, among its metrics"""

ROW_ERRORS = "row_errors"
"""Key under which a loss returns the error of each row, `(batch,)`, for prioritized sampling"""


ActionKind = Literal["continuous", "discrete", "multi_discrete", "multi_binary"]
"""Numbers in a range, one choice, several choices, or several switches"""
ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)


@dataclass(frozen=True)
class ActionSpec:
    """What an action is inside models and buffers."""

    kind: ActionKind
    size: int
    """Number of components, or of choices if `discrete`"""
    choices: tuple[int, ...] = ()
    """Number of choices of each component, if `multi_discrete`"""

    @property
    def width(self) -> int:
        """How many numbers an action is stored as."""
        return 1 if self.kind == "discrete" else self.size

    def chunks_of(self, number: int) -> ActionSpec:
        """Return what a chunk of that many continuous actions is, side by side."""
        if number == 1:
            return self
        if self.kind != "continuous":
            raise ValueError(f"chunks of {self.kind} actions are not supported")
        return ActionSpec(self.kind, self.size * number)

    @property
    def num_choices(self) -> tuple[int, ...]:
        """Number of choices of each stored number of an action that is not continuous."""
        return (self.size,) if self.kind == "discrete" else self.choices or (2,) * self.size


@dataclass(frozen=True)
class SpaceInfo:
    """Sizes and bounds of an environment's observation and action spaces."""

    obs_dim: int
    """Number of words of an observation row: of a vector, the number of its components"""
    action_dim: int
    """Number of action components, or of choices if `discrete`"""
    action_kind: ActionKind = "continuous"
    action_low: np.ndarray | None = None
    """Lower bounds in environment units, `(action_dim,)`; None if `discrete`. The components of
    `multi_discrete` and `multi_binary` actions are the integers between the bounds"""
    action_high: np.ndarray | None = None
    """Upper bounds, like `action_low`"""
    action_start: int = 0
    """The environment's number for the first action, if `discrete`"""
    action_shape: tuple[int, ...] | None = None
    """Shape of an action in the environment, which is a vector elsewhere; None: `(action_dim,)`,
    or `()` if `discrete`"""
    given_observation: ObservationSpec | None = None
    """The leaves of an observation; None: one vector of `obs_dim` float32"""

    @property
    def is_continuous(self) -> bool:
        return self.action_kind == "continuous"

    @property
    def actions(self) -> ActionSpec:
        """What an action is inside models and buffers."""
        return ActionSpec(self.action_kind, self.action_dim, self.choices)

    @property
    def choices(self) -> tuple[int, ...]:
        """Number of choices of each component; empty unless `multi_discrete`."""
        if self.action_kind != "multi_discrete":
            return ()
        return tuple(int(high - low) + 1 for low, high in zip(*self.bounds, strict=True))

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The bounds of actions that are not `discrete`."""
        assert self.action_low is not None
        assert self.action_high is not None
        return self.action_low, self.action_high

    @property
    def first_choice(self) -> int | np.ndarray:
        """The environment's number for index 0: one, or an integer for each component."""
        if self.action_kind == "discrete":
            return self.action_start
        return self.bounds[0].astype("int64")

    def shaped(self, actions: np.ndarray) -> np.ndarray:
        """Return a batch of actions in the shape of the environment's."""
        if self.action_shape is None or len(self.action_shape) == 1:
            return actions
        return actions.reshape(len(actions), *self.action_shape)

    @cached_property
    def observation(self) -> ObservationSpec:
        """The leaves of an observation."""
        return self.given_observation or ObservationSpec.vector(self.obs_dim)

    def fits(self, other: SpaceInfo) -> bool:
        """Return whether a policy for these spaces can act in the other ones.

        It can if numbers are only stored in other types.
        """
        has_leaves = self.observation.has_leaves_of(other.observation)
        return has_leaves and self.actions == other.actions

    def stored_as(self, types: NumberTypes) -> SpaceInfo:
        """The same spaces, with the numbers of observations stored in these types."""
        observation = self.observation.stored_as(types)
        given = None if observation.is_vector else observation
        return replace(self, obs_dim=observation.size, given_observation=given)

    def misfit(self, other: SpaceInfo) -> str:
        """Say what a policy for these spaces expects, and what the environment of others has."""
        if self.observation.is_vector and other.observation.is_vector:
            return (
                f"the policy expects {self.obs_dim} observations and {self.action_dim} actions, "
                f"but the environment has {other.obs_dim} and {other.action_dim}"
            )
        return (
            f"the policy expects observations {self.observation.describe()} and {self.action_dim} "
            f"actions, but the environment has {other.observation.describe()} and "
            f"{other.action_dim}"
        )


@dataclass(frozen=True)
class UpdateResult:
    """Result of one call of a learner's `update`."""

    metrics: Metrics
    num_gradient_steps: int = 1
    row_errors: Tensor | None = None
    """`(batch,)`; only algorithms that support prioritized sampling return it"""


class ResumeLevel(StrEnum):
    """How exactly a run can be resumed; depends on its environment."""

    BIT_EXACT = "bit-exact"
    EPISODE_EXACT = "episode-exact"
    STATISTICAL = "statistical"


@dataclass(frozen=True)
class TrainResult:
    """Result of a run: its paths, last metrics, and the reason why it stopped."""

    run_dir: Path
    checkpoint_path: Path
    best_checkpoint_path: Path | None
    metrics: Mapping[str, float]
    stop_reason: str
    evaluation_due: bool = False
    """Whether training has ended, but an interruption prevented the last evaluation; resuming the
    run makes it"""

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in ("evaluate", "learn", "policy", "predict", "save"):
                message += (
                    "; learn returns the result; keep the agent: agent = SAC(...); agent.learn(...)"
                )
            raise AttributeError(message, name=name, obj=self)


PRUNED = "pruned"
"""Stop reason of a trial of a sweep that is not worth continuing"""
FINISHED = ("total_timesteps", "max_updates", "early_stopping", "target_value", PRUNED)
"""Stop reasons after which a run continues only with a larger total"""

ReturnAfterTruncation = Literal["last_reward", "zero"]
"""What the rewards after a truncation count as in a return: the last reward forever, or nothing"""

Regime = Literal["online", "offline", "mixed"]
"""Source of a run's batches: the environment, recorded data, or both"""

ScheduleChoice = Literal["extend", "keep"]
"""What happens to schedules if `total_timesteps` grows: stretched to it, or left unchanged"""

EvaluationMetric = Literal[
    "eval_return_mean",
    "eval_return_std",
    "eval_return_min",
    "eval_return_max",
    "eval_return_median",
    "eval_length_mean",
    "eval_success_rate",
]
SUCCESS_RATE: EvaluationMetric = "eval_success_rate"
"""Only evaluations in an environment with `info["is_success"]` or `info["success"]` have it"""
EVALUATION_METRICS: tuple[str, ...] = tuple(
    metric for metric in get_args(EvaluationMetric) if metric != SUCCESS_RATE
)
"""The metrics of every evaluation"""

Json = dict[str, Any]


VideoSelection = Literal["all", "best", "worst"]
"""Which of the played episodes a video shows"""


@dataclass(frozen=True)
class RecordedEpisode:
    """An episode of a video."""

    number: int
    """Its position among the episodes that were played, from 1"""
    episode_return: float
    length: int
    """Steps of the environment; a video has one frame more, for the first state"""
