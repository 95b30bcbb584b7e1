"""Blocks of networks that several methods use."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConvolutionalResidualBlock(nn.Module):
    """Two 3x3 convolutions with ReLU before each, added to the input (1603.05027)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution_0 = nn.Conv2d(channels, channels, 3, padding=1)
        self.convolution_1 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.convolution_0(torch.relu(inputs))
        residual: Tensor = self.convolution_1(torch.relu(hidden))
        return inputs + residual
