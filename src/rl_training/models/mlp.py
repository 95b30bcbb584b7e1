"""How the layers of a network start.

Matrix products of hidden layers, exact or of rounded numbers.

One vector holds all parameters of a network; a layout says which part is which.

Papers write a network's parameters as one symbol. Doing the same in code makes an optimiser step,
a target update or a copy one operation on one tensor instead of a loop over layers.

Multilayer perceptrons, alone or as an ensemble evaluated in one batched product.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


LARGE_PRODUCT = 4_000_000
"""Multiplications from which a product is worth a second thread, or the rounding of its factors"""

_rounded = False


@contextlib.contextmanager
def rounded_products(rounded: bool = True) -> Iterator[None]:
    """Within, large products on a CPU are made of bfloat16 numbers, which take half the time.

    They have float32's range and eight bits of precision. Sums are kept in float32 until their
    end, and so is everything that is no product.
    """
    global _rounded
    before, _rounded = _rounded, rounded
    try:
        yield
    finally:
        _rounded = before


def is_rounded(inputs: Tensor, weight: Tensor) -> bool:
    """Whether the product of these is to be a rounded one."""
    if not _rounded or inputs.device.type != "cpu":
        return False
    return inputs.shape[-2] * weight.shape[-2] * weight.shape[-1] >= LARGE_PRODUCT


def rounded_product(inputs: Tensor, weight: Tensor) -> Tensor:
    """`inputs @ weight`, and its gradients likewise, of bfloat16 numbers."""
    multiply = torch.mm if weight.dim() == 2 else torch.bmm  # without a look at their shapes
    return multiply(inputs.to(torch.bfloat16), weight.to(torch.bfloat16)).to(inputs.dtype)


ALIGNMENT = 16
"""Every tensor starts at a multiple of 16 floats (64 bytes), as a freshly allocated one would:
matrix kernels are faster there, and give the same bits wherever the vector lies."""


class ParameterLayout:
    """Where each named tensor lies in a parameter vector (or in a stack of such vectors)."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self._paddings = [-math.prod(shape) % ALIGNMENT for shape in self.shapes.values()]
        self._chunks: list[int] = []
        self._places: list[int] = []
        """Which of the chunks are tensors; the others are padding, of which there is little"""
        for shape, padding in zip(self.shapes.values(), self._paddings, strict=True):
            self._places.append(len(self._chunks))
            self._chunks += [math.prod(shape), padding] if padding else [math.prod(shape)]
        self.size = sum(self._chunks)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views of a vector `(..., size)`; leading axes stay in front of each shape."""
        lead = vector.shape[:-1]
        # One split, rather than a slice a tensor, so that its gradient is a single concatenation.
        parts = torch.split_with_sizes(vector, self._chunks, dim=-1)
        return {
            name: parts[place].view(lead + shape)
            for (name, shape), place in zip(self.shapes.items(), self._places, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector of these tensors; the inverse of `unflatten`, padding filled with zeros."""
        parts = []
        for (name, shape), padding in zip(self.shapes.items(), self._paddings, strict=True):
            tensor = tensors[name]
            lead = tensor.shape[: tensor.dim() - len(shape)]
            if tensor.shape[len(lead) :] != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
            parts += [tensor.reshape(*lead, -1), tensor.new_zeros(*lead, padding)]
        return torch.cat(parts, dim=-1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,  # in place: it is given a sum that nothing else needs
    "tanh": torch.tanh,
    "elu": F.elu,
    "gelu": F.gelu,
    "silu": F.silu,
}


