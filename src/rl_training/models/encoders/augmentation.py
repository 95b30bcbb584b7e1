"""Random shifts of images (DrQ, 2004.13649), which regularize critics on pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.models.encoders.images import ImageLayout
from rl_training.models.encoders.observations import leaf_label
from rl_training.models.network_settings import NetworkSettings
from rl_training.observations import WORD_BYTES, ObservationSpec


class RandomShift:
    """Shifts the images in rows of observations by whole pixels.

    A shifted image is what is left of one that is padded by its border and cropped at a random
    place. All channels and frames of an image are shifted alike.
    """

    def __init__(self, observation: ObservationSpec, settings: NetworkSettings) -> None:
        self._largest = settings.random_shift
        self._images = []
        for leaf, start in zip(observation.leaves, observation.offsets, strict=True):
            if leaf.kind == "image":
                chosen = settings.encoders.get(leaf_label(leaf))
                layout = ImageLayout.of(leaf.shape, "auto" if chosen is None else chosen.channels)
                self._images.append((leaf, start, layout))

    @property
    def numbers(self) -> int:
        """How many random integers each row needs: two for each image."""
        return 2 * len(self._images)

    def __call__(self, rows: Tensor, bits: Tensor) -> Tensor:
        """Return shifted rows `(..., size)`, by random integers `(..., numbers)` of at least 0."""
        flat = rows.reshape(-1, rows.shape[-1])
        offsets = bits.reshape(-1, self.numbers) % (2 * self._largest + 1) - self._largest
        parts, end = [], 0
        for number, (leaf, start, layout) in enumerate(self._images):
            stored = flat[:, start : start + leaf.words].view(torch.uint8)
            images = stored[:, : leaf.numbers].reshape(-1, *leaf.shape)
            moved = shifted(images, layout, offsets[:, 2 * number], offsets[:, 2 * number + 1])
            padding = leaf.words * WORD_BYTES - leaf.numbers
            words = F.pad(moved.reshape(-1, leaf.numbers), (0, padding)).view(torch.float32)
            parts += [flat[:, end:start], words]
            end = start + leaf.words
        return torch.cat([*parts, flat[:, end:]], dim=-1).reshape(rows.shape)


def shifted(images: Tensor, layout: ImageLayout, down: Tensor, right: Tensor) -> Tensor:
    """Return images `(batch, *shape)`, with pixels from that many rows below and columns right.

    `down` and `right` are `(batch,)`. Beyond the border, its pixels are repeated.
    """
    axes = (layout.height_axis, layout.height_axis + 1, *layout.channel_axes)
    order = [0, *(1 + axis for axis in axes)]
    device = images.device
    from_rows = torch.arange(layout.height, device=device) + down[:, None]
    from_columns = torch.arange(layout.width, device=device) + right[:, None]
    batch = torch.arange(images.shape[0], device=device)
    moved = images.permute(order)[
        batch[:, None, None],
        from_rows.clamp(0, layout.height - 1)[:, :, None],
        from_columns.clamp(0, layout.width - 1)[:, None, :],
    ]
    return moved.permute([order.index(axis) for axis in range(len(order))])
