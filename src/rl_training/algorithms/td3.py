"""Twin delayed deep deterministic policy gradient (1802.09477).

DDPG with three additions: the lesser of twin critics as the target, noise on the target actor's
actions so that a target is an average over similar ones, and a policy that moves, together with
all targets, only at every second critic update.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Draw, Draws
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


class TD3Hyperparameters(DeterministicHyperparameters, OnlineHyperparameters):
    """Defaults are those of the authors' current code, which differs from the paper's."""

    default_learning_starts: ClassVar[int] = 25_000

    policy_delay: Count = 2
    policy_noise: Annotated[float, Field(ge=0)] = 0.2
    """Standard deviation of the noise on target actions"""
    noise_clip: Annotated[float, Field(ge=0)] = 0.5
    """That noise is clipped to plus and minus this"""


class TD3(DeterministicAlgorithm):
    """Twin delayed deep deterministic policy gradient."""

    hyperparameters_type = TD3Hyperparameters
    hyperparameters: TD3Hyperparameters

    def update_noise(self, batch_size: int) -> Draws:
        return {"next_action": Draw("normal", (batch_size, self.action_dim))}

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        chosen = self.hyperparameters
        disturbance = smoothing_noise(noise["next_action"], chosen.policy_noise, chosen.noise_clip)
        return deterministic_critic_loss(self.model, state, batch, disturbance)

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return deterministic_actor_loss(self.model, state, batch)


def td3_loss(
    model: MLPTD3Model,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    policy_noise: float,
    noise_clip: float,
) -> tuple[Tensor, Metrics]:
    """The sum of TD3's losses, as in an update that moves the policy too.

    `parameters` holds `actor`, `critic`, `target_actor` and `target_critic`.
    """
    TD3Hyperparameters.check(policy_noise=policy_noise, noise_clip=noise_clip)
    disturbance = smoothing_noise(noise["next_action"], policy_noise, noise_clip)
    critic_loss, critic_metrics = deterministic_critic_loss(model, parameters, batch, disturbance)
    actor_loss, actor_metrics = deterministic_actor_loss(model, parameters, batch)
    return critic_loss + actor_loss, critic_metrics | actor_metrics


def smoothing_noise(standard: Tensor, policy_noise: float, noise_clip: float) -> Tensor:
    """Standard normal numbers, scaled and clipped."""
    return (standard * policy_noise).clamp(-noise_clip, noise_clip)


SPEC = AlgorithmSpec(
    name="td3",
    title="Twin Delayed DDPG",
    reference="arXiv:1802.09477",
    algorithm=TD3,
)
