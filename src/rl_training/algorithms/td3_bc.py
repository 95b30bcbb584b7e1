"""TD3+BC (2106.06860): TD3 on recorded data, with a term that keeps the actor close to the data.

States are normalized by the dataset's mean and standard deviation, which are saved with the
policy, and clipped to ±10. The authors divide by the standard deviation plus 1e-3 and do not clip.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.hyperparameters import MixedHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.algorithms.td3 import TD3, TargetNoiseHyperparameters
from rl_training.types import Batch, Metrics, Noise, State


class TD3BCHyperparameters(TargetNoiseHyperparameters, MixedHyperparameters):
    """The paper's hyper-parameters."""

    symbols: ClassVar[Mapping[str, str]] = {"bc_alpha": "α"}
    default_learning_starts: ClassVar[int] = 25_000

    bc_alpha: Annotated[float, Field(gt=0)] = 2.5
    """Weight of the critic's value relative to the distance from the data's actions; smaller
    imitates the data more closely"""


class TD3BC(TD3):
    """TD3 with a behavior-cloning term."""

    hyperparameters_type = TD3BCHyperparameters
    hyperparameters: TD3BCHyperparameters

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return `-lambda Q + (pi - a)^2`, where lambda normalizes the scale of Q."""
        action = self.act(state, batch.obs)
        q = self.first_critic_values(state, batch.obs, action, noise)
        bc_lambda = self.hyperparameters.bc_alpha / q.detach().abs().mean().clamp(min=1e-6)
        bc_loss = (action - batch.action).square().mean()
        loss = -bc_lambda * q.mean() + bc_loss
        return loss, {"actor_loss": loss, "bc_loss": bc_loss, "bc_lambda": bc_lambda}


td3_bc_loss = TD3BC.total_loss
"""The sum of TD3+BC's losses and their metrics: `td3_bc_loss(td3_bc, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="td3_bc",
    title="TD3+BC",
    reference="arXiv:2106.06860",
    use_when="recorded data of good quality; the simplest offline method with a critic",
    algorithm=TD3BC,
    regimes=("offline", "online", "mixed"),
    normalizes_observations=True,
)
