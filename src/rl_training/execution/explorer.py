"""Exploration: chooses actions for the environments of all seeds of a program at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Draw
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.transforms import ObservationNormalizer
from rl_training.execution.cuda_graphs import capture
from rl_training.execution.learner import Learner
from rl_training.execution.programs import compile_program
from rl_training.execution.random_streams import RandomPool
from rl_training.types import SpaceInfo

RANDOM = "explorer.random_action"
"""Name of the random numbers from which uniformly random actions are computed"""

ALIGNMENT = 16
"""Alignment in bytes of the arrays of a `Staging`"""

Field = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of an array"""


class Explorer:
    """Chooses actions in two calls, between which the device computes and the host is free."""

    def __init__(
        self,
        learner: Learner,
        spaces: SpaceInfo,
        num_envs: int,
        generators: Sequence[torch.Generator],
        *,
        replay: ReplayBuffer | None = None,
        normalizers: Sequence[ObservationNormalizer] = (),
    ) -> None:
        """Prepare for `num_envs` environments per seed, with one CPU generator per slot.

        If `replay` is given, its pending rows may be copied to the device together with the
        observations.
        """
        self._population, self._spaces = learner.population, spaces
        self._occupied, self._normalizers = self._population.occupied, normalizers
        self.num_seeds = len(self._population.slots)
        self._shape = (self.num_seeds, num_envs, spaces.obs_dim)
        random = (num_envs,) if spaces.discrete else (num_envs, spaces.action_dim)
        draws = learner.algorithms[0].exploration_noise(num_envs)
        # Drawn on the host, to be copied to the device together with the observations.
        self.pool = RandomPool({**draws, RANDOM: Draw("uniform", random)}, generators, "cpu")
        self._program: ActionProgram = (
            GraphedActions(learner, self.pool, (num_envs, spaces.obs_dim), replay)
            if learner.execution.graphed
            else DirectActions(learner, self.pool, (num_envs, spaces.obs_dim))
        )
        self._at_random = False

    def begin(self, obs: np.ndarray, progress: float, *, at_random: bool) -> None:
        """Start choosing actions for observations `(seeds * num_envs, obs_dim)`."""
        self.pool.advance()
        self._at_random = at_random
        if at_random:
            return
        rows = obs.reshape(self._shape)
        if self._normalizers:
            pairs = zip(self._normalizers, rows, strict=True)
            rows = np.stack(
                [normalizer.normalize(torch.tensor(raw)).numpy() for normalizer, raw in pairs]
            )
        self._program.begin(rows, progress)

    @property
    def has_chosen(self) -> bool:
        """Whether `finish` returns without waiting for the device."""
        return self._at_random or isinstance(self._program, DirectActions)

    def finish(self) -> np.ndarray:
        """Return the chosen actions `(seeds * num_envs, ...)` as a new array."""
        actions = self._random_actions() if self._at_random else self._program.finish()
        if self._population.width == 1:
            return actions.copy()
        of_seeds: np.ndarray = actions[self._occupied]
        return of_seeds.reshape(-1, *of_seeds.shape[2:]).copy()

    def _random_actions(self) -> np.ndarray:
        uniform = self.pool.current_noise()[RANDOM].numpy()
        if self._spaces.discrete:
            return (uniform * np.float32(self._spaces.action_dim)).astype(np.int64)
        return uniform * np.float32(2) - np.float32(1)


class ActionProgram(Protocol):
    """A way to execute `Algorithm.explore` for all slots, with the pool's current numbers."""

    def begin(self, obs: np.ndarray, progress: float) -> None:
        """Start choosing actions for observations `(seeds, num_envs, obs_dim)`."""
        ...

    def finish(self) -> np.ndarray:
        """Return the actions of all slots, `(num_envs, ...)` if there is a single slot."""
        ...


