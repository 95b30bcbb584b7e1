"""What the networks of a model look like: by observations, settings and a user's factory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from rl_training.errors import ConfigError
from rl_training.internals import available_memory
from rl_training.models.custom_networks import ROWS, CustomNetworks, why_not_mapped
from rl_training.models.encoders.observations import (
    ObservationEncoder,
    leaf_encoder,
    leaf_label,
)
from rl_training.models.mlp import MLP, Network, count_parameters, draw_lecun
from rl_training.models.network_settings import NetworkSettings
from rl_training.models.networks import EncodedNetwork, JoinedNumbers, ModuleNetwork, chosen_leaves
from rl_training.observations import ObservationLeaf, ObservationSpec, select_names

DEFAULTS = NetworkSettings()
TRAINED_BYTES = 12
"""Bytes of a parameter and of Adam's moments"""
SMALL = 2**28
"""Bytes from which the memory of an encoder is checked"""

Make = Callable[..., Network]
"""Builds a network from the arguments of `MLP`"""


class LayerOptions(TypedDict, total=False):
    """Optional keyword arguments of an `MLP`."""

    ensemble: int | None
    activation: str
    layer_norm: bool
    initialization: str
    free_parameters: Mapping[str, tuple[int, ...]] | None
    noisy_std: float | None
    dropout: float
    generator: torch.Generator | None


