"""Minibatches of the newest rollout, in a random order that changes with every epoch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.storage.rows import stored_actions
from rl_training.observations import ObservationSpec
from rl_training.types import ActionSpec, Batch

TARGETS = ("advantages", "returns", "log_probs", "values")
"""What is computed once for all transitions of a rollout, before the first update on it"""

COLUMNS = ("reward", "discount", "ended", *TARGETS)
"""Fields of a minibatch with one number for each transition"""

GOLDEN, MIX_1, MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of SplitMix64 (doi:10.1145/2714064.2660195), as signed numbers"""


class Rollouts:
    """A source of minibatches that together contain each transition of a rollout once per epoch.

    The transitions are the rows of a replay buffer that is as long as a rollout: row `t * num_envs
    + e` is step t of environment e. Collecting the next rollout overwrites them.

    A block of updates goes through these calls: `all_rows` and `keep` once, `shuffle` once per
    epoch, `seek` and `draw` once per update. They use only device tensors. What minibatches need is
    copied to a table, with observations normalized already, so that a minibatch is one gather.

    The minibatches of recurrent policies are made of sequences: of consecutive steps of one
    environment.
    """

    def __init__(
        self,
        storage: ReplayBuffer,
        batch_size: int,
        num_epochs: int,
        *,
        sequence_steps: int = 1,
        num_envs: int = 1,
    ) -> None:
        """A rollout with fewer than `batch_size` transitions is one minibatch.

        If the size of a rollout is no multiple of `batch_size`, each epoch leaves out the rest,
        which are other transitions every time. `batch_size` must be a multiple of `sequence_steps`,
        and the steps of each of `num_envs` environments as well.
        """
        self.storage, rows = storage, storage.capacity
        self.batch_size = min(batch_size, rows)
        self.num_minibatches = rows // self.batch_size
        self.updates_per_rollout = num_epochs * self.num_minibatches
        lead, device = storage.sizes.shape[:1], storage.device
        self._positions = torch.arange(rows, device=device).expand(*lead, rows)
        sequences = rows // sequence_steps
        self._steps = (torch.arange(sequences, device=device) + 1) * GOLDEN
        self.order = self._positions[..., :sequences].clone()
        """The numbers of all sequences in the order in which minibatches take them. If sequences
        are single steps, these are the positions of all rows"""
        self._sequences: _Sequences | None = None
        if sequence_steps > 1 or storage.columns.memory:
            self._sequences = _Sequences(storage, sequences, sequence_steps, num_envs)
        self._actions = storage.columns.actions
        self._widths = self.widths(storage.columns.observation, self._actions)
        self._table = torch.zeros(*lead, rows, sum(self._widths), device=device)
        self.is_kept = False
        """Whether the table has the transitions that the storage has"""
        self._starts = rows * torch.arange(*lead, device=device)[:, None] if lead else None
        self._first = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(self.batch_size // sequence_steps, device=device)

    @staticmethod
    def widths(observation: ObservationSpec, actions: ActionSpec) -> list[int]:
        """Columns of the table: of observation and action, and one for each number."""
        return [observation.size, actions.width, *[1] * len(COLUMNS)]

    def __len__(self) -> int:
        return len(self.storage)

    def flush(self) -> None:
        self.storage.flush()

    def all_rows(self) -> Batch:
        """Return all transitions, `(rows, ...)` or `(width, rows, ...)`, in order of time."""
        return self.storage.at(self._positions)

    def keep(self, rows: Batch, targets: Mapping[str, Tensor]) -> None:
        """Store all transitions as updates see them, and what was computed for each of them."""
        fields = {**rows._asdict(), **targets}
        vectors = [rows.obs, rows.action.reshape(*rows.reward.shape, -1).float()]
        columns = [fields[name][..., None] for name in COLUMNS]
        torch.cat([*vectors, *columns], dim=-1, out=self._table)
        if self._sequences is not None:
            self._sequences.keep(rows)
        self.is_kept = True

    def shuffle(self, keys: Tensor) -> None:
        """Choose a new order from one random integer per slot, `(1,)` or `(width, 1)`."""
        self.order.copy_(torch.argsort(scrambled(keys + self._steps), dim=-1, stable=True))

    def seek(self, minibatch: int) -> None:
        """Let `draw` return this minibatch of the current order."""
        self._first.fill_(minibatch * len(self._places))

    def draw(self, bits: Tensor | None = None) -> Batch:
        """Return the current minibatch; no random integers are needed.

        It has no next observations: its targets are known.
        """
        chosen = self.order.index_select(-1, self._first + self._places)
        memory = None
        if self._sequences is not None:
            chosen, memory = self._sequences.rows_and_memory(chosen)
        rows = chosen if self._starts is None else chosen + self._starts
        gathered = self._table.flatten(0, -2).index_select(0, rows.reshape(-1))
        gathered = gathered.view(*chosen.shape, -1)
        obs, action, *columns = torch.split(gathered, self._widths, dim=-1)
        fields = {name: part.squeeze(-1) for name, part in zip(COLUMNS, columns, strict=True)}
        action = stored_actions(action, self._actions.kind)
        return Batch(obs=obs, action=action, next_obs=obs[..., :0], memory=memory, **fields)

    def sample(self, batch_size: int) -> Batch:
        """Return a minibatch in the order of time, of any size up to that of the rollout."""
        self.flush()
        return self.storage.at(self._positions[..., :batch_size])

    def targets(self) -> dict[str, Tensor]:
        """What was computed for each transition, `(rows,)` or `(width, rows)`."""
        first = sum(self._widths) - len(TARGETS)
        return {name: self._table[..., first + index] for index, name in enumerate(TARGETS)}

    def state_dict(self, slot: int = 0) -> dict[str, Tensor]:
        """What the remaining updates of a block need of a slot, besides the rows."""
        state = {"order": self.order, **self.targets()}
        return {name: part if part.dim() == 1 else part[slot] for name, part in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], slot: int = 0) -> None:
        """Restore what `state_dict` returned; raises `ValueError` if it cannot be that.

        The rows are restored with the storage. `keep` is due before the next minibatch.
        """
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
            raise ValueError("order does not contain each transition or sequence once")
        for name, part in own.items():
            part.copy_(state[name])


