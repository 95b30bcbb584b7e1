"""Choose actions for observations that are on the device, where the actions stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Draw
from rl_training.data.transforms import normalize
from rl_training.execution.learner import Learner, compile_stoppable
from rl_training.execution.programs import (
    MEMORY,
    RANDOM,
    compile_program,
    explore_program,
    is_uncompiled,
    placeholder,
)
from rl_training.execution.random_streams import RandomPool
from rl_training.types import Noise, SpaceInfo, State


class TensorExplorer:
    """The explorer of tensor environments. It waits for nothing, and copies nothing to the host."""

    def __init__(
        self,
        learner: Learner,
        spaces: SpaceInfo,
        num_envs: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        """Prepare for `num_envs` worlds per seed, with one generator on the device per slot."""
        algorithm, population = learner.algorithms[0], learner.population
        self._state, self._device, self._spaces = learner.state, algorithm.device, spaces
        self._normalization, self._first_seed = learner.normalization, population.first_seed
        self.num_seeds, self._is_alone = len(population.slots), population.width == 1
        self._slot_of_seed = population.slots
        self._slots = torch.tensor(population.slots, device=self._device)
        self._memories = [each.exploration_memory(num_envs) for each in learner.algorithms]
        self._remembered: list[State] = [
            {}
            if memory is None
            else {k: torch.tensor(v, device=self._device) for k, v in memory.state.items()}
            for memory in self._memories
        ]
        draws = dict(algorithm.exploration_noise(num_envs))
        if self._memories[0] is not None:
            draws |= self._memories[0].draws()
        one = spaces.action_kind == "discrete"
        random = Draw("uniform", (num_envs,) if one else (num_envs, spaces.action_dim))
        self.pool = RandomPool({**draws, RANDOM: random}, generators, self._device)
        # Not made when actions are drawn: a graph cannot capture a copy from the host.
        self._num_choices = torch.tensor(
            spaces.actions.num_choices, dtype=torch.float32, device=self._device
        )
        lead = population.leading_shape
        self._obs = placeholder(algorithm, population, num_envs).to(self._device)
        self._progress = torch.zeros(lead, device=self._device)
        self._memory: Tensor | None = None
        """What recurrent policies remember before their next actions"""
        if size := algorithm.memory_size:
            self._memory = torch.zeros(*lead, num_envs, size, device=self._device)
            self._memory_after = torch.zeros_like(self._memory)
        explore, compiled = explore_program(algorithm, population), learner.execution.compiled
        self._explore = compile_program(explore, self._device) if compiled else explore

    def needs_compiling(self) -> bool:
        return is_uncompiled(self._explore)

    def prepare(self, stopping: Callable[[], bool]) -> bool:
        return compile_stoppable(self._compile, stopping)

    @torch.no_grad()
    def _compile(self) -> None:
        self._policy_actions(self.pool.at_cursor())

    def advance(self, progress: float) -> None:
        """Prepare the next call of `choose`, or the next replay of a graph that contains one."""
        self.pool.advance()
        self._progress.fill_(progress)

    def choose(self, obs: Tensor, *, at_random: bool) -> Tensor:
        """Return actions `(seeds * num_envs, ...)` for observations, in [-1, 1] or from 0.

        A graph can capture it: the random numbers are those at the cursor of the pool.
        """
        noise = self.pool.at_cursor()
        self.pool.cursor.add_(1)
        if at_random:
            return self._of_seeds(self._random_actions(noise[RANDOM]))
        if self._is_alone:
            self._obs.copy_(obs)
        else:
            self._obs.index_copy_(0, self._slots, obs.view(self.num_seeds, *self._obs.shape[1:]))
        return self._of_seeds(self._remembering_actions(noise))

    def _remembering_actions(self, noise: Noise) -> Tensor:
        """Return the actions of all slots, with numbers that depend on those of earlier steps."""
        parts = zip(self._slot_of_seed, self._memories, self._remembered, strict=True)
        for slot, memory, state in parts:
            if memory is not None:
                own = noise if self._is_alone else {k: v[slot] for k, v in noise.items()}
                memory.change(own, state)
        return self._policy_actions(noise)

    def _policy_actions(self, noise: Noise) -> Tensor:
        obs = self._obs
        if self._normalization is not None:
            obs = normalize(obs, self._normalization[0], self._normalization[1])
        used = {name: numbers for name, numbers in noise.items() if name != RANDOM}
        inputs = self._state, obs, used, self._progress
        if self._memory is None:
            actions: Tensor = self._explore(*inputs)
            return actions
        actions, after = self._explore(*inputs, self._memory)
        self._memory_after.copy_(after)
        return actions

    @property
    def remembered(self) -> Tensor | None:
        """What recurrent policies remember, `(seeds * num_envs, memory_size)`; None for others.

        Until `move_on`, it is what they remembered when they chose the last actions.
        """
        return None if self._memory is None else self._of_seeds(self._memory)

    def move_on(self, begins: Tensor) -> None:
        """Remember the last step too; nothing where an episode begins, `(seeds * num_envs,)`."""
        if self._memory is None:
            return
        after = torch.where(begins[:, None], 0.0, self._of_seeds(self._memory_after))
        if self._is_alone:
            self._memory.copy_(after)
        else:
            own = after.view(self.num_seeds, *self._memory.shape[1:])
            self._memory.index_copy_(0, self._slots, own)

    def remembered_by(self, seed_index: int) -> State:
        """What the recurrent policy of a seed remembers, to be changed in place; empty for others.

        It belongs to the worlds of the seed, and is saved with them.
        """
        if self._memory is None:
            return {}
        slot = self._slot_of_seed[seed_index - self._first_seed]
        return {MEMORY: self._memory if self._is_alone else self._memory[slot]}

    def _random_actions(self, uniform: Tensor) -> Tensor:
        if self._spaces.is_continuous:
            return uniform * 2 - 1
        return (uniform * self._num_choices).long()

    def _of_seeds(self, actions: Tensor) -> Tensor:
        return actions if self._is_alone else actions.index_select(0, self._slots).flatten(0, 1)

    def memory(self, seed_index: int = 0) -> dict[str, np.ndarray] | None:
        state = self._remembered[seed_index - self._first_seed]
        return {name: tensor.cpu().numpy() for name, tensor in state.items()} or None

    def load_memory(self, saved: Mapping[str, np.ndarray], seed_index: int = 0) -> None:
        for name, tensor in self._remembered[seed_index - self._first_seed].items():
            array = np.asarray(saved[name])
            if array.shape != tuple(tensor.shape) or not np.isfinite(array).all():
                raise ValueError(f"{name} is damaged")
            tensor.copy_(torch.from_numpy(array.copy()))
