"""Several seeds in one program: a leading axis of slots on states, batches and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rl_training.algorithms.base import Algorithm
from rl_training.types import State


@dataclass(frozen=True)
class Population:
    """How wide the program is, and which slot each member has.

    Kernels of another width may round differently. So a seed that goes on alone, because others
    have stopped or are not resumed with it, keeps its slot in a program of the same width: the
    other slots compute without effect, and its bits stay those of the whole population.
    """

    width: int = 1
    slots: tuple[int, ...] = (0,)

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape in front of a slot's own: none where there is a single slot."""
        return () if self.width == 1 else (self.width,)

    @property
    def members(self) -> slice | list[int]:
        """What picks the members' slots out of a leading axis, in their order."""
        everyone = self.slots == tuple(range(self.width))
        return slice(None) if everyone else list(self.slots)

    def stack_states(self, algorithms: Sequence[Algorithm]) -> State:
        """The state of all slots; each algorithm's own becomes a view of it."""
        if self.width == 1:
            return algorithms[0].state
        stacked = {
            name: tensor.expand(self.width, *tensor.shape).clone()
            for name, tensor in algorithms[0].state.items()
        }
        for slot, algorithm in zip(self.slots, algorithms, strict=True):
            algorithm.move_state({name: tensor[slot] for name, tensor in stacked.items()})
        return stacked

    def over_slots(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` on one slot's tensors, made to take those of all slots."""
        if self.width == 1:
            return function

        def mapped(*arguments: Any) -> Any:
            # What a batch does not have is None, which has no axis.
            axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, arguments)
            return torch.func.vmap(function, in_dims=axes)(*arguments)

        return mapped