class MLP(nn.Module):
    """A perceptron whose parameters are one vector, its own or one handed in.

    With `ensemble=E` it is E networks of one shape: inputs `(batch, in)` give outputs
    `(E, batch, out)`, or fewer if the vector handed in is one of `members`. Without,
    `(batch, in)` gives `(batch, out)`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_sizes: Sequence[int],
        output_size: int,
        *,
        ensemble: int | None = None,
        activation: str = "relu",
        layer_norm: bool = False,
        initialization: str = "default",
        free_parameters: Mapping[str, tuple[int, ...]] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """`free_parameters` are learned with the layers, start at zero, and are in none of them."""
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r}: choose from {', '.join(ACTIVATIONS)}")
        self.sizes = (input_size, *hidden_sizes, output_size)
        self.ensemble = ensemble
        self.layer_norm = layer_norm
        self._activation = ACTIVATIONS[activation]
        self._free_parameters = dict(free_parameters or {})
        self.layout = ParameterLayout(self._shapes())
        self.vector = nn.Parameter(self._initial_vector(initialization, generator))

    def forward(
        self, inputs: Tensor, vector: Tensor | None = None, *, mean_output: bool = False
    ) -> Tensor:
        """Evaluate with the parameters in `vector`, or with the network's own.

        With `mean_output`, only the mean of the outputs, as the last axis of size one.
        """
        parameters = self.unflatten(self.vector if vector is None else vector)
        if self.ensemble is None:
            hidden = inputs
        else:
            hidden = inputs.expand(parameters["weight_0"].shape[0], -1, -1)
        last = len(self.sizes) - 2
        for layer in range(last):
            hidden = self._affine(parameters, layer, hidden)
            if self.layer_norm:
                hidden = F.layer_norm(hidden, hidden.shape[-1:])
                hidden = hidden * parameters[f"scale_{layer}"] + parameters[f"shift_{layer}"]
            hidden = self._activation(hidden)
        if mean_output:  # the last layer is linear: the mean of its columns gives it at once
            for name in (f"weight_{last}", f"bias_{last}"):
                parameters[name] = parameters[name].mean(-1, keepdim=True)
        return self._affine(parameters, last, hidden)

    def _affine(self, parameters: dict[str, Tensor], layer: int, inputs: Tensor) -> Tensor:
        weight, bias = parameters[f"weight_{layer}"], parameters[f"bias_{layer}"]
        if weight.shape[-1] == 1:
            # A product with one column is slow as a matrix product and free as a fused sum.
            return (inputs * weight.mT).sum(-1, keepdim=True) + bias
        # What comes from outside and what goes there is not rounded.
        is_hidden = 0 < layer < len(self.sizes) - 2
        if is_hidden and is_rounded(inputs, weight):
            return rounded_product(inputs, weight) + bias
        if torch.compiler.is_compiling():
            # The sum fuses with what follows, while as part of a product it costs a pass of its
            # own. On a CPU the compiler would make it one, unless it looks like a difference.
            product = inputs @ weight
            return product - (-bias) if inputs.device.type == "cpu" else product + bias
        if self.ensemble is None:
            return torch.addmm(bias, inputs, weight)
        return torch.baddbmm(bias, inputs, weight)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views of a parameter vector; those of an ensemble have a leading axis."""
        if self.ensemble is not None:
            vector = vector.reshape(*vector.shape[:-1], -1, self.layout.size)
        return self.layout.unflatten(vector)

    def members(self, vector: Tensor, chosen: Tensor | slice) -> Tensor:
        """The parameter vector of some of an ensemble's networks."""
        rows = vector.reshape(-1, self.layout.size)
        picked = rows[chosen] if isinstance(chosen, slice) else rows.index_select(0, chosen)
        return picked.reshape(-1)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `unflatten`."""
        vector = self.layout.flatten(tensors)
        return vector if self.ensemble is None else vector.flatten(-2)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one network: an ensemble's members lie one after another, equally far apart."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (fan_in, fan_out) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
            row = (fan_out,) if self.ensemble is None else (1, fan_out)
            shapes[f"weight_{layer}"] = (fan_in, fan_out)
            shapes[f"bias_{layer}"] = row
            if self.layer_norm and layer < len(self.sizes) - 2:
                shapes[f"scale_{layer}"] = row
                shapes[f"shift_{layer}"] = row
        return shapes | self._free_parameters

    def _initial_vector(self, initialization: str, generator: torch.Generator | None) -> Tensor:
        """Layers as `initialization` says; identity normalisation; free parameters at zero."""
        lead = () if self.ensemble is None else (self.ensemble,)
        tensors = {
            name: torch.full(lead + shape, 1.0 if name.startswith("scale_") else 0.0)
            for name, shape in self.layout.shapes.items()
        }
        last = len(self.sizes) - 2
        for layer, (fan_in, fan_out) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
            weight, bias = initial_layer(
                initialization,
                self.ensemble,
                fan_in,
                fan_out,
                is_output=layer == last,
                generator=generator,
            )
            tensors[f"weight_{layer}"] = weight
            tensors[f"bias_{layer}"] = bias.view(tensors[f"bias_{layer}"].shape)
        return self.flatten(tensors)
