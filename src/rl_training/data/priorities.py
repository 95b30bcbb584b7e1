"""Sampling of rows by priority (1511.05952): a sum tree made of a few wide, flat levels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FAN_OUT = 128
"""Children of a node. Few levels, each one gather and one sum, suit a tensor library better than
the twenty levels of a binary tree; a million rows need three."""

SMALLEST_ERROR = 1e-6
"""Added to every error, so that no row is forgotten"""

UNIFORM_BITS = 24
"""Random bits that a float32 in [0, 1) has room for"""


class Priorities:
    """The priorities of every member's rows, and rows drawn in proportion to them.

    Level 0 holds a number for each row, every other level the sums of the one below. A sum is
    always taken anew from its children, never changed by a difference, so errors do not add up.
    All methods are operations on device tensors alone, so that they can be compiled and captured.
    """

    def __init__(
        self, capacity: int, exponent: float, *, num_seeds: int = 1, device: torch.device | str
    ) -> None:
        """A row whose error is e has the priority `(|e| + a little) ** exponent`."""
        self.capacity, self.exponent, self.num_seeds = capacity, exponent, num_seeds
        self._widths = _level_widths(capacity)
        # Behind the seeds there is room for the row that nobody reads.
        self.levels = [
            torch.zeros(num_seeds * width + FAN_OUT, device=device) for width in self._widths
        ]
        self.largest = torch.ones(num_seeds + 1, device=device)
        """What a new row gets, by seed, so that each is seen soon; nothing for the unread row"""
        self.largest[num_seeds] = 0.0

    def tensors(self) -> list[Tensor]:
        """All that `admit` and `learn` change."""
        return [*self.levels, self.largest]

    def admit(self, positions: Tensor) -> None:
        """Give new rows, by their position in the members' rings, the largest priority so far."""
        seed_index, row = self._locate(positions)
        self.levels[0][seed_index * self._widths[0] + row] = self.largest[seed_index]
        self._add_up(seed_index, row)

    def update(self, positions: Tensor, errors: Tensor) -> None:
        """Give rows the priorities that their errors call for."""
        seed_index, row = self._locate(positions.reshape(-1))
        priority = (errors.reshape(-1).abs() + SMALLEST_ERROR) ** self.exponent
        priority = torch.where(seed_index < self.num_seeds, priority, 0.0)
        leaf = seed_index * self._widths[0] + row
        # Of a row's several errors in one batch the largest counts, whichever comes first.
        self.levels[0][leaf] = 0.0
        self.levels[0].scatter_reduce_(0, leaf, priority, "amax")
        self.largest.scatter_reduce_(0, seed_index, priority, "amax")
        self._add_up(seed_index, row)

    def draw(self, bits: Tensor, seed_index: Tensor | int, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """A row for each random integer, and how much rarer than under uniform sampling it is.

        `bits` is `(..., batch)`; `member` and `sizes`, the rows each has, fit its leading axes.
        Every row of a batch comes from its own equal share of the total.
        """
        batch = bits.shape[-1]
        uniform = (bits >> (63 - UNIFORM_BITS)).float() * 2.0**-UNIFORM_BITS
        share = (torch.arange(batch, device=bits.device) + uniform) / batch
        node = torch.zeros_like(bits)
        total = self._children(len(self.levels) - 1, seed_index, node[..., :1]).sum(-1)
        rest = share * total
        for level in reversed(range(len(self.levels))):
            children = self._children(level, seed_index, node)
            up_to = children.cumsum(-1)
            chosen = (up_to <= rest[..., None]).sum(-1, keepdim=True)
            # Rounding must not lead past the last child that has anything.
            last = torch.where(children > 0, self._order(bits), 0).amax(-1, keepdim=True)
            chosen = torch.minimum(chosen, last)
            priority = children.gather(-1, chosen).squeeze(-1)
            rest = rest - (up_to.gather(-1, chosen).squeeze(-1) - priority)
            node = node * FAN_OUT + chosen.squeeze(-1)
        return node, total / (sizes * priority)

    def state_dict(self, seed_index: int, filled: int) -> dict[str, Tensor]:
        """A member's priorities; sums are saved too, since their last bits depend on the mode."""
        parts = {f"level_{i}": self._of(i, seed_index) for i in range(len(self.levels))}
        parts["level_0"] = parts["level_0"][:filled]
        return {**parts, "largest": self.largest[seed_index]}

    def load_state_dict(self, state: dict[str, Tensor], seed_index: int) -> None:
        for index in range(len(self.levels)):
            saved = state[f"level_{index}"]
            self._of(index, seed_index).zero_()[: len(saved)] = saved.to(self.largest.device)
        self.largest[seed_index] = state["largest"].to(self.largest.device)

    def _locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return positions // self.capacity, positions % self.capacity

    def _of(self, level: int, seed_index: int) -> Tensor:
        width = self._widths[level]
        return self.levels[level][seed_index * width : (seed_index + 1) * width]

    def _children(self, level: int, seed_index: Tensor | int, node: Tensor) -> Tensor:
        blocks = self.levels[level].view(-1, FAN_OUT)
        block = node + seed_index * (self._widths[level] // FAN_OUT)
        return blocks[block]

    def _add_up(self, seed_index: Tensor, row: Tensor) -> None:
        """Renew the sums above changed rows."""
        for level in range(len(self.levels) - 1):
            row = row // FAN_OUT
            sums = self._children(level, seed_index, row).sum(-1)
            self.levels[level + 1][seed_index * self._widths[level + 1] + row] = sums

    def _order(self, like: Tensor) -> Tensor:
        return torch.arange(FAN_OUT, device=like.device)


def _level_widths(capacity: int) -> list[int]:
    """How many numbers each level has room for, from the rows up to a single node's children."""
    widths, nodes = [], capacity
    while True:
        blocks = math.ceil(nodes / FAN_OUT)
        widths.append(blocks * FAN_OUT)
        if blocks == 1:
            return widths
        nodes = blocks
