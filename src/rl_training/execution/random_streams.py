"""Independent random streams from one root seed, and the random numbers of updates.

A run has one root seed. Each purpose (`Stream`) has a separate stream, derived from that seed.
`RandomPool` draws the random numbers of many updates at once from one stream per slot.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import KIND_TYPES, Draws, draw_kind
from rl_training.envs.snapshots.codec import Decoder, Encoder
from rl_training.internals import available_memory
from rl_training.types import Json, Noise

ROUNDS = 64
"""Updates whose numbers are drawn together. Never change it: a seed would give other numbers."""


class Stream(IntEnum):
    """The purposes of random streams. Never renumber them: a seed would give other numbers."""

    INITIALIZATION = 0
    EXPLORATION = 1
    UPDATE_NOISE = 3
    """Training batches and the noise of losses"""
    TRAINING_ENVIRONMENT = 4
    EVALUATION_ENVIRONMENT = 5
    """Evaluations during a run, which repeat the same episodes"""
    GLOBAL = 6
    VALIDATION = 7
    """Batches of held-out data and the noise of their losses"""
    FITTED_Q = 8
    REPORT_ENVIRONMENT = 9
    """New episodes, because those of EVALUATION_ENVIRONMENT have selected the best checkpoint"""
    HEALTH = 10
    """Batches and noise for the figures of a run's health, which nothing else depends on"""
    HINDSIGHT = 11
    """Goals with which transitions are repeated"""
    ROLLOUTS = 12
    """The order in which minibatches take the transitions of a rollout"""


