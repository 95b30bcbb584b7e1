"""What learners see of a reward: scaled, shifted and clipped, alike in recorded and live data."""

from __future__ import annotations

from typing import Annotated, TypeVar

import numpy as np
from pydantic import Field
from torch import Tensor

from rl_training.validation import StrictModel

Rewards = TypeVar("Rewards", np.ndarray, Tensor)


class RewardTransform(StrictModel):
    """Scaled, then shifted, then clipped to plus and minus `clip`.

    It belongs to what was learned, as the normalisation of observations does: critics know rewards
    of this scale alone.
    """

    scale: Annotated[float, Field(gt=0)] = 1.0
    shift: float = 0.0
    clip: Annotated[float, Field(gt=0)] | None = None

    def __call__(self, rewards: Rewards) -> Rewards:
        """Rewards as a learner sees them, of the same type."""
        if self.scale == 1 and self.shift == 0 and self.clip is None:
            return rewards
        changed = rewards * self.scale + self.shift
        return changed if self.clip is None else changed.clip(-self.clip, self.clip)

    def undo(self, rewards: Rewards) -> Rewards:
        """The rewards that were changed; what was clipped cannot be known."""
        assert self.clip is None
        return (rewards - self.shift) / self.scale

    def __str__(self) -> str:
        text = f"scaled by {self.scale:g}"
        if self.shift:
            text += f", shifted by {self.shift:g}"
        return text if self.clip is None else f"{text}, clipped to ±{self.clip:g}"
