"""Deep deterministic policy gradient (1509.02971).

One critic, and a deterministic actor that maximizes it, each with a polyak-averaged target. As in
the TD3 authors' comparison it explores with Gaussian noise. The losses are in `deterministic.py`,
since TD3 extends them.
"""

from __future__ import annotations

from typing import ClassVar

from rl_training.algorithms.base import Draws
from rl_training.algorithms.deterministic import (
    DeterministicAlgorithm,
    DeterministicHyperparameters,
)
from rl_training.algorithms.hyperparameters import Count, OnlineHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec


class DDPGHyperparameters(DeterministicHyperparameters, OnlineHyperparameters):
    """TD3's defaults, without its additions."""

    default_learning_starts: ClassVar[int] = 25_000

    num_critics: Count = 1
    """Number of critics. With more than one, targets use the smallest of their values"""
    policy_delay: Count = 1
    """The actor and all target networks are updated at every n-th update of the critics"""


class DDPG(DeterministicAlgorithm):
    """Deep deterministic policy gradient."""

    hyperparameters_type = DDPGHyperparameters
    hyperparameters: DDPGHyperparameters

    def update_noise(self, batch_size: int) -> Draws:
        return self.dropout_noise(batch_size)


ddpg_loss = DDPG.total_loss
"""The sum of DDPG's losses and their metrics: `ddpg_loss(ddpg, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="ddpg",
    title="Deep Deterministic Policy Gradient",
    reference="arXiv:1509.02971",
    use_when="a baseline, and images with DrQ-v2's encoder; otherwise TD3",
    algorithm=DDPG,
)
