"""Independent random streams from one root seed.

Random numbers for many updates at once, from one stream per seed.

Drawing takes the time of a kernel whether it gives a hundred numbers or a million, so the numbers
of the next `ROUNDS` updates are drawn together. Which numbers a seed gets depends on its own
stream alone: not on the mode of execution, nor on the population it is trained in.
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
from rl_training.types import Json, Noise


class Stream(IntEnum):
    """What a stream is for. The numbers are part of what a seed means: never renumber them."""

    INITIALIZATION = 0
    EXPLORATION = 1
    UPDATE_NOISE = 3
    """Batches to learn from, and the losses' own noise"""
    TRAINING_ENVIRONMENT = 4
    EVALUATION_ENVIRONMENT = 5
    """Of a run's own evaluations, which repeat the same episodes"""
    GLOBAL = 6
    VALIDATION = 7
    """Batches of held-out data, and the losses' own noise"""
    FITTED_Q = 8
    REPORT_ENVIRONMENT = 9
    """Fresh episodes: those of EVALUATION_ENVIRONMENT have chosen the best checkpoint"""


def stream_seed(root_seed: int, stream: Stream) -> int:
    """The seed of one stream; streams of one root, and of different roots, are independent."""
    words = np.random.SeedSequence([root_seed, int(stream)]).generate_state(2, dtype=np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def stream_generator(
    root_seed: int, stream: Stream, device: torch.device | str = "cpu"
) -> torch.Generator:
    return torch.Generator(device).manual_seed(stream_seed(root_seed, stream))


def generator_state(generator: torch.Generator) -> Json:
    """A generator's state as plain values."""
    encoded: Json = Encoder().encode(generator.get_state().numpy())
    return encoded


def set_generator_state(generator: torch.Generator, state: Json) -> None:
    generator.set_state(torch.from_numpy(Decoder().decode(state).copy()))


def global_state() -> Json:
    """The process-wide streams of Python, NumPy and PyTorch, which a user's environment may use."""
    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": Encoder().encode((name, key, int(position), int(has_gauss), float(cached))),
        "torch": Encoder().encode(torch.get_rng_state().numpy()),
    }


def set_global_state(state: Json) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(Decoder().decode(state["numpy"]))
    torch.set_rng_state(torch.from_numpy(Decoder().decode(state["torch"]).copy()))


@contextlib.contextmanager
def isolated_global_streams(root_seed: int) -> Iterator[None]:
    """Seed the process-wide streams for a run, and give the caller's back afterwards."""
    before = global_state()
    seed = stream_seed(root_seed, Stream.GLOBAL)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        set_global_state(before)


ROUNDS = 64
"""Part of what a seed means: another number draws in another order."""


class RandomPool:
    """What `draws` asks for, round after round, for every slot of a population."""

    def __init__(
        self, draws: Draws, generators: Sequence[torch.Generator], device: torch.device | str
    ) -> None:
        """One generator per slot; numbers have a leading axis of slots if there are several."""
        self._draws = dict(draws)
        self._generators = list(generators)
        self._sizes: dict[str, int] = {}
        self._places: dict[str, tuple[str, int]] = {}
        for name, draw in self._draws.items():
            start = self._sizes.get(draw.kind, 0)
            self._places[name] = (draw.kind, start)
            self._sizes[draw.kind] = start + draw.size
        self.numbers = {kind: self._empty(kind, device) for kind in self._sizes}
        self._arrays = {
            kind: numbers.numpy() for kind, numbers in self.numbers.items() if numbers.is_cpu
        }
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        """The round that a captured program, which moves this itself, reads next"""
        self._starts: dict[int, Tensor] = {}
        self._restored: int | None = None
        # Numbers are drawn into the same memory again and again, so each round's views last.
        self._rounds: list[Noise | None] = [None] * ROUNDS
        self._refill()

    def take(self) -> Noise:
        """The numbers of the next round, by the names they were asked for under."""
        self.advance()
        return self.current_noise()

    def current_noise(self) -> Noise:
        """The numbers of the round that `advance` came to; a mapping of its own."""
        noise = self._rounds[self.position - 1]
        if noise is None:
            noise = self._rounds[self.position - 1] = self.split(self.current())
        return dict(noise)

    def current(self) -> dict[str, Tensor]:
        """All numbers of the round that `advance` came to, by kind."""
        return {kind: numbers[self.position - 1] for kind, numbers in self.numbers.items()}

    def copy_current(self, targets: Mapping[str, np.ndarray]) -> None:
        """Write the same into arrays, by kind; for a pool on the host."""
        for kind, rounds in self._arrays.items():
            targets[kind][...] = rounds[self.position - 1]

    def advance(self) -> None:
        """Go on to the next round, drawing new ones if they are used up."""
        if self.position == ROUNDS:
            self._refill()
        self.position += 1

    def at_cursor(self) -> Noise:
        """The numbers of the round at the cursor, by operations that can be captured."""
        rounds = {
            kind: numbers.index_select(0, self.cursor).squeeze(0)
            for kind, numbers in self.numbers.items()
        }
        return self.split(rounds)

    def split(self, numbers: dict[str, Tensor]) -> Noise:
        """One round's numbers, by the names they were asked for under."""
        noise = {}
        for name, (kind, start) in self._places.items():
            draw = self._draws[name]
            part = numbers[kind].narrow(-1, start, draw.size)
            noise[name] = part.view((*part.shape[:-1], *draw.shape))
        return noise

    def state_dict(self, slot: int = 0) -> Json:
        """Where a slot's stream stands: before its newest drawing, and how much of that is used."""
        generator = torch.Generator(self._generators[slot].device)
        generator.set_state(self._starts[slot])
        return {"generator": generator_state(generator), "position": self.position}

    def load_state_dict(self, state: Json, slot: int = 0) -> None:
        """Continue a slot's stream; every slot that is restored must stand at the same round."""
        position = int(state["position"])
        if not 0 <= position <= ROUNDS:
            raise ValueError(f"its random streams stand at round {position} of {ROUNDS}")
        if self._restored not in (None, position):
            raise ValueError(f"its random streams stand at rounds {self._restored} and {position}")
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
        self._starts[slot] = generator.get_state()
        for kind, size in self._sizes.items():
            numbers = self.numbers[kind]
            its_numbers = numbers if len(self._generators) == 1 else numbers[:, slot]
            its_numbers.copy_(draw_kind(kind, (ROUNDS, size), generator))

    def _empty(self, kind: str, device: torch.device | str) -> Tensor:
        lead = (ROUNDS,) if len(self._generators) == 1 else (ROUNDS, len(self._generators))
        return torch.zeros(*lead, self._sizes[kind], dtype=KIND_TYPES[kind], device=device)
