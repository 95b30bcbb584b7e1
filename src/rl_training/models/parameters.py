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
        self._paddings = [-math.prod(shape) % ALIGNMENT for shape in self.shapes.values()]
        self._chunks: list[int] = []
        self._places: list[int] = []
        """Which of the chunks are tensors; the others are padding, of which there is little"""
        for shape, padding in zip(self.shapes.values(), self._paddings, strict=True):
            self._places.append(len(self._chunks))
            self._chunks += [math.prod(shape), padding] if padding else [math.prod(shape)]
        self.size = sum(self._chunks)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views of a vector `(..., size)`; leading axes stay in front of each shape."""
        lead = vector.shape[:-1]
        # One split, rather than a slice a tensor, so that its gradient is a single concatenation.
        parts = torch.split_with_sizes(vector, self._chunks, dim=-1)
        return {
            name: parts[place].view(lead + shape)
            for (name, shape), place in zip(self.shapes.items(), self._places, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector of these tensors; the inverse of `unflatten`, padding filled with zeros."""
        parts = []
        for (name, shape), padding in zip(self.shapes.items(), self._paddings, strict=True):
            tensor = tensors[name]
            lead = tensor.shape[: tensor.dim() - len(shape)]
            if tensor.shape[len(lead) :] != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
            parts += [tensor.reshape(*lead, -1), tensor.new_zeros(*lead, padding)]
        return torch.cat(parts, dim=-1)
