"""The interface between training and the data that batches are sampled from."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from rl_training.types import Batch


class Source(Protocol):
    """A collection of transitions that batches are sampled from."""

    def __len__(self) -> int:
        """Current number of rows."""
        ...

    def sample(self, batch_size: int) -> Batch:
        """Sample rows at random, on the learner's device."""
        ...

    def flush(self) -> None:
        """Make all added rows visible to `draw`."""
        ...

    def draw(self, bits: Tensor) -> Batch:
        """Return the rows selected by random integers in [0, 2^63), one row for each.

        Uses only device tensors, so that it can be compiled and captured.
        """
        ...


@runtime_checkable
class FeedbackSource(Source, Protocol):
    """A source that receives the learner's error for each sampled row."""

    def update_priorities(self, indices: Tensor, errors: Tensor) -> None:
        """Set priorities from the errors of the rows at `indices`; uses only device tensors."""
        ...

    def feedback_tensors(self) -> list[Tensor]:
        """The tensors that `update_priorities` writes."""
        ...
