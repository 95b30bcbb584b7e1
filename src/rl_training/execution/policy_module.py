"""A policy as a `torch.nn.Module`, for `torch.export`, `torch.compile` and other tools."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm
from rl_training.data.transforms import ObservationNormalizer, normalize
from rl_training.observations import ObservationLeaf, ObservationSpec
from rl_training.types import SpaceInfo, State


class PolicyLayers(nn.Module):
    """What all modules of a policy share: its networks, and the units of the environment.

    The parameters are the layers of the networks that choose actions, with the names that a saved
    policy uses, such as `actor.weight_0`. Weights are `(inputs, outputs)`. The buffers are the
    observation normalization and the bounds of the actions.

    Everything is copied from the policy. Training, moving or changing the module does not change
    the policy, and the module does not follow a policy that continues to learn.
    """

    obs_shift: Tensor | None
    obs_scale: Tensor | None
    action_low: Tensor | None
    action_high: Tensor | None
    first_choice: Tensor | None

    def __init__(
        self, algorithm: Algorithm, spaces: SpaceInfo, normalizer: ObservationNormalizer | None
    ) -> None:
        super().__init__()
        shape = spaces.action_shape
        self._action_shape = None if shape is None or len(shape) == 1 else shape
        self._chunk = algorithm.action_chunk
        self._action_start = spaces.action_start
        names = self._names_read(algorithm)
        self._names = [name for name in algorithm.networks() if name in names]
        self._buffer_names = [name for name in algorithm.buffers() if name in names]
        for name in self._buffer_names:
            self.register_buffer(name, algorithm.state[name].detach().clone())
        for name in self._names:
            layers = algorithm.networks()[name].unflatten(algorithm.state[name])
            self.add_module(name, nn.ParameterDict())
            for part, layer in layers.items():
                _add_parameter(getattr(self, name), part, nn.Parameter(layer.clone()))
        self._algorithm = _structure_of(algorithm)

        device = algorithm.device
        statistics = (normalizer.shift, normalizer.scale) if normalizer else (None, None)
        bounds = spaces.bounds if spaces.is_continuous else (None, None)
        first = None
        if spaces.action_kind in ("multi_discrete", "multi_binary"):
            first = torch.as_tensor(spaces.first_choice)
        values = {
            "obs_shift": statistics[0],
            "obs_scale": statistics[1],
            "action_low": None if bounds[0] is None else torch.as_tensor(bounds[0]),
            "action_high": None if bounds[1] is None else torch.as_tensor(bounds[1]),
            "first_choice": first,
        }
        for name, tensor in values.items():
            if tensor is None:
                setattr(self, name, None)  # `torch.export` does not accept empty buffers
            else:
                self.register_buffer(name, tensor.detach().clone())
        low, high = self.action_low, self.action_high
        self._symmetric = low is not None and high is not None and torch.equal(low, -high)
        self.to(device)

    def _choose(self, algorithm: Algorithm, state: State, obs: Tensor, *others: Tensor) -> Tensor:
        """Return actions in the units of the model."""
        return algorithm.act(state, obs)

    def _actions(self, obs: Tensor, *others: Tensor) -> Tensor:
        chosen = self._choose(self._algorithm, self._state(), self._normalized(obs), *others)
        if self._chunk > 1:
            chosen = chosen.reshape(*chosen.shape[:-1], self._chunk, -1)
        scaled = self._in_environment_units(chosen)
        if self._action_shape is None:
            return scaled
        lead = (-1, self._chunk) if self._chunk > 1 else (-1,)
        return scaled.reshape(*lead, *self._action_shape)

    def _state(self) -> State:
        layers = {name: dict(getattr(self, name).named_parameters()) for name in self._names}
        buffers = {name: getattr(self, name) for name in self._buffer_names}
        # Networks also accept their layers by name instead of a parameter vector.
        return cast("State", {**layers, **buffers})

    def _normalized(self, obs: Tensor) -> Tensor:
        if self.obs_shift is None or self.obs_scale is None:
            return obs
        return normalize(obs, self.obs_shift, self.obs_scale)

    def _in_environment_units(self, actions: Tensor) -> Tensor:
        """Scale as `ActionScaler` does, whose arrays cannot be exported."""
        low, high = self.action_low, self.action_high
        if low is None or high is None:
            return actions + (
                self._action_start if self.first_choice is None else self.first_choice
            )
        if self._symmetric:
            return actions.clamp(-1, 1) * high
        scaled = (1 - actions) * (0.5 * low) + (1 + actions) * (0.5 * high)
        return torch.minimum(torch.maximum(scaled, low), high)

    def _names_read(self, algorithm: Algorithm) -> set[str]:
        """Return the parts of the state that choose actions, fewer than a saved policy has."""
        names: set[str] = set()

        class Watched(dict[str, Any]):
            def __getitem__(self, name: str) -> Any:
                names.add(name)
                return super().__getitem__(name)

        obs = torch.tensor(algorithm.observation.smallest_rows(1), device=algorithm.device)
        draws = algorithm.exploration_noise(1).values()
        noise = [torch.zeros(draw.shape, device=algorithm.device) for draw in draws]
        with torch.inference_mode():
            self._choose(algorithm, Watched(algorithm.state), obs, *noise)
        return names


class PolicyModule(PolicyLayers):
    """Maps observations `(batch, obs_dim)` to deterministic actions, both in environment units."""

    def forward(self, obs: Tensor) -> Tensor:
        return self._actions(obs)


class PolicyModuleWithValues(PolicyLayers):
    """Same as `PolicyModule`, and the values of all discrete actions, `(batch, actions)`."""

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        values = self._algorithm.action_values(self._state(), self._normalized(obs))
        assert values is not None, "checked by the caller"
        return self._actions(obs), values


class SampledPolicyModule(PolicyLayers):
    """Maps observations and noise to sampled actions.

    The noise is that of `exploration_noise`: standard normal `(batch, action_dim)`, or uniform if
    actions are choices.
    """

    def forward(self, obs: Tensor, noise: Tensor) -> Tensor:
        return self._actions(obs, noise)

    def _choose(self, algorithm: Algorithm, state: State, obs: Tensor, *others: Tensor) -> Tensor:
        (noise,) = others
        return algorithm.explore(state, obs, {"action": noise}, noise.new_ones(()))


class LeafInputs(nn.Module):
    """A policy's module for observations that are not one vector: its inputs are the leaves.

    Numbers have the type in which they are stored, and images are uint8. Discrete and binary leaves
    may have any integer type.
    Leaves that only critics see are no inputs.
    """

    def __init__(
        self,
        module: PolicyLayers,
        observation: ObservationSpec,
        leaves: Sequence[ObservationLeaf],
    ) -> None:
        """`leaves` are those that the actions depend on, in the order of the observation."""
        super().__init__()
        self.policy = module
        self._observation, self._leaves = observation, tuple(leaves)

    @property
    def names(self) -> list[str]:
        """The names of the inputs: `obs`, or `obs/` and the name of a leaf."""
        return [f"obs/{leaf.name}" if leaf.name else "obs" for leaf in self._leaves]

    def forward(self, *inputs: Tensor) -> Any:
        """Take the leaves `(batch, ...)` in their order, then the other inputs of the module."""
        number = len(self._leaves)
        obs: Any = {leaf.name: value for leaf, value in zip(self._leaves, inputs, strict=False)}
        if self._observation.is_float32:
            obs = torch.cat(self._words(obs, inputs[0]), dim=-1)
        return self.policy(obs, *inputs[number:])

    def _words(self, given: Mapping[str, Tensor], like: Tensor) -> list[Tensor]:
        """Return the words of each leaf of numbers; zeros of those that are not given."""
        rows = like.shape[0]
        return [
            given[leaf.name].reshape(rows, leaf.words)
            if leaf.name in given
            else like.new_zeros(rows, leaf.words)
            for leaf in self._observation.leaves
        ]


def _add_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Add a parameter under a name whose dots separate nested modules."""
    *owners, own = name.split(".")
    for owner in owners:
        if owner not in dict(module.named_children()):
            module.add_module(owner, nn.Module())
        module = module.get_submodule(owner)
    if isinstance(module, nn.ParameterDict):
        module[own] = parameter
    else:
        module.register_parameter(own, parameter)


def _structure_of(algorithm: Algorithm) -> Algorithm:
    """Return a copy without numbers, which only knows how its networks are put together."""
    structure = copy.copy(algorithm)
    structure.model = copy.deepcopy(algorithm.model).to("meta")
    structure.state = {}
    del structure.generator
    return structure