class _Sequences:
    """Which rows the sequences of a rollout are, and what was remembered before each of them."""

    def __init__(self, storage: ReplayBuffer, number: int, steps: int, num_envs: int) -> None:
        lead, device = storage.sizes.shape[:1], storage.device
        numbers = torch.arange(number, device=device)
        self._firsts = numbers // num_envs * steps * num_envs + numbers % num_envs
        """The row of the first step of each sequence; that of the next one is `num_envs` further"""
        self._offsets = num_envs * torch.arange(steps, device=device)[:, None]
        self._memories = torch.zeros(*lead, number, storage.columns.memory, device=device)

    def keep(self, rows: Batch) -> None:
        """Store what was remembered before the first step of each sequence."""
        assert rows.memory is not None, "only recurrent policies learn from sequences"
        self._memories.copy_(rows.memory.index_select(-2, self._firsts))

    def rows_and_memory(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of sequences, `(..., steps * sequences)`, and what was remembered."""
        firsts = self._firsts.take(chosen)
        rows = (firsts[..., None, :] + self._offsets).flatten(-2)
        wide = chosen[..., None].expand(*chosen.shape, self._memories.shape[-1])
        return rows, self._memories.gather(-2, wide)


def scrambled(numbers: Tensor) -> Tensor:
    """Return the outputs of SplitMix64 for its states, which are 64-bit integers."""
    numbers = (numbers ^ _shifted(numbers, 30)) * MIX_1
    numbers = (numbers ^ _shifted(numbers, 27)) * MIX_2
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros at the left."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
