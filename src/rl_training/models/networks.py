"""Networks of plain modules, and networks that first encode observations.

Like those of an `MLP`, their parameters are one vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.custom_networks import called_with, places_of
from rl_training.models.mlp import Network, ParameterLayout
from rl_training.observations import ObservationLeaf, ObservationSpec

ENCODER = "encoder."
"""Prefix of the names of an encoder's parameters"""


class ModuleNetwork(Network):
    """Any modules as a network: their parameters are replaced by parts of a vector.

    Parameters that do not require a gradient keep their values.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        sizes: tuple[int, ...],
        *,
        ensemble: int | None = None,
        free_parameters: Mapping[str, tuple[int, ...]] | None = None,
        why_not_mapped: str | None = None,
    ) -> None:
        """Take one module, or the equal modules of an ensemble.

        `why_not_mapped` says why they cannot be mapped over seeds.
        """
        super().__init__()
        self.sizes, self.ensemble, self.why_not_mapped = sizes, ensemble, why_not_mapped
        free = dict(free_parameters or {})
        own = dict(modules[0].named_parameters())
        self._names, self._places = list(own), places_of(modules[0])
        self._frozen = [name for name, parameter in own.items() if not parameter.requires_grad]
        shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        self.layout = ParameterLayout(shapes | free)
        zeros = {name: torch.zeros(shape) for name, shape in free.items()}
        vectors = [
            self.layout.flatten({**dict(module.named_parameters()), **zeros}).detach()
            for module in modules
        ]
        self.vector = nn.Parameter(vectors[0] if ensemble is None else torch.cat(vectors))
        # In a tuple, since its parameters are not this network's: they have no numbers.
        self._structure = (_without_numbers(modules[0]),)

    @property
    def constants(self) -> Sequence[str]:
        return self._frozen

    def forward(
        self,
        inputs: Tensor | Mapping[str, Tensor],
        vector: Tensor | None = None,
        *,
        mean_output: bool = False,
        noise: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """Evaluate as every network does; an encoder takes leaves by name."""
        assert noise is None, "only layers that this package builds are noisy"
        assert dropout is None, "only layers that this package builds have dropout"
        tensors = self.unflatten(self.vector if vector is None else vector)
        tensors = {name: tensors[name] for name in self._names}
        tensors |= {name: tensors[name].detach() for name in self._frozen}
        own_rows = isinstance(inputs, Tensor) and inputs.dim() == 3
        if self.ensemble is None:
            outputs = self._call(tensors, inputs)
        elif self.why_not_mapped:
            members = zip(*(tensor.unbind() for tensor in tensors.values()), strict=True)
            each = (dict(zip(tensors, member, strict=True)) for member in members)
            given = inputs if own_rows else itertools.repeat(inputs)
            calls = zip(each, given, strict=False)
            outputs = torch.stack([self._call(member, rows) for member, rows in calls])
        else:
            in_dims = (0, 0 if own_rows else None)
            outputs = torch.func.vmap(self._call, in_dims=in_dims)(tensors, inputs)
        return outputs.mean(-1, keepdim=True) if mean_output else outputs

    def _call(self, tensors: dict[str, Tensor], inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        outputs: Tensor = called_with(self._structure[0], tensors, inputs, self._places)
        return outputs


def _without_numbers(module: nn.Module) -> nn.Module:
    """Replace the parameters of a module by ones that take no memory; shared ones stay shared."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter not in replaced:
                empty = torch.empty_like(parameter, device="meta")
                replaced[parameter] = nn.Parameter(empty, requires_grad=False)
            if parameter is not None:
                part._parameters[name] = replaced[parameter]
    return module


