"""Recurrent layers: GRU (1406.1078) and LSTM (doi:10.1162/neco.1997.9.8.1735).

The cells are matrix products on parts of one parameter vector, so that they can be mapped over
seeds and compiled like every other network. Their equations, and the order of the gates in a
weight, are those of `torch.nn.GRUCell` and `torch.nn.LSTMCell`. Weights are `(inputs, outputs)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from rl_training.models.mlp import Network, ParameterLayout, count_parameters, initial_layer

Recurrence = Literal["none", "gru", "lstm"]

STATES: Mapping[str, int] = {"none": 0, "gru": 1, "lstm": 2}
"""Numbers that each unit remembers: its output, and the cell of an LSTM"""

GATES: Mapping[str, int] = {"gru": 3, "lstm": 4}
"""Columns of a weight for each unit"""


class RecurrentNetwork(Network):
    """A recurrent layer whose state, the memory, is an input and an output.

    The memory is `(batch, memory_size)`. Its first `size` numbers are the outputs of the units,
    which the networks on top see; those of an LSTM are followed by its cells. At the start of an
    episode all are zero.
    """

    ensemble = None

    def __init__(
        self,
        kind: str,
        input_size: int,
        size: int,
        *,
        initialization: str = "default",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.size, self.memory_size = size, STATES[kind] * size
        self.sizes = (input_size, size)
        self._cell: Callable[[Tensor, Tensor, Tensor], Tensor] = gru if kind == "gru" else lstm
        columns = GATES[kind] * size
        count_parameters((input_size + size + 2) * columns)
        self.layout = ParameterLayout(
            {
                "input_weight": (input_size, columns),
                "input_bias": (columns,),
                "hidden_weight": (size, columns),
                "hidden_bias": (columns,),
            }
        )
        self.vector = nn.Parameter(self._initial_vector(initialization, generator))

    def forward(
        self,
        inputs: Tensor,
        vector: Tensor | None = None,
        *,
        mean_output: bool = False,
        noise: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """Return the memory after inputs `(batch, input_size + memory_size)`: the last are it."""
        given, memory = torch.split(inputs, [self.sizes[0], self.memory_size], dim=-1)
        return self.step(given, memory, vector)

    def step(self, inputs: Tensor, memory: Tensor, vector: Tensor | None = None) -> Tensor:
        """Return the memory after inputs `(batch, input_size)`."""
        parameters = self.unflatten(self.vector if vector is None else vector)
        given = inputs @ parameters["input_weight"] + parameters["input_bias"]
        return self._next(parameters, given, memory)

    def outputs(self, memory: Tensor) -> Tensor:
        """Return the outputs `(..., size)` of the units that have this memory."""
        return memory[..., : self.size]

    def unroll(
        self, inputs: Tensor, memory: Tensor, continues: Tensor, vector: Tensor | None = None
    ) -> Tensor:
        """Return the outputs `(steps, batch, size)` for sequences of inputs.

        `inputs` are `(steps, batch, input_size)` and `memory` is that before the first step.
        `continues`, `(steps, batch)`, is 0 where an episode begins and 1 elsewhere: the memory
        before such a step is zero.
        """
        parameters = self.unflatten(self.vector if vector is None else vector)
        steps, batch = inputs.shape[:2]
        rows = inputs.reshape(steps * batch, -1)  # one product instead of one per step
        given = rows @ parameters["input_weight"] + parameters["input_bias"]
        outputs = []
        parts = zip(given.view(steps, batch, -1).unbind(), continues.unbind(), strict=True)
        for of_step, goes_on in parts:
            memory = self._next(parameters, of_step, memory * goes_on[:, None])
            outputs.append(self.outputs(memory))
        return torch.stack(outputs)

    def _next(self, parameters: Mapping[str, Tensor], given: Tensor, memory: Tensor) -> Tensor:
        """Return the next memory from what the inputs add to the gates."""
        own = self.outputs(memory) @ parameters["hidden_weight"] + parameters["hidden_bias"]
        return self._cell(given, own, memory)

    def _initial_vector(self, initialization: str, generator: torch.Generator | None) -> Tensor:
        """Draw weights and biases; PyTorch's depend on the number of units alone."""
        tensors: dict[str, Tensor] = {}
        for name in ("input", "hidden"):
            rows, columns = self.layout.shapes[f"{name}_weight"]
            if initialization == "default":
                bound = 1 / math.sqrt(self.size)
                weight, bias = torch.empty(rows, columns), torch.empty(columns)
                weight.uniform_(-bound, bound, generator=generator)
                bias.uniform_(-bound, bound, generator=generator)
            else:
                weight, bias = initial_layer(
                    initialization, None, rows, columns, is_output=True, generator=generator
                )
            tensors |= {f"{name}_weight": weight, f"{name}_bias": bias}
        return self.flatten(tensors)


def gru(given: Tensor, own: Tensor, memory: Tensor) -> Tensor:
    """Return the next memory from the parts of the gates that inputs and outputs add."""
    reset_given, update_given, new_given = given.chunk(3, dim=-1)
    reset_own, update_own, new_own = own.chunk(3, dim=-1)
    reset = torch.sigmoid(reset_given + reset_own)
    update = torch.sigmoid(update_given + update_own)
    new = torch.tanh(new_given + reset * new_own)
    return new + update * (memory - new)


def lstm(given: Tensor, own: Tensor, memory: Tensor) -> Tensor:
    """Return the next memory from the parts of the gates that inputs and outputs add."""
    _, cell = memory.chunk(2, dim=-1)
    admit, keep, new, show = (given + own).chunk(4, dim=-1)
    cell = torch.sigmoid(keep) * cell + torch.sigmoid(admit) * torch.tanh(new)
    return torch.cat([torch.sigmoid(show) * torch.tanh(cell), cell], dim=-1)
