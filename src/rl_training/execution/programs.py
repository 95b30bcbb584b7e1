"""Programs that update, or choose actions for, all slots of a population, eagerly or compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training import internals
from rl_training.algorithms.base import Algorithm
from rl_training.data.source import FeedbackSource, Source
from rl_training.execution.compile_cache import remember_vector_instructions
from rl_training.execution.random_streams import RandomPool
from rl_training.types import ROW_ERRORS, Batch, Metrics, Noise, State

ROWS = "learner.rows"
"""Name of the random integers that select the rows of a batch"""

SHIFTS = "learner.shifts"
"""Name of the random integers that shift the images of a batch"""

ORDER = "learner.order"
"""Name of the random integers that choose the order of a rollout's transitions"""

RANDOM = "explorer.random_action"
"""Name of the random numbers from which uniformly random actions are computed"""


MEMORY = "explorer.memory"
"""Name of what recurrent policies remember"""


@dataclass(frozen=True)
class Population:
    """The seeds of one program: each seed has a slot on a leading axis of every tensor.

    The rounding of kernels may depend on the width. A seed that continues alone, because the others
    have stopped or are not resumed with it, therefore keeps its slot in a program of the same
    width. The unoccupied slots are computed and ignored.
    """

    width: int = 1
    """Number of slots"""
    slots: tuple[int, ...] = (0,)
    """The slot of each seed, in the order of their `seed_index`"""
    first_seed: int = 0
    """The `seed_index` of the first seed; the others follow it"""

    def slot_of(self, seed_index: int) -> int:
        return self.slots[seed_index - self.first_seed]

    @property
    def leading_shape(self) -> tuple[int, ...]:
        """`(width,)`, or `()` if there is a single slot and therefore no leading axis."""
        return () if self.width == 1 else (self.width,)

    @property
    def occupied(self) -> slice | list[int]:
        """The index that selects the seeds' slots from a leading axis, in seed order."""
        all_in_order = self.slots == tuple(range(self.width))
        return slice(None) if all_in_order else list(self.slots)

    def stack_states(self, algorithms: Sequence[Algorithm]) -> State:
        """Return one state with all slots, and make each algorithm's state a view of its slot."""
        if self.width == 1:
            return algorithms[0].state
        stacked = {
            name: tensor.expand(self.width, *tensor.shape).clone()
            for name, tensor in algorithms[0].state.items()
        }
        for slot, algorithm in zip(self.slots, algorithms, strict=True):
            algorithm.move_state({name: tensor[slot] for name, tensor in stacked.items()})
        return stacked

    def over_slots(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Map a function of one slot's tensors over the tensors of all slots."""
        if self.width == 1:
            return function

        def mapped(*arguments: Any) -> Any:
            return torch.func.vmap(function, in_dims=_slot_axes(arguments))(*arguments)

        return mapped


def _slot_axes(value: Any) -> Any:
    """Return `value` with 0 for each tensor and None for anything else, as `vmap` expects."""
    if isinstance(value, dict):
        return {name: _slot_axes(part) for name, part in value.items()}
    if isinstance(value, Batch):
        return Batch(*map(_slot_axes, value))
    if isinstance(value, tuple):
        return tuple(map(_slot_axes, value))
    return 0 if isinstance(value, Tensor) else None


class Program(Protocol):
    """A way to execute updates."""

    def __call__(self, source: Source, *, update_policy: bool) -> Metrics:
        """Update every slot once from `source`, with the next round of random numbers.

        The batches of all sources must have the same fields.
        """
        ...

    def needs_compiling(self, source: Source, *, update_policy: bool) -> bool:
        """Whether the next such update compiles first, which can take a minute."""
        ...

    def compile(self, source: Source, *, update_policy: bool) -> None:
        """Compile by making one update, without advancing the pool's rounds.

        The caller restores the tensors of `written_tensors` afterwards.
        """
        ...

    def written_tensors(self, source: Source) -> list[Tensor]:
        """The tensors that `compile` writes."""
        ...


@dataclass(frozen=True)
class UpdateParts:
    """The inputs of an update."""

    algorithm: Algorithm
    state: State
    population: Population
    pool: RandomPool
    batch_of: Callable[[Source, Noise], Batch]
    """Maps a source and random numbers to a batch, and removes the numbers that it uses"""


class DirectProgram:
    """Calls the algorithm's step, eagerly or compiled.

    There are two steps: one that updates the policy and one that does not.
    """

    def __init__(self, parts: UpdateParts, *, compiled: bool, like: Program | None = None) -> None:
        """Reuse the compiled steps of `like`, a program with the same settings, if it is given."""
        self._parts = parts
        self._steps: dict[bool, Callable[..., Metrics]] = (
            like._steps
            if isinstance(like, DirectProgram)
            else {on: self._make_step(on, compiled) for on in (True, False)}
        )

    def __call__(self, source: Source, *, update_policy: bool) -> Metrics:
        batch, metrics = self._update(source, self._parts.pool.take(), update_policy)
        give_feedback(source, batch, metrics)
        return metrics

    def needs_compiling(self, source: Source, *, update_policy: bool) -> bool:
        return is_uncompiled(self._steps[update_policy])

    def compile(self, source: Source, *, update_policy: bool) -> None:
        self._update(source, self._parts.pool.current_noise(), update_policy)

    def written_tensors(self, source: Source) -> list[Tensor]:
        return list(self._parts.state.values())

    def _update(self, source: Source, noise: Noise, update_policy: bool) -> tuple[Batch, Metrics]:
        batch = self._parts.batch_of(source, noise)
        return batch, self._steps[update_policy](self._parts.state, batch, noise)

    def _make_step(self, update_policy: bool, compiled: bool) -> Callable[..., Metrics]:
        algorithm = self._parts.algorithm

        def step(state: State, batch: Batch, noise: Noise) -> Metrics:
            return algorithm.step(state, batch, noise, update_policy=update_policy)

        mapped = self._parts.population.over_slots(step)
        return compile_program(mapped, algorithm.device) if compiled else mapped


def give_feedback(source: Source, batch: Batch, metrics: Metrics) -> None:
    """Remove the row errors from `metrics`, and pass them to a source with priorities."""
    errors = metrics.pop(ROW_ERRORS, None)
    if errors is not None and batch.indices is not None and isinstance(source, FeedbackSource):
        source.update_priorities(batch.indices, errors)


@dataclass(frozen=True)
class ActionParts:
    """The objects that an `ActionProgram` uses."""

    algorithm: Algorithm
    state: State
    population: Population
    pool: RandomPool
    obs_shape: tuple[int, int]
    """Environments per seed, and size of an observation"""

    def placeholder(self) -> Tensor:
        """Return possible observations of all slots; see `placeholder`."""
        return placeholder(self.algorithm, self.population, self.obs_shape[0])


def placeholder(algorithm: Algorithm, population: Population, num_envs: int) -> Tensor:
    """Return possible observations of all slots, for compiling and for slots without a seed.

    Zeros are not always possible: an embedding has no row for them if values count from 1.
    """
    rows = torch.from_numpy(algorithm.observation.smallest_rows(num_envs))
    return rows.repeat(*population.leading_shape, 1, 1)


def explore_program(algorithm: Algorithm, population: Population) -> Callable[..., Any]:
    """Return what chooses the actions of all slots; if they remember, with the next memory."""
    remembers = algorithm.memory_size > 0
    return population.over_slots(algorithm.explore_and_remember if remembers else algorithm.explore)


class ActionProgram(Protocol):
    """A way to execute `Algorithm.explore` for all slots, with the pool's current numbers."""

    memory: np.ndarray | None
    """What a recurrent policy remembers after the last actions, for all slots"""

    def begin(self, obs: np.ndarray, progress: float, memory: np.ndarray | None = None) -> None:
        """Start choosing actions for observations `(seeds, num_envs, obs_dim)`.

        `memory`, `(seeds, num_envs, memory_size)`, is what a recurrent policy remembers.
        """
        ...

    def finish(self) -> np.ndarray:
        """Return the actions of all slots, `(num_envs, ...)` if there is a single slot."""
        ...

    def needs_compiling(self) -> bool:
        """Whether the next `begin` compiles first."""
        ...

    def compile(self) -> None:
        """Compile by choosing actions that are not used."""
        ...


class DirectActions:
    """Calls `explore`, compiled if updates are compiled.

    With few observations the number of calls matters more than the arithmetic, and a compiled
    program is a single call.
    """

    def __init__(self, parts: ActionParts, *, compiled: bool) -> None:
        algorithm, population = parts.algorithm, parts.population
        self._state, self._device = parts.state, algorithm.device
        explore = explore_program(algorithm, population)
        self._explore = compile_program(explore, self._device) if compiled else explore
        self._pool, self._lead = parts.pool, population.leading_shape
        self._occupied = population.occupied if self._lead else ...
        # Allocated by PyTorch: kernels give the same bits only at equal alignment.
        self._obs, self._progress = parts.placeholder(), torch.zeros(self._lead)
        self._obs_array, self._progress_array = self._obs.numpy(), self._progress.numpy()
        self.memory: np.ndarray | None = None
        self._remembered: list[Tensor] = []
        """What a recurrent policy remembers before the actions; empty for others"""
        if size := algorithm.memory_size:
            self._remembered = [torch.zeros(*self._lead, parts.obs_shape[0], size)]

    @torch.no_grad()
    def begin(self, obs: np.ndarray, progress: float, memory: np.ndarray | None = None) -> None:
        self._obs_array[self._occupied] = obs if self._lead else obs[0]
        self._progress_array[...] = progress
        if memory is not None:
            self._remembered[0].numpy()[self._occupied] = memory if self._lead else memory[0]
        self._actions = self._choose()

    def finish(self) -> np.ndarray:
        return self._actions

    def needs_compiling(self) -> bool:
        return is_uncompiled(self._explore)

    @torch.no_grad()
    def compile(self) -> None:
        self._choose()

    def _choose(self) -> np.ndarray:
        noise = self._pool.current_noise()
        del noise[RANDOM]
        inputs = self._obs, noise, self._progress, *self._remembered
        if self._device.type != "cpu":
            on_device = {name: numbers.to(self._device) for name, numbers in noise.items()}
            others = (part.to(self._device) for part in (self._progress, *self._remembered))
            inputs = self._obs.to(self._device), on_device, *others
        chosen = self._explore(self._state, *inputs)
        if self._remembered:
            chosen, memory = chosen
            self.memory = memory.cpu().numpy()
        actions: np.ndarray = chosen.cpu().numpy()
        return actions


def compile_program(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a program for tensors that keep their shapes and strides, compiled at its first call.

    A program belongs to one learner. The learner's state stays in place and its batches keep their
    size, so the program is compiled once and its inputs are not checked again.
    """
    return _Compiled(function, device)


class _Compiled:
    """Compiles a function into a single program at the first call. Later calls run it directly.

    The compiler is imported at the first call too. That takes seconds, in which a run would not
    have shown anything yet.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self._function, self._device = function, device
        self._call: Callable[..., Any] = self._compile_and_call
        self.was_called = False

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def _compile_and_call(self, *arguments: Any) -> Any:
        from rl_training.execution.common_subexpressions import merge_equal_nodes, pass_version

        function = self._function

        def program(*arguments: Any) -> Any:
            return function(*arguments)

        # PyTorch stores compiled code by code object, so each program needs a separate one.
        assert isinstance(program, FunctionType)
        program.__code__ = program.__code__.replace()
        if self._device.type == "cpu":
            remember_vector_instructions()
        options = (
            internals.guard_options()
            | internals.graph_pass_options(merge_equal_nodes, pass_version())
            | internals.kernel_options(self._device.type)
        )
        compiled = internals.compile_with_options(program, options)
        with warnings.catch_warnings():
            # The precision is a setting of the run, and float32 is the default on purpose.
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
            warnings.filterwarnings("ignore", internals.MAPPED_BY_A_LOOP)
            result = compiled(*arguments)
        self._call = internals.compiled_function(program) or compiled
        self.was_called = True
        return result


def is_uncompiled(program: Callable[..., Any]) -> bool:
    """Return whether the next call of `program` compiles it; False if it is never compiled."""
    return isinstance(program, _Compiled) and not program.was_called
