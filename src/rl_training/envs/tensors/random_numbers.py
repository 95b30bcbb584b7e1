"""Random numbers of worlds, computed from the seed, the world and its episode.

There is no generator whose state must be saved, or that other worlds could advance. So a world has
the same episodes whatever the others do, on any device, and in a captured program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The constants of SplitMix64 (Steele, Lea and Flood, 2014), as signed integers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64
_BITS = 24
"""Random bits of a float32 in [0, 1)"""


def world_keys(seeds: Sequence[int], num_envs: int, device: torch.device) -> Tensor:
    """Return a key `(num_envs,)` for each world; the worlds are split evenly between the seeds."""
    if num_envs % len(seeds):
        raise ValueError(f"{num_envs} worlds cannot be split evenly between {len(seeds)} seeds")
    each = num_envs // len(seeds)
    roots = torch.tensor(list(seeds), dtype=torch.int64, device=device).repeat_interleave(each)
    indices = torch.arange(each, device=device).repeat(len(seeds))
    return mixed(mixed(roots) + indices)


def mixed(numbers: Tensor) -> Tensor:
    """Return int64 numbers whose bits depend on all bits of the given ones (SplitMix64)."""
    numbers = numbers + _INCREMENT
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST_FACTOR
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND_FACTOR
    return numbers ^ _shifted(numbers, 31)


def uniform(keys: Tensor, counts: Tensor, size: int) -> Tensor:
    """Return `(num_envs, size)` float32 in [0, 1) for the `counts`-th use of each key."""
    places = torch.arange(size, device=keys.device)
    bits = mixed(mixed(keys + counts)[:, None] + places)
    return _shifted(bits, 64 - _BITS).float() * 2.0**-_BITS


def normal(keys: Tensor, counts: Tensor, size: int) -> Tensor:
    """Return `(num_envs, size)` standard normal numbers (Box and Muller)."""
    numbers = uniform(keys, counts, 2 * size)
    radius = torch.sqrt(-2 * torch.log1p(-numbers[:, :size]))
    return radius * torch.cos(2 * math.pi * numbers[:, size:])


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros; `>>` alone repeats the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
