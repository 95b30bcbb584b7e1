"""Advantage actor-critic: A3C (1602.01783) with environments that are stepped together.

One update per short rollout follows the policy gradient. That is PPO with one epoch of one
minibatch, where the probabilities of actions have not changed yet (2205.09123).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict
from torch import Tensor

from rl_training.algorithms.hyperparameters import (
    Count,
    Decay,
    Fraction,
    Rate,
    RolloutHyperparameters,
)
from rl_training.algorithms.on_policy import OnPolicyAlgorithm
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.types import Batch, Metrics, State


class A2CHyperparameters(RolloutHyperparameters):
    """The defaults of Stable-Baselines3, except that the value's loss is half its squared error.

    Adam without a first moment stands for RMSprop; it also corrects the bias of the second moment.
    """

    learning_rate: Rate = 7e-4
    """Learning rate of Adam"""
    rollout_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 5
    """Steps of each environment between two updates, which learn from all of them"""
    batch_size: Count = 512
    """Largest number of transitions in an update. A rollout that has more is divided into several
    minibatches. With `recurrent`, rounded down to entire sequences"""
    gae_lambda: Fraction = 1.0
    """Decay of later errors of the value in advantages (GAE, 1506.02438): 0 uses one step, 1 all
    steps of the rollout"""
    normalize_advantages: bool = False
    """Subtract the mean of each minibatch's advantages and divide by their standard deviation"""
    adam_betas: Annotated[tuple[Decay, Decay], Strict(False)] = (0.0, 0.99)
    """Decay rates of Adam's first and second moment"""
    sequence_length: Annotated[int, Field(ge=1, le=1_000_000)] = 5
    """Consecutive steps through which the gradient of a recurrent policy goes back. Minibatches
    are made of such sequences. Must divide `rollout_steps`. Used if `recurrent`"""


class A2C(OnPolicyAlgorithm):
    """Advantage actor-critic."""

    hyperparameters_type = A2CHyperparameters
    hyperparameters: A2CHyperparameters
    plain_actions = "discrete"

    def policy_loss(
        self, state: State, log_probs: Tensor, advantages: Tensor, batch: Batch
    ) -> tuple[Tensor, Metrics]:
        """Return minus the log-likelihood of the actions, weighted by their advantages."""
        return -(advantages * log_probs).mean(), {}


a2c_loss = A2C.total_loss
"""A2C's loss and its metrics: `a2c_loss(a2c, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="a2c",
    title="Advantage Actor-Critic",
    reference="arXiv:1602.01783, arXiv:2205.09123",
    use_when="the simplest on-policy baseline; otherwise PPO",
    algorithm=A2C,
    actions=("discrete", "continuous", "multi_discrete", "multi_binary"),
)
