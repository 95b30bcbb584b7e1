"""Actions to gather experience with, for all members of a population at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.noise import Draw
from rl_training.data.normalization import ObservationNormalizer
from rl_training.runtime.cuda_graphs import capture
from rl_training.runtime.learner import Learner
from rl_training.runtime.programs import compile_program
from rl_training.runtime.random_pool import RandomPool
from rl_training.types import Noise, SpaceInfo

RANDOM = "random_action"
"""The explorer's own draw beside the algorithm's: actions of no policy"""


class Explorer:
    """Chooses actions in two halves, between which the device computes and the host is free."""

    def __init__(
        self,
        learner: Learner,
        spaces: SpaceInfo,
        num_envs: int,
        generators: Sequence[torch.Generator],
        normalizers: Sequence[ObservationNormalizer] = (),
    ) -> None:
        """`num_envs` environments per member; one generator, on the CPU, per slot."""
        self._population, self._spaces = learner.population, spaces
        self._normalizers = normalizers
        random = (num_envs,) if spaces.discrete else (num_envs, spaces.action_dim)
        draws = learner.algorithms[0].exploration_noise(num_envs)
        # Drawn on the host, so that they travel to the device with the observations.
        self.pool = RandomPool({**draws, RANDOM: Draw("uniform", random)}, generators, "cpu")
        self._obs = torch.zeros(self._population.width, num_envs, spaces.obs_dim)
        self._program: ActionProgram = (
            _GraphedActions(learner) if learner.execution.graphed else _DirectActions(learner)
        )
        self._random: Tensor | None = None

    def begin(self, obs: np.ndarray, progress: float, *, at_random: bool) -> None:
        """Start choosing actions for observations `(members * num_envs, obs_dim)`."""
        noise = self.pool.take()
        random = noise.pop(RANDOM)
        self._random = random if at_random else None
        if at_random:
            return
        rows = torch.from_numpy(obs).view(len(self._population.slots), *self._obs.shape[1:])
        for member, slot in enumerate(self._population.slots):
            its_rows = rows[member]
            if self._normalizers:
                its_rows = self._normalizers[member].normalize(its_rows)
            self._obs[slot] = its_rows
        given = self._obs[0] if self._population.width == 1 else self._obs
        shape = () if self._population.width == 1 else (self._population.width,)
        self._program.begin(given, noise, torch.full(shape, progress))

    def finish(self) -> np.ndarray:
        """The chosen actions `(members * num_envs, ...)`; a fresh array."""
        chosen = self._program.finish() if self._random is None else self._at_random(self._random)
        if self._population.width > 1:
            chosen = chosen[list(self._population.slots)].flatten(0, 1)
        actions: np.ndarray = chosen.numpy(force=True)
        return actions.copy()

    def _at_random(self, uniform: Tensor) -> Tensor:
        if self._spaces.discrete:
            return (uniform * self._spaces.action_dim).long()
        return uniform * 2 - 1


class ActionProgram(Protocol):
    """A way to execute `Algorithm.explore` for all slots."""

    def begin(self, obs: Tensor, noise: Noise, progress: Tensor) -> None: ...

    def finish(self) -> Tensor: ...


class _DirectActions:
    def __init__(self, learner: Learner) -> None:
        self._state, self._device = learner.state, learner.algorithms[0].device
        self._explore = learner.population.over_slots(learner.algorithms[0].explore)

    @torch.no_grad()
    def begin(self, obs: Tensor, noise: Noise, progress: Tensor) -> None:
        device = self._device
        moved = {name: numbers.to(device) for name, numbers in noise.items()}
        chosen = self._explore(self._state, obs.to(device), moved, progress.to(device))
        self._actions: Tensor = chosen.cpu()

    def finish(self) -> Tensor:
        return self._actions


class _GraphedActions:
    """One copy to the device, the policy, and one copy back, in one graph."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self._device = learner, learner.algorithms[0].device
        explore = learner.population.over_slots(learner.algorithms[0].explore)
        self._explore = compile_program(explore, self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def begin(self, obs: Tensor, noise: Noise, progress: Tensor) -> None:
        inputs = [obs, *noise.values(), progress]
        if self._graph is None:
            self._capture(inputs, list(noise))
        # Free to be written: the copy that read it was over before the last actions were known.
        torch.cat([tensor.reshape(-1) for tensor in inputs], out=self._host_inputs)
        assert self._graph is not None
        self._graph.replay()
        self._done.record()

    def finish(self) -> Tensor:
        self._done.synchronize()
        return self._host_actions

    def _capture(self, inputs: list[Tensor], names: list[str]) -> None:
        sizes = [tensor.numel() for tensor in inputs]
        shapes = [tensor.shape for tensor in inputs]
        self._host_inputs = torch.zeros(sum(sizes), pin_memory=True)
        device_inputs = torch.zeros(sum(sizes), device=self._device)

        def choose() -> Tensor:
            device_inputs.copy_(self._host_inputs, non_blocking=True)
            parts = torch.split(device_inputs, sizes)
            obs, *noise, progress = (
                part.view(shape) for part, shape in zip(parts, shapes, strict=True)
            )
            by_name = dict(zip(names, noise, strict=True))
            chosen: Tensor = self._explore(self._learner.state, obs, by_name, progress)
            return chosen

        example = choose()
        self._host_actions = torch.zeros(example.shape, dtype=example.dtype, pin_memory=True)
        self._graph, _ = capture(
            lambda: self._host_actions.copy_(choose(), non_blocking=True), self._device, changed=[]
        )
