"""Encoders of images: convolutional networks that adapt to the size and the axes of the images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.blocks import Convolution, ConvolutionalResidualBlock
from rl_training.models.network_settings import ChannelAxis
from rl_training.observations import ObservationLeaf

NATURE_MINIMUM = 36
"""Pixels that Nature's kernels and strides need; smaller images get smaller ones"""
LARGE_ENOUGH = 16
"""Pixels from which a layer for small images has a stride of two"""


@dataclass(frozen=True)
class ImageLayout:
    """The axes of an image's shape that are its height and width. All others are channels."""

    shape: tuple[int, ...]
    height_axis: int

    @classmethod
    def of(cls, shape: Sequence[int], channels: ChannelAxis = "auto") -> ImageLayout:
        """Find the axes by the number of axes.

        - 2: a grey image, `(height, width)`;
        - 3: `(height, width, channels)`, or `(channels, height, width)` where channels may be
          frames. With "auto" the channels are the shorter one of the first and the last axis, and
          the last one if they are equal;
        - 4: several frames, each of which is as above.
        """
        shape = tuple(shape)
        if len(shape) not in (2, 3, 4):
            raise ValueError(f"an image has 2 to 4 axes, not {len(shape)}: {shape}")
        if len(shape) == 2:
            return cls(shape, 0)
        if channels == "auto":
            channels = "last" if shape[-1] <= shape[-3] else "first"
        return cls(shape, len(shape) - (3 if channels == "last" else 2))

    @property
    def height(self) -> int:
        return self.shape[self.height_axis]

    @property
    def width(self) -> int:
        return self.shape[self.height_axis + 1]

    @property
    def channels(self) -> int:
        """Number of channels, of all frames together."""
        return math.prod(self.shape) // (self.height * self.width)

    @property
    def channel_axes(self) -> tuple[int, ...]:
        pixels = (self.height_axis, self.height_axis + 1)
        return tuple(axis for axis in range(len(self.shape)) if axis not in pixels)

    def channels_first(self, images: Tensor) -> Tensor:
        """Return images `(batch, *shape)` as `(batch, channels, height, width)`."""
        axes = (*self.channel_axes, self.height_axis, self.height_axis + 1)
        moved = images.permute(0, *(1 + axis for axis in axes))
        return moved.reshape(images.shape[0], self.channels, self.height, self.width)


def convolved(size: int, kernel: int, stride: int) -> int:
    """Return the number of outputs of a convolution without padding, along one axis."""
    return (size - kernel) // stride + 1


def fitted_convolution(
    channels: int, outputs: int, sizes: tuple[int, int], kernel: int, stride: int
) -> tuple[Convolution, tuple[int, int]]:
    """Return a convolution whose kernel is at most its input, and the sizes of its output."""
    kernels = min(kernel, sizes[0]), min(kernel, sizes[1])
    after = tuple(convolved(size, each, stride) for size, each in zip(sizes, kernels, strict=True))
    return Convolution(channels, outputs, kernels, stride), (after[0], after[1])


class ImageEncoder(nn.Module):
    """Base class of the encoders of images `(batch, *shape)`; gives features `(batch, size)`.

    Bytes are scaled to 0 to 1; images of floating-point numbers are used as they are.
    """

    default_size: ClassVar[int]
    """Number of features by default"""

    def __init__(
        self, leaf: ObservationLeaf, feature_size: int | None, channels: ChannelAxis
    ) -> None:
        super().__init__()
        self.layout = ImageLayout.of(leaf.shape, channels)
        self.feature_size = self.default_size if feature_size is None else feature_size
        self._scale = 1 / 255 if leaf.kind == "image" else 1.0

    def pixels(self, images: Tensor) -> Tensor:
        """Return images as floats, `(batch, channels, height, width)`."""
        pixels = self.layout.channels_first(images)
        return pixels.to(torch.get_default_dtype()) * self._scale


