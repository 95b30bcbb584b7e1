"""Random numbers for many updates at once, from one stream per seed.

Drawing takes the time of a kernel whether it gives a hundred numbers or a million, so the numbers
of the next `ROUNDS` updates are drawn together. Which numbers a seed gets depends on its own
stream alone: not on the mode of execution, nor on the population it is trained in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.noise import KIND_TYPES, Draws, draw_kind
from rl_training.runtime.random_streams import generator_state, set_generator_state
from rl_training.types import Json, Noise

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
