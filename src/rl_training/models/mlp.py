"""Multilayer perceptrons, alone or as an ensemble evaluated in one batched product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.initialization import initial_layer
from rl_training.models.parameters import ParameterLayout
from rl_training.models.products import is_rounded, rounded_product

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
