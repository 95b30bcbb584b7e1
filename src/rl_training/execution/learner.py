"""Update all seeds that share a program, and choose their actions."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Draw, Draws, draw_noise, part_of
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollouts.minibatches import Rollouts
from rl_training.data.source import Source
from rl_training.data.transforms import (
    ObservationNormalizer,
    ReturnScaler,
    copy_arrays,
    normalize_batch,
)
from rl_training.execution.cuda_graphs import GraphedActions, GraphedProgram
from rl_training.execution.execution import Execution
from rl_training.execution.policy import NORMALIZER_PREFIX
from rl_training.execution.programs import (
    MEMORY,
    ORDER,
    RANDOM,
    ROWS,
    SHIFTS,
    ActionParts,
    ActionProgram,
    DirectActions,
    DirectProgram,
    Population,
    Program,
    UpdateParts,
    compile_program,
    is_uncompiled,
)
from rl_training.execution.random_streams import RandomPool
from rl_training.internals import compiles_in_threads
from rl_training.models.encoders.augmentation import RandomShift
from rl_training.models.mlp import rounded_products
from rl_training.types import Batch, Metrics, Noise, SpaceInfo, State

MOST_QUEUED = 128
"""Updates of a block that may wait for the device, so that a stop need not wait for many"""


def compile_stoppable(compile_all: Callable[[], None], stopping: Callable[[], bool]) -> bool:
    """Compile; return False if `stopping` ended it before.

    Where PyTorch cannot compile in a thread, a stop takes effect when it has finished.
    """
    if not compiles_in_threads():
        compile_all()
        return True
    # Imported here: eager runs do not need it.
    from rl_training.execution.stoppable import run_stoppable

    return run_stoppable(compile_all, stopping)


class Learner:
    """Samples batches, updates the algorithms, and keeps the newest metrics.

    The states of a population are stored in one tensor per name, with a leading axis of slots. The
    `algorithm.state` of each seed is a view of its slot, so saving, loading and acting are the same
    as for a single seed.
    """

    def __init__(
        self,
        algorithms: Sequence[Algorithm],
        source: Source,
        execution: Execution,
        *,
        population: Population | None = None,
        generators: Sequence[torch.Generator] | None = None,
        order_generators: Sequence[torch.Generator] | None = None,
        normalizers: Sequence[ObservationNormalizer] = (),
        scalers: Sequence[ReturnScaler] = (),
        like: Learner | None = None,
    ) -> None:
        """Take one algorithm, one normalizer and one scaler per seed, and one generator per slot.

        `order_generators` are those of the order of rollouts, if the source has them. `like` is a
        learner with the same sizes and settings, whose compiled programs are reused.
        """
        self.algorithms, self.source, self.execution = list(algorithms), source, execution
        self.population = population or Population()
        algorithm = self.algorithms[0]
        self.state = self.population.stack_states(self.algorithms)
        self._normalizers = list(normalizers)
        self._normalization = self._place(normalizers)
        self._reward_scale = self._place_scales(scalers)
        self._shift: RandomShift | None = None
        if algorithm.plan.settings.random_shift:
            self._shift = RandomShift(algorithm.observation, algorithm.plan.settings)
        self.rollouts = source if isinstance(source, Rollouts) else None
        if self.rollouts is not None:
            self._prepare_rollouts(order_generators or generators, like)
        batch_size = algorithm.hyperparameters.batch_size
        self.pool = RandomPool(
            {**algorithm.update_noise(batch_size), **self._batch_draws()},
            generators or [algorithm.generator],
            algorithm.device,
        )
        # A CUDA graph draws its batches itself, so that nothing can be measured there.
        graphed = execution.graphs_updates
        batch_of = self._batch_of if graphed else self._timed_batch_of
        parts = UpdateParts(algorithm, self.state, self.population, self.pool, batch_of)
        self._program: Program = (
            GraphedProgram(parts)
            if graphed
            else DirectProgram(
                parts, compiled=execution.compiled, like=None if like is None else like._program
            )
        )
        self._is_on_cuda = algorithm.device.type == "cuda"
        self._sampling_seconds = 0.0
        self._latest: Metrics = {}
        self._read: dict[str, list[float]] | None = None
        self._extremes: dict[str, list[list[float]]] | None = None

    @torch.no_grad()
    def update(
        self,
        already_made: int,
        count: int = 1,
        *,
        source: Source | None = None,
        stopping: Callable[[], bool] | None = None,
    ) -> int:
        """Make `count` gradient steps in every slot, after `already_made` earlier ones.

        `source` replaces the learner's source for this call; its batches must have the same fields.
        If `stopping` returns True after a step, the remaining ones are not made. Returns the number
        of steps made.
        """
        chosen, made = self.source if source is None else source, 0
        chosen.flush()
        with rounded_products(self.execution.rounds_products):
            for made in range(1, count + 1):
                number = already_made + made - 1
                if self.rollouts is not None:
                    self._begin_update(self.rollouts, number)
                on = self.algorithms[0].updates_policy_after(number)
                self._latest.update(self._program(chosen, update_policy=on))
                if made % MOST_QUEUED == 0 and self._is_on_cuda:
                    torch.cuda.synchronize(self.algorithms[0].device)
                if stopping is not None and stopping():
                    break
        rollouts = self.rollouts
        if rollouts is not None and (already_made + made) % rollouts.updates_per_rollout == 0:
            self._observe(rollouts)
        self._read = self._extremes = None
        return made

    def _prepare_rollouts(
        self, generators: Sequence[torch.Generator] | None, like: Learner | None
    ) -> None:
        """Build what is needed before the updates on a rollout."""
        algorithm = self.algorithms[0]
        self.orders = RandomPool(
            {ORDER: Draw("bits", (1,))}, generators or [algorithm.generator], algorithm.device
        )
        begin = self.population.over_slots(algorithm.begin_rollout)
        if like is not None:
            begin = like._begin_rollout
        elif self.execution.compiled:
            begin = compile_program(begin, algorithm.device)
        self._begin_rollout: Callable[[State, Batch], tuple[Metrics, Metrics]] = begin

    def _begin_update(self, rollouts: Rollouts, number: int) -> None:
        """Prepare the update after the first `number` ones."""
        place = number % rollouts.updates_per_rollout
        if place == 0:
            rows = self._scaled(rollouts.all_rows())
            targets, metrics = self._begin_rollout(self.state, rows)
            rollouts.keep(rows, targets)
            self._latest.update(metrics)
        elif not rollouts.is_kept:  # the run was stopped in the middle of a block
            rollouts.keep(self._scaled(rollouts.all_rows()), rollouts.targets())
        if place % rollouts.num_minibatches == 0:
            rollouts.shuffle(self.orders.take()[ORDER])
        rollouts.seek(place % rollouts.num_minibatches)

    def _observe(self, rollouts: Rollouts) -> None:
        """Add the observations of a rollout to the statistics that normalize the next one.

        They stay the same while a rollout is collected and learned from: its actions are then as
        likely as they were when they were chosen.
        """
        if not self._normalizers:
            return
        obs = rollouts.all_rows().obs
        for slot, normalizer in zip(self.population.slots, self._normalizers, strict=True):
            normalizer.observe(obs if self.population.width == 1 else obs[slot])

    def take_sampling_seconds(self) -> float:
        """Return how long drawing batches took since the last call.

        0 for batches that are drawn inside a CUDA graph.
        """
        seconds, self._sampling_seconds = self._sampling_seconds, 0.0
        return seconds

    def needs_compiling(self, source: Source | None = None) -> bool:
        """Whether an update from `source`, by default the learner's, would compile first."""
        if self.rollouts is not None and is_uncompiled(self._begin_rollout):
            return True
        return bool(self._uncompiled(self.source if source is None else source))

    def prepare(self, stopping: Callable[[], bool], *, source: Source | None = None) -> bool:
        """Compile all updates from `source`; return False if `stopping` ended it before.

        Compiling takes one update per program. Its effects are undone, so the state and the random
        streams of the run stay as they are.
        """
        chosen = self.source if source is None else source
        chosen.flush()
        written = self._program.written_tensors(chosen)
        before = [tensor.clone() for tensor in written]
        try:
            with rounded_products(self.execution.rounds_products):
                return compile_stoppable(lambda: self._compile(chosen), stopping)
        finally:
            for tensor, kept in zip(written, before, strict=True):
                tensor.copy_(kept)
            self._sampling_seconds = 0.0  # drawing a batch to compile with is no part of updates

    @torch.no_grad()
    def _compile(self, source: Source) -> None:
        if self.rollouts is not None and is_uncompiled(self._begin_rollout):
            self._begin_rollout(self.state, self._scaled(self.rollouts.all_rows()))
        for update_policy in self._uncompiled(source):
            self._program.compile(source, update_policy=update_policy)

    def _uncompiled(self, source: Source) -> list[bool]:
        """The kinds of updates, with and without the policy, that are not compiled yet."""
        algorithm = self.algorithms[0]
        delay = algorithm.hyperparameters.policy_delay
        kinds = sorted({algorithm.updates_policy_after(number) for number in range(delay)})
        return [on for on in kinds if self._program.needs_compiling(source, update_policy=on)]

    def metrics(self, seed_index: int = 0) -> dict[str, float]:
        """Return the newest value of each metric of a seed, read from the device in one copy."""
        if self._read is None:
            values = [value.float().reshape(-1) for value in self._latest.values()]
            read = torch.stack(values).tolist() if values else []
            self._read = dict(zip(self._latest, read, strict=True))
        slot = self.population.slot_of(seed_index)
        return {name: values[slot] for name, values in self._read.items()}

    def load_metrics(self, metrics: dict[str, float | None], seed_index: int = 0) -> None:
        """Restore the metrics of a seed, so that a resumed run logs all of them.

        None stands for a value that was not finite.
        """
        slot, width = self.population.slot_of(seed_index), self.population.width
        device = self.algorithms[0].device
        for name, value in metrics.items():
            empty = torch.full((width,), torch.nan, device=device)
            self._latest.setdefault(name, empty)[slot] = torch.nan if value is None else value
        self._read = self._extremes = None

    def first_not_finite(self, seed_index: int = 0, *, recompute: bool = False) -> str | None:
        """Name the first metric or part of a seed's learned state that is not finite.

        The values that `Algorithm.may_be_not_finite` names are not checked. By default, the state
        is examined once per update. `recompute` examines it again, because callbacks may have
        changed it since.
        """
        if recompute:
            self._extremes = None
        allowed = self.algorithms[0].may_be_not_finite()
        values = {name: [value] for name, value in self.metrics(seed_index).items()}
        index = seed_index - self.population.first_seed
        values |= {name: of_seeds[index] for name, of_seeds in self._state_extremes().items()}
        if self._normalizers:  # on the host, and changed by steps rather than by updates
            state = self._normalizers[index].state
            values |= {
                NORMALIZER_PREFIX + name: part.reshape(-1).tolist() for name, part in state.items()
            }
        found = (name for name, found in values.items() if not all(map(math.isfinite, found)))
        return next((name for name in found if name not in allowed), None)

    @torch.no_grad()
    def _state_extremes(self) -> dict[str, list[list[float]]]:
        """The smallest and largest value of each part of the state, by seed.

        Both are finite exactly if the complete part is finite. They are computed on the device for
        all seeds, read in one copy, and kept until the next update.
        """
        if self._extremes is None:
            parts = {
                name: tensor.reshape(self.population.width, -1)[self.population.occupied]
                for name, tensor in self.state.items()
                if tensor.is_floating_point() and tensor.numel()
            }
            if isinstance(self.source, ReplayBuffer) and self.source.priorities is not None:
                extremes = self.source.priorities.extremes()
                parts["priorities"] = extremes.to(self.algorithms[0].device)
            # For one row, two reductions are many times faster than `torch.aminmax` or `isfinite`.
            both = [torch.stack([part.amin(1), part.amax(1)], dim=1) for part in parts.values()]
            self._extremes = dict(zip(parts, torch.stack(both).tolist(), strict=True))
        return self._extremes

    @torch.no_grad()
    def norms(self, seed_index: int, generator: torch.Generator, source: Source | None) -> Metrics:
        """Return the norms of the weights of each part of a seed, and of their gradients.

        The gradients are those of one batch from `source`, before they are clipped; without a
        source there are none. Nothing changes: the batch and the noise come from `generator`.
        """
        algorithm = self.algorithms[seed_index - self.population.first_seed]
        weights = {name: algorithm.state[name] for name in algorithm.networks()}
        found = _norms("weight_norm", weights)
        if source is None:
            return found
        size = algorithm.hyperparameters.batch_size
        # Equal bits for all slots, so that a seed has the same batch alone and in a population.
        bits = draw_noise(self._batch_draws(), generator)
        lead = self.population.leading_shape
        batch = self._batch_of(source, {k: v.expand(*lead, *v.shape) for k, v in bits.items()})
        if self.population.width > 1:
            slot = self.population.slot_of(seed_index)
            batch = Batch(*(field if field is None else field[slot] for field in batch))  # type: ignore[arg-type]
        noise = draw_noise(algorithm.update_noise(size), generator)
        gradients: State = {}
        for objective in algorithm.objectives(update_policy=True):
            unclipped = objective._replace(max_grad_norm=None)
            gradients |= algorithm.differentiate(unclipped, algorithm.state, batch, noise)[0]
        return found | _norms("gradient_norm", {name: gradients[name] for name in weights})

    @property
    def normalization(self) -> Tensor | None:
        """The shifts and scales of observations, as `_place` describes; None if there are none."""
        return self._normalization

    def _place(self, normalizers: Sequence[ObservationNormalizer]) -> Tensor | None:
        """Return the shifts and scales of all slots as one tensor, and let normalizers write to it.

        Its shape is `(2, width, 1, obs_dim)`, or `(2, obs_dim)` if there is a single slot.
        """
        if not normalizers:
            return None
        width, algorithm = self.population.width, self.algorithms[0]
        storage = torch.zeros(2, width, 1, algorithm.obs_dim, device=algorithm.device)
        for slot, normalizer in zip(self.population.slots, normalizers, strict=True):
            normalizer.place(storage[:, slot, 0])
        return storage[:, 0, 0] if width == 1 else storage

    def _place_scales(self, scalers: Sequence[ReturnScaler]) -> Tensor | None:
        """Return the reward scales of all slots, `(width, 1)`, or one number for a single slot."""
        if not scalers:
            return None
        width = self.population.width
        storage = torch.ones(width, 1, device=self.algorithms[0].device)
        for slot, scaler in zip(self.population.slots, scalers, strict=True):
            scaler.place(storage[slot, 0])
        return storage[0, 0] if width == 1 else storage

    def _batch_draws(self) -> Draws:
        """The random numbers that a batch needs."""
        size = self.algorithms[0].hyperparameters.batch_size
        draws = {} if self.rollouts is not None else {ROWS: Draw("bits", (size,))}
        if self._shift is not None:  # one set for observations, one for the next ones
            draws[SHIFTS] = Draw("bits", (2, size, self._shift.numbers))
        return draws

    def _batch_of(self, source: Source, noise: Noise) -> Batch:
        if isinstance(source, Rollouts):
            return source.draw()
        batch = source.draw(noise.pop(ROWS))
        if self._shift is not None:
            both = noise.pop(SHIFTS).unbind(-3)
            batch = batch.with_fields(
                obs=self._shift(batch.obs, both[0]), next_obs=self._shift(batch.next_obs, both[1])
            )
        return self._scaled(batch)

    def _scaled(self, batch: Batch) -> Batch:
        """Scale rewards by returns, and normalize observations, where the run does."""
        if self._reward_scale is not None:
            batch = batch.with_fields(reward=batch.reward * self._reward_scale)
        if self._normalization is None:
            return batch
        return normalize_batch(batch, self._normalization[0], self._normalization[1])

    def _timed_batch_of(self, source: Source, noise: Noise) -> Batch:
        began = time.perf_counter()
        if isinstance(source, ReplayBuffer) and source.is_on_host:
            # The same numbers, for which the host does not wait: while it puts a batch together,
            # the device still makes the last update.
            noise[ROWS] = self.pool.current_on_host(ROWS)
        batch = self._batch_of(source, noise)
        self._sampling_seconds += time.perf_counter() - began
        return batch


