"""What the adapters share: one simulator, rows of observations, and worlds that break."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rl_training.envs.spaces import describe_observations
from rl_training.envs.tensors.contract import TensorEnvironment, TensorStep
from rl_training.errors import EnvironmentSetupError

FINAL_KEYS = ("final_obs", "final_observation", "terminal_obs", "terminal_observation")
"""Where packages tell what the last step of an episode led to"""


class AdaptedWorlds(TensorEnvironment):
    """Worlds of another package: no snapshots, and checks of what the package returns.

    Its random numbers are drawn for all worlds together. Several seeds therefore share the worlds,
    but what happens in those of one seed depends on which other seeds there are.
    """

    is_restorable = False

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
    ) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.observation_space, self.action_space = observation_space, action_space
        self._leaves = describe_observations(observation_space).leaves

    @abstractmethod
    def begin(self, seed: int) -> Any:
        """Start the first episodes and return observations."""

    def reset(self, seeds: Sequence[int]) -> Tensor:
        seed = seeds[0]
        if len(seeds) > 1:
            seed = int(np.random.SeedSequence(list(seeds)).generate_state(1)[0])
        return self.rows(self.begin(seed % 2**31))

    def snapshot(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """There is nothing to restore."""

    def rows(self, observations: Any, what: str = "observation") -> Tensor:
        """The leaves of observations, side by side."""
        parts = []
        for leaf in self._leaves:
            found = observations
            for key in leaf.path:
                found = found[key]
            parts.append(self.numbers(found, what, leaf.shape).flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def numbers(self, values: Any, what: str, shape: tuple[int, ...] = ()) -> Tensor:
        """`values` as float32, if they are `(num_envs, *shape)` on the right device."""
        if not isinstance(values, Tensor):
            raise EnvironmentSetupError(
                f"{type(self).__name__}: the {what} is {type(values).__name__}, not a tensor"
            )
        if values.shape != (self.num_envs, *shape) or values.device.type != self.device.type:
            each = f", each with the shape {shape}," if shape else ""
            raise EnvironmentSetupError(
                f"{type(self).__name__}: the {what} has the shape {tuple(values.shape)} on "
                f"{values.device}; expected {self.num_envs} worlds{each} on {self.device}"
            )
        return values.float()

    def completed(
        self,
        obs: Tensor,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        reached: Tensor | None,
    ) -> TensorStep:
        """Return a step that led to `reached`, of which only the rows of ended episodes count.

        If it is None, episodes that were truncated are left out.
        """
        terminated, truncated = terminated.bool(), truncated.bool()
        left_out = truncated & ~terminated
        if reached is None:
            reached = obs
        else:
            reached = torch.where((terminated | truncated)[:, None], reached, obs)
            left_out = torch.zeros_like(left_out)
        # A simulator that resets a broken world itself shows it in the final observation alone.
        healthy = are_finite(obs, reward) & are_finite(reached, reward)
        return TensorStep(
            torch.nan_to_num(obs, 0.0, 0.0, 0.0),
            reward,
            terminated & healthy,
            truncated & healthy,
            reached,
            ~healthy,
            left_out,
        )


def are_finite(obs: Tensor, reward: Tensor) -> Tensor:
    """Which worlds have numbers that are finite."""
    return torch.isfinite(obs).all(-1) & torch.isfinite(reward)


def names_of(observations: Any) -> list[str]:
    """The names of parts of observations; a `TensorDict` itself would iterate over its rows."""
    return list(map(str, observations.keys()))


def space_of(observations: Any) -> gym.Space[Any]:
    """The space of one world's observations: a `Box`, or a dictionary of them."""
    if hasattr(observations, "keys"):
        names = names_of(observations)
        return gym.spaces.Dict({name: space_of(observations[name]) for name in names})
    return gym.spaces.Box(-np.inf, np.inf, tuple(observations.shape[1:]))


def final_observations(told: Any) -> Any:
    """What the infos or extras of a step tell about the last observations; None if nothing."""
    return next((told[key] for key in FINAL_KEYS if key in told), None)