class DirectActions:
    """Calls `explore`, compiled if updates are compiled.

    With few observations the number of calls matters more than the arithmetic, and a compiled
    program is a single call.
    """

    def __init__(self, learner: Learner, pool: RandomPool, obs_shape: tuple[int, ...]) -> None:
        algorithm, population = learner.algorithms[0], learner.population
        self._state, self._device = learner.state, algorithm.device
        explore = population.over_slots(algorithm.explore)
        self._explore = (
            compile_program(explore, self._device) if learner.execution.compiled else explore
        )
        self._pool, self._lead = pool, population.leading_shape
        self._occupied = population.occupied if self._lead else ...
        # Allocated by PyTorch: kernels give the same bits only at equal alignment.
        self._obs, self._progress = torch.zeros(*self._lead, *obs_shape), torch.zeros(self._lead)
        self._obs_array, self._progress_array = self._obs.numpy(), self._progress.numpy()

    @torch.no_grad()
    def begin(self, obs: np.ndarray, progress: float) -> None:
        self._obs_array[self._occupied] = obs if self._lead else obs[0]
        self._progress_array[...] = progress
        noise = self._pool.current_noise()
        del noise[RANDOM]
        inputs = self._obs, noise, self._progress
        if self._device.type != "cpu":
            on_device = {name: numbers.to(self._device) for name, numbers in noise.items()}
            inputs = self._obs.to(self._device), on_device, self._progress.to(self._device)
        self._actions: np.ndarray = self._explore(self._state, *inputs).cpu().numpy()

    def finish(self) -> np.ndarray:
        return self._actions


class GraphedActions:
    """Copies to the device, runs the policy and copies back, all in one CUDA graph.

    Pending rows of the replay buffer are copied together with the observations, and are written
    after the actions are chosen. A step of the environments therefore needs a single launch.
    """

    def __init__(
        self,
        learner: Learner,
        pool: RandomPool,
        obs_shape: tuple[int, ...],
        replay: ReplayBuffer | None,
    ) -> None:
        self._learner, self._pool, self._replay = learner, pool, replay
        self._device, self._occupied = learner.algorithms[0].device, learner.population.occupied
        width = learner.population.width
        self._lead = learner.population.leading_shape
        fields: dict[str, Field] = {
            "obs": ((width, *obs_shape), torch.float32),
            "progress": (self._lead, torch.float32),
            **{kind: (tuple(n.shape[1:]), n.dtype) for kind, n in pool.numbers.items()},
        }
        if replay is not None:
            rows = len(learner.algorithms) * obs_shape[0]
            fields["positions"] = ((rows,), torch.int64)
            fields["rows"] = ((rows, replay.row_width), torch.float32)
            fields["sizes"] = ((width,), torch.int64)
        self._staging = Staging(fields, self._device)
        explore = learner.population.over_slots(learner.algorithms[0].explore)
        self._explore = compile_program(explore, self._device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def begin(self, obs: np.ndarray, progress: float) -> None:
        if self._graph is None:
            self._capture()
        # Safe to overwrite: `finish` waited for the copy that read this memory.
        host = self._staging.host
        host["obs"][self._occupied] = obs
        host["progress"][...] = progress
        self._pool.copy_current(host)
        if self._replay is not None:
            self._replay.stage(host["positions"], host["rows"], host["sizes"])
        assert self._graph is not None
        self._graph.replay()
        self._done.record(self._stream)

    def finish(self) -> np.ndarray:
        self._done.synchronize()
        return self._actions

    def _capture(self) -> None:
        example = self._choose()
        host_actions = torch.zeros(example.shape, dtype=example.dtype, pin_memory=True)
        self._actions = host_actions.numpy()
        self._stream = torch.cuda.current_stream(self._device)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        staged = self._staging.device

        def body() -> None:
            self._staging.upload()
            host_actions.copy_(self._choose(), non_blocking=True)
            if self._replay is not None:
                self._replay.write(staged["positions"], staged["rows"], staged["sizes"])

        if self._replay is not None:
            self._replay.flush()
            host = self._staging.host
            # With no pending rows, the calls before capture write only to an unused row.
            self._replay.stage(host["positions"], host["rows"], host["sizes"])
        self._graph, _ = capture(body, self._device, changed=[])

    def _choose(self) -> Tensor:
        staged = self._staging.device
        noise = self._pool.split({kind: staged[kind] for kind in self._pool.numbers})
        del noise[RANDOM]
        obs = staged["obs"] if self._lead else staged["obs"][0]
        actions: Tensor = self._explore(self._learner.state, obs, noise, staged["progress"])
        return actions


class Staging:
    """Named arrays that share one block of memory, so that one copy uploads all of them.

    Write to `host`, call `upload`, read from `device`.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        starts, size = {}, 0
        for name, (shape, dtype) in fields.items():
            starts[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (shape, dtype) in fields.items():
            last = starts[name] + math.prod(shape) * dtype.itemsize
            part = slice(starts[name], last)
            self.host[name] = self._host[part].view(dtype).view(shape).numpy()
            self.device[name] = self._device[part].view(dtype).view(shape)

    def upload(self) -> None:
        """Copy all arrays asynchronously; do not write to `host` before the copy is done."""
        self._device.copy_(self._host, non_blocking=True)