def _norms(name: str, vectors: Mapping[str, Tensor]) -> Metrics:
    """Return the joint norm of the vectors of each part."""
    by_part: dict[str, list[Tensor]] = defaultdict(list)
    for network, vector in vectors.items():
        by_part[part_of(network)].append(torch.linalg.vector_norm(vector))
    return {
        f"{name}_{part}": torch.linalg.vector_norm(torch.stack(norms))
        for part, norms in by_part.items()
    }


class ActionChooser(Protocol):
    """What a run needs of the object that chooses its actions, on the host or on the device."""

    pool: RandomPool
    num_seeds: int

    def needs_compiling(self) -> bool:
        """Whether the next actions that are not random would compile first."""
        ...

    def prepare(self, stopping: Callable[[], bool]) -> bool:
        """Compile the choice of actions; return False if `stopping` ended it before."""
        ...

    def memory(self, seed_index: int = 0) -> dict[str, np.ndarray] | None:
        """What a seed remembers from step to step, to be saved and restored; None if nothing."""
        ...

    def load_memory(self, saved: Mapping[str, np.ndarray], seed_index: int = 0) -> None:
        """Restore what `memory` returned."""
        ...


class Explorer:
    """Chooses actions in two calls, so that the host can work while the device computes."""

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
        one = spaces.action_kind == "discrete"
        random = (num_envs,) if one else (num_envs, spaces.action_dim)
        draws = learner.algorithms[0].exploration_noise(num_envs)
        made = [algorithm.exploration_memory(num_envs) for algorithm in learner.algorithms]
        self._memories = [memory for memory in made if memory is not None]
        if self._memories:
            draws = {**draws, **self._memories[0].draws()}
        # Drawn on the host, to be copied to the device together with the observations.
        self.pool = RandomPool({**draws, RANDOM: Draw("uniform", random)}, generators, "cpu")
        self._memory: np.ndarray | None = None
        """What recurrent policies remember before their next actions"""
        if size := learner.algorithms[0].memory_size:
            self._memory = np.zeros((self.num_seeds, num_envs, size), np.float32)
        parts = ActionParts(
            learner.algorithms[0],
            learner.state,
            learner.population,
            self.pool,
            (num_envs, spaces.obs_dim),
        )
        staged = replay if replay is not None and replay.can_be_staged else None
        self._program: ActionProgram = (
            GraphedActions(parts, staged)
            if learner.execution.graphed
            else DirectActions(parts, compiled=learner.execution.compiled)
        )
        self._at_random = self._is_idle = False

    def needs_compiling(self) -> bool:
        """Whether the next actions that are not random would compile first."""
        return self._program.needs_compiling()

    def prepare(self, stopping: Callable[[], bool]) -> bool:
        """Compile the choice of actions; return False if `stopping` ended it before."""
        return compile_stoppable(self._program.compile, stopping)

    def begin(
        self, obs: np.ndarray, progress: float, *, at_random: bool, idle: bool = False
    ) -> None:
        """Start choosing actions for observations `(seeds * num_envs, obs_dim)`.

        If `idle`, no environment needs one: all are in the middle of a chunk.
        """
        # In every step, so that the numbers of a seed do not depend on the chunks of other seeds.
        self.pool.advance()
        self._at_random, self._is_idle = at_random, idle
        if at_random or idle:
            return
        if self._memories:
            self._remember()
        rows = obs.reshape(self._shape)
        if self._normalizers:
            pairs = zip(self._normalizers, rows, strict=True)
            known = [normalizer.normalize_array(raw) for normalizer, raw in pairs]
            rows = known[0][None] if len(known) == 1 else np.stack(known)
        self._program.begin(rows, progress, self._memory)

    @property
    def remembered(self) -> np.ndarray | None:
        """What recurrent policies remember, `(seeds * num_envs, memory_size)`; None for others.

        Until `move_on`, it is what they remembered when they chose the last actions.
        """
        return None if self._memory is None else self._memory.reshape(-1, self._memory.shape[-1])

    def move_on(self, begins: np.ndarray) -> None:
        """Remember the last step too; nothing where an episode begins, `(seeds * num_envs,)`."""
        after = self._program.memory
        if self._memory is None or after is None:
            return
        self._memory[...] = after if self._population.width == 1 else after[self._occupied]
        self._memory[begins.reshape(self._memory.shape[:2])] = 0.0

    def forget(self, seed_index: int = 0) -> None:
        """Remember nothing of the episodes of a seed, which restart."""
        if self._memory is not None:
            self._memory[seed_index - self._population.first_seed] = 0.0

    def memory(self, seed_index: int = 0) -> dict[str, np.ndarray] | None:
        """What a seed remembers from step to step, to be saved and restored; None if nothing."""
        index = seed_index - self._population.first_seed
        found = dict(self._memories[index].state) if self._memories else {}
        if self._memory is not None:
            found[MEMORY] = self._memory[index]
        return found or None

    def load_memory(self, saved: Mapping[str, np.ndarray], seed_index: int = 0) -> None:
        """Restore what `memory` returned."""
        found = self.memory(seed_index)
        if found is not None:
            copy_arrays(saved, found)

    def _remember(self) -> None:
        """Change the current random numbers by what is remembered."""
        noise = {name: numbers.numpy() for name, numbers in self.pool.current_noise().items()}
        for slot, memory in zip(self._population.slots, self._memories, strict=True):
            one = self._population.width == 1
            memory(noise if one else {name: numbers[slot] for name, numbers in noise.items()})

    @property
    def has_chosen(self) -> bool:
        """Whether `finish` returns without waiting for the device."""
        return self._at_random or self._is_idle or isinstance(self._program, DirectActions)

    def finish(self) -> np.ndarray | None:
        """Return the chosen actions `(seeds * num_envs, ...)` as a new array; None if idle."""
        if self._is_idle and not self._at_random:
            return None
        actions = self._random_actions() if self._at_random else self._program.finish()
        if self._population.width == 1:
            return actions.copy()
        of_seeds: np.ndarray = actions[self._occupied]
        return of_seeds.reshape(-1, *of_seeds.shape[2:]).copy()

    def _random_actions(self) -> np.ndarray:
        uniform = self.pool.current_noise()[RANDOM].numpy()
        if self._spaces.is_continuous:
            return uniform * np.float32(2) - np.float32(1)
        return (uniform * np.asarray(self._spaces.actions.num_choices, np.float32)).astype(np.int64)


@dataclass(frozen=True)
class SharedLearner:
    """The learner, explorer and replay buffer that several seeds share.

    On a GPU all seeds of a run share one, because many small networks take little longer than one.
    On a CPU each seed has its own, and its results are bit-identical to training it alone.
    """

    learner: Learner
    explorer: ActionChooser | None = None
    """None, as is the replay buffer, if the run collects no data"""
    replay: ReplayBuffer | None = None
    prior_data: Source | None = None
    """Recorded data to pretrain on, in runs that also collect transitions"""
    scalers: Sequence[ReturnScaler] = ()
    """One per seed if sampled rewards are scaled by returns, else none"""

    @property
    def num_seeds(self) -> int:
        return len(self.learner.algorithms)

    def needs_compiling(self) -> bool:
        """Whether a step of the run, after pretraining, would compile first."""
        acts = self.explorer is not None and self.explorer.needs_compiling()
        return acts or self.learner.needs_compiling()
