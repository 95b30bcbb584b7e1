"""Multilayer perceptrons whose parameters are one vector, alone or as an ensemble.

Papers write the parameters of a network as one symbol. With one vector per network, an optimizer
step, a target update or a copy is one operation on one tensor instead of a loop over layers. A
`ParameterLayout` says which part of the vector is which tensor. An ensemble is evaluated with
batched matrix products.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.blocks import dropout as drop_out
from rl_training.models.noisy import (
    disturbance,
    initial_noise,
    noise_shapes,
    noise_size,
    split_noise,
)

Initialization = Literal["default", "lecun", "orthogonal", "xavier"]
INITIALIZATIONS: tuple[str, ...] = get_args(Initialization)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,  # in place: its input is a sum that is not needed afterwards
    "tanh": torch.tanh,
    "elu": F.elu,
    "gelu": F.gelu,
    "silu": F.silu,
}

TRUNCATED_STD = 0.87962566
"""Standard deviation of a standard normal distribution that is truncated at -2 and 2"""

ALIGNMENT = 16
"""Every tensor starts at a multiple of 16 floats (64 bytes), as a newly allocated one does. Matrix
kernels are faster there, and their results do not depend on where the vector is in memory."""

LARGE_PRODUCT = 4_000_000
"""Number of multiplications from which a matrix product benefits from a second thread, or from
rounding its factors"""


class ParameterLayout:
    """Positions of named tensors in a parameter vector, or in a stack of such vectors."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self._paddings = [-math.prod(shape) % ALIGNMENT for shape in self.shapes.values()]
        self._chunks: list[int] = []
        self._places: list[int] = []
        """Indices of the chunks that are tensors; the other chunks are padding"""
        for shape, padding in zip(self.shapes.values(), self._paddings, strict=True):
            self._places.append(len(self._chunks))
            self._chunks += [math.prod(shape), padding] if padding else [math.prod(shape)]
        self.size = sum(self._chunks)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Return named views of a vector `(..., size)`; its leading axes are kept."""
        lead = vector.shape[:-1]
        if not self.shapes:
            return {}
        # One split instead of a slice per tensor, so that its gradient is a single concatenation.
        parts = torch.split_with_sizes(vector, self._chunks, dim=-1)
        return {
            name: parts[place].view(lead + shape)
            for (name, shape), place in zip(self.shapes.items(), self._places, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the vector of these tensors, with zeros as padding; the inverse of `unflatten`."""
        parts = []
        for (name, shape), padding in zip(self.shapes.items(), self._paddings, strict=True):
            tensor = tensors[name]
            lead = tensor.shape[: tensor.dim() - len(shape)]
            if tensor.shape[len(lead) :] != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
            parts += [tensor.reshape(*lead, -1), tensor.new_zeros(*lead, padding)]
        return torch.cat(parts, dim=-1) if parts else torch.zeros(0)


