"""Hyper-parameters that several algorithms share, under the same names everywhere."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from rl_training.validation import StrictModel

Count = Annotated[int, Field(ge=1, le=10**9)]
Rate = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# Not strict at the outer level alone: YAML and JSON have lists where Python has tuples.
LayerSizes = Annotated[tuple[Annotated[int, Field(ge=1, le=65536)], ...], Strict(False)]
Activation = Literal["relu", "tanh", "elu", "gelu", "silu"]
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


class OnlineHyperparameters(Hyperparameters):
    """What algorithms that learn from a replay buffer have as well."""

    buffer_capacity: Count = 1_000_000
    learning_starts: Annotated[int, Field(ge=0)] = 5_000
    """Environment steps of uniformly random actions before the first update"""
    train_frequency: Count = 1
    """Environment steps between blocks of updates, whatever the number of environments"""
    gradient_updates_per_step: Count = 1
    """Updates in one block"""
    n_step: Annotated[int, Field(ge=1, le=1000)] = 1
