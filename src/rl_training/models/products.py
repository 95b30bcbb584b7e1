"""Matrix products of hidden layers, exact or of rounded numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

LARGE_PRODUCT = 4_000_000
"""Multiplications from which a product is worth a second thread, or the rounding of its factors"""

_rounded = False


@contextlib.contextmanager
def rounded_products(rounded: bool = True) -> Iterator[None]:
    """Within, large products on a CPU are made of bfloat16 numbers, which take half the time.

    They have float32's range and eight bits of precision. Sums are kept in float32 until their
    end, and so is everything that is no product.
    """
    global _rounded
    before, _rounded = _rounded, rounded
    try:
        yield
    finally:
        _rounded = before


def is_rounded(inputs: Tensor, weight: Tensor) -> bool:
    """Whether the product of these is to be a rounded one."""
    if not _rounded or inputs.device.type != "cpu":
        return False
    return inputs.shape[-2] * weight.shape[-2] * weight.shape[-1] >= LARGE_PRODUCT


def rounded_product(inputs: Tensor, weight: Tensor) -> Tensor:
    """`inputs @ weight`, and its gradients likewise, of bfloat16 numbers."""
    multiply = torch.mm if weight.dim() == 2 else torch.bmm  # without a look at their shapes
    return multiply(inputs.to(torch.bfloat16), weight.to(torch.bfloat16)).to(inputs.dtype)
