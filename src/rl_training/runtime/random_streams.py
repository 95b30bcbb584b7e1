"""Independent random streams from one root seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import torch

from rl_training.envs.snapshot_codec import Decoder, Encoder
from rl_training.types import Json


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
