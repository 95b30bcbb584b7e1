"""How the layers of a network start."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Initialization = Literal["default", "orthogonal", "xavier"]
INITIALIZATIONS: tuple[str, ...] = get_args(Initialization)


def initial_layer(
    kind: str,
    ensemble: int | None,
    fan_in: int,
    fan_out: int,
    *,
    is_output: bool,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Weights `(fan_in, fan_out)` and biases `(fan_out,)`, with an axis of networks if any.

    `default` draws both from a uniform distribution in +-1/sqrt(fan_in), as `torch.nn.Linear`
    does. The others start biases at zero: `xavier` draws weights from a uniform distribution in
    +-sqrt(6 / (fan_in + fan_out)), `orthogonal` from orthogonal matrices, scaled by sqrt(2) where
    an activation follows.
    """
    lead = () if ensemble is None else (ensemble,)
    weight, bias = torch.empty(*lead, fan_in, fan_out), torch.zeros(*lead, fan_out)
    if kind == "default":
        bound = 1.0 / math.sqrt(fan_in)
        weight.uniform_(-bound, bound, generator=generator)
        bias.uniform_(-bound, bound, generator=generator)
    elif kind == "xavier":
        bound = math.sqrt(6.0 / (fan_in + fan_out))
        weight.uniform_(-bound, bound, generator=generator)
    elif kind == "orthogonal":
        gain = 1.0 if is_output else math.sqrt(2.0)
        for matrix in weight.view(-1, fan_in, fan_out):
            torch.nn.init.orthogonal_(matrix, gain, generator=generator)
    else:
        raise ValueError(f"initialization {kind!r}: choose from {', '.join(INITIALIZATIONS)}")
    return weight, bias
