"""Networks with batch normalization, whose running statistics are a tensor besides the parameters.

A network is evaluated with running statistics. A loss uses those of its batch instead, and gets new
running statistics, which it returns like a gradient. Nothing changes by being evaluated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rl_training.models.blocks import (
    batch_norm,
    batch_statistics,
    initial_statistics,
    renormalized_statistics,
    rms_norm,
    updated_statistics,
)
from rl_training.models.mlp import (
    ACTIVATIONS,
    Network,
    ParameterLayout,
    count_parameters,
    initial_layer,
    is_rounded,
    rounded_product,
    watch_units,
)
from rl_training.models.networks import EncodedNetwork

EXPANSION = 4
"""Units inside a residual block, as a multiple of its inputs"""
SMALLEST_NORM = 1e-8


@dataclass(frozen=True)
class Normalization:
    """Where a network is normalized, and how."""

    order: Literal["after", "before", "residual"]
    """Batch normalization `after` or `before` each activation. `residual`: blocks that widen,
    normalize, activate, narrow, normalize, activate and add; at the end each row is divided by its
    root mean square. Inputs are always normalized"""
    epsilon: float = 1e-5
    """Added to variances"""
    unbiased: bool = True
    """Whether running variances are corrected for the number of rows"""
    unit_weights: bool = False
    """Whether `projected` gives the weights into each unit the norm one"""
    unit_scales: bool = False
    """Whether `projected` gives the scales and shifts of a normalization the norm that they have
    at first, which is the square root of their number of units"""


class NormalizedNetwork(Network):
    """A perceptron with batch normalization, or an ensemble of them."""

    running: Tensor
    """Running mean and variance of all normalized units, `(2, units)`, with a leading axis if this
    is an ensemble"""

    def __init__(
        self,
        input_size: int,
        hidden_sizes: Sequence[int],
        output_size: int,
        *,
        normalization: Normalization,
        ensemble: int | None = None,
        activation: str = "relu",
        layer_norm: bool = False,
        dropout: float = 0.0,
        initialization: str = "orthogonal",
        free_parameters: Mapping[str, tuple[int, ...]] | None = None,
        noisy_std: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Draw the parameters from `generator`."""
        super().__init__()
        assert not layer_norm, "it has batch normalization instead"
        assert not dropout, "it has batch normalization instead"
        assert not free_parameters, "its heads have none"
        assert noisy_std is None, "its layers have no noise"
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r}: choose from {', '.join(ACTIVATIONS)}")
        self.sizes, self.ensemble = (input_size, *hidden_sizes, output_size), ensemble
        self.normalization = normalization
        self._activation = ACTIVATIONS[activation]
        self._layers, self._normalized = _sizes(self.sizes, normalization.order)
        count_parameters((ensemble or 1) * sum(given * made for given, made in self._layers))
        self.layout = ParameterLayout(self._shapes())
        self.vector = nn.Parameter(self._initial_vector(initialization, generator))
        lead = () if ensemble is None else (ensemble,)
        running = initial_statistics(sum(self._normalized))
        self.register_buffer("running", running.expand(*lead, *running.shape).clone())

    @property
    def statistics(self) -> Tensor:
        return self.running

    def use_statistics(self, statistics: Tensor) -> None:
        self.running = statistics

    def forward(
        self,
        inputs: Tensor,
        vector: Tensor | None = None,
        *,
        mean_output: bool = False,
        noise: Tensor | None = None,
        dropout: Tensor | None = None,
        statistics: Tensor | None = None,
    ) -> Tensor:
        """Evaluate with running statistics: the given ones, or the network's own."""
        assert noise is None, "its layers have no noise"
        assert dropout is None, "its layers have no dropout"
        assert not mean_output, "the outputs of its critics are no samples"
        given = self.running if statistics is None else statistics
        parts = torch.split(given.detach(), self._normalized, dim=-1)

        def normalize(index: int, hidden: Tensor) -> Tensor:
            return batch_norm(hidden, parts[index], epsilon=self.normalization.epsilon)

        return self._outputs(inputs, vector, normalize)

    def in_training(
        self,
        inputs: Tensor,
        vector: Tensor,
        statistics: Tensor,
        *,
        momentum: float,
        renormalize: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Evaluate with the statistics of the batch; return outputs and new running statistics.

        These move by `momentum` from the given ones towards the batch's. Where `renormalize` is
        true, the batch is renormalized to the given ones.
        """
        parts, found = torch.split(statistics, self._normalized, dim=-1), []
        epsilon = self.normalization.epsilon

        def normalize(index: int, hidden: Tensor) -> Tensor:
            used = batch_statistics(hidden)
            found.append(used.detach())
            if renormalize is not None:
                moved = renormalized_statistics(used, parts[index], epsilon=epsilon)
                used = torch.where(renormalize, moved, used)
            return batch_norm(hidden, used, epsilon=epsilon)

        outputs = self._outputs(inputs, vector, normalize)
        unbiased, rows = self.normalization.unbiased, inputs.shape[-2]
        of_batch = torch.cat(found, dim=-1)
        return outputs, updated_statistics(
            statistics, of_batch, rows=rows, momentum=momentum, unbiased=unbiased
        )

    def projected(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters with the norms that the normalization asks for; others unchanged."""
        changed = dict(named)
        if self.normalization.unit_weights:
            for layer in range(len(self._layers)):
                weight = named[f"weight_{layer}"]
                norm = torch.linalg.vector_norm(weight, dim=-2, keepdim=True)
                changed[f"weight_{layer}"] = weight / norm.clamp(min=SMALLEST_NORM)
        if self.normalization.unit_scales:
            for index in range(len(self._normalized)):
                changed |= _with_unit_scales(named, f"scale_{index}", f"shift_{index}")
            if "gain" in named:
                changed |= _with_unit_scales(named, "gain")
        return changed

    def _outputs(
        self,
        inputs: Tensor,
        vector: Tensor | None,
        normalize: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        parameters = self.unflatten(self.vector if vector is None else vector)
        if self.ensemble is not None:
            inputs = inputs.expand(parameters["weight_0"].shape[0], -1, -1)

        def normalized(index: int, hidden: Tensor) -> Tensor:
            scale, shift = parameters[f"scale_{index}"], parameters.get(f"shift_{index}")
            scaled = normalize(index, hidden) * scale
            return scaled if shift is None else scaled + shift

        def linear(layer: int, hidden: Tensor) -> Tensor:
            return self._linear(parameters, layer, hidden)

        def activated(hidden: Tensor) -> Tensor:
            outputs = self._activation(hidden)
            watch_units(self, outputs)
            return outputs

        hidden, last = normalized(0, inputs), len(self._layers) - 1
        if self.normalization.order == "residual":
            hidden = linear(0, hidden)
            for layer in range(1, last, 2):
                widened = activated(normalized(layer, linear(layer, hidden)))
                hidden = hidden + activated(normalized(layer + 1, linear(layer + 1, widened)))
            return linear(last, rms_norm(hidden) * parameters["gain"])
        for layer in range(last):
            hidden = linear(layer, hidden)
            if self.normalization.order == "before":
                hidden = activated(normalized(layer + 1, hidden))
            else:
                hidden = normalized(layer + 1, activated(hidden))
        return linear(last, hidden)

    def _linear(self, parameters: Mapping[str, Tensor], layer: int, inputs: Tensor) -> Tensor:
        weight, bias = parameters[f"weight_{layer}"], parameters.get(f"bias_{layer}")
        is_hidden = 0 < layer < len(self._layers) - 1
        product = (
            rounded_product(inputs, weight)
            if is_hidden and is_rounded(inputs, weight)
            else inputs @ weight
        )
        return product if bias is None else product + bias

    def _has_bias(self, layer: int) -> bool:
        """Whether a layer has biases; those before a normalization would have no effect."""
        return self.normalization.order == "after" or layer == len(self._layers) - 1

    def _has_shift(self, index: int) -> bool:
        """Whether a normalization has shifts; the next one would remove those of the inputs."""
        return index > 0 or self.normalization.order != "before"

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        def row(size: int) -> tuple[int, ...]:
            return (size,) if self.ensemble is None else (1, size)

        shapes: dict[str, tuple[int, ...]] = {}
        for index, size in enumerate(self._normalized):
            shapes[f"scale_{index}"] = row(size)
            if self._has_shift(index):
                shapes[f"shift_{index}"] = row(size)
        for layer, (fan_in, fan_out) in enumerate(self._layers):
            shapes[f"weight_{layer}"] = (fan_in, fan_out)
            if self._has_bias(layer):
                shapes[f"bias_{layer}"] = row(fan_out)
        if self.normalization.order == "residual":
            shapes["gain"] = row(self._layers[-1][0])
        return shapes

    def _initial_vector(self, initialization: str, generator: torch.Generator | None) -> Tensor:
        """Return initialized layers, and normalizations that change nothing else."""
        lead = () if self.ensemble is None else (self.ensemble,)
        tensors = {
            name: torch.full(lead + shape, 0.0 if name.startswith("shift_") else 1.0)
            for name, shape in self.layout.shapes.items()
        }
        for layer, (fan_in, fan_out) in enumerate(self._layers):
            weight, bias = initial_layer(
                initialization,
                self.ensemble,
                fan_in,
                fan_out,
                is_output=layer == len(self._layers) - 1,
                generator=generator,
            )
            tensors[f"weight_{layer}"] = weight
            if self._has_bias(layer):
                tensors[f"bias_{layer}"] = bias.view(tensors[f"bias_{layer}"].shape)
        return self.flatten(self.projected(tensors))


def _sizes(sizes: Sequence[int], order: str) -> tuple[list[tuple[int, int]], list[int]]:
    """Return inputs and outputs of each linear layer, and the size of each normalization."""
    if order != "residual":
        return list(itertools.pairwise(sizes)), list(sizes[:-1])
    inputs, *widths, outputs = sizes
    width = widths[0]
    layers, normalized = [(inputs, width)], [inputs]
    for _ in widths:
        layers += [(width, EXPANSION * width), (EXPANSION * width, width)]
        normalized += [EXPANSION * width, width]
    return [*layers, (width, outputs)], normalized


def _with_unit_scales(named: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    """Return these tensors, scaled so that the sum of all squares is their number of units."""
    squares = sum(named[name].square() for name in names)
    assert isinstance(squares, Tensor)
    total = squares.sum(-1, keepdim=True)
    factor = math.sqrt(squares.shape[-1]) * torch.rsqrt(total + SMALLEST_NORM)
    return {name: named[name] * factor for name in names}


def normalized_part(
    network: Network, inputs: Tensor | Mapping[str, Tensor], vector: Tensor | None
) -> tuple[NormalizedNetwork, Tensor, Any]:
    """Return the normalized network, its inputs and its parameters; it may be on an encoder."""
    if isinstance(network, EncodedNetwork):
        assert isinstance(network.head, NormalizedNetwork)
        return network.head, *network.head_inputs(inputs, vector)
    assert isinstance(network, NormalizedNetwork)
    assert isinstance(inputs, Tensor)
    return network, inputs, vector


def projected_vector(network: Network, vector: Tensor) -> Tensor:
    """Return a parameter vector with the norms that the network's normalization asks for."""
    head = network.head if isinstance(network, EncodedNetwork) else network
    assert isinstance(head, NormalizedNetwork)
    return network.flatten(head.projected(network.unflatten(vector)))