class NetworkPlan:
    """Builds networks on observations.

    Networks on numbers alone are plain MLPs, unless the settings say otherwise: a row of float32
    needs no encoder, and numbers of other types are only converted.
    """

    def __init__(
        self,
        observation: ObservationSpec,
        settings: NetworkSettings | None = None,
        custom: CustomNetworks | None = None,
    ) -> None:
        self.observation, self.custom = observation, custom
        self.settings = settings or DEFAULTS
        if settings is not None:
            self._check_names()

    @classmethod
    def of(cls, given: int | ObservationSpec | NetworkPlan) -> NetworkPlan:
        """Return the plan for observations that are one vector of that size, or as described."""
        if isinstance(given, NetworkPlan):
            return given
        return cls(ObservationSpec.vector(given) if isinstance(given, int) else given)

    @property
    def custom_name(self) -> str | None:
        """The name of a user's factory; None if all networks are built in."""
        return None if self.custom is None else self.custom.name

    @property
    def shares_encoder(self) -> bool:
        """Whether the actor's inputs are the features of the critics' encoder."""
        return self.settings.shared_encoder

    def build(
        self,
        part: str,
        hidden_sizes: Sequence[int] | None,
        outputs: int,
        *,
        other_inputs: int = 0,
        make: Make | None = None,
        **options: Unpack[LayerOptions],
    ) -> Network:
        """Build a network on observations and `other_inputs` numbers.

        `part` is `actor`, `critic` or `value`. Without `hidden_sizes` it is only the encoder.
        `make` builds what is on top of it instead of `MLP`, with the same arguments.
        """
        if part == "actor" and self.shares_encoder:
            size = self._feature_size("critic", options)
            return self._head(
                part, size + other_inputs, hidden_sizes or (), outputs, make, **options
            )
        if not self.encodes(part) and self.observation.is_float32:
            size = self.observation.size
            return self._head(
                part, size + other_inputs, hidden_sizes or (), outputs, make, **options
            )
        encoder: ModuleNetwork | JoinedNumbers = (
            self._encoder(part, options) if self.encodes(part) else JoinedNumbers(self.leaves(part))
        )
        inputs, head = encoder.sizes[-1] + other_inputs, None
        if hidden_sizes is not None:
            head = self._head(part, inputs, hidden_sizes, outputs, make, **options)
        return EncodedNetwork(self.observation, self.leaves(part), encoder, head)

    def build_on(
        self,
        inputs: int,
        part: str,
        hidden_sizes: Sequence[int],
        outputs: int,
        **options: Unpack[LayerOptions],
    ) -> Network:
        """Build a network on numbers that another network makes of observations."""
        return self._head(part, inputs, hidden_sizes, outputs, None, **options)

    def encodes(self, part: str) -> bool:
        """Whether a network needs an encoder to read observations."""
        is_custom = self.custom is not None and self.custom.defines("encoder")
        leaves = self.leaves(part)
        is_plain = self.observation.is_numeric and leaves == self.observation.leaves
        return is_custom or not is_plain or bool(self.settings.encoders)

    def leaves(self, part: str) -> tuple[ObservationLeaf, ...]:
        """Return the leaves that a network sees, in the order of the observation."""
        chosen = self.settings.actor_obs if part == "actor" else self.settings.critic_obs
        if chosen is None:
            return self.observation.leaves
        every = {leaf_label(leaf): leaf for leaf in self.observation.leaves}
        return tuple(every[name] for name in select_names(list(every), chosen))

    def check(self, networks: Mapping[str, Network]) -> None:
        """Raise `ConfigError` for settings that these networks of an algorithm have no use for."""
        settings, parts = self.settings, {name.partition("_")[0] for name in networks}
        reads = [isinstance(network, EncodedNetwork) for network in networks.values()]
        if not self.observation.is_float32 and not any(reads):
            advice = " or wrap the environment in Boxes of float32"
            raise ConfigError(
                "this algorithm reads only observations that are float32, not "
                f"{self.observation.describe()}; let it build its model with self.plan"
                f"{advice if self.observation.is_numeric else ''}"
            )
        for part, given in (("actor", settings.actor_obs), ("critic", settings.critic_obs)):
            if given is not None and part not in parts:
                raise ConfigError(f"networks.{part}_obs = {given}: this algorithm has no {part}")
        if settings.shared_encoder and not {"actor", "critic"} <= parts:
            raise ConfigError(
                "networks.shared_encoder = True: this algorithm does not have both actor and critic"
            )
        if settings.shared_encoder and not self.encodes("critic"):
            raise ConfigError(
                "networks.shared_encoder = True: observations are numbers, so that there is no "
                "encoder to share"
            )
        if settings.random_shift and not any(x.kind == "image" for x in self.observation.leaves):
            raise ConfigError(
                f"networks.random_shift = {settings.random_shift}: observations have no images"
            )
        for method in ("actor", "critic", "value"):
            if self.custom is not None and self.custom.defines(method) and method not in parts:
                raise ConfigError(
                    f"{self.custom.name}.{method}: this algorithm has no network {method!r}"
                )

    def _check_names(self) -> None:
        """Raise `ConfigError` if a setting names a leaf that does not exist."""
        known = [leaf_label(leaf) for leaf in self.observation.leaves]
        unknown = [("encoders", name) for name in self.settings.encoders if name not in known]
        for key in ("actor_obs", "critic_obs"):
            try:
                select_names(known, getattr(self.settings, key))
            except KeyError as missing:
                unknown.append((key, missing.args[0]))
        for key, name in unknown:
            raise ConfigError(
                f"networks.{key}: the observation has no part {name!r}; it has "
                f"{', '.join(map(repr, known))}"
            )

    def _head(
        self,
        part: str,
        inputs: int,
        hidden_sizes: Sequence[int],
        outputs: int,
        make: Make | None,
        **options: Unpack[LayerOptions],
    ) -> Network:
        """Build a network on features."""
        custom = self.custom
        if custom is None or not custom.defines(part):
            return (make or MLP)(inputs, hidden_sizes, outputs, **options)
        if make is not None:
            raise ConfigError(
                f"{custom.name}.{part}: this algorithm needs its own {part}, because the layers of "
                f"its networks are part of the method; remove {custom.name}.{part}"
            )
        if options.get("noisy_std") is not None:
            raise ConfigError(
                f"noisy = True: needs the built-in {part}; remove {custom.name}.{part}"
            )
        if options.get("dropout"):
            raise ConfigError(
                f"{part}_dropout = {options['dropout']}: needs the built-in {part}; remove "
                f"{custom.name}.{part}"
            )
        ensemble = options.get("ensemble")
        with drawn_from(options.get("generator")):
            modules = [custom.network(part, inputs, outputs) for _ in range(ensemble or 1)]
        return ModuleNetwork(
            modules,
            (inputs, outputs),
            ensemble=ensemble,
            free_parameters=options.get("free_parameters"),
            why_not_mapped=why_not_mapped(modules[0], torch.zeros(ROWS, inputs)),
        )

    def _encoder(self, part: str, options: LayerOptions) -> ModuleNetwork:
        leaves = self.leaves(part)
        if self.custom is not None and self.custom.defines("encoder"):
            examples = self._examples(leaves)
            with drawn_from(options.get("generator")):
                module, size = self.custom.encoder(ObservationSpec(leaves), examples)
            reason = why_not_mapped(module, examples)
            return ModuleNetwork([module], (self.observation.size, size), why_not_mapped=reason)
        with torch.device("meta"):
            structure = ObservationEncoder(leaves, self.settings)
        count_parameters(sum(parameter.numel() for parameter in structure.parameters()))
        _require_memory(leaves, self.settings)
        with drawn_from(options.get("generator")):
            built_in = ObservationEncoder(leaves, self.settings)
            initialize(built_in, options.get("initialization", "default"))
        return ModuleNetwork([built_in], (self.observation.size, built_in.feature_size))

    def _feature_size(self, part: str, options: LayerOptions) -> int:
        """Return the number of features that an encoder would have."""
        if self.custom is not None and self.custom.defines("encoder"):
            leaves = self.leaves(part)
            with drawn_from(torch.Generator()):
                return self.custom.encoder(ObservationSpec(leaves), self._examples(leaves))[1]
        with torch.device("meta"):
            return ObservationEncoder(self.leaves(part), self.settings).feature_size

    def _examples(self, leaves: Sequence[ObservationLeaf]) -> Any:
        """Return possible inputs of an encoder."""
        rows = torch.tensor(self.observation.smallest_rows(ROWS))
        return chosen_leaves(self.observation.leaves_of(rows), [leaf.name for leaf in leaves])


