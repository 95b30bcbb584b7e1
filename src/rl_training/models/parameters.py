"""One vector holds all parameters of a network; a layout says which part is which.

Papers write a network's parameters as one symbol. Doing the same in code makes an optimiser step,
a target update or a copy one operation on one tensor instead of a loop over layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 16
"""Every tensor starts at a multiple of 16 floats (64 bytes), as a freshly allocated one would:
matrix kernels are faster there, and give the same bits wherever the vector lies."""


class ParameterLayout:
    """Where each named tensor lies in a parameter vector (or in a stack of such vectors)."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self._chunks: list[int] = []
        for shape in self.shapes.values():
            count = math.prod(shape)
            self._chunks += [count, -count % ALIGNMENT]
        self.size = sum(self._chunks)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views of a vector `(..., size)`; leading axes stay in front of each shape."""
        lead = vector.shape[:-1]
        # One split, rather than a slice a tensor, so that its gradient is a single concatenation.
        parts = torch.split(vector, self._chunks, dim=-1)[::2]
        return {
            name: part.reshape(lead + shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector of these tensors; the inverse of `unflatten`, padding filled with zeros."""
        parts = []
        for (name, shape), padding in zip(self.shapes.items(), self._chunks[1::2], strict=True):
            tensor = tensors[name]
            lead = tensor.shape[: tensor.dim() - len(shape)]
            if tensor.shape[len(lead) :] != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
            parts += [tensor.reshape(*lead, -1), tensor.new_zeros(*lead, padding)]
        return torch.cat(parts, dim=-1)