class NatureEncoder(ImageEncoder):
    """The three convolutions of the DQN paper (doi:10.1038/nature14236) and a linear layer.

    Images of less than 36 pixels in height or width have kernels of 3 pixels, and a stride of two
    only where at least 16 pixels are left.
    """

    default_size = 512

    def __init__(
        self, leaf: ObservationLeaf, feature_size: int | None = None, channels: ChannelAxis = "auto"
    ) -> None:
        super().__init__(leaf, feature_size, channels)
        sizes, inputs = (self.layout.height, self.layout.width), self.layout.channels
        is_small = min(sizes) < NATURE_MINIMUM
        for layer, (outputs, kernel, stride) in enumerate(((32, 8, 4), (64, 4, 2), (64, 3, 1))):
            if is_small:
                kernel, stride = 3, 2 if min(sizes) >= LARGE_ENOUGH else 1
            convolution, sizes = fitted_convolution(inputs, outputs, sizes, kernel, stride)
            self.add_module(f"convolution_{layer}", convolution)
            inputs = outputs
        self.output = nn.Linear(inputs * math.prod(sizes), self.feature_size)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.pixels(images)
        for layer in range(3):
            hidden = torch.relu(self.get_submodule(f"convolution_{layer}")(hidden))
        return torch.relu(self.output(hidden.flatten(1)))


class ImpalaEncoder(ImageEncoder):
    """IMPALA's residual network (1802.01561).

    Three stages of 16, 32 and 32 channels: a convolution, a maximum that halves the size, and two
    residual blocks; then a linear layer.
    """

    default_size = 256

    def __init__(
        self, leaf: ObservationLeaf, feature_size: int | None = None, channels: ChannelAxis = "auto"
    ) -> None:
        super().__init__(leaf, feature_size, channels)
        sizes, inputs = (self.layout.height, self.layout.width), self.layout.channels
        for stage, outputs in enumerate((16, 32, 32)):
            self.add_module(f"convolution_{stage}", Convolution(inputs, outputs, 3, padding=1))
            self.add_module(f"block_{stage}_0", ConvolutionalResidualBlock(outputs))
            self.add_module(f"block_{stage}_1", ConvolutionalResidualBlock(outputs))
            sizes, inputs = ((sizes[0] + 1) // 2, (sizes[1] + 1) // 2), outputs
        self.output = nn.Linear(inputs * math.prod(sizes), self.feature_size)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.pixels(images)
        for stage in range(3):
            hidden = self.get_submodule(f"convolution_{stage}")(hidden)
            hidden = F.max_pool2d(hidden, kernel_size=3, stride=2, padding=1)
            for block in range(2):
                hidden = self.get_submodule(f"block_{stage}_{block}")(hidden)
        return torch.relu(self.output(torch.relu(hidden).flatten(1)))


class DrQEncoder(ImageEncoder):
    """DrQ's encoder (2004.13649): four convolutions, and tanh of a normalized linear layer.

    The kernels have 3 pixels, and the first one a stride of two. Pixels are from -0.5 to 0.5.
    """

    default_size = 50

    def __init__(
        self, leaf: ObservationLeaf, feature_size: int | None = None, channels: ChannelAxis = "auto"
    ) -> None:
        super().__init__(leaf, feature_size, channels)
        sizes, inputs = (self.layout.height, self.layout.width), self.layout.channels
        for layer in range(4):
            convolution, sizes = fitted_convolution(inputs, 32, sizes, 3, 1 if layer else 2)
            self.add_module(f"convolution_{layer}", convolution)
            inputs = 32
        self.output = nn.Linear(inputs * math.prod(sizes), self.feature_size)
        self.normalization = nn.LayerNorm(self.feature_size)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.pixels(images) - 0.5
        for layer in range(4):
            hidden = torch.relu(self.get_submodule(f"convolution_{layer}")(hidden))
        return torch.tanh(self.normalization(self.output(hidden.flatten(1))))
