"""What all ring buffers share: what waits to be written, and which segments have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor


def newest_writes(
    pending: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Join the positions and values of several writes; of equal positions, the newest counts."""
    if len(pending) == 1:
        return pending[0]
    positions, values = (np.concatenate(parts) for parts in zip(*pending, strict=True))
    _, last = np.unique(positions[::-1], return_index=True)
    newest = len(positions) - 1 - last
    return positions[newest], values[newest]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device; the host does not wait for a GPU."""
    return delivered(torch.from_numpy(array), device)


def delivered(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device; the host does not wait for a GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    # With pinned memory the host does not wait; PyTorch does not reuse it before the copy ends.
    return tensor.pin_memory().to(device, non_blocking=True)


def segments_of(
    added: int, capacity: int, length: int, since: int | None
) -> Iterator[tuple[int, slice, bool]]:
    """Yield the filled part of a ring in segments: index, positions, whether they have changed.

    A segment has changed if any of its positions was written after `added` was `since`.
    """
    filled = min(added, capacity)
    for index in range(-(-filled // length)):
        first, last = index * length, min((index + 1) * length, filled)
        yield index, slice(first, last), _written_since(first, last, since, added, capacity)


def _written_since(first: int, last: int, since: int | None, added: int, capacity: int) -> bool:
    if since is None or added - since >= capacity:
        return True
    # When a position of the segment was last written, counted in what was added.
    cursor = added % capacity
    lap_start = added - cursor
    newest = lap_start + min(last, cursor) if cursor > first else lap_start - capacity + last
    return newest > since