class Network(nn.Module):
    """A network, or an ensemble of networks, that is evaluated with a given parameter vector.

    Inputs `(batch, in)` give outputs `(batch, out)`. With `ensemble=E` these are E networks of the
    same shape, and outputs are `(E, batch, out)`, or fewer with a vector from `select`. Inputs of
    an ensemble can also be `(E, batch, in)`, with other rows for each member.
    """

    sizes: tuple[int, ...]
    """Number of inputs, units of hidden layers if they are known, and number of outputs"""
    ensemble: int | None
    layout: ParameterLayout
    """Names and shapes of the parameters, without the axis of the ensemble"""
    vector: nn.Parameter

    noise_size: int = 0
    """Number of random numbers that `noise` has for each row"""
    dropout_size: int = 0
    """Number of random numbers that `dropout` has for each row; 0 if there is no dropout"""

    @property
    def statistics(self) -> Tensor | None:
        """Running statistics that it is evaluated with; None if it has none."""
        return None

    def use_statistics(self, statistics: Tensor) -> None:
        """Keep the running statistics in the given tensor from now on."""
        raise NotImplementedError

    @property
    def constants(self) -> Sequence[str]:
        """Names of the parameters that are never trained."""
        return ()

    def with_constants_of(self, vector: Tensor, other: Tensor) -> Tensor:
        """Return a parameter vector with the constants of the vector `other`."""
        kept = self.unflatten(other)
        return self.flatten(self.unflatten(vector) | {name: kept[name] for name in self.constants})

    def forward(
        self,
        inputs: Tensor,
        vector: Tensor | None = None,
        *,
        mean_output: bool = False,
        noise: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """Evaluate with the parameters in `vector`, or with the network's own.

        With `mean_output`, return only the mean of the outputs, as a last axis of size one.
        `noise`, standard normal `(1 or batch, noise_size)`, disturbs the weights of a noisy
        network, which are its mean weights otherwise. `dropout`, uniform in [0, 1)
        `(..., batch, dropout_size)` with the axis of an ensemble, drops hidden units of a network
        with dropout; without it, as in evaluation, none are dropped.
        """
        raise NotImplementedError

    def unflatten(self, vector: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return named views of a parameter vector; an ensemble's have a leading axis.

        Tensors that are already named are returned unchanged.
        """
        if isinstance(vector, Mapping):
            return dict(vector)
        if self.ensemble is not None:
            vector = vector.reshape(*vector.shape[:-1], -1, self.layout.size)
        return self.layout.unflatten(vector)

    def select(self, vector: Tensor, subset: Tensor | slice) -> Tensor:
        """Return the parameter vector of a subset of the ensemble members."""
        rows = vector.reshape(-1, self.layout.size)
        selected = rows[subset] if isinstance(subset, slice) else rows.index_select(0, subset)
        return selected.reshape(-1)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the parameter vector of these tensors; the inverse of `unflatten`."""
        vector = self.layout.flatten(tensors)
        return vector if self.ensemble is None else vector.flatten(-2)


class MLP(Network):
    """A multilayer perceptron, or an ensemble of them."""

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
        noisy_std: float | None = None,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        """Draw the parameters from `generator`.

        `free_parameters` are the shapes of further parameters that belong to no layer. They start
        at zero. With `noisy_std`, layers have learned noise that starts at this size. `dropout` is
        the fraction of hidden units that are dropped: after the linear layer, and before LayerNorm
        and the activation, as in DroQ.
        """
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r}: choose from {', '.join(ACTIVATIONS)}")
        self.sizes = (input_size, *hidden_sizes, output_size)
        layers = itertools.pairwise(self.sizes)
        count_parameters((ensemble or 1) * sum((given + 1) * made for given, made in layers))
        self.ensemble = ensemble
        self.layer_norm = layer_norm
        self._activation = ACTIVATIONS[activation]
        self._free_parameters = dict(free_parameters or {})
        self._dropout = dropout
        self.dropout_size = sum(hidden_sizes) if dropout else 0
        self._initial_values: dict[str, float] = {}
        if noisy_std is not None:
            self.noise_size = noise_size(self.sizes)
            self._free_parameters |= noise_shapes(self.sizes)
            self._initial_values = initial_noise(self.sizes, noisy_std)
        self.layout = ParameterLayout(self._shapes())
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
        parameters = self.unflatten(self.vector if vector is None else vector)
        if self.ensemble is None:
            hidden = inputs
        else:
            hidden = inputs.expand(parameters["weight_0"].shape[0], -1, -1)
        last = len(self.sizes) - 2
        drawn = None if noise is None else split_noise(noise, self.sizes)
        uniform = None if dropout is None else torch.split(dropout, list(self.sizes[1:-1]), dim=-1)
        for layer in range(last):
            outputs = self._affine(parameters, layer, hidden)
            if drawn is not None:
                outputs = outputs + disturbance(parameters, layer, hidden, drawn[layer])
            hidden = outputs
            if uniform is not None:
                hidden = drop_out(hidden, uniform[layer], self._dropout)
            if self.layer_norm:
                hidden = F.layer_norm(hidden, hidden.shape[-1:])
                hidden = hidden * parameters[f"scale_{layer}"] + parameters[f"shift_{layer}"]
            hidden = self._activation(hidden)
            watch_units(self, hidden)
        if mean_output:  # the last layer is linear, so averaging its columns is enough
            for name in (f"weight_{last}", f"bias_{last}"):
                parameters[name] = parameters[name].mean(-1, keepdim=True)
        outputs = self._affine(parameters, last, hidden)
        return (
            outputs
            if drawn is None
            else outputs + disturbance(parameters, last, hidden, drawn[last])
        )

    def _affine(self, parameters: dict[str, Tensor], layer: int, inputs: Tensor) -> Tensor:
        weight, bias = parameters[f"weight_{layer}"], parameters[f"bias_{layer}"]
        if weight.shape[-1] == 1:
            # A matrix product with one column is slow; a sum can be fused with other operations.
            return (inputs * weight.mT).sum(-1, keepdim=True) + bias
        # The network's own inputs and outputs are not rounded.
        is_hidden = 0 < layer < len(self.sizes) - 2
        if is_hidden and is_rounded(inputs, weight):
            return rounded_product(inputs, weight) + bias
        if torch.compiler.is_compiling():
            # A separate sum is fused with the next operation; as part of the product it costs an
            # extra pass. On a CPU the compiler merges sums into products, but not differences.
            product = inputs @ weight
            return product - (-bias) if inputs.device.type == "cpu" else product + bias
        if self.ensemble is None:
            return torch.addmm(bias, inputs, weight)
        return torch.baddbmm(bias, inputs, weight)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one network; ensemble members are stored one after another."""
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
        """Return initialized layers, LayerNorms that are the identity, and free parameters."""
        lead = () if self.ensemble is None else (self.ensemble,)
        tensors = {
            name: torch.full(
                lead + shape,
                self._initial_values.get(name, 1.0 if name.startswith("scale_") else 0.0),
            )
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


def initial_layer(
    kind: str,
    ensemble: int | None,
    fan_in: int,
    fan_out: int,
    *,
    is_output: bool,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Return weights `(fan_in, fan_out)` and biases `(fan_out,)`, with a leading ensemble axis.

    `default` draws both uniformly from +-1/sqrt(fan_in), as `torch.nn.Linear` does. The others set
    biases to zero: `xavier` draws weights uniformly from +-sqrt(6 / (fan_in + fan_out)),
    `lecun` from a normal distribution of variance 1 / fan_in, truncated at two standard deviations,
    `orthogonal` draws orthogonal matrices, scaled by sqrt(2) if an activation follows.
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
    elif kind == "lecun":
        draw_lecun(weight, fan_in, generator)
    elif kind == "orthogonal":
        gain = 1.0 if is_output else math.sqrt(2.0)
        for matrix in weight.view(-1, fan_in, fan_out):
            torch.nn.init.orthogonal_(matrix, gain, generator=generator)
    else:
        raise ValueError(f"initialization {kind!r}: choose from {', '.join(INITIALIZATIONS)}")
    return weight, bias


def draw_lecun(weight: Tensor, fan_in: int, generator: torch.Generator | None = None) -> None:
    """Draw weights of variance `1 / fan_in`, as Flax does by default (LeCun et al., 1998)."""
    std = 1 / (TRUNCATED_STD * math.sqrt(fan_in))
    torch.nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)


_parameters_left: float = math.inf


@contextlib.contextmanager
def at_most_parameters(number: int) -> Iterator[None]:
    """Let networks with more parameters than this in total raise `ValueError`, before allocating.

    For networks whose sizes come from a file.
    """
    global _parameters_left
    before, _parameters_left = _parameters_left, number
    try:
        yield
    finally:
        _parameters_left = before


def count_parameters(number: int) -> None:
    """Raise `ValueError` if these are too many for `at_most_parameters`, before allocating."""
    global _parameters_left
    _parameters_left -= number
    if _parameters_left < 0:
        raise ValueError("networks of these sizes would be larger than the saved ones")


_watched: list[tuple[nn.Module, Tensor]] | None = None


@contextlib.contextmanager
def watched_units() -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Collect the outputs of hidden units while networks are evaluated, layer by layer."""
    global _watched
    before, _watched = _watched, []
    try:
        yield _watched
    finally:
        _watched = before


def watch_units(network: nn.Module, outputs: Tensor) -> None:
    """Show the outputs `(..., batch, units)` of a hidden layer to `watched_units`."""
    if _watched is not None:
        _watched.append((network, outputs))


_rounded = False


@contextlib.contextmanager
def rounded_products(rounded: bool = True) -> Iterator[None]:
    """Compute large matrix products on a CPU in bfloat16, which takes half the time.

    bfloat16 has float32's range and eight bits of precision. Products are accumulated in float32,
    and all other operations stay in float32.
    """
    global _rounded
    before, _rounded = _rounded, rounded
    try:
        yield
    finally:
        _rounded = before


def is_rounded(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether the product of these tensors is computed in bfloat16."""
    if not _rounded or inputs.device.type != "cpu":
        return False
    return inputs.shape[-2] * weight.shape[-2] * weight.shape[-1] >= LARGE_PRODUCT


def rounded_product(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return `inputs @ weight`, computed in bfloat16 like its gradients."""
    multiply = torch.mm if weight.dim() == 2 else torch.bmm  # without the shape checks of matmul
    return multiply(inputs.to(torch.bfloat16), weight.to(torch.bfloat16)).to(inputs.dtype)
