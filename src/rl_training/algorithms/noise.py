"""Random numbers as an algorithm asks for them: by name, distribution and shape.

An algorithm only declares what it needs. Whoever runs it draws, once for many updates if that is
faster, so that eager, compiled and captured updates see the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rl_training.types import Noise


class Draw(NamedTuple):
    """Independent random numbers of one kind."""

    kind: Literal["normal", "uniform", "bits"]
    """Standard normal, uniform in [0, 1), or integers uniform in [0, 2^63)"""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Draws = Mapping[str, Draw]

KIND_TYPES = {"normal": torch.float32, "uniform": torch.float32, "bits": torch.int64}


def draw_kind(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers of one kind, on the generator's device."""
    numbers = torch.empty(shape, dtype=KIND_TYPES[kind], device=generator.device)
    if kind == "normal":
        return numbers.normal_(generator=generator)
    if kind == "uniform":
        return numbers.uniform_(generator=generator)
    return numbers.random_(generator=generator)


def draw_noise(draws: Draws, generator: torch.Generator) -> Noise:
    """All the numbers that are asked for, drawn one after another."""
    return {name: draw_kind(draw.kind, draw.shape, generator) for name, draw in draws.items()}
