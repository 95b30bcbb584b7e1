"""What a batch, a transition and a result are: the words every other module speaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from torch import Tensor

State = dict[str, Tensor]
"""Everything an algorithm learns, by name: parameters, targets, moments, temperature, counters."""

Metrics = dict[str, Tensor]
"""Detached scalars, read (and so synchronised) only when they are logged."""

Noise = dict[str, Tensor]
"""The random numbers of one update, drawn outside it so that every execution mode sees the same."""


class Batch(NamedTuple):
    """Transitions ready to learn from, one row each.

    `discount` is `gamma**n * (1 - terminated)`: n-step returns and truncation are settled where
    data is made, so that every target reads `reward + discount * value(next_obs)`.
    """

    obs: Tensor
    """`(batch, obs_dim)`"""
    action: Tensor
    """`(batch, action_dim)` in [-1, 1]; `(batch,)` of indices for discrete actions"""
    reward: Tensor
    """`(batch,)`"""
    discount: Tensor
    """`(batch,)`"""
    next_obs: Tensor
    """`(batch, obs_dim)`"""
    weights: Tensor | None = None
    """`(batch,)`: how much rarer than under uniform sampling each row is; None where it is not"""
    indices: Tensor | None = None
    """`(batch,)`: where each row lies in its source, if that wants to hear of its error"""
    is_offline: Tensor | None = None
    """`(batch,)`: which rows are recorded data's; None where all have the same origin"""


ROW_ERRORS = "row_errors"
"""The name under which a loss hands out each row's error `(batch,)`: not a metric, but feedback"""


@dataclass(frozen=True)
class SpaceInfo:
    """What an algorithm must know of an environment's spaces."""

    obs_dim: int
    action_dim: int
    """Number of action components, or of choices where `discrete`"""
    discrete: bool = False
    action_low: np.ndarray | None = None
    """Environment units, `(action_dim,)`; None where `discrete`"""
    action_high: np.ndarray | None = None
    action_start: int = 0
    """What the environment calls the first choice, where `discrete`"""


@dataclass(frozen=True)
class UpdateResult:
    """What one call of a learner's `update` did."""

    metrics: Metrics
    num_gradient_steps: int = 1
    row_errors: Tensor | None = None
    """`(batch,)`, of algorithms that can learn from prioritised rows"""


class ResumeLevel(StrEnum):
    """How exactly a run can be continued, which depends on its environment."""

    BIT_EXACT = "bit-exact"
    EPISODE_EXACT = "episode-exact"
    STATISTICAL = "statistical"


@dataclass(frozen=True)
class TrainResult:
    """Where a run is and how it ended."""

    run_dir: Path
    checkpoint_path: Path
    best_checkpoint_path: Path | None
    metrics: Mapping[str, float]
    stop_reason: str


Regime = Literal["online", "offline", "mixed"]
"""Where a run's batches come from: its environment, recorded data, or both"""

ScheduleChoice = Literal["extend", "keep"]
"""What becomes of schedules where a run is given a larger total: planned anew, or as they were"""

EvaluationMetric = Literal[
    "eval_return_mean",
    "eval_return_std",
    "eval_return_min",
    "eval_return_max",
    "eval_return_median",
    "eval_length_mean",
]
EVALUATION_METRICS: tuple[str, ...] = get_args(EvaluationMetric)

Json = dict[str, Any]