def stream_seed(root_seed: int, stream: Stream) -> int:
    """Return the seed of a stream; different streams and different root seeds are independent."""
    words = np.random.SeedSequence([root_seed, int(stream)]).generate_state(2, dtype=np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def stream_generator(
    root_seed: int, stream: Stream, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a generator at the start of a stream."""
    return torch.Generator(device).manual_seed(stream_seed(root_seed, stream))


def generator_state(generator: torch.Generator) -> Json:
    """Return a generator's state as JSON values."""
    encoded: Json = Encoder().encode(generator.get_state().numpy())
    return encoded


def set_generator_state(generator: torch.Generator, state: Json) -> None:
    """Restore the result of `generator_state`."""
    generator.set_state(torch.from_numpy(Decoder().decode(state).copy()))


def global_state() -> Json:
    """Return the state of the global generators of Python, NumPy and PyTorch as JSON values.

    A user's environment may draw from them.
    """
    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": Encoder().encode((name, key, int(position), int(has_gauss), float(cached))),
        "torch": Encoder().encode(torch.get_rng_state().numpy()),
    }


def set_global_state(state: Json) -> None:
    """Restore the result of `global_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(Decoder().decode(state["numpy"]))
    torch.set_rng_state(torch.from_numpy(Decoder().decode(state["torch"]).copy()))


@contextlib.contextmanager
def isolated_global_streams(root_seed: int) -> Iterator[None]:
    """Seed the global generators for a run, and restore the caller's state afterwards."""
    before = global_state()
    seed = stream_seed(root_seed, Stream.GLOBAL)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        set_global_state(before)


class RandomPool:
    """Random numbers for every slot of a population, one round per update.

    Drawing a million numbers takes about as long as drawing a hundred, so `ROUNDS` rounds are drawn
    together. A seed's numbers depend only on its generator: not on the execution mode, nor on the
    other seeds of the population.
    """

    def __init__(
        self, draws: Draws, generators: Sequence[torch.Generator], device: torch.device | str
    ) -> None:
        """Draw `draws` in each round, with one generator per slot.

        The numbers have a leading axis of slots if there are several slots.
        """
        self._draws = dict(draws)
        self._generators = list(generators)
        self._sizes: dict[str, int] = {}
        self._places: dict[str, tuple[str, int]] = {}
        for name, draw in self._draws.items():
            start = self._sizes.get(draw.kind, 0)
            self._places[name] = (draw.kind, start)
            self._sizes[draw.kind] = start + draw.size
        self._check_memory(device)
        self.numbers = {kind: self._empty(kind, device) for kind in self._sizes}
        self._arrays = {
            kind: numbers.numpy() for kind, numbers in self.numbers.items() if numbers.is_cpu
        }
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        """The next round for a captured program, which advances the cursor itself"""
        self._starts: dict[int, Tensor] = {}
        self._restored: int | None = None
        self._on_host: dict[str, Tensor] = {}
        # All refills write to the same memory, so the views of each round stay valid.
        self._rounds: list[Noise | None] = [None] * ROUNDS
        self._refill()

    def take(self) -> Noise:
        """Advance, and return the numbers of the new round by name."""
        self.advance()
        return self.current_noise()

    def current_noise(self) -> Noise:
        """Return the numbers of the current round by name, in a new dictionary."""
        noise = self._rounds[self.position - 1]
        if noise is None:
            noise = self._rounds[self.position - 1] = self.split(self.current())
        return dict(noise)

    def current(self) -> dict[str, Tensor]:
        """Return the numbers of the current round by kind."""
        return {kind: numbers[self.position - 1] for kind, numbers in self.numbers.items()}

    def current_on_host(self, name: str) -> Tensor:
        """Return numbers of the current round in host memory, without waiting for the device.

        All rounds are copied together, so the host waits once per refill.
        """
        kind, start = self._places[name]
        if kind not in self._on_host:
            self._on_host[kind] = self.numbers[kind].cpu()
        return self._part(self._on_host[kind][self.position - 1], name, start)

    def copy_current(self, targets: Mapping[str, np.ndarray]) -> None:
        """Write the numbers of the current round to arrays by kind; the pool must be on the CPU."""
        for kind, rounds in self._arrays.items():
            targets[kind][...] = rounds[self.position - 1]

    def advance(self) -> None:
        """Advance to the next round, and draw new rounds if all are used."""
        if self.position == ROUNDS:
            self._refill()
        self.position += 1

    def at_cursor(self) -> Noise:
        """Return the numbers of the round at the cursor, by operations that a graph can capture."""
        rounds = {
            kind: numbers.index_select(0, self.cursor).squeeze(0)
            for kind, numbers in self.numbers.items()
        }
        return self.split(rounds)

    def split(self, numbers: dict[str, Tensor]) -> Noise:
        """Split the numbers of one round, given by kind, into views by name."""
        return {
            name: self._part(numbers[kind], name, start)
            for name, (kind, start) in self._places.items()
        }

    def _part(self, numbers: Tensor, name: str, start: int) -> Tensor:
        """The numbers of a name among those of its kind, which begin at `start`."""
        draw = self._draws[name]
        part = numbers.narrow(-1, start, draw.size)
        return part.view((*part.shape[:-1], *draw.shape))

    def state_dict(self, slot: int = 0) -> Json:
        """Return a slot's generator state before the newest refill, and the rounds used since."""
        generator = torch.Generator(self._generators[slot].device)
        generator.set_state(self._starts[slot])
        return {"generator": generator_state(generator), "position": self.position}

    def load_state_dict(self, state: Json, slot: int = 0) -> None:
        """Restore a slot's stream; all restored slots must be at the same round."""
        position = int(state["position"])
        if not 0 <= position <= ROUNDS:
            raise ValueError(f"random streams: round {position} is not between 0 and {ROUNDS}")
        if self._restored not in (None, position):
            raise ValueError(f"random streams: seeds are at rounds {self._restored} and {position}")
        self._restored = position
        set_generator_state(self._generators[slot], state["generator"])
        self._draw(slot)
        self.position = position
        self.cursor.fill_(position)

    def _refill(self) -> None:
        for slot in range(len(self._generators)):
            self._draw(slot)
        self.position = 0
        self.cursor.zero_()

    def _draw(self, slot: int) -> None:
        generator = self._generators[slot]
        self._on_host.clear()
        self._starts[slot] = generator.get_state()
        for kind, size in self._sizes.items():
            numbers = self.numbers[kind]
            of_slot = numbers if len(self._generators) == 1 else numbers[:, slot]
            of_slot.copy_(draw_kind(kind, (ROUNDS, size), generator))

    def _check_memory(self, device: torch.device | str) -> None:
        """Raise `MemoryError` instead of letting the system end the process as it draws."""
        needed = (
            ROUNDS
            * len(self._generators)
            * sum(size * KIND_TYPES[kind].itemsize for kind, size in self._sizes.items())
        )
        available = available_memory(device)
        if available is not None and needed > available:
            raise MemoryError(f"random numbers need {needed:,} bytes of memory")

    def _empty(self, kind: str, device: torch.device | str) -> Tensor:
        lead = (ROUNDS,) if len(self._generators) == 1 else (ROUNDS, len(self._generators))
        return torch.zeros(*lead, self._sizes[kind], dtype=KIND_TYPES[kind], device=device)
