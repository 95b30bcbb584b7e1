"""Collects transitions of worlds that are tensors, without copying them to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.callbacks import LastStep, Stopwatch
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.transforms import (
    DeviceReturnScaler,
    ObservationNormalizer,
    RewardTransform,
)
from rl_training.envs.tensors.contract import TensorStep
from rl_training.envs.tensors.vector import TensorVector
from rl_training.errors import CheckpointError, TrainingError
from rl_training.execution.tensor_explorer import TensorExplorer
from rl_training.training.tensors.statistics import EpisodeStatistics
from rl_training.types import Batch, Json, State

CHECK_ROUNDS = 1_000
"""Rounds after which the host waits for the device, to count the worlds that broke"""
MAX_BROKEN_SHARE = 0.001
"""Largest share of the steps since the last check in which worlds may break"""
FEW_BROKEN = 10
"""Number of worlds that may break between two checks in any case"""

_WORLDS, _EPISODES, _SCALER, _OBS = "worlds.", "episodes.", "scaler.", "obs"


class TensorCollector:
    """Steps the worlds of all seeds together and fills the replay buffers.

    All is launched by the host and done by the device in that order; counters are on the host. A
    seed that is retired goes on, unused: its worlds cost less than to leave them out.
    """

    def __init__(
        self,
        vector: TensorVector,
        explorers: Sequence[TensorExplorer],
        replays: Sequence[ReplayBuffer],
        *,
        gamma: float,
        random_steps: int,
        normalizers: Sequence[ObservationNormalizer] = (),
        rewards: RewardTransform | None = None,
        scalers: Sequence[DeviceReturnScaler] = (),
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """One explorer and replay buffer per program; one normalizer and scaler, if any, per seed.

        The first `random_steps` actions are uniformly random.
        """
        self._vector, self._gamma, self._random_steps = vector, gamma, random_steps
        self._explorers, self._replays = list(explorers), list(replays)
        self._normalizers, self._scalers = list(normalizers), list(scalers)
        for normalizer in self._normalizers:
            normalizer.move(vector.device)
        self._rewards = None if rewards == RewardTransform() else rewards
        self._stopwatch = stopwatch or Stopwatch()
        self._statistics = EpisodeStatistics(vector.total_envs, vector.device)
        self._obs: Tensor | None = None
        self._actions: Tensor | None = None
        self._last: tuple[Tensor, TensorStep] | None = None
        self._rounds, self._checked = 0, [0] * vector.num_seeds
        self._errors: dict[int, Exception] = {}

    @property
    def num_envs(self) -> int:
        """Number of worlds per seed."""
        return self._vector.num_envs

    @property
    def steps_per_round(self) -> int:
        """Number of steps of each seed that one round completes."""
        return self._vector.num_envs

    def at_episode_boundary(self, seed_index: int = 0) -> bool:
        """Whether all worlds of the seed are at the start of an episode."""
        rows = self._vector.rows(seed_index)
        return not bool(self._statistics.state["lengths"][rows].any())

    def retire(self, seed_index: int) -> None:
        """The worlds of this seed are no longer needed."""

    def acts_at_random(self, global_step: int) -> bool:
        """Whether the actions of this step are uniformly random, without the policy."""
        return global_step < self._random_steps

    @torch.no_grad()
    def begin(self, global_step: int, progress: float, updates: int = 0) -> None:
        """Choose the next actions."""
        self._stopwatch.start()
        if self._obs is None:
            self._start()
            self._stopwatch.stop("environments")
        assert self._obs is not None
        at_random, first, chosen = self.acts_at_random(global_step), 0, []
        for explorer in self._explorers:
            last = first + explorer.num_seeds * self.num_envs
            chosen.append(explorer.choose(self._obs[first:last], progress, at_random=at_random))
            first = last
        self._actions = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
        self._stopwatch.stop("acting")

    def _start(self) -> None:
        self._obs = self._vector.reset().clone()
        self._observe(self._obs)

    @torch.no_grad()
    def finish(self, global_step: int, updates: int = 0) -> dict[int, Exception]:
        """Step the worlds and store their transitions; return the errors by seed index."""
        self._stopwatch.start()
        assert self._obs is not None
        assert self._actions is not None
        step = self._vector.step(self._actions)
        self._stopwatch.stop("environments")
        self._store(self._obs, self._actions, step)
        self._last = self._actions, step
        self._obs = step.obs.clone()  # the next step may overwrite it
        self._observe(self._obs)
        self._stopwatch.stop("sampling")
        self._rounds += 1
        if self._rounds % CHECK_ROUNDS == 0:
            self._check_broken()
        errors, self._errors = self._errors, {}
        return errors

    def _store(self, obs: Tensor, actions: Tensor, step: TensorStep) -> None:
        self._statistics.add(step)
        reward = step.reward if self._rewards is None else self._rewards(step.reward)
        ended = step.terminated | step.truncated
        for scaler, rows in zip(self._scalers, self._seed_rows(), strict=False):
            usable = torch.where(step.broken[rows], 0.0, reward[rows])
            scaler.observe_on_device(usable, (ended | step.broken)[rows])
        batch = Batch(
            obs, actions, reward, self._gamma * (~step.terminated).float(), step.final_obs
        )
        batch = Batch(*(self._without_broken(part, step.broken) for part in batch[:5]))
        first = 0
        for explorer, replay in zip(self._explorers, self._replays, strict=True):
            last = first + explorer.num_seeds * self.num_envs
            replay.add_on_device(Batch(*(part[first:last] for part in batch[:5])))
            first = last

    def _without_broken(self, values: Tensor, broken: Tensor) -> Tensor:
        """Repeat the transition of a healthy world of the same seed where a world broke.

        The number of rows must not depend on data. Of a seed whose worlds all broke, which ends the
        run, numbers that are not finite become zero.
        """
        seeds, each = self._vector.num_seeds, self.num_envs
        of_seeds, mask = values.view(seeds, each, *values.shape[1:]), broken.view(seeds, each)
        donor = mask.int().argmin(1) + torch.arange(seeds, device=values.device) * each
        given = values.index_select(0, donor).unsqueeze(1).expand_as(of_seeds)
        mask = mask.view(seeds, each, *[1] * (values.dim() - 1))
        chosen = torch.where(mask, given, of_seeds).reshape(values.shape)
        if values.is_floating_point():
            chosen = torch.nan_to_num(chosen, 0.0, 0.0, 0.0)
        return chosen

    def _seed_rows(self) -> list[slice]:
        return [self._vector.rows(index) for index in range(self._vector.num_seeds)]

    def _observe(self, obs: Tensor) -> None:
        """Update the normalizer of each seed with the observations to act on."""
        for normalizer, rows in zip(self._normalizers, self._seed_rows(), strict=False):
            normalizer.observe(obs[rows])

    def _check_broken(self) -> None:
        """Note an error for each seed of which too many worlds broke since the last check."""
        steps = CHECK_ROUNDS * self.num_envs
        for seed_index, before in enumerate(self._checked):
            total = self._statistics.broken(self._vector.rows(seed_index))
            self._checked[seed_index], new = total, total - before
            if new > max(FEW_BROKEN, MAX_BROKEN_SHARE * steps):
                self._errors[seed_index] = TrainingError(
                    f"{new:,} worlds broke in {steps:,} steps: their observations or rewards were "
                    "not finite, and they were reset; use a smaller time step of the simulator, "
                    "or less randomization"
                )

    def why_lost(self, seed_index: int = 0) -> str | None:
        """Why a seed lost an episode in this process: never."""
        return None

    def watch_for_stop(self, stopping: Callable[[], bool]) -> None:
        """Nothing that the host waits for can hang."""

    def metrics(self, seed_index: int = 0) -> dict[str, float]:
        """Means over the last episode of each world; empty until an episode has ended.

        `broken_worlds` is how often a world was reset because its numbers were not finite.
        """
        return self._statistics.metrics(self._vector.rows(seed_index))

    def last_step(self, seed_index: int = 0) -> LastStep | None:
        """The last step of a seed's worlds; None before the first one of this process."""
        if self._last is None:
            return None
        rows = self._vector.rows(seed_index)
        actions, step = self._last
        taken = self._vector.in_environment_units(actions)
        obs, acted, reward, terminated, truncated = (
            part[rows].cpu().numpy()
            for part in (step.obs, taken, step.reward, step.terminated, step.truncated)
        )
        return LastStep(
            observations=self._vector.spaces.observation.arrays_of(obs),
            actions=acted,
            rewards=reward,
            terminations=terminated,
            truncations=truncated,
        )

    def infos(self, seed_index: int = 0) -> tuple[Mapping[str, Any], ...]:
        """Tensor environments have no infos."""
        return ()

    def environment_of(self, seed_index: int = 0) -> Any:
        """The tensor environment, with the worlds of all seeds."""
        return self._vector.worlds

    def state_dict(self, seed_index: int = 0) -> Json:
        """How far the seed is; the tensors are in `unfinished_episodes`."""
        return {"rounds": self._rounds, "checked": self._checked[seed_index]}

    def load_state_dict(self, state: Json, seed_index: int = 0) -> None:
        self._rounds, self._checked[seed_index] = int(state["rounds"]), int(state["checked"])

    def unfinished_episodes(self, seed_index: int = 0) -> dict[str, np.ndarray]:
        """The worlds of a seed in the midst of their episodes; empty before the first step."""
        if self._obs is None:
            return {}
        rows = self._vector.rows(seed_index)
        found = {name: tensor[rows] for name, tensor in self._tensors().items()}
        if self._scalers:
            state = self._scalers[seed_index].tensors
            found |= {_SCALER + name: tensor for name, tensor in state.items()}
        return {name: tensor.cpu().numpy() for name, tensor in found.items()}

    def load_unfinished_episodes(
        self, state: Mapping[str, np.ndarray], seed_index: int = 0
    ) -> None:
        """Restore what `unfinished_episodes` returned, after `load_state_dict`."""
        if self._obs is None:
            self._obs = self._vector.reset().clone()
        saved = {name: torch.tensor(array) for name, array in state.items()}
        current, rows = self._tensors(), self._vector.rows(seed_index)
        for name, tensor in current.items():
            if name not in saved or saved[name].shape != tensor[rows].shape:
                raise CheckpointError(f"the saved worlds do not fit: {name} is missing or differs")
            tensor[rows] = saved[name].to(tensor.device)
        self._vector.worlds.restore(_part_of(current, _WORLDS))
        if self._scalers:
            self._scalers[seed_index].load_tensors(_part_of(saved, _SCALER))

    def _tensors(self) -> State:
        """The tensors with an axis of worlds that the next steps depend on.

        Those of the worlds are copies; the others are changed in place.
        """
        assert self._obs is not None
        worlds = self._vector.worlds.snapshot()
        return {
            _OBS: self._obs,
            **{_EPISODES + name: tensor for name, tensor in self._statistics.state.items()},
            **{_WORLDS + name: tensor for name, tensor in worlds.items()},
        }

    def wrapper_statistics(self, seed_index: int = 0) -> list[Json] | None:
        """Tensor environments have no wrappers."""
        return None

    def give_wrapper_statistics(self, learned: list[Json], seed_index: int = 0) -> None:
        """Tensor environments have no wrappers."""


def _part_of(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
