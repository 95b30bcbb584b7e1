"""Give transitions other goals when they are sampled: they are stored once, as they were.

The distribution is that of `Hindsight`, which stores each transition again for every new goal: one
of `1 + per_transition` sampled transitions keeps its goal, and the others get one that the same
episode reached. Rewards are computed for every batch, so the environment needs functions of tensors
for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training.data.formats.recording import episode_lengths
from rl_training.data.hindsight.relabelling import Strategy
from rl_training.types import Batch


class TensorGoals(Protocol):
    """What relabelling of batches needs to know about an environment with goals."""

    @property
    def achieved(self) -> slice:
        """The words of an observation row that are the achieved goal."""
        ...

    @property
    def desired(self) -> slice:
        """The words of an observation row that are the desired goal."""
        ...

    def tensor_rewards(self, achieved: Tensor, desired: Tensor) -> Tensor:
        """The rewards `(...,)`, float32, of steps that lead to `achieved`, `(..., words)`."""
        ...

    def tensor_terminations(self, achieved: Tensor, desired: Tensor) -> Tensor | None:
        """Whether such steps end the episode, bool; None if only the episode itself says."""
        ...


@dataclass(frozen=True)
class SampledHindsight:
    """How the transitions of a batch are relabelled; each is a single step.

    Uses only tensors of the device of the batch, with any leading axes, so that it can be compiled
    and captured.
    """

    goals: TensorGoals
    strategy: Strategy
    per_transition: int
    gamma: float
    transform: Callable[[Tensor], Tensor] | None = None
    """Applied to the rewards of the environment"""

    def choose(self, bits: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Choose which transitions get another goal, and which one, from random integers.

        `before` and `after` are how many steps of its episode are stored before and after each
        transition. Returns a mask, and how many steps after its own the goal was reached.
        """
        copies = 1 + self.per_transition
        is_relabelled, bits = bits % copies > 0, bits // copies
        if self.strategy == "final":
            return is_relabelled, after
        if self.strategy == "future":
            return is_relabelled, bits % (after + 1)
        return is_relabelled, bits % (before + after + 1) - before

    def relabel(self, batch: Batch, is_relabelled: Tensor, goal: Tensor) -> Batch:
        """Give the transitions of the mask these goals, `(..., words)`, and their rewards."""
        achieved = batch.next_obs[..., self.goals.achieved]
        reward = self.goals.tensor_rewards(achieved, goal)
        reward = reward if self.transform is None else self.transform(reward)
        discount = batch.discount
        if (ended := self.goals.tensor_terminations(achieved, goal)) is not None:
            left = torch.where(ended, 0.0, self.gamma).to(discount.dtype)
            discount = torch.where(is_relabelled, left, discount)
        return batch._replace(
            obs=self._with_goal(batch.obs, is_relabelled, goal),
            next_obs=self._with_goal(batch.next_obs, is_relabelled, goal),
            reward=torch.where(is_relabelled, reward, batch.reward),
            discount=discount,
        )

    def _with_goal(self, obs: Tensor, is_relabelled: Tensor, goal: Tensor) -> Tensor:
        desired = self.goals.desired
        new = torch.where(is_relabelled.unsqueeze(-1), goal, obs[..., desired])
        return torch.cat([obs[..., : desired.start], new, obs[..., desired.stop :]], dim=-1)


class RecordedEpisodes:
    """Finds goals for recorded rows, which are stored episode by episode."""

    def __init__(
        self, hindsight: SampledHindsight, ends: np.ndarray, device: torch.device | str
    ) -> None:
        """`ends` is the exclusive end row of each episode."""
        self.hindsight = hindsight
        rows, lengths = np.arange(ends[-1]), episode_lengths(ends)
        first, last = np.repeat(ends - lengths, lengths), np.repeat(ends, lengths)
        around = np.stack([rows - first, last - 1 - rows], axis=1)
        self._around = torch.from_numpy(around).to(device)

    def relabel(self, batch: Batch, indices: Tensor, bits: Tensor, next_obs: Tensor) -> Batch:
        """Relabel the rows at `indices`; `next_obs` are the next observations of all rows."""
        before, after = self._around[indices].unbind(-1)
        is_relabelled, ahead = self.hindsight.choose(bits, before, after)
        reached = next_obs[:, self.hindsight.goals.achieved]
        return self.hindsight.relabel(batch, is_relabelled, reached[indices + ahead])
