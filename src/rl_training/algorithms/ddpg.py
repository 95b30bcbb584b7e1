"""Deep deterministic policy gradient (1509.02971).

One critic and a deterministic actor that climbs it, each with a polyak-averaged target. As in the
TD3 authors' comparison it explores by Gaussian noise.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rl_training.algorithms.base import Draws
from rl_training.algorithms.deterministic import (
    DeterministicAlgorithm,
    DeterministicHyperparameters,
    deterministic_actor_loss,
    deterministic_critic_loss,
)
from rl_training.algorithms.hyperparameters import Count, OnlineHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.mlp_td3 import MLPTD3Model
from rl_training.types import Batch, Metrics, Noise, State


class DDPGHyperparameters(DeterministicHyperparameters, OnlineHyperparameters):
    """Defaults are TD3's, without its additions."""

    default_learning_starts: ClassVar[int] = 25_000

    num_critics: Count = 1


class DDPG(DeterministicAlgorithm):
    """Deep deterministic policy gradient."""

    hyperparameters_type = DDPGHyperparameters
    hyperparameters: DDPGHyperparameters

    def update_noise(self, batch_size: int) -> Draws:
        return {}

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return deterministic_critic_loss(self.model, state, batch)

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return deterministic_actor_loss(self.model, state, batch)


def ddpg_loss(model: MLPTD3Model, parameters: State, batch: Batch) -> tuple[Tensor, Metrics]:
    """The sum of DDPG's losses; `parameters` holds both networks and their targets."""
    critic_loss, critic_metrics = deterministic_critic_loss(model, parameters, batch)
    actor_loss, actor_metrics = deterministic_actor_loss(model, parameters, batch)
    return critic_loss + actor_loss, critic_metrics | actor_metrics


SPEC = AlgorithmSpec(
    name="ddpg",
    title="Deep Deterministic Policy Gradient",
    reference="arXiv:1509.02971",
    algorithm=DDPG,
)
