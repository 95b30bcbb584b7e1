"""One block of host memory, mirrored on the device, that several arrays share.

However much a step has to tell the device, it goes there in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16

Field = tuple[tuple[int, ...], torch.dtype]
"""Shape and type"""


class Staging:
    """Named arrays: `host` to write, `device` to read after `upload`."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        starts, size = {}, 0
        for name, (shape, dtype) in fields.items():
            starts[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (shape, dtype) in fields.items():
            last = starts[name] + math.prod(shape) * dtype.itemsize
            part = slice(starts[name], last)
            self.host[name] = self._host[part].view(dtype).view(shape).numpy()
            self.device[name] = self._device[part].view(dtype).view(shape)

    def upload(self) -> None:
        """Copy everything, without waiting; the host must not write again until that is done."""
        self._device.copy_(self._host, non_blocking=True)
