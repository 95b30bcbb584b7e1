"""Encoders of observations: one for each leaf, whose outputs are joined to one vector of features.

They are plain modules. `models.networks` evaluates them with parameters from a vector.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_training.errors import ConfigError
from rl_training.models.encoders.images import (
    DrQEncoder,
    ImageEncoder,
    ImpalaEncoder,
    NatureEncoder,
)
from rl_training.models.network_settings import EncoderSettings, NetworkSettings
from rl_training.observations import ObservationLeaf

ONE_HOT_LIMIT = 1_000
"""Discrete values of which more are possible are embedded by default; others are one-hot"""
MLP_FEATURES = 64
"""Number of features of an `mlp` by default"""

IMAGE_NETWORKS: Mapping[str, type[NatureEncoder | ImpalaEncoder | DrQEncoder]] = {
    "nature": NatureEncoder,
    "impala": ImpalaEncoder,
    "drq": DrQEncoder,
}


class NumbersEncoder(nn.Module):
    """Numbers as they are, or the outputs of an MLP with ReLU after each of its layers."""

    def __init__(self, leaf: ObservationLeaf, layers: Sequence[int] = ()) -> None:
        super().__init__()
        self._layers = len(layers)
        inputs = self._numbers = leaf.numbers
        for layer, outputs in enumerate(layers):
            self.add_module(f"layer_{layer}", nn.Linear(inputs, outputs))
            inputs = outputs
        self.feature_size = inputs

    def forward(self, values: Tensor) -> Tensor:
        """Return features `(batch, feature_size)` of a leaf `(batch, *shape)`."""
        hidden = values.reshape(values.shape[0], self._numbers).to(torch.get_default_dtype())
        for layer in range(self._layers):
            hidden = torch.relu(self.get_submodule(f"layer_{layer}")(hidden))
        return hidden


class DiscreteEncoder(nn.Module):
    """One-hot vectors of the components with few values, learned embeddings of the others."""

    def __init__(
        self, leaf: ObservationLeaf, *, one_hot_limit: float, embedding_size: int = 64
    ) -> None:
        super().__init__()
        self._starts, self._choices = leaf.starts, leaf.choices
        self._embedded: dict[int, str] = {}
        self.feature_size = 0
        for component, choices in enumerate(leaf.choices):
            if choices <= one_hot_limit:
                self.feature_size += choices
                continue
            name = self._embedded[component] = f"embedding_{component}"
            self.add_module(name, nn.Embedding(choices, embedding_size))
            self.feature_size += embedding_size

    def forward(self, values: Tensor) -> Tensor:
        """Return features `(batch, feature_size)` of a leaf `(batch, *shape)`."""
        parts: list[Tensor] = []
        for component, value in enumerate(values.reshape(values.shape[0], -1).unbind(1)):
            index = value - self._starts[component]
            if component in self._embedded:
                parts.append(self.get_submodule(self._embedded[component])(index))
            else:
                # Comparisons instead of `one_hot`, because they are mapped over seeds and fused.
                possible = torch.arange(self._choices[component], device=index.device)
                parts.append((index[:, None] == possible).to(torch.get_default_dtype()))
        return torch.cat(parts, dim=-1)


LeafEncoder = NumbersEncoder | DiscreteEncoder | ImageEncoder


class ObservationEncoder(nn.Module):
    """Encodes each leaf of an observation and joins the features, in the order of the leaves."""

    def __init__(self, leaves: Sequence[ObservationLeaf], settings: NetworkSettings) -> None:
        super().__init__()
        self._modules_of: dict[str, str] = {}
        self.feature_size = 0
        for leaf in leaves:
            encoder = leaf_encoder(leaf, settings)
            name = self._modules_of[leaf.name] = self._free_name(leaf)
            self.add_module(name, encoder)
            self.feature_size += encoder.feature_size

    def _free_name(self, leaf: ObservationLeaf) -> str:
        """Return the leaf's name as that of a module, which must not be an attribute's."""
        name = re.sub(r"\W", "_", leaf_label(leaf))
        while hasattr(self, name):
            name += "_"
        return name

    def forward(self, leaves: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Return features `(batch, feature_size)` of a single array, or of leaves by name."""
        if isinstance(leaves, Tensor):
            leaves = {"": leaves}
        parts = [self.get_submodule(module)(leaves[n]) for n, module in self._modules_of.items()]
        return torch.cat(parts, dim=-1)


def leaf_label(leaf: ObservationLeaf) -> str:
    """Return the name of a leaf in settings: a single array is called `observation`."""
    return leaf.name or "observation"


def leaf_encoder(leaf: ObservationLeaf, settings: NetworkSettings) -> LeafEncoder:
    """Build the encoder of a leaf; raise `ConfigError` if the chosen one does not fit it."""
    label = leaf_label(leaf)
    chosen = settings.encoders.get(label)
    if chosen is None:
        if leaf.kind == "image":
            return IMAGE_NETWORKS[settings.image_encoder](leaf)
        if leaf.kind == "discrete":
            return DiscreteEncoder(leaf, one_hot_limit=ONE_HOT_LIMIT)
        return NumbersEncoder(leaf)
    build, kinds = _CHOICES[chosen.encoder]
    if leaf.kind not in kinds:
        fitting = ", ".join(name for name, (_, fits) in _CHOICES.items() if leaf.kind in fits)
        raise ConfigError(
            f"networks.encoders.{label} = {chosen.encoder!r}: is not for {leaf.kind}; choose from "
            f"{fitting}"
        )
    try:
        return build(leaf, chosen)
    except ValueError as error:
        raise ConfigError(f"networks.encoders.{label} = {chosen.encoder!r}: {error}") from None


def _image(leaf: ObservationLeaf, chosen: EncoderSettings) -> LeafEncoder:
    return IMAGE_NETWORKS[chosen.encoder](leaf, chosen.feature_size, chosen.channels)


def _mlp(leaf: ObservationLeaf, chosen: EncoderSettings) -> LeafEncoder:
    return NumbersEncoder(leaf, (*chosen.hidden_sizes, chosen.feature_size or MLP_FEATURES))


def _embedding(leaf: ObservationLeaf, chosen: EncoderSettings) -> LeafEncoder:
    return DiscreteEncoder(leaf, one_hot_limit=0, embedding_size=chosen.embedding_size)


_Build = Callable[[ObservationLeaf, EncoderSettings], LeafEncoder]
_CHOICES: Mapping[str, tuple[_Build, tuple[str, ...]]] = {
    "identity": (lambda leaf, chosen: NumbersEncoder(leaf), ("numbers", "binary")),
    "mlp": (_mlp, ("numbers", "binary")),
    "one_hot": (
        lambda leaf, chosen: DiscreteEncoder(leaf, one_hot_limit=float("inf")),
        ("discrete",),
    ),
    "embedding": (_embedding, ("discrete",)),
    **dict.fromkeys(IMAGE_NETWORKS, (_image, ("image", "numbers"))),
}
"""How to build each encoder, and the kinds of leaves that it is for"""
