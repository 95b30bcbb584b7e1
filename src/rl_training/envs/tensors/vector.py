"""The worlds of all seeds of a run: made, checked and stepped with the actions of policies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.snapshots.layers import foreign_code
from rl_training.envs.spaces import describe_space_pair
from rl_training.envs.tensors.contract import TensorEnvironment, TensorStep
from rl_training.errors import (
    EnvironmentRuntimeError,
    EnvironmentSetupError,
    UserError,
    last_line,
)
from rl_training.observations import ALL_FLOAT32
from rl_training.types import Json


class TensorVector:
    """`num_envs` worlds for each seed, in one tensor environment on the learner's device."""

    def __init__(
        self,
        factory: EnvironmentFactory,
        num_envs: int,
        seeds: Sequence[int],
        device: torch.device | str,
    ) -> None:
        """Raises `EnvironmentSetupError` if the worlds cannot be made or do not fit."""
        source = factory.tensor_source
        assert source is not None, "the backend is chosen by it"
        self.num_envs, self.num_seeds = num_envs, len(seeds)
        self.total_envs = num_envs * len(seeds)
        self.device, self._seeds, self._label = torch.device(device), list(seeds), factory.label
        with foreign_code(self._making_error):
            self.worlds: TensorEnvironment = source.make(
                self.total_envs, self.device, **factory.kwargs
            )
        self.spaces = describe_space_pair(
            self.worlds.observation_space, self.worlds.action_space, number_types=ALL_FLOAT32
        )
        if not self.spaces.observation.is_numeric:
            raise EnvironmentSetupError(
                f"{self._label}: tensor environments have vectors of numbers as observations, "
                f"not {self.worlds.observation_space}"
            )
        if self.worlds.num_envs != self.total_envs:
            raise EnvironmentSetupError(
                f"{self._label} made {self.worlds.num_envs:,} worlds, but num_envs = {num_envs:,} "
                f"for {len(seeds)} seed(s) needs {self.total_envs:,}; set num_envs to "
                f"{self.worlds.num_envs // len(seeds):,}, or make as many worlds as it asks for"
            )
        self._low, self._half = self._bounds()
        self._is_own = source.evaluated
        self._is_checked = False

    def _making_error(self, error: BaseException) -> Exception:
        if isinstance(error, UserError):
            return error
        return EnvironmentSetupError(f"Cannot make {self._label}: {last_line(error)}")

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """The lower bounds of actions, and half of their range; of integers, the first ones."""
        if not self.spaces.is_continuous:
            first = self.spaces.action_low
            start = self.spaces.action_start if first is None else first
            return torch.as_tensor(start, dtype=torch.int64, device=self.device), torch.ones(1)
        low, high = (
            torch.as_tensor(bound, dtype=torch.float32, device=self.device)
            for bound in (self.spaces.action_low, self.spaces.action_high)
        )
        return low, (high - low) / 2

    def reset(self) -> Tensor:
        """Start the first episodes of all seeds."""
        return self.worlds.reset(self._seeds)

    def step(self, actions: Tensor) -> TensorStep:
        """Step all worlds with actions in [-1, 1], or indices from 0."""
        step = self.worlds.step(self.in_environment_units(actions))
        if not self._is_checked:
            self._check(step)
            self._is_checked = True
        return step

    def _check(self, step: TensorStep) -> None:
        """Raise `EnvironmentRuntimeError` if a result has the wrong shape or type."""
        for name, part in step._asdict().items():
            if part is None and name == "left_out":
                continue
            shape: tuple[int, ...] = (self.total_envs,)
            types: tuple[torch.dtype, ...] = (torch.bool,)
            if name in ("obs", "final_obs"):
                shape = (self.total_envs, self.spaces.obs_dim)
            if name in ("obs", "final_obs", "reward"):
                types = (torch.float32, torch.float64)
            if not isinstance(part, Tensor) or part.shape != shape or part.dtype not in types:
                found = (
                    f"{part.dtype} of shape {tuple(part.shape)}"
                    if isinstance(part, Tensor)
                    else type(part).__name__
                )
                raise EnvironmentRuntimeError(
                    f"{self._label}: {name} of a step must be {types[0]} of shape {shape}, not "
                    f"{found}"
                )

    def in_environment_units(self, actions: Tensor) -> Tensor:
        if not self.spaces.is_continuous:
            return actions + self._low
        return self._low + (actions.clamp(-1, 1) + 1) * self._half

    def rows(self, seed_index: int) -> slice:
        """The worlds of a seed."""
        return slice(seed_index * self.num_envs, (seed_index + 1) * self.num_envs)

    def give_statistics(self, statistics: Sequence[Json], seed_index: int = 0) -> None:
        """Tensor environments have no wrappers, and so no statistics of them."""

    def close(self) -> None:
        """Free the worlds, unless they exist once in the process: another run may need them."""
        if self._is_own:
            self.worlds.close()

    def __enter__(self) -> TensorVector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
