"""What simulated worlds share: time limits, masked resets, worlds that break, and snapshots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rl_training.envs.tensors.captured import Captured
from rl_training.envs.tensors.contract import TensorEnvironment, TensorStep
from rl_training.envs.tensors.random_numbers import world_keys
from rl_training.errors import CheckpointError


class Outcome(NamedTuple):
    """What a simulation step led to, before any world is reset."""

    obs: Tensor
    reward: Tensor
    terminated: Tensor


class SimulatedWorlds(TensorEnvironment):
    """A tensor environment in terms of its simulation.

    A step calls `simulate`, `outcome`, `begin_episodes`, `refresh` and `first_observations`, in
    this order. All but `simulate` and `refresh` may be captured (see `Captured`): they work on
    tensors that stay where they are. If these two may be as well, set `is_capturable`, so that a
    round of training is one graph.
    """

    max_steps: int
    """Steps after which an episode is truncated"""

    def __init__(self, num_envs: int, device: torch.device | str) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.keys = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.episodes = torch.zeros_like(self.keys)
        """Number of the current episode of each world; with `keys`, it determines its randomness"""
        self.lengths = torch.zeros_like(self.keys)
        self._ended = torch.zeros_like(self.keys, dtype=torch.bool)
        self._end_step = Captured(self._end_episodes, self.device)
        self._begin_step = Captured(self._begin_episodes, self.device)

    @abstractmethod
    def simulate(self, actions: Tensor) -> None:
        """Take the actions, and simulate one step of all worlds if that cannot be captured."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """What the step led to, in new tensors."""

    def begin_worlds(self) -> None:
        """Prepare what a world keeps for all its episodes, by its `keys`."""

    @abstractmethod
    def begin_episodes(self, chosen: Tensor) -> None:
        """Put the `chosen` worlds, a mask, into the initial state of their current episode."""

    def refresh(self) -> None:
        """Compute what follows from the states of the worlds, if that cannot be captured."""

    @abstractmethod
    def first_observations(self, chosen: Tensor) -> Tensor:
        """Observations of all worlds, of which those of the `chosen` ones count."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors that the simulation depends on, to be read and written in place."""

    @torch.no_grad()
    def reset(self, seeds: Sequence[int]) -> Tensor:
        self.keys.copy_(world_keys(seeds, self.num_envs, self.device))
        self.episodes.zero_()
        self.lengths.zero_()
        self.begin_worlds()
        everywhere = torch.ones_like(self._ended)
        self.begin_episodes(everywhere)
        self.refresh()
        return self.first_observations(everywhere)

    @torch.no_grad()
    def step(self, actions: Tensor) -> TensorStep:
        self.simulate(actions)
        ended = self._end_step()
        self.refresh()
        self._last = ended.final_obs
        return ended._replace(obs=self._begin_step())

    def _end_episodes(self) -> TensorStep:
        obs, reward, terminated = self.outcome()
        self.lengths += 1
        truncated = self.lengths >= self.max_steps
        healthy = torch.isfinite(obs).all(-1) & torch.isfinite(reward)
        ended = terminated | truncated | ~healthy
        self.lengths *= ~ended
        self.episodes += ended
        self._ended.copy_(ended)
        self.begin_episodes(ended)
        return TensorStep(obs, reward, terminated & healthy, truncated & healthy, obs, ~healthy)

    def _begin_episodes(self) -> Tensor:
        first = self.first_observations(self._ended)
        return torch.where(self._ended[:, None], first, self._last)

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
        counted = {"keys": self.keys, "episodes": self.episodes, "lengths": self.lengths}
        return counted | self.state()
