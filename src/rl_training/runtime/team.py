"""Seeds that one program trains."""

from __future__ import annotations

from dataclasses import dataclass

from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.source import Source
from rl_training.runtime.explorer import Explorer
from rl_training.runtime.learner import Learner


@dataclass(frozen=True)
class Team:
    """What a program's seeds share: all seeds of a run on a GPU, a single seed on a CPU.

    A GPU computes many small networks in hardly more time than one. A CPU does not: there, seeds
    take turns, and each one's bits are those of a run of its own.
    """

    learner: Learner
    explorer: Explorer | None = None
    """None, like the buffer, where nothing is collected"""
    replay: ReplayBuffer | None = None
    prior_data: Source | None = None
    """Recorded data alone, to pretrain on, where there is live experience too"""

    @property
    def size(self) -> int:
        return len(self.learner.algorithms)
