"""A policy as a `torch.nn.Module`, for `torch.export`, `torch.compile` and other tools."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm
from rl_training.data.transforms import ObservationNormalizer, normalize
from rl_training.types import SpaceInfo, State


class PolicyModule(nn.Module):
    """Maps observations `(batch, obs_dim)` to deterministic actions, both in environment units.

    Its parameters are the layers of the networks that choose actions, with the names that a saved
    policy uses, such as `actor.weight_0`. Weights are `(inputs, outputs)`. Its buffers are the
    observation normalization and the bounds of the actions.

    Everything is copied from the policy. Training, moving or changing the module does not change
    the policy, and the module does not follow a policy that continues to learn.
    """

    obs_shift: Tensor | None
    obs_scale: Tensor | None
    action_low: Tensor | None
    action_high: Tensor | None

    def __init__(
        self, algorithm: Algorithm, spaces: SpaceInfo, normalizer: ObservationNormalizer | None
    ) -> None:
        super().__init__()
        self._action_start = spaces.action_start
        self._names = _names_read_by_act(algorithm)
        for name in self._names:
            layers = algorithm.networks()[name].unflatten(algorithm.state[name])
            copies = {part: nn.Parameter(tensor.clone()) for part, tensor in layers.items()}
            self.add_module(name, nn.ParameterDict(copies))
        self._algorithm = _structure_of(algorithm)

        device = algorithm.device
        statistics = (normalizer.shift, normalizer.scale) if normalizer else (None, None)
        bounds = (spaces.action_low, spaces.action_high)
        values = {
            "obs_shift": statistics[0],
            "obs_scale": statistics[1],
            "action_low": None if bounds[0] is None else torch.as_tensor(bounds[0]),
            "action_high": None if bounds[1] is None else torch.as_tensor(bounds[1]),
        }
        for name, tensor in values.items():
            if tensor is None:
                setattr(self, name, None)  # `torch.export` does not accept empty buffers
            else:
                self.register_buffer(name, tensor.detach().clone())
        low, high = self.action_low, self.action_high
        self._symmetric = low is not None and high is not None and torch.equal(low, -high)
        self.to(device)

    def forward(self, obs: Tensor) -> Tensor:
        if self.obs_shift is not None and self.obs_scale is not None:
            obs = normalize(obs, self.obs_shift, self.obs_scale)
        layers = {name: dict(getattr(self, name).items()) for name in self._names}
        # Networks also accept their layers by name instead of a parameter vector.
        actions = self._algorithm.act(cast("State", layers), obs)
        return self._in_environment_units(actions)

    def _in_environment_units(self, actions: Tensor) -> Tensor:
        """Scale as `ActionScaler` does, whose arrays cannot be exported."""
        low, high = self.action_low, self.action_high
        if low is None or high is None:
            return actions + self._action_start
        if self._symmetric:
            return actions.clamp(-1, 1) * high
        scaled = (1 - actions) * (0.5 * low) + (1 + actions) * (0.5 * high)
        return torch.minimum(torch.maximum(scaled, low), high)


def _names_read_by_act(algorithm: Algorithm) -> list[str]:
    """Return the networks that choose actions, which are fewer than those in a saved policy."""
    names: dict[str, None] = {}

    class Watched(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            names[name] = None
            return super().__getitem__(name)

    with torch.inference_mode():
        algorithm.act(
            Watched(algorithm.state), torch.zeros(1, algorithm.obs_dim, device=algorithm.device)
        )
    return [name for name in algorithm.networks() if name in names]


def _structure_of(algorithm: Algorithm) -> Algorithm:
    """Return a copy without numbers, which only knows how its networks are put together."""
    structure = copy.copy(algorithm)
    structure.model = copy.deepcopy(algorithm.model).to("meta")
    structure.state = {}
    del structure.generator
    return structure
