"""Several seeds in one program: a leading axis of slots on states, batches and random numbers.

How an update is executed: directly, or compiled into one program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rl_training.algorithms.base import Algorithm
from rl_training.data.source import FeedbackSource, Source
from rl_training.execution.random_streams import RandomPool
from rl_training.types import ROW_ERRORS, Batch, Metrics, Noise, State


@dataclass(frozen=True)
class Population:
    """How wide the program is, and which slot each member has.

    Kernels of another width may round differently. So a seed that goes on alone, because others
    have stopped or are not resumed with it, keeps its slot in a program of the same width: the
    other slots compute without effect, and its bits stay those of the whole population.
    """

    width: int = 1
    slots: tuple[int, ...] = (0,)

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape in front of a slot's own: none where there is a single slot."""
        return () if self.width == 1 else (self.width,)

    @property
    def seeds(self) -> slice | list[int]:
        """What picks the seeds' slots out of a leading axis, in their order."""
        everyone = self.slots == tuple(range(self.width))
        return slice(None) if everyone else list(self.slots)

    def stack_states(self, algorithms: Sequence[Algorithm]) -> State:
        """The state of all slots; each algorithm's own becomes a view of it."""
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
        """`function` on one slot's tensors, made to take those of all slots."""
        if self.width == 1:
            return function

        def mapped(*arguments: Any) -> Any:
            # What a batch does not have is None, which has no axis.
            axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, arguments)
            return torch.func.vmap(function, in_dims=axes)(*arguments)

        return mapped


ROWS = "learner.rows"
"""The learner's own draw beside the algorithm's: which rows make up the batch"""


class Program(Protocol):
    """A way to execute updates."""

    def __call__(self, source: Source, *, update_policy: bool) -> Metrics:
        """One update of every slot from a source, with the next round of random numbers.

        Batches of all sources that it is called with must have the same parts.
        """
        ...


@dataclass(frozen=True)
class UpdateParts:
    """What an update works on."""

    algorithm: Algorithm
    state: State
    population: Population
    pool: RandomPool
    batch_of: Callable[[Source, Tensor], Batch]
    """A source and random integers to a batch"""


def give_feedback(source: Source, batch: Batch, metrics: Metrics) -> None:
    """Take the rows' errors out of the metrics, to where the rows came from if it wants them."""
    errors = metrics.pop(ROW_ERRORS, None)
    if errors is not None and batch.indices is not None and isinstance(source, FeedbackSource):
        source.update_priorities(batch.indices, errors)


class DirectProgram:
    """Calls the algorithm's step, as it is or compiled, with and without the policy's part."""

    def __init__(self, parts: UpdateParts, *, compiled: bool, like: Program | None = None) -> None:
        """`like` is the program of another seed, whose compiled code serves this one too."""
        self._parts = parts
        self._steps: dict[bool, Callable[..., Metrics]] = (
            like._steps
            if isinstance(like, DirectProgram)
            else {on: self._make_step(on, compiled) for on in (True, False)}
        )

    def __call__(self, source: Source, *, update_policy: bool) -> Metrics:
        parts = self._parts
        noise = parts.pool.take()
        batch = parts.batch_of(source, noise.pop(ROWS))
        metrics: Metrics = self._steps[update_policy](parts.state, batch, noise)
        give_feedback(source, batch, metrics)
        return metrics

    def _make_step(self, update_policy: bool, compiled: bool) -> Callable[..., Metrics]:
        algorithm = self._parts.algorithm

        def step(state: State, batch: Batch, noise: Noise) -> Metrics:
            return algorithm.step(state, batch, noise, update_policy=update_policy)

        mapped = self._parts.population.over_slots(step)
        return compile_program(mapped, algorithm.device) if compiled else mapped


def compile_program(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """One whole compiled program for tensors that keep their shapes and strides.

    It belongs to one learner, whose state stays in place and whose batches keep their size, so
    what it was compiled for need not be checked again at every call.
    """

    def program(*arguments: Any) -> Any:
        return function(*arguments)

    # Compiled code is found by code object: each program needs one of its own.
    assert isinstance(program, FunctionType)
    program.__code__ = program.__code__.replace()
    # Imported here: the compiler takes a second to load, and eager runs do without.
    from rl_training.execution.common_subexpressions import MergeEqualNodes

    options: dict[str, Any] = {
        "guard_filter_fn": lambda guards: [False for _ in guards],
        "post_grad_custom_pre_pass": MergeEqualNodes(),
    }
    if device.type == "cpu":
        options["cpp_wrapper"] = True  # kernels are called from C++, not from Python
    else:
        # Otherwise kernels are chosen by trying them out, and another choice, of a run at the same
        # time or on the next day, sums in another order. It costs nothing that could be measured.
        options["deterministic"] = True
    return _Compiled(
        program, torch.compile(program, fullgraph=True, dynamic=False, options=options)
    )


class _Compiled:
    """A program that is compiled at its first call, and from then on called without detours.

    What `torch.compile` gives looks at every call whether it must compile again, which for a small
    update takes half as long as the update itself. Behind that is a plain function, the compiled
    code's own, and that is called instead.
    """

    def __init__(self, program: FunctionType, compiled: Callable[..., Any]) -> None:
        self._program, self._call, self._is_direct = program, compiled, False

    def __call__(self, *arguments: Any) -> Any:
        result = self._call(*arguments)
        if not self._is_direct:
            self._call, self._is_direct = self._direct() or self._call, True
        return result

    def _direct(self) -> Callable[..., Any] | None:
        """The function that the one call so far has left; None where PyTorch keeps it elsewhere."""
        try:
            from torch._dynamo.eval_frame import _debug_get_cache_entry_list

            [entry] = _debug_get_cache_entry_list(self._program.__code__)
            return FunctionType(
                entry.code, self._program.__globals__, closure=self._program.__closure__
            )
        except (AttributeError, ImportError, TypeError, ValueError):
            return None
