"""What simulated worlds share: time limits, masked resets, worlds that break, and snapshots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rl_training.envs.tensors.contract import TensorEnvironment, TensorStep
from rl_training.envs.tensors.random_numbers import world_keys
from rl_training.errors import CheckpointError

_KEYS, _EPISODES, _LENGTHS = "keys", "episodes", "lengths"


class Outcome(NamedTuple):
    """What a simulation step led to, before any world is reset."""

    obs: Tensor
    reward: Tensor
    terminated: Tensor


class SimulatedWorlds(TensorEnvironment):
    """A tensor environment in terms of its simulation: `advance`, `begin_episodes` and `state`."""

    max_steps: int
    """Steps after which an episode is truncated"""

    def __init__(self, num_envs: int, device: torch.device | str) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.keys = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.episodes = torch.zeros_like(self.keys)
        """Number of the current episode of each world; with `keys`, it determines its randomness"""
        self.lengths = torch.zeros_like(self.keys)

    @abstractmethod
    def advance(self, actions: Tensor) -> Outcome:
        """Simulate one step of all worlds. The results are new tensors."""

    @abstractmethod
    def begin_episodes(self, chosen: Tensor) -> Tensor:
        """Put the `chosen` worlds, a mask, into the initial state of their current episode.

        Returns observations of all worlds. Those of other worlds are ignored.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors that the simulation depends on, to be read and written in place."""

    def reset(self, seeds: Sequence[int]) -> Tensor:
        self.keys.copy_(world_keys(seeds, self.num_envs, self.device))
        self.episodes.zero_()
        self.lengths.zero_()
        return self.begin_episodes(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))

    @torch.no_grad()
    def step(self, actions: Tensor) -> TensorStep:
        obs, reward, terminated = self.advance(actions)
        self.lengths += 1
        truncated = self.lengths >= self.max_steps
        broken = ~(torch.isfinite(obs).all(-1) & torch.isfinite(reward))
        ended = terminated | truncated | broken
        self.lengths *= ~ended
        self.episodes += ended
        first_obs = self.begin_episodes(ended)
        next_obs = torch.where(ended[:, None], first_obs, obs)
        healthy = ~broken
        return TensorStep(
            next_obs, reward, terminated & healthy, truncated & healthy, obs, broken
        )

    def snapshot(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        own = self._tensors()
        if missing := own.keys() - state.keys():
            raise CheckpointError(f"the snapshot of the worlds lacks {', '.join(sorted(missing))}")
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                raise CheckpointError(f"the snapshot of the worlds has another shape of {name}")
            tensor.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        counted = {_KEYS: self.keys, _EPISODES: self.episodes, _LENGTHS: self.lengths}
        return counted | self.state()