class JoinedNumbers(Network):
    """The numbers of observations side by side, as floats: an encoder without parameters."""

    def __init__(self, leaves: Sequence[ObservationLeaf]) -> None:
        super().__init__()
        self._numbers = [leaf.numbers for leaf in leaves]
        size = sum(self._numbers)
        self.sizes, self.ensemble, self.layout = (size, size), None, ParameterLayout({})
        self.vector = nn.Parameter(torch.zeros(0))

    def forward(
        self,
        inputs: Tensor | Mapping[str, Tensor],
        vector: Tensor | None = None,
        *,
        mean_output: bool = False,
        noise: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        leaves = [inputs] if isinstance(inputs, Tensor) else list(inputs.values())
        pairs = zip(leaves, self._numbers, strict=True)
        # Sizes are given, because an exported program cannot infer those of leaves without axes.
        return torch.cat([x.reshape(x.shape[0], numbers) for x, numbers in pairs], dim=-1)


def chosen_leaves(leaves: Mapping[str, Tensor], names: Sequence[str]) -> Tensor | dict[str, Tensor]:
    """Return what an encoder takes: a single array itself, or the leaves by name."""
    return leaves[""] if list(names) == [""] else {name: leaves[name] for name in names}


class EncodedNetwork(Network):
    """A network on the features of an observation and on further inputs, such as actions.

    Inputs are rows of an observation, followed by the further inputs. The vector has the encoder's
    parameters first, which the members of an ensemble share, and then those of the network on top.
    Without such a network, the outputs are the features.
    """

    def __init__(
        self,
        observation: ObservationSpec,
        leaves: Sequence[ObservationLeaf],
        encoder: ModuleNetwork | JoinedNumbers,
        head: Network | None,
    ) -> None:
        super().__init__()
        self._observation, self._names = observation, [leaf.name for leaf in leaves]
        self.encoder, self.head = encoder, head
        self.ensemble = None if head is None else head.ensemble
        self.sizes = encoder.sizes if head is None else head.sizes
        self.noise_size = 0 if head is None else head.noise_size
        self.dropout_size = 0 if head is None else head.dropout_size
        parts: list[Network] = [encoder] if head is None else [encoder, head]
        self._encoder_length = len(encoder.vector)
        shapes = {ENCODER + name: shape for name, shape in encoder.layout.shapes.items()}
        self.layout = ParameterLayout(shapes | (head.layout.shapes if head is not None else {}))
        self.vector = nn.Parameter(torch.cat([part.vector.detach() for part in parts]))
        for part in parts:
            del part.vector  # its numbers are in this network's vector

    def forward(
        self,
        inputs: Tensor | Mapping[str, Tensor],
        vector: Tensor | None = None,
        *,
        mean_output: bool = False,
        noise: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """Evaluate as every network does; observations may also be leaves `(batch, ...)`."""
        features, others = self.head_inputs(inputs, vector)
        if self.head is None:
            return features
        outputs: Tensor = self.head(
            features, others, mean_output=mean_output, noise=noise, dropout=dropout
        )
        return outputs

    def head_inputs(
        self, inputs: Tensor | Mapping[str, Tensor], vector: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return the inputs and the parameters of the network on top."""
        own, others = self._split(self.vector if vector is None else vector)
        size, rest = self._observation.size, None
        if isinstance(inputs, Tensor):
            inputs, rest = inputs[..., :size], inputs[..., size:]
        features = self._features(inputs, own)
        if rest is not None and rest.shape[-1]:
            features = torch.cat([features, rest], dim=-1)
        return features, others

    @property
    def statistics(self) -> Tensor | None:
        return None if self.head is None else self.head.statistics

    def use_statistics(self, statistics: Tensor) -> None:
        assert self.head is not None
        self.head.use_statistics(statistics)

    @property
    def constants(self) -> Sequence[str]:
        own = [ENCODER + name for name in self.encoder.constants]
        return own if self.head is None else [*own, *self.head.constants]

    def encode(self, rows: Tensor | Mapping[str, Tensor], vector: Tensor | None = None) -> Tensor:
        """Return the features `(batch, features)` of observations."""
        return self._features(rows, self._split(self.vector if vector is None else vector)[0])

    def decode(self, inputs: Tensor, vector: Any = None) -> Tensor:
        """Return the outputs for features that are known already, followed by further inputs."""
        assert self.head is not None
        others = self._split(self.vector if vector is None else vector)[1]
        outputs: Tensor = self.head(inputs, others)
        return outputs

    def with_encoder_of(self, vector: Tensor, other: Tensor) -> Tensor:
        """Return a parameter vector with the encoder of the vector `other`."""
        return torch.cat([self._split(other)[0], self._split(vector)[1]], dim=-1)

    def _features(self, rows: Tensor | Mapping[str, Tensor], vector: Any) -> Tensor:
        if not isinstance(rows, Tensor):
            given = {n: self._observation.leaf(n).as_given(rows[n]) for n in self._names}
            encoded: Tensor = self.encoder(chosen_leaves(given, self._names), vector)
            return encoded
        # Most leaves are no floats, and no method differentiates with respect to the others.
        leaves = self._observation.leaves_of(rows.detach().reshape(-1, rows.shape[-1]))
        features: Tensor = self.encoder(chosen_leaves(leaves, self._names), vector)
        return features.reshape(*rows.shape[:-1], -1)

    def _split(self, vector: Tensor | Mapping[str, Tensor]) -> tuple[Any, Any]:
        """Return the parts of the encoder and of the network on top, as a vector or by name."""
        if isinstance(vector, Mapping):
            own = {n.removeprefix(ENCODER): t for n, t in vector.items() if n.startswith(ENCODER)}
            return own, {n: t for n, t in vector.items() if not n.startswith(ENCODER)}
        length = self._encoder_length
        parts = torch.split(vector, [length, vector.shape[-1] - length], dim=-1)
        return parts[0], parts[1]

    def unflatten(self, vector: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(vector, Mapping):
            return dict(vector)
        own, others = self._split(vector)
        named = {ENCODER + name: part for name, part in self.encoder.unflatten(own).items()}
        return named if self.head is None else named | self.head.unflatten(others)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        own, others = self._split(tensors)
        vector = self.encoder.flatten(own)
        return vector if self.head is None else torch.cat([vector, self.head.flatten(others)], -1)

    def select(self, vector: Tensor, subset: Tensor | slice) -> Tensor:
        assert self.head is not None
        own, others = self._split(vector)
        return torch.cat([own, self.head.select(others, subset)], dim=-1)
