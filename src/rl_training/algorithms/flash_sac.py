"""FlashSAC (2604.04539): soft actor-critic on normalized residual networks.

Actor and critics are residual blocks with batch normalization. Weights into each unit have norm
one, and the scales of normalizations a fixed norm: both are restored after each update. The critics
are categorical, on rewards that are divided by the size of returns so far. Exploration repeats its
noise for a random number of steps.

Follows the authors' code. The actor's learning rate follows the schedule by its own updates, of
which there are half as many; the code's first update is one of the actor, here it is the second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import Draw, Draws, ExplorationMemory
from rl_training.algorithms.batch_normalized import (
    CategoricalAlgorithm,
    CategoricalHyperparameters,
)
from rl_training.algorithms.hyperparameters import (
    Count,
    Fraction,
    LayerSizes,
    Rate,
    Schedule,
    UnitInterval,
)
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.models.normalized import Normalization
from rl_training.types import Noise, ReturnScaling, State

REPEAT = "repeat"
"""Name of the random numbers from which the number of repetitions is computed"""


class FlashSACHyperparameters(CategoricalHyperparameters):
    """The authors' settings for one environment; `learning_starts` is theirs too."""

    symbols: ClassVar[Mapping[str, str]] = {"target_std": "σ_tgt", "noise_repeat_exponent": "μ"}
    default_learning_starts: ClassVar[int] = 10_000

    batch_size: Count = 512
    hidden_sizes: LayerSizes = (256, 256)
    """Units of each residual block, which must be equal; inside, a block has four times as many"""
    actor_hidden_sizes: LayerSizes | None = (128, 128)
    """Units of each residual block of the actor; if only `hidden_sizes` is given, that is used"""
    target_entropy: float | Literal["auto"] = "auto"
    """Entropy of the policy, in nats for actions in [-1, 1], that a tuned temperature aims at.
    `auto`: that of a Gaussian with `target_std` in each action component"""
    normalize_rewards: bool = True
    """Divide sampled rewards by the standard deviation of the discounted returns so far, or by the
    largest of them over `value_max` if that is more"""
    tau: UnitInterval = 0.01
    policy_delay: Count = 2
    learning_rate_schedule: Schedule = "cosine"
    learning_rate_end_factor: Fraction = 0.5
    target_std: Rate = 0.15
    """With `target_entropy: auto`, the tuned temperature aims at the entropy of a Gaussian with
    this standard deviation in each action component"""
    noise_repeat_max: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Largest number of steps that exploration uses the same noise for; 1: new noise at each
    step"""
    noise_repeat_exponent: Annotated[float, Field(ge=0)] = 2.0
    """How quickly longer repetitions become less likely: n steps have a probability in proportion
    to n to the power of minus this"""

    @model_validator(mode="after")
    def _use_hidden_sizes(self) -> FlashSACHyperparameters:
        given = self.model_fields_set
        if "hidden_sizes" in given and "actor_hidden_sizes" not in given:
            self.derive(actor_hidden_sizes=None)
        return self

    @model_validator(mode="after")
    def _check_blocks(self) -> FlashSACHyperparameters:
        for name in ("hidden_sizes", "actor_hidden_sizes", "critic_hidden_sizes"):
            sizes = getattr(self, name)
            if sizes is not None and len(set(sizes)) != 1:
                raise ValueError(
                    f"{name} = {list(sizes)}: residual blocks need one size, such as [256, 256] "
                    "for two blocks of 256 units"
                )
        return self

    def return_scaling(self) -> ReturnScaling | None:
        if not self.normalize_rewards:
            return None
        return ReturnScaling(self.gamma, largest=self.value_max)


class FlashSAC(CategoricalAlgorithm):
    """Soft actor-critic with normalized residual networks and repeated noise."""

    hyperparameters_type = FlashSACHyperparameters
    hyperparameters: FlashSACHyperparameters
    normalization = Normalization("residual", unit_weights=True, unit_scales=True)
    smooth_log_std = True
    actor_sees_next = True

    @property
    def target_entropy(self) -> float | None:
        settings = self.hyperparameters
        if settings.alpha != "auto" or settings.target_entropy != "auto":
            return super().target_entropy
        return self.action_dim * gaussian_entropy(settings.target_std)

    def over_critics(self, losses: Tensor) -> Tensor:
        """Return the mean of the critics' losses."""
        return losses.mean()

    def exploration_memory(self, num_envs: int) -> RepeatedNoise | None:
        settings = self.hyperparameters
        if settings.noise_repeat_max == 1:
            return None
        shape = self.exploration_noise(num_envs)["action"].shape
        return RepeatedNoise(shape, settings.noise_repeat_max, settings.noise_repeat_exponent)


def gaussian_entropy(std: float) -> float:
    """Return the entropy of a Gaussian, in nats."""
    return 0.5 * math.log(2 * math.pi * math.e * std**2)


class RepeatedNoise(ExplorationMemory):
    """Repeats the noise of actions for a random number of steps, the same for all environments.

    n steps, at most `longest`, have a probability in proportion to `n ** -exponent`.
    """

    def __init__(self, shape: tuple[int, ...], longest: int, exponent: float) -> None:
        weights = np.arange(1, longest + 1, dtype=np.float64) ** -exponent
        self._up_to = np.cumsum(weights / weights.sum())
        self.state = {"noise": np.zeros(shape, np.float32), "left": np.zeros((), np.int64)}

    def draws(self) -> Draws:
        return {REPEAT: Draw("uniform", (1,))}

    def __call__(self, noise: Mapping[str, np.ndarray]) -> None:
        held, left = self.state["noise"], self.state["left"]
        if left == 0:
            held[...] = noise["action"]
            number = int(np.searchsorted(self._up_to, noise[REPEAT][0], side="right")) + 1
            left[...] = min(number, len(self._up_to))
        noise["action"][...] = held
        left -= 1

    def change(self, noise: Noise, state: State) -> None:
        held, left = state["noise"], state["left"]
        ends = left == 0
        held.copy_(torch.where(ends, noise["action"], held))
        # The last limit is 1, perhaps rounded down: at most `longest` steps are chosen.
        number = sum((noise[REPEAT][0] >= limit).long() for limit in self._up_to[:-1].tolist()) + 1
        left.copy_(torch.where(ends, number, left) - 1)
        noise["action"].copy_(held)


flash_sac_loss = FlashSAC.total_loss
"""The sum of FlashSAC's losses and their metrics: `flash_sac_loss(sac, state, batch, noise)`"""

SPEC = AlgorithmSpec(
    name="flash_sac",
    title="FlashSAC",
    reference="arXiv:2604.04539",
    use_when="few environment steps on a GPU: the best published results after 200,000 steps",
    algorithm=FlashSAC,
)
