"""Categorical critics: the distribution of the return over evenly spaced values (1707.06887)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Support(NamedTuple):
    """The values, called atoms, that a categorical critic gives probabilities to."""

    low: float
    high: float
    size: int
    """Number of atoms, at least 2"""

    @property
    def spacing(self) -> float:
        """Distance from one atom to the next."""
        return (self.high - self.low) / (self.size - 1)

    def atoms(self, like: Tensor) -> Tensor:
        """Return the atoms `(size,)`, with the device and type of another tensor."""
        return torch.linspace(self.low, self.high, self.size, device=like.device, dtype=like.dtype)

    def mean(self, logits: Tensor) -> Tensor:
        """Return the expected value of distributions `(..., size)`."""
        return (torch.softmax(logits, -1) * self.atoms(logits)).sum(-1)
