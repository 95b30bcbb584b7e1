"""CrossQ (1902.05605): soft actor-critic with batch normalization and without target networks.

The critics value taken and next actions in one batch, which batch normalization then treats alike;
this is what makes target networks superfluous. The critics are wide, and Adam forgets quickly.

Follows the authors' code, which uses batch renormalization (1702.03275) in actor and critics: after
a warm-up, minibatches are moved to the running statistics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Strict, model_validator
from torch import Tensor

from rl_training.algorithms.batch_normalized import (
    BatchNormalizedAlgorithm,
    BatchNormalizedHyperparameters,
)
from rl_training.algorithms.functional import Adam, bootstrapped_target, squared_errors
from rl_training.algorithms.hyperparameters import (
    Count,
    Decay,
    LayerSizes,
    Rate,
    Steps,
    UnitInterval,
)
from rl_training.algorithms.maximum_entropy import least
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.actor_critic import LOG_STD_MIN
from rl_training.models.mlp import Initialization
from rl_training.models.normalized import Normalization
from rl_training.types import Batch, Metrics, State


class CrossQHyperparameters(BatchNormalizedHyperparameters):
    """The authors' settings."""

    symbols: ClassVar[Mapping[str, str]] = {"adam_betas": "β₁, β₂"}

    learning_rate: Rate = 1e-3
    adam_betas: Annotated[tuple[Decay, Decay], Strict(False)] = (0.5, 0.999)
    """Decay rates of Adam's first and second moment; the temperature has 0.9 and 0.999"""
    critic_hidden_sizes: LayerSizes | None = (2048, 2048)
    """Units of each hidden layer of the critics; if only `hidden_sizes` is given, that is used"""
    initialization: Initialization = "lecun"
    policy_delay: Count = 3
    tau: UnitInterval = 1.0
    """Always 1, since there are no target networks"""
    renormalization_starts: Steps = 100_000
    """Updates of a network after which its minibatches are moved to the running statistics (batch
    renormalization); before, they are normalized by their own"""

    @model_validator(mode="after")
    def _use_hidden_sizes(self) -> CrossQHyperparameters:
        given = self.model_fields_set
        if "hidden_sizes" in given and "critic_hidden_sizes" not in given:
            self.derive(critic_hidden_sizes=None)
        return self

    @model_validator(mode="after")
    def _check_tau(self) -> CrossQHyperparameters:
        if self.tau != 1:
            raise ValueError(f"tau = {self.tau}: must be 1, because crossq has no target networks")
        return self


class CrossQ(BatchNormalizedAlgorithm):
    """Soft actor-critic with batch normalization and without target networks."""

    hyperparameters_type = CrossQHyperparameters
    hyperparameters: CrossQHyperparameters
    normalization = Normalization("after", epsilon=1e-3, unbiased=False)
    log_std_min: ClassVar[float] = LOG_STD_MIN

    def targets(self) -> dict[str, str]:
        return {}

    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        """There is nothing to move."""

    def optimizers(self) -> dict[str, Adam]:
        optimizers = super().optimizers()
        if "log_alpha" in optimizers:
            plain: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999}
            optimizers["log_alpha"] = dataclasses.replace(optimizers["log_alpha"], **plain)
        return optimizers

    def renormalizes(self, state: State, network: str) -> Tensor:
        return state[f"{network}.adam_count"] >= self.hyperparameters.renormalization_starts

    def compare(
        self, outputs: Tensor, next_outputs: Tensor, bonus: Tensor, batch: Batch
    ) -> tuple[Tensor, Metrics]:
        """Return the squared error of every critic with respect to the soft Bellman target."""
        next_value = least(next_outputs.squeeze(-1).mT) + bonus
        target = bootstrapped_target(batch.reward, batch.discount, next_value)
        return squared_errors(outputs.squeeze(-1).mT, target)


crossq_loss = CrossQ.total_loss
"""The sum of CrossQ's losses and their metrics: `crossq_loss(crossq, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="crossq",
    title="CrossQ",
    reference="arXiv:1902.05605",
    use_when="few environment steps on a GPU, with smaller networks than XQC and FlashSAC",
    algorithm=CrossQ,
)
