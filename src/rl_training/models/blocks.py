"""Blocks of networks that several methods use, and that a user's own networks may use.

PyTorch's `nn.LayerNorm` and `nn.RMSNorm` work in networks as they are. Its dropout and batch
normalization do not: they draw random numbers and change themselves when they are evaluated. Here
the random numbers and the running statistics are inputs, and new statistics are outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Normalization = Callable[[int], nn.Module]


class Convolution(nn.Conv2d):
    """A convolution with a square stride and padding, whose gradients repeat bit for bit on a GPU.

    cuDNN's kernels may add in any order. So a GPU multiplies patches of the inputs by the weight;
    mapped over seeds, that is a batch of products.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        if not inputs.is_cuda:
            return super().forward(inputs)
        assert isinstance(self.padding, tuple)
        assert self.bias is not None
        return convolution_by_product(
            inputs, self.weight, self.bias, stride=self.stride[0], padding=self.padding[0]
        )


def convolution_by_product(
    inputs: Tensor, weight: Tensor, bias: Tensor, *, stride: int = 1, padding: int = 0
) -> Tensor:
    """Return the same as `F.conv2d`, computed as one matrix product.

    Blocks of `stride` x `stride` pixels become channels, and what is left is a convolution with few
    kernel positions and a stride of one. Its gradient is a sum over these positions in a fixed
    order, so that updates repeat bit for bit.
    """
    batch, channels = inputs.shape[:2]
    kernel, sizes = weight.shape[2:], inputs.shape[2:]
    height, width = (
        (size + 2 * padding - each) // stride + 1 for size, each in zip(sizes, kernel, strict=True)
    )
    down, right = (-(-each // stride) for each in kernel)  # blocks that a patch spans
    rows, columns = height + down - 1, width + right - 1  # blocks that patches read
    ends = (rows * stride - sizes[0] - padding, columns * stride - sizes[1] - padding)
    # Negative numbers remove pixels that no patch reads.
    blocks = _padded(inputs, (padding, ends[1], padding, ends[0]))
    blocks = blocks.reshape(batch, channels, rows, stride, columns, stride)
    blocks = blocks.permute(0, 2, 4, 1, 3, 5)
    beside = torch.stack([blocks[:, :, first : first + width] for first in range(right)], 3)
    patches = torch.stack([beside[:, first : first + height] for first in range(down)], 3)
    kernels = _padded(weight, (0, right * stride - kernel[1], 0, down * stride - kernel[0]))
    kernels = kernels.reshape(-1, channels, down, stride, right, stride)
    kernels = kernels.permute(2, 4, 1, 3, 5, 0)
    per_patch = down * right * channels * stride**2
    outputs = torch.addmm(bias, patches.reshape(-1, per_patch), kernels.reshape(per_patch, -1))
    return outputs.reshape(batch, height, width, -1).permute(0, 3, 1, 2)


def _padded(images: Tensor, sides: tuple[int, int, int, int]) -> Tensor:
    return F.pad(images, sides) if any(sides) else images


class ConvolutionalResidualBlock(nn.Module):
    """Two 3x3 convolutions with ReLU before each, added to the input (1603.05027)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution_0 = Convolution(channels, channels, 3, padding=1)
        self.convolution_1 = Convolution(channels, channels, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.convolution_0(torch.relu(inputs))
        residual: Tensor = self.convolution_1(torch.relu(hidden))
        return inputs + residual


class ResidualBlock(nn.Module):
    """Two linear layers with normalization and ReLU before each, added to the input (1603.05027).

    Inputs and outputs are `(..., size)`.
    """

    def __init__(self, size: int, normalization: Normalization = nn.LayerNorm) -> None:
        super().__init__()
        self.normalization_0, self.layer_0 = normalization(size), nn.Linear(size, size)
        self.normalization_1, self.layer_1 = normalization(size), nn.Linear(size, size)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer_0(torch.relu(self.normalization_0(inputs)))
        residual: Tensor = self.layer_1(torch.relu(self.normalization_1(hidden)))
        return inputs + residual


class InvertedBottleneckBlock(nn.Module):
    """A normalized input, widened, ReLU, narrowed, and added to the input (SimBa, 2410.09754).

    Inputs and outputs are `(..., size)`.
    """

    def __init__(
        self, size: int, expansion: int = 4, normalization: Normalization = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.normalization = normalization(size)
        self.layer_0 = nn.Linear(size, expansion * size)
        self.layer_1 = nn.Linear(expansion * size, size)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.layer_0(self.normalization(inputs)))
        residual: Tensor = self.layer_1(hidden)
        return inputs + residual


def dropout(inputs: Tensor, uniform: Tensor, rate: float) -> Tensor:
    """Set a fraction `rate` of the inputs to zero and scale the others up (1207.0580).

    `uniform` are random numbers in [0, 1) of the inputs' shape.
    """
    return torch.where(uniform < rate, 0.0, inputs / (1 - rate))


def initial_statistics(size: int) -> Tensor:
    """Return the running mean and variance, `(2, size)`, before any batch was seen."""
    return torch.stack([torch.zeros(size), torch.ones(size)])


def batch_norm(inputs: Tensor, statistics: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Normalize inputs `(..., batch, size)` by mean and variance, `(..., 2, size)` (1502.03167)."""
    mean, variance = statistics.unsqueeze(-2).unbind(-3)
    return (inputs - mean) * torch.rsqrt(variance + epsilon)


def batch_statistics(inputs: Tensor) -> Tensor:
    """Return mean and variance of the rows of inputs `(..., batch, size)`, as `(..., 2, size)`."""
    mean = inputs.mean(-2)
    variance = (inputs - mean.unsqueeze(-2)).square().mean(-2)
    return torch.stack([mean, variance], dim=-2)


def renormalized_statistics(
    found: Tensor,
    running: Tensor,
    *,
    epsilon: float = 1e-5,
    largest_ratio: float = 3.0,
    largest_shift: float = 5.0,
) -> Tensor:
    """Return the statistics of a batch, moved to running ones (batch renormalization, 1702.03275).

    A batch that is normalized by them has about the running mean and variance, but its gradient is
    that of batch normalization. The correction is limited: the ratio of standard deviations to
    `largest_ratio`, the distance of means, in running standard deviations, to `largest_shift`.
    """
    mean, variance = found.unbind(-2)
    running_mean, running_variance = running.detach().unbind(-2)
    running_std = (running_variance + epsilon).sqrt()
    ratio = ((variance.detach() + epsilon).sqrt() / running_std).clamp(
        1 / largest_ratio, largest_ratio
    )
    shift = ((mean.detach() - running_mean) / running_std).clamp(-largest_shift, largest_shift)
    # The smallest number keeps the gradient finite where a unit is constant.
    std = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()
    return torch.stack([mean - shift * std / ratio, variance / ratio.square()], dim=-2)


def updated_statistics(
    running: Tensor, found: Tensor, *, rows: int, momentum: float, unbiased: bool = True
) -> Tensor:
    """Move running statistics towards those of a batch of that many rows, without a gradient.

    If `unbiased`, the variance of the batch is corrected for its size, as PyTorch does.
    """
    found = found.detach()
    if unbiased:
        mean, variance = found.unbind(-2)
        found = torch.stack([mean, variance * (rows / max(1, rows - 1))], dim=-2)
    return running.detach() + momentum * (found - running.detach())


def rms_norm(inputs: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Divide each row of inputs `(..., size)` by its root mean square (1910.07467)."""
    return inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + epsilon)
