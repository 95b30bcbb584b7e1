"""Minibatches of the newest rollout, in a random order that changes with every epoch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.types import Batch

TARGETS = ("advantages", "returns", "log_probs", "values")
"""What is computed once for all transitions of a rollout, before the first update on it"""

GOLDEN, MIX_1, MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of SplitMix64 (doi:10.1145/2714064.2660195), as signed numbers"""


class Rollouts:
    """A source of minibatches that together contain each transition of a rollout once per epoch.

    The transitions are the rows of a replay buffer that is as long as a rollout: row `t * num_envs
    + e` is step t of environment e. Collecting the next rollout overwrites them.

    A block of updates goes through these calls: `all_rows` and `keep` once, `shuffle` once per
    epoch, `seek` and `draw` once per update. They use only device tensors.
    """

    def __init__(self, storage: ReplayBuffer, batch_size: int, num_epochs: int) -> None:
        """A rollout with fewer than `batch_size` transitions is one minibatch.

        If the size of a rollout is no multiple of `batch_size`, each epoch leaves out the rest,
        which are other transitions every time.
        """
        self.storage, rows = storage, storage.capacity
        self.batch_size = min(batch_size, rows)
        self.num_minibatches = rows // self.batch_size
        self.updates_per_rollout = num_epochs * self.num_minibatches
        lead, device = storage.sizes.shape[:1], storage.device
        self._positions = torch.arange(rows, device=device).expand(*lead, rows)
        self._steps = (torch.arange(rows, device=device) + 1) * GOLDEN
        self.order = self._positions.clone()
        """The positions of all rows in the order in which minibatches take them"""
        self.targets = {name: torch.zeros(*lead, rows, device=device) for name in TARGETS}
        self._first = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(self.batch_size, device=device)

    def __len__(self) -> int:
        return len(self.storage)

    def flush(self) -> None:
        self.storage.flush()

    def all_rows(self) -> Batch:
        """Return all transitions, `(rows, ...)` or `(width, rows, ...)`, in order of time."""
        return self.storage.at(self._positions)

    def keep(self, targets: Mapping[str, Tensor]) -> None:
        """Store what was computed for all transitions."""
        for name, values in self.targets.items():
            values.copy_(targets[name])

    def shuffle(self, keys: Tensor) -> None:
        """Choose a new order from one random integer per slot, `(1,)` or `(width, 1)`."""
        self.order.copy_(torch.argsort(scrambled(keys + self._steps), dim=-1, stable=True))

    def seek(self, minibatch: int) -> None:
        """Let `draw` return this minibatch of the current order."""
        self._first.fill_(minibatch * self.batch_size)

    def draw(self, bits: Tensor | None = None) -> Batch:
        """Return the current minibatch; no random integers are needed."""
        chosen = self.order.index_select(-1, self._first + self._places)
        targets = {name: values.gather(-1, chosen) for name, values in self.targets.items()}
        return self.storage.at(chosen).with_fields(**targets)

    def sample(self, batch_size: int) -> Batch:
        """Return a minibatch in the order of time, of any size up to that of the rollout."""
        self.flush()
        return self.storage.at(self._positions[..., :batch_size])

    def state_dict(self, slot: int = 0) -> dict[str, Tensor]:
        """What the remaining updates of a block need of a slot, besides the rows."""
        state = {"order": self.order, **self.targets}
        return {name: part if part.dim() == 1 else part[slot] for name, part in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], slot: int = 0) -> None:
        """Restore what `state_dict` returned; raises `ValueError` if it cannot be that."""
        own = self.state_dict(slot)
        if state.keys() != own.keys():
            raise ValueError(f"contains {', '.join(sorted(state))}")
        for name, part in own.items():
            given = state[name]
            if given.shape != part.shape or given.dtype != part.dtype:
                raise ValueError(f"{name} does not fit a rollout of {part.shape[-1]:,} steps")
            if not given.isfinite().all():
                raise ValueError(f"{name} contains numbers that are not finite")
        # On a GPU, a position that is out of range would end the process.
        if not torch.equal(state["order"].sort().values.cpu(), torch.arange(len(own["order"]))):
            raise ValueError("order does not contain each transition once")
        for name, part in own.items():
            part.copy_(state[name])


def scrambled(numbers: Tensor) -> Tensor:
    """Return the outputs of SplitMix64 for its states, which are 64-bit integers."""
    numbers = (numbers ^ _shifted(numbers, 30)) * MIX_1
    numbers = (numbers ^ _shifted(numbers, 27)) * MIX_2
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros at the left."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
