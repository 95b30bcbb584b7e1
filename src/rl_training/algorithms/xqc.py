"""XQC (2509.25174): soft actor-critic with well-conditioned critics.

Batch normalization before each ReLU, weights into each unit of norm one, and a cross-entropy loss
of categorical critics, on rewards that are divided by the standard deviation of returns so far.

Follows the authors' code. There the actor's running statistics move at every update of the critics;
here they move as far in one update of the actor. Learning rates of actor and temperature follow the
schedule by their own updates, of which there are a third as many.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from rl_training.algorithms.batch_normalized import (
    CategoricalAlgorithm,
    CategoricalHyperparameters,
)
from rl_training.algorithms.hyperparameters import (
    Count,
    Fraction,
    LayerSizes,
    Schedule,
    UnitInterval,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.normalized import Normalization


class XQCHyperparameters(CategoricalHyperparameters):
    """The authors' settings, except `gamma`, which they set by the length of episodes.

    It is `1 - 5 / steps`, from 0.95 to 0.995, where an episode has at most that many steps.
    """

    batch_norm_momentum: UnitInterval = 0.01
    """Fraction by which running statistics of the critics move toward those of a minibatch; those
    of the actor move as far as in `policy_delay` such steps"""
    target_entropy: float | Literal["auto"] = "auto"
    """Entropy of the policy, in nats for actions in [-1, 1], that a tuned temperature aims at.
    `auto`: -0.5 per action component"""
    hidden_sizes: LayerSizes = (512, 512, 512, 512)
    actor_hidden_sizes: LayerSizes | None = (256, 256, 256, 256)
    """Units of each hidden layer of the actor; if only `hidden_sizes` is given, that is used"""
    policy_delay: Count = 3
    gradient_updates_per_step: Count = 2
    learning_rate_schedule: Schedule = "linear"
    learning_rate_end_factor: Fraction = 0.1

    @model_validator(mode="after")
    def _use_hidden_sizes(self) -> XQCHyperparameters:
        given = self.model_fields_set
        if "hidden_sizes" in given and "actor_hidden_sizes" not in given:
            self.derive(actor_hidden_sizes=None)
        return self


class XQC(CategoricalAlgorithm):
    """Soft actor-critic with batch and weight normalization and a cross-entropy loss."""

    hyperparameters_type = XQCHyperparameters
    hyperparameters: XQCHyperparameters
    normalization = Normalization("before", epsilon=1e-3, unbiased=False, unit_weights=True)
    entropy_per_action: ClassVar[float] = -0.5

    def actor_momentum(self) -> float:
        settings = self.hyperparameters
        return 1 - (1 - settings.batch_norm_momentum) ** settings.policy_delay


xqc_loss = XQC.total_loss
"""The sum of XQC's losses and their metrics: `xqc_loss(xqc, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="xqc",
    title="XQC",
    reference="arXiv:2509.25174",
    use_when="few environment steps on a GPU, two updates per step",
    algorithm=XQC,
)
