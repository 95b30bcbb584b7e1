"""Collects transitions of worlds that are tensors, without copying them to the host."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.callbacks import LastStep, Stopwatch
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollouts.steps import with_ends
from rl_training.data.transforms import (
    DeviceReturnScaler,
    ObservationNormalizer,
    RewardTransform,
)
from rl_training.envs.tensors.captured import Captured
from rl_training.envs.tensors.contract import TensorStep
from rl_training.envs.tensors.vector import TensorVector
from rl_training.errors import CheckpointError, EnvironmentRuntimeError
from rl_training.execution.tensor_explorer import TensorExplorer
from rl_training.training.tensors.n_step import StepWindows
from rl_training.training.tensors.statistics import EpisodeStatistics
from rl_training.types import Batch, Json, State

CHECK_ROUNDS = 100
"""Rounds after which the host waits for the device, to count the worlds that broke"""
EARLY_CHECKS = (1, 2, 4, 8, 16)
"""It does so after these too: with many worlds, a run has few rounds"""
MAX_BROKEN_SHARE = 0.001
"""Largest share of the steps of `CHECK_ROUNDS` in which worlds may break"""
FEW_BROKEN = 10
"""Number of worlds that may break in `CHECK_ROUNDS` in any case"""

_WORLDS, _EPISODES, _SCALER, _WAITING = "worlds.", "episodes.", "scaler.", "waiting."
_OBS, _SPARE = "obs", "spare"
_OF_PAST = tuple(_EPISODES + name for name in ("last_returns", "last_lengths", "broken"))
"""What does not depend on the current episodes"""

Collected = tuple[Tensor, TensorStep]
"""Actions of all worlds, and what they led to"""


class TensorCollector:
    """Steps the worlds of all seeds together and fills the replay buffers.

    All is launched by the host and done by the device in that order; counters are on the host. On
    a GPU, a round (act, simulate, store) is one CUDA graph if the worlds can be captured. The
    updates after it are launched separately, because callbacks may look at the run in between. A
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
        n_step: int = 1,
        normalizers: Sequence[ObservationNormalizer] = (),
        rewards: RewardTransform | None = None,
        scalers: Sequence[DeviceReturnScaler] = (),
        stopwatch: Stopwatch | None = None,
        graphed: bool = True,
    ) -> None:
        """One explorer and replay buffer per program; one normalizer and scaler, if any, per seed.

        The first `random_steps` actions are uniformly random. Rounds on a GPU are captured if
        `graphed`.
        """
        self._vector, self._gamma, self._random_steps = vector, gamma, random_steps
        self._explorers, self._replays = list(explorers), list(replays)
        self._normalizers, self._scalers = list(normalizers), list(scalers)
        for normalizer in self._normalizers:
            normalizer.move(vector.device)
        self._rewards = None if rewards == RewardTransform() else rewards
        self._stopwatch = stopwatch or Stopwatch()
        self._statistics = EpisodeStatistics(vector.total_envs, vector.device)
        shape = vector.total_envs, vector.spaces.obs_dim
        self._obs, self._has_begun = torch.zeros(shape, device=vector.device), False
        self._progress = 0.0
        self._last: Collected | None = None
        self._rounds, self._checked = 0, [0] * vector.num_seeds
        self._errors: dict[int, Exception] = {}
        self._spare = torch.zeros(
            vector.num_seeds, self._replays[0].row_width, device=vector.device
        )
        """The newest transition of each seed that can be learned from; at first zeros"""
        self._invented = torch.zeros(vector.num_seeds, dtype=torch.int64, device=vector.device)
        """Steps of each seed for which there was no transition yet, and zeros were stored"""
        self._windows: StepWindows | None = None
        if n_step > 1:
            widths = self._replays[0].columns.widths
            size = vector.total_envs
            self._windows = StepWindows(n_step, gamma, size, widths, vector.device)
        self._graphed = graphed
        self._kinds: dict[tuple[bool, bool], Captured[Collected]] = {}
        """Rounds by whether their actions are random, and whether they complete transitions"""

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
        """Start the worlds, if that is due; `finish` launches the round."""
        self._progress = progress
        if not self._has_begun:
            self._stopwatch.start()
            self._start()
            self._stopwatch.stop("environments")

    def _start(self) -> None:
        self._obs.copy_(self._vector.reset())
        self._observe(self._obs)
        self._has_begun = True

    @torch.no_grad()
    def finish(self, global_step: int, updates: int = 0) -> dict[int, Exception]:
        """Act, step the worlds and store their transitions; return the errors by seed index."""
        self._stopwatch.start()
        for explorer in self._explorers:
            explorer.advance(self._progress)
        # The first steps complete no transition over several of them.
        stores = self._windows is None or self._rounds + 1 >= self._windows.n_step
        self._last = self._round(self.acts_at_random(global_step), stores)()
        if stores:
            for explorer, replay in zip(self._explorers, self._replays, strict=True):
                replay.count_on_device(explorer.num_seeds * self.num_envs)
        self._stopwatch.stop("environments")
        self._rounds += 1
        if self._rounds % CHECK_ROUNDS == 0 or self._rounds in EARLY_CHECKS:
            self._check_broken()
        errors, self._errors = self._errors, {}
        return errors

    def _round(self, at_random: bool, stores: bool) -> Captured[Collected]:
        kind = at_random, stores
        if kind not in self._kinds:
            worlds, graphed = self._vector.worlds, self._graphed
            captured = functools.partial(Captured, device=self._vector.device)
            choose = captured(functools.partial(self._choose, at_random), enabled=graphed)
            store = captured(functools.partial(self._store, stores), enabled=graphed)
            collect = functools.partial(self._collect, choose, store)
            self._kinds[kind] = captured(collect, enabled=graphed and worlds.is_capturable)
        return self._kinds[kind]

    def _collect(self, choose: Callable[[], Tensor], store: Callable[[], None]) -> Collected:
        """Return the actions of one round, and what they led to."""
        actions = choose()
        collected = actions, self._vector.step(actions)
        if self._vector.worlds.is_capturable:
            self._last = collected
        else:  # `store` reads the same memory in every round
            self._last = _copied(collected, self._last)
        store()
        return self._last

    def _choose(self, at_random: bool) -> Tensor:
        """Return the actions of all worlds."""
        chosen = [
            explorer.choose(self._obs[part], at_random=at_random)
            for explorer, part in zip(self._explorers, self._parts(), strict=True)
        ]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def _store(self, stores: bool) -> None:
        """Update all statistics with the last step, and add its transitions to the buffers."""
        assert self._last is not None
        rows = self._digest(*self._last, stores=stores)
        if stores:
            for replay, part in zip(self._replays, self._parts(), strict=True):
                replay.add_on_device(rows[part])

    def _parts(self) -> list[slice]:
        """The worlds of each program."""
        ends = np.cumsum([explorer.num_seeds * self.num_envs for explorer in self._explorers])
        return [slice(*both) for both in itertools.pairwise([0, *ends.tolist()])]

    def _digest(self, actions: Tensor, step: TensorStep, *, stores: bool) -> Tensor:
        """Update all statistics with a step, and return its transitions as rows to store."""
        self._statistics.add(step)
        reward = step.reward if self._rewards is None else self._rewards(step.reward)
        ended = step.terminated | step.truncated | step.broken
        for scaler, rows in zip(self._scalers, self._seed_rows(), strict=False):
            scaler.observe_on_device(torch.where(step.broken, 0.0, reward)[rows], ended[rows])
        discount = self._gamma * (~step.terminated).float()
        batch = Batch(self._obs, actions, reward, discount, step.final_obs)
        unknown = step.broken if step.left_out is None else step.broken | step.left_out
        replay = self._replays[0]
        if replay.columns.ended:  # the position of a row says which world and step it is
            batch = self._with_memory(with_ends(batch, ended, unknown))
            packed = replay.pack_on_device(batch)
        else:
            packed = replay.pack_on_device(batch)
            if self._windows is not None:
                packed, unknown = self._windows.add(packed, ended, unknown)
            packed = self._without(unknown, packed, stores=stores)
        self._obs.copy_(step.obs)
        self._observe(self._obs)
        return packed

    def _with_memory(self, batch: Batch) -> Batch:
        """Add what recurrent policies remembered to the rows of a rollout, and remember the step.

        An episode begins after every row that says that its own ended, or that it was lost.
        """
        assert batch.ended is not None
        begins, known = batch.ended > 0, []
        for explorer, part in zip(self._explorers, self._parts(), strict=True):
            if (remembered := explorer.remembered) is not None:
                known.append(remembered.clone())
                explorer.move_on(begins[part])
        return batch.with_fields(memory=torch.cat(known)) if known else batch

    def _without(self, unknown: Tensor, rows: Tensor, *, stores: bool) -> Tensor:
        """Repeat the transition of another world of the same seed where one cannot be learned from.

        The number of rows must not depend on data. If it is so in all worlds of a seed, that of an
        earlier step is repeated.
        """
        seeds, each = self._vector.num_seeds, self.num_envs
        of_seeds, mask = rows.view(seeds, each, -1), unknown.view(seeds, each)
        donors = mask.int().argmin(1)[:, None, None].expand(-1, 1, rows.shape[1])
        known = of_seeds.gather(1, donors).squeeze(1)
        without = mask.all(1)
        if stores:
            self._invented += without & (self._spare == 0).all(1)
        self._spare.copy_(torch.where(without[:, None], self._spare, known))
        return torch.where(mask[..., None], self._spare[:, None], of_seeds).view(rows.shape)

    def _seed_rows(self) -> list[slice]:
        return [self._vector.rows(index) for index in range(self._vector.num_seeds)]

    def _observe(self, obs: Tensor) -> None:
        """Update the normalizer of each seed with the observations to act on."""
        for normalizer, rows in zip(self._normalizers, self._seed_rows(), strict=False):
            normalizer.observe(obs[rows])

    def _check_broken(self) -> None:
        """Note an error for each seed of which too many worlds broke."""
        rounds = (self._rounds - 1) % CHECK_ROUNDS + 1
        steps = rounds * self.num_envs
        allowed = max(FEW_BROKEN, MAX_BROKEN_SHARE * CHECK_ROUNDS * self.num_envs)
        for seed_index, before in enumerate(self._checked):
            total = self._statistics.broken(self._vector.rows(seed_index))
            new, is_empty = total - before, bool(self._invented[seed_index])
            if rounds == CHECK_ROUNDS:
                self._checked[seed_index] = total
            if is_empty:
                self._errors[seed_index] = EnvironmentRuntimeError(
                    "all worlds broke, or were cut off without a last observation, before there "
                    "was any transition to learn from; use more worlds, or check the first steps "
                    "of the environment"
                )
            elif new > allowed:
                self._errors[seed_index] = EnvironmentRuntimeError(
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
        if not self._has_begun:
            return {}
        rows = self._vector.rows(seed_index)
        found = {name: tensor[rows] for name, tensor in self._tensors().items()}
        found[_SPARE] = self._spare[seed_index]
        found |= self._explorers[self._program_of(seed_index)].remembered_by(seed_index)
        if self._scalers:
            state = self._scalers[seed_index].tensors
            found |= {_SCALER + name: tensor for name, tensor in state.items()}
        return {name: tensor.cpu().numpy() for name, tensor in found.items()}

    def load_unfinished_episodes(
        self, state: Mapping[str, np.ndarray], seed_index: int = 0
    ) -> None:
        """Restore what `unfinished_episodes` returned, after `load_state_dict`."""
        if not self._has_begun:
            self._obs.copy_(self._vector.reset())
            self._has_begun = True
        saved = {name: torch.tensor(array) for name, array in state.items()}
        current, rows = self._tensors(), self._vector.rows(seed_index)
        program, is_restorable = self._program_of(seed_index), self._vector.worlds.is_restorable
        remembered = self._explorers[program].remembered_by(seed_index)
        if not is_restorable:  # new episodes have begun
            current = {name: tensor for name, tensor in current.items() if name in _OF_PAST}
            for tensor in remembered.values():
                tensor.zero_()
        own = {name: tensor[rows] for name, tensor in current.items()}
        for name, tensor in (own | remembered if is_restorable else own).items():
            if name not in saved or saved[name].shape != tensor.shape:
                raise CheckpointError(f"the saved worlds do not fit: {name} is missing or differs")
            tensor.copy_(saved[name])
        if is_restorable:
            self._vector.worlds.restore(_part_of(current, _WORLDS))
        else:
            self._replays[program].interrupt(seed_index)
            if self._windows is not None:
                self._windows.forget()
        self._spare[seed_index] = saved[_SPARE].to(self._spare.device)
        if self._scalers:
            self._scalers[seed_index].load_tensors(_part_of(saved, _SCALER))
            if not self._vector.worlds.is_restorable:
                self._scalers[seed_index].forget()

    def _program_of(self, seed_index: int) -> int:
        """The position of the explorer and the replay buffer of a seed."""
        sizes = [explorer.num_seeds for explorer in self._explorers]
        return int(np.searchsorted(np.cumsum(sizes), seed_index, side="right"))

    def _tensors(self) -> State:
        """The tensors with an axis of worlds that the next steps depend on.

        Those of the worlds are copies; the others are changed in place.
        """
        worlds = self._vector.worlds.snapshot()
        waiting = {} if self._windows is None else self._windows.state
        return {
            _OBS: self._obs,
            **{_WAITING + name: tensor for name, tensor in waiting.items()},
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


def _copied(given: Collected, to: Collected | None) -> Collected:
    """Copy what was collected to tensors that stay where they are, or to new ones."""
    if to is None:
        copies = (None if part is None else part.clone() for part in given[1])
        return given[0].clone(), TensorStep(*copies)  # type: ignore[arg-type]
    for kept, part in zip((to[0], *to[1]), (given[0], *given[1]), strict=True):
        if kept is not None and part is not None:
            kept.copy_(part)
    return to
