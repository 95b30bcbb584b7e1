"""Noisy networks (1706.10295): learned, factorized Gaussian noise on the weights of layers.

The weight from input `i` to output `j` is `mu_ij + sigma_ij f(e_i) f(e_j)`, and the bias of output
`j` is `mu_j + sigma_j f(e_j)`, where `e` is standard normal and `f(x) = sign(x) sqrt(|x|)`. The
noise is a product, so each row of a batch can have its own without weights of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor


def noise_size(sizes: Sequence[int]) -> int:
    """Return how many random numbers the layers of these sizes need."""
    return sum(fan_in + fan_out for fan_in, fan_out in pairwise(sizes))


def noise_shapes(sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the learned standard deviations."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        shapes |= {f"noise_weight_{layer}": (fan_in, fan_out), f"noise_bias_{layer}": (fan_out,)}
    return shapes


def initial_noise(sizes: Sequence[int], std: float) -> dict[str, float]:
    """Return the initial standard deviations: `std / sqrt(inputs)`, as in the paper."""
    return {
        f"noise_{part}_{layer}": std / math.sqrt(fan_in)
        for layer, (fan_in, _) in enumerate(pairwise(sizes))
        for part in ("weight", "bias")
    }


def split_noise(noise: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return `f(e)` for the inputs and the outputs of each layer, from `(rows, noise_size)`."""
    scaled = noise.sign() * noise.abs().sqrt()
    parts = torch.split(scaled, [size for pair in pairwise(sizes) for size in pair], dim=-1)
    return list(zip(parts[::2], parts[1::2], strict=True))


def disturbance(
    parameters: Mapping[str, Tensor], layer: int, inputs: Tensor, noise: tuple[Tensor, Tensor]
) -> Tensor:
    """Return what the noise adds to the outputs `(batch, out)` of a layer.

    The parts of `noise` have one row for all rows of `inputs`, or one for each.
    """
    of_inputs, of_outputs = noise
    weight, bias = parameters[f"noise_weight_{layer}"], parameters[f"noise_bias_{layer}"]
    return ((inputs * of_inputs) @ weight + bias) * of_outputs
