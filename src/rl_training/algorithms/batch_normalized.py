"""What CrossQ, XQC and FlashSAC share: SAC with batch normalization in actor and critics.

The critics see the taken actions and the policy's next actions in one batch, so that both are
normalized by the same statistics. The actor and the values that it maximizes use running statistics
wherever nothing is learned about the network: in targets, in the actor's loss the critics, and when
acting. The losses return new running statistics, which are part of a saved policy.

All objectives are computed from the same state, as in every algorithm of this package. The authors
update critics before the actor (CrossQ, XQC) or after it (FlashSAC).
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import STATISTICS
from rl_training.algorithms.functional import Adam, cross_entropies, of_least_mean, projected
from rl_training.algorithms.hyperparameters import Decay, Rate, ReturnSteps, UnitInterval
from rl_training.algorithms.maximum_entropy import (
    MaximumEntropyAlgorithm,
    MaximumEntropyHyperparameters,
    least,
)
from rl_training.models.categorical import Support
from rl_training.models.mlp import Initialization
from rl_training.models.mlp_normalized import NormalizedActorCritic
from rl_training.models.normalized import Normalization, projected_vector
from rl_training.types import BUFFERS, Batch, Metrics, Noise, ReturnScaling, State

ACTOR_STATISTICS, CRITIC_STATISTICS = "actor" + STATISTICS, "critic" + STATISTICS


class BatchNormalizedHyperparameters(MaximumEntropyHyperparameters):
    """Hyper-parameters of SAC with batch normalization."""

    batch_norm_momentum: UnitInterval = 0.01
    """Fraction by which running statistics move toward those of a minibatch"""
    critic_layer_norm: bool = False
    """Always false, since the networks have batch normalization"""
    actor_layer_norm: bool = False
    """Always false, since the networks have batch normalization"""
    critic_dropout: Decay = 0.0
    """Always 0, since the networks have batch normalization"""

    @model_validator(mode="after")
    def _check_other_layers(self) -> BatchNormalizedHyperparameters:
        for name in ("critic_layer_norm", "actor_layer_norm", "critic_dropout"):
            if value := getattr(self, name):
                raise ValueError(
                    f"{name} = {value}: the networks of this algorithm have batch normalization "
                    "instead; use sac with this setting"
                )
        return self

    @model_validator(mode="after")
    def _check_batch_size(self) -> BatchNormalizedHyperparameters:
        if self.batch_size < 2:
            raise ValueError(
                f"batch_size = {self.batch_size}: must be at least 2, because batch normalization "
                "needs the variance of a minibatch"
            )
        return self


class BatchNormalizedAlgorithm(MaximumEntropyAlgorithm):
    """Soft actor-critic whose networks have batch normalization."""

    hyperparameters: BatchNormalizedHyperparameters
    model: NormalizedActorCritic
    normalization: ClassVar[Normalization]
    log_std_min: ClassVar[float] = -10.0
    smooth_log_std: ClassVar[bool] = False
    """Whether a tanh limits the logarithm of the standard deviation, instead of clipping"""
    actor_sees_next: ClassVar[bool] = False
    """Whether the actor's loss normalizes observations and next observations together"""

    @abstractmethod
    def compare(
        self, outputs: Tensor, next_outputs: Tensor, bonus: Tensor, batch: Batch
    ) -> tuple[Tensor, Metrics]:
        """Return the critics' loss and metrics.

        Outputs are `(critics, batch, outputs)`, without a gradient for the next ones. `bonus` is
        the entropy bonus `(batch,)` of the next actions.
        """

    def support(self) -> Support | None:
        """Return the support of categorical critics; None if critics are scalar."""
        return None

    def build_model(self, generator: torch.Generator) -> NormalizedActorCritic:
        return self.hyperparameters.build(
            NormalizedActorCritic,
            self.plan,
            self.action_dim,
            generator,
            normalization=self.normalization,
            support=self.support(),
            log_std_min=self.log_std_min,
            smooth_log_std=self.smooth_log_std,
        )

    def project(self, state: State, *, policy_updated: bool) -> None:
        normalization = self.normalization
        if not (normalization.unit_weights or normalization.unit_scales):
            return
        for name, network in self.networks().items():
            if name == "critic" or policy_updated:
                state[name].copy_(projected_vector(network, state[name]))

    def act(self, state: State, obs: Tensor) -> Tensor:
        return self.model.head.actions_of(self.actor_outputs(state, obs))

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        return self.model.head.actions_of(self.actor_outputs(state, obs), noise["action"])

    def actor_outputs(self, state: State, obs: Tensor) -> Tensor:
        """Return the outputs of the actor's network, with running statistics."""
        inputs = self.actor_input(state, obs)
        return self.model.actor_outputs(inputs, state["actor"], state[ACTOR_STATISTICS])

    def actor_momentum(self) -> float:
        """Return how far the actor's running statistics move in one update of the policy."""
        return self.hyperparameters.batch_norm_momentum

    def renormalizes(self, state: State, network: str) -> Tensor | None:
        """Return whether the network's minibatches are renormalized; None if they never are."""
        return None

    def critic_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the error of the critics on one batch of taken and next actions."""
        rows = batch.reward.shape[0]
        with torch.no_grad():
            next_action, next_log_prob = self.model.head.sample_of(
                self.actor_outputs(state, batch.next_obs), noise["next_action"]
            )
            bonus = -state["log_alpha"].exp() * next_log_prob
            if not self.hyperparameters.entropy_in_target:
                bonus = torch.zeros_like(bonus)
        obs = torch.cat([batch.obs, batch.next_obs])
        actions = torch.cat([batch.action, next_action])
        outputs, statistics = self._critic_outputs(state, "critic", obs, actions)
        next_outputs = outputs
        if "target_critic" in state:
            with torch.no_grad():
                next_outputs, _ = self._critic_outputs(state, "target_critic", obs, actions)
        loss, metrics = self.compare(
            outputs[:, :rows], next_outputs[:, rows:].detach(), bonus, batch
        )
        return loss, {**metrics, BUFFERS + CRITIC_STATISTICS: statistics}

    def _critic_outputs(
        self, state: State, name: str, obs: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.model.critic_in_training(
            obs,
            actions,
            state[name],
            state[CRITIC_STATISTICS],
            momentum=self.hyperparameters.batch_norm_momentum,
            renormalize=self.renormalizes(state, "critic"),
        )

    def policy_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        """Return the actor's loss, plus the temperature's if that is tuned.

        As in the authors' code, the temperature's is linear in the temperature itself, not in its
        logarithm.
        """
        rows = batch.reward.shape[0]
        obs = torch.cat([batch.obs, batch.next_obs]) if self.actor_sees_next else batch.obs
        outputs, statistics = self.model.actor_in_training(
            self.actor_input(state, obs),
            state["actor"],
            state[ACTOR_STATISTICS],
            momentum=self.actor_momentum(),
            renormalize=self.renormalizes(state, "actor"),
        )
        action, log_prob = self.model.head.sample_of(outputs[:rows], noise["action"])
        q = self.model.q_values(
            batch.obs,
            action,
            # Detached, so that the gradient passes through the critics to the actor only.
            critic=state["critic"].detach(),
            statistics=state[CRITIC_STATISTICS],
        )
        alpha, entropy = state["log_alpha"].exp(), -log_prob.detach().mean()
        loss = actor_loss = (alpha.detach() * log_prob - self.policy_value(q)).mean()
        metrics = {"actor_loss": actor_loss, "entropy": entropy, "alpha": alpha.detach()}
        if self.target_entropy is not None:
            alpha_loss = alpha * (entropy - self.target_entropy)
            loss = loss + alpha_loss
            metrics["alpha_loss"] = alpha_loss
        return loss, {**metrics, BUFFERS + ACTOR_STATISTICS: statistics}

    def policy_value(self, q: Tensor) -> Tensor:
        """Return the minimum over the critics."""
        return least(q)


class CategoricalHyperparameters(BatchNormalizedHyperparameters):
    """Hyper-parameters of XQC and FlashSAC: categorical critics on scaled rewards."""

    symbols: ClassVar[Mapping[str, str]] = {"num_atoms": "N", "value_max": "G_max"}

    initialization: Initialization = "orthogonal"
    """Initial parameters of layers, whose weights are then scaled: those into a unit have norm
    one"""
    initial_alpha: Rate = 0.01
    num_atoms: Annotated[int, Field(ge=2, le=100_000)] = 101
    """Number of values in the distribution of the return that the critics learn"""
    value_max: Rate = 5.0
    """Largest return of the distribution, in units of scaled rewards; the smallest one is minus
    this"""
    normalize_rewards: bool = True
    """Divide sampled rewards by the standard deviation of the discounted returns so far"""
    n_step: ReturnSteps = 1

    def return_scaling(self) -> ReturnScaling | None:
        return ReturnScaling(self.gamma) if self.normalize_rewards else None


class CategoricalAlgorithm(BatchNormalizedAlgorithm):
    """Critics learn the distribution of the return; weights into each unit have norm one."""

    hyperparameters: CategoricalHyperparameters

    def support(self) -> Support:
        settings = self.hyperparameters
        return Support(-settings.value_max, settings.value_max, settings.num_atoms)

    def optimizers(self) -> dict[str, Adam]:
        # As in the authors' code, schedules count the steps of each optimizer.
        delay = self.hyperparameters.policy_delay
        return {
            name: optimizer if name == "critic" else dataclasses.replace(optimizer, delay=delay)
            for name, optimizer in super().optimizers().items()
        }

    def compare(
        self, outputs: Tensor, next_outputs: Tensor, bonus: Tensor, batch: Batch
    ) -> tuple[Tensor, Metrics]:
        """Return the cross-entropy with the distribution of the critic with the least mean."""
        support = self.support()
        chosen = of_least_mean(next_outputs, support)
        atoms = support.atoms(chosen) + bonus[:, None]
        values = batch.reward[:, None] + batch.discount[:, None] * atoms
        target = projected(torch.softmax(chosen, -1), values, support).detach()
        losses = cross_entropies(outputs, target).mean(-1)
        loss = self.over_critics(losses)
        return loss, {
            "critic_loss": loss,
            "q_mean": support.mean(outputs).mean(),
            "target_q_mean": (target * support.atoms(target)).sum(-1).mean(),
        }

    def over_critics(self, losses: Tensor) -> Tensor:
        """Return one loss from those of the critics, `(critics,)`: their sum."""
        return losses.sum()
