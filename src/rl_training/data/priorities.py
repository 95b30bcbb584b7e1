"""Prioritized sampling (1511.05952) with a sum tree that has a few wide levels."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

FAN_OUT = 128
"""Children of a node. A million rows need three levels, each one gather and one sum. A binary tree
would need twenty, which is slow in a tensor library."""

SMALLEST_ERROR = 1e-6
"""Added to every error, so that every row can be sampled"""

ROUNDING = 1e-4
"""Largest relative difference between two sums of the same priorities"""

UNIFORM_BITS = 24
"""Random bits used for a float32 in [0, 1)"""


class Priorities:
    """Priorities of the rows of every seed, and sampling in proportion to them.

    Level 0 holds the priority of each row; every other level holds sums over the level below. Sums
    are always recomputed from their children, so that rounding errors do not accumulate. All
    methods use only device tensors, so that they can be compiled and captured.
    """

    def __init__(
        self, capacity: int, exponent: float, *, num_seeds: int = 1, device: torch.device | str
    ) -> None:
        """A row with error e has priority `(|e| + SMALLEST_ERROR) ** exponent`."""
        self.capacity, self.exponent, self.num_seeds = capacity, exponent, num_seeds
        self._widths = _level_widths(capacity)
        # One more block at the end, for the unused row.
        self.levels = [
            torch.zeros(num_seeds * width + FAN_OUT, device=device) for width in self._widths
        ]
        self.largest = torch.ones(num_seeds + 1, device=device)
        """Priority of a new row, by seed: the largest so far. 0 for the unused row"""
        self.largest[num_seeds] = 0.0

    def tensors(self) -> list[Tensor]:
        """All tensors that `admit` and `update` write."""
        return [*self.levels, self.largest]

    def admit(self, positions: Tensor) -> None:
        """Give new rows, by their storage position, the largest priority so far."""
        seed_index, row = self._locate(positions)
        self.levels[0][seed_index * self._widths[0] + row] = self.largest[seed_index]
        self._add_up(seed_index, row)

    def exclude(self, positions: Tensor) -> None:
        """Never draw these rows again, until new rows take their places."""
        seed_index, row = self._locate(positions)
        self.levels[0][seed_index * self._widths[0] + row] = 0.0
        self._add_up(seed_index, row)

    def update(self, positions: Tensor, errors: Tensor) -> None:
        """Set the priorities of rows from their errors."""
        seed_index, row = self._locate(positions.reshape(-1))
        priority = (errors.reshape(-1).abs() + SMALLEST_ERROR) ** self.exponent
        priority = torch.where(seed_index < self.num_seeds, priority, 0.0)
        leaf = seed_index * self._widths[0] + row
        # If a row is in the batch more than once, its largest error counts, in any order.
        self.levels[0][leaf] = 0.0
        self.levels[0].scatter_reduce_(0, leaf, priority, "amax")
        self.largest.scatter_reduce_(0, seed_index, priority, "amax")
        self._add_up(seed_index, row)

    def draw(self, bits: Tensor, seed_index: Tensor | int, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return a row for each random integer, and its uniform divided by its actual probability.

        `bits` is `(..., batch)`; `seed_index` and `sizes` (rows of each seed) broadcast to its
        leading axes. Sampling is stratified: the total priority is split into equal segments, one
        for each row of the batch.
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
            # Rounding must not select a child after the last one with a positive priority.
            last = torch.where(children > 0, self._order(bits), 0).amax(-1, keepdim=True)
            chosen = torch.minimum(chosen, last)
            priority = children.gather(-1, chosen).squeeze(-1)
            rest = rest - (up_to.gather(-1, chosen).squeeze(-1) - priority)
            node = node * FAN_OUT + chosen.squeeze(-1)
        return node, total / (sizes * priority)

    def extremes(self) -> Tensor:
        """The smallest and largest number of each seed, `(num_seeds, 2)`, the total included."""
        top = self.levels[-1][: self.num_seeds * self._widths[-1]].view(self.num_seeds, -1)
        parts = [self.largest[: self.num_seeds, None], top.sum(1, keepdim=True)]
        for level, width in zip(self.levels, self._widths, strict=True):
            of_seeds = level[: self.num_seeds * width].view(self.num_seeds, width)
            parts += [of_seeds.amin(1, keepdim=True), of_seeds.amax(1, keepdim=True)]
        both = torch.cat(parts, dim=1)
        return torch.stack([both.amin(1), both.amax(1)], dim=1)

    def state_dict(self, seed_index: int, filled: int) -> dict[str, Tensor]:
        """Priorities of a seed, with the sums: their last bits depend on the execution mode."""
        parts = {f"level_{i}": self._of(i, seed_index) for i in range(len(self.levels))}
        parts["level_0"] = parts["level_0"][:filled]
        return {**parts, "largest": self.largest[seed_index]}

    def load_state_dict(
        self, state: dict[str, Tensor], seed_index: int, excluded: Tensor | None = None
    ) -> None:
        """Restore the priorities of a seed; raise `ValueError` if `draw` could not use them.

        `excluded` are the seed's rows that must not be drawn.
        """
        for index in range(len(self.levels)):
            saved = state[f"level_{index}"]
            self._of(index, seed_index).zero_()[: len(saved)] = saved.to(self.largest.device)
        self.largest[seed_index] = state["largest"].to(self.largest.device)
        drawn = torch.ones_like(state["level_0"], dtype=torch.bool, device=self.largest.device)
        if excluded is not None:
            drawn[excluded] = False
        if not self._is_sound(seed_index, drawn):
            raise ValueError("contains priorities or sums that are not possible")

    def _is_sound(self, seed_index: int, drawn: Tensor) -> bool:
        """Whether priorities are finite, those of rows to draw positive, and the sums are right.

        With any other sums, `draw` could choose a row that does not exist.
        """
        levels = [self._of(index, seed_index) for index in range(len(self.levels))]
        values = torch.cat([*levels, self.largest[seed_index : seed_index + 1]])
        if not (values.isfinite() & (values >= 0)).all():
            return False
        if not torch.equal(levels[0][: len(drawn)] > 0, drawn):
            return False
        for below, above in itertools.pairwise(levels):
            sums = torch.zeros_like(above)
            sums[: len(below) // FAN_OUT] = below.view(-1, FAN_OUT).sum(-1)
            if not torch.allclose(above, sums, rtol=ROUNDING, atol=0.0):
                return False
        return True

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
        """Recompute the sums above changed rows."""
        for level in range(len(self.levels) - 1):
            row = row // FAN_OUT
            sums = self._children(level, seed_index, row).sum(-1)
            self.levels[level + 1][seed_index * self._widths[level + 1] + row] = sums

    def _order(self, like: Tensor) -> Tensor:
        return torch.arange(FAN_OUT, device=like.device)


def _level_widths(capacity: int) -> list[int]:
    """Size of each level, from the rows up to the children of the root."""
    widths, nodes = [], capacity
    while True:
        blocks = math.ceil(nodes / FAN_OUT)
        widths.append(blocks * FAN_OUT)
        if blocks == 1:
            return widths
        nodes = blocks
