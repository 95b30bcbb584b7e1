"""TD3+BC (2106.06860): TD3 on recorded data, with a term that keeps the actor near the data.

States are normalised by the data set's mean and standard deviation, which go with the policy, and
clipped to ±10. The authors divide by the deviation plus 1e-3, and do not clip.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Draw, Draws
from rl_training.algorithms.deterministic import (
    DeterministicAlgorithm,
    deterministic_critic_loss,
    first_critic_values,
)
from rl_training.algorithms.hyperparameters import MixedHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.algorithms.td3 import TD3Hyperparameters, smoothing_noise
from rl_training.models.mlp_td3 import MLPTD3Model
from rl_training.types import Batch, Metrics, Noise, State


class TD3BCHyperparameters(TD3Hyperparameters, MixedHyperparameters):
    """Hyper-parameters are the paper's."""

    bc_alpha: Annotated[float, Field(gt=0)] = 2.5
    """How much the critic's word weighs against the data's"""


class TD3BC(DeterministicAlgorithm):
    """TD3 with a behaviour-cloning term."""

    hyperparameters_type = TD3BCHyperparameters
    hyperparameters: TD3BCHyperparameters

    def update_noise(self, batch_size: int) -> Draws:
        return {"next_action": Draw("normal", (batch_size, self.action_dim))}

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        chosen = self.hyperparameters
        disturbance = smoothing_noise(noise["next_action"], chosen.policy_noise, chosen.noise_clip)
        return deterministic_critic_loss(self.model, state, batch, disturbance)

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        return td3_bc_actor_loss(self.model, state, batch, bc_alpha=self.hyperparameters.bc_alpha)


def td3_bc_loss(
    model: MLPTD3Model,
    parameters: State,
    batch: Batch,
    noise: Noise,
    *,
    policy_noise: float,
    noise_clip: float,
    bc_alpha: float,
) -> tuple[Tensor, Metrics]:
    """The sum of TD3+BC's losses, as in an update that moves the policy too."""
    TD3BCHyperparameters.check(policy_noise=policy_noise, noise_clip=noise_clip, bc_alpha=bc_alpha)
    disturbance = smoothing_noise(noise["next_action"], policy_noise, noise_clip)
    critic_loss, critic_metrics = deterministic_critic_loss(model, parameters, batch, disturbance)
    actor_loss, actor_metrics = td3_bc_actor_loss(model, parameters, batch, bc_alpha=bc_alpha)
    return critic_loss + actor_loss, critic_metrics | actor_metrics


def td3_bc_actor_loss(
    model: MLPTD3Model, parameters: State, batch: Batch, *, bc_alpha: float
) -> tuple[Tensor, Metrics]:
    """`-lambda Q + (pi - a)^2`, where lambda makes up for the scale of Q."""
    action = model.actions(batch.obs, actor=parameters["actor"])
    q = first_critic_values(model, parameters, batch.obs, action)
    bc_lambda = bc_alpha / q.detach().abs().mean().clamp(min=1e-6)
    bc_loss = (action - batch.action).square().mean()
    loss = -bc_lambda * q.mean() + bc_loss
    return loss, {"actor_loss": loss, "bc_loss": bc_loss, "bc_lambda": bc_lambda}


SPEC = AlgorithmSpec(
    name="td3_bc",
    title="TD3+BC",
    reference="arXiv:2106.06860",
    algorithm=TD3BC,
    regimes=("offline", "online", "mixed"),
    normalizes_observations=True,
)
