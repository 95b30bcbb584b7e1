"""Twin delayed deep deterministic policy gradient (1802.09477).

DDPG with three additions: the minimum of twin critics as the target, noise on the target actor's
actions, which averages the target over similar actions, and a policy that is updated, together
with all targets, only at every second critic update.

With more than one atom, critics learn the distribution of the return, as in FastTD3 (2505.22642),
which also uses thousands of environments and large batches: see the config `td3/fast`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Draw, Draws
from rl_training.algorithms.deterministic import (
    DeterministicAlgorithm,
    DeterministicHyperparameters,
)
from rl_training.algorithms.functional import (
    categorical_target,
    cross_entropies,
    of_least_mean,
)
from rl_training.algorithms.hyperparameters import (
    Count,
    DistributionHyperparameters,
    Hyperparameters,
    OnlineHyperparameters,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.categorical import Support
from rl_training.types import Batch, Metrics, Noise, State


class TargetNoiseHyperparameters(DeterministicHyperparameters):
    """Hyper-parameters of algorithms with TD3's additions."""

    symbols: ClassVar[Mapping[str, str]] = {
        "exploration_noise": "σ",
        "policy_noise": "σ̃",
        "noise_clip": "c",
        "policy_delay": "d",
    }

    policy_delay: Count = 2
    """The actor and all target networks are updated at every n-th update of the critics"""
    policy_noise: Annotated[float, Field(ge=0)] = 0.2
    """Standard deviation of the noise on the actions in targets, which are in [-1, 1]; 0: none"""
    noise_clip: Annotated[float, Field(ge=0)] = 0.5
    """The noise on the actions in targets is clipped to plus and minus this"""


class TD3Hyperparameters(
    TargetNoiseHyperparameters, OnlineHyperparameters, DistributionHyperparameters
):
    """The defaults of the authors' current code, which differ from the paper's."""

    default_learning_starts: ClassVar[int] = 25_000


class TD3(DeterministicAlgorithm):
    """Twin delayed deep deterministic policy gradient."""

    hyperparameters_type: ClassVar[type[Hyperparameters]] = TD3Hyperparameters
    hyperparameters: TargetNoiseHyperparameters

    def update_noise(self, batch_size: int) -> Draws:
        smoothing = Draw("normal", (batch_size, self.action_dim))
        return {"next_action": smoothing, **self.dropout_noise(batch_size)}

    def support(self) -> Support | None:
        settings = self.hyperparameters
        return settings.support() if isinstance(settings, DistributionHyperparameters) else None

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the squared error of critics, or the cross-entropy of their distributions."""
        support = self.model.support
        if support is None:
            return super().critic_loss(state, batch, noise)
        with torch.no_grad():
            next_action = self.target_actions(state, batch.next_obs, noise)
            critic, dropout = self.target_critic(state), noise.get("target_dropout")
            next_logits = self.model.critic_outputs(
                batch.next_obs, next_action, critic, dropout=dropout
            )
            least = of_least_mean(next_logits, support)
            target = categorical_target(least, batch.reward, batch.discount, support)
        logits = self.model.critic_outputs(
            batch.obs, batch.action, state["critic"], dropout=noise.get("critic_dropout")
        )
        loss = cross_entropies(logits, target).mean(-1).sum()
        return loss, {
            "critic_loss": loss,
            "q_mean": support.mean(logits).mean(),
            "target_q_mean": (target * support.atoms(target)).sum(-1).mean(),
        }

    def target_actions(self, state: State, next_obs: Tensor, noise: Noise) -> Tensor:
        """Return the target actor's actions with clipped noise added."""
        settings = self.hyperparameters
        smoothing = smoothing_noise(
            noise["next_action"], settings.policy_noise, settings.noise_clip
        )
        return (super().target_actions(state, next_obs, noise) + smoothing).clamp(-1, 1)


def smoothing_noise(standard: Tensor, policy_noise: float, noise_clip: float) -> Tensor:
    """Scale standard normal numbers by `policy_noise`, then clip them."""
    return (standard * policy_noise).clamp(-noise_clip, noise_clip)


td3_loss = TD3.total_loss
"""The sum of TD3's losses and their metrics: `td3_loss(td3, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="td3",
    title="Twin Delayed DDPG",
    reference="arXiv:1802.09477, arXiv:2505.22642",
    use_when="a deterministic policy, or a second opinion on SAC (docs/results.md has both)",
    algorithm=TD3,
)
