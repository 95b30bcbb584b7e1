"""What the engine asks of anything that batches come from."""

from __future__ import annotations

from typing import Protocol

from rl_training.types import Batch


class Source(Protocol):
    """Transitions to sample from."""

    def __len__(self) -> int:
        """How many rows there are now."""
        ...

    def sample(self, batch_size: int) -> Batch:
        """Rows drawn at random, on the learner's device."""
        ...
