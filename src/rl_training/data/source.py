"""What the engine asks of anything that batches come from."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from rl_training.types import Batch


class Source(Protocol):
    """Transitions to sample from."""

    def __len__(self) -> int:
        """How many rows there are now."""
        ...

    def sample(self, batch_size: int) -> Batch:
        """Rows drawn at random, on the learner's device."""
        ...

    def flush(self) -> None:
        """Let `draw` see everything that was added."""
        ...

    def draw(self, bits: Tensor) -> Batch:
        """The rows that random integers in [0, 2^63) choose, one row for each.

        By operations on device tensors alone, so that it can be compiled and captured.
        """
        ...


@runtime_checkable
class FeedbackSource(Source, Protocol):
    """A source that receives the learner's error for each sampled row."""

    def update_priorities(self, indices: Tensor, errors: Tensor) -> None:
        """Use the errors of the rows at `indices` of a batch; operations on device tensors only."""
        ...

    def feedback_tensors(self) -> list[Tensor]:
        """The tensors that `update_priorities` writes."""
        ...