def _require_memory(leaves: Sequence[ObservationLeaf], settings: NetworkSettings) -> None:
    """Raise `ConfigError` if the largest encoder of a leaf cannot be trained in memory.

    Embeddings have a vector for each value, of which there may be billions.
    """
    with torch.device("meta"):
        encoders = [(leaf_encoder(leaf, settings), leaf) for leaf in leaves]
    sizes = [(sum(part.numel() for part in each.parameters()), leaf) for each, leaf in encoders]
    number, leaf = max(sizes, key=lambda size: size[0])
    needed = TRAINED_BYTES * number
    available = None if needed < SMALL else available_memory("cpu")
    if available is not None and needed > available:
        raise ConfigError(
            f"the encoder of the {leaf.label} has {number:,} parameters, which need "
            f"{needed / 2**30:,.0f} GiB of memory; {available / 2**30:,.0f} GiB are available; "
            f"choose a smaller one in networks.encoders.{leaf_label(leaf)}, or wrap the environment"
        )


@contextlib.contextmanager
def drawn_from(generator: torch.Generator | None) -> Iterator[None]:
    """Let modules draw their initial parameters from a generator.

    Modules use PyTorch's global one. It is seeded, and restored afterwards.
    """
    seed = int(torch.randint(2**62, (), generator=generator))
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def initialize(module: nn.Module, kind: str) -> None:
    """Initialize layers like those of an `MLP`; `default` leaves them as PyTorch does."""
    if kind == "default":
        return
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            if kind == "orthogonal":
                nn.init.orthogonal_(layer.weight, math.sqrt(2))
            elif kind == "lecun":
                draw_lecun(layer.weight, layer.weight[0].numel())
            else:
                nn.init.xavier_uniform_(layer.weight)
