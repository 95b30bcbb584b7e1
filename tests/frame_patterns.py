"""Made-up environments with images, whose transitions fill replay buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rl_training.data import NStepAccumulator, Transitions
from rl_training.data.storage.stacks import FrameLayout
from rl_training.observations import ObservationLeaf, ObservationSpec


def stacked(*shapes: tuple[int, ...], numbers: int = 0) -> ObservationSpec:
    """Observations with images of these shapes, after a vector of numbers."""
    images = [ObservationLeaf(f"image {i}", "image", shape) for i, shape in enumerate(shapes)]
    vectors = [ObservationLeaf("vector", "numbers", (numbers,))] if numbers else []
    return ObservationSpec((*vectors, *images))


class Pictures:
    """Stacks of the newest frames, as `FrameStackObservation` makes them, in short episodes."""

    def __init__(
        self, layout: FrameLayout, seed: int, *, longest: int, still: float, padded: bool
    ) -> None:
        """Episodes have up to `longest` steps; a share `still` of frames repeats the last one.

        With `padded`, the first stack of an episode is filled with zeros, else with its frame.
        """
        self._layout, self._random = layout, np.random.default_rng(seed)
        self._longest, self._still, self._padded = longest, still, padded
        self.row = self.reset()

    def reset(self) -> np.ndarray:
        self._left = int(self._random.integers(1, self._longest + 1))
        self._stacks = []
        for stack in self._layout.stacks:
            frame = self._frame(stack.frame_bytes)
            first = np.zeros_like(frame) if self._padded else frame
            self._stacks.append([*[first] * (stack.frames - 1), frame])
        return self._observe()

    def step(self) -> tuple[np.ndarray, bool]:
        """Return the next observation, and whether the episode has ended."""
        self._left -= 1
        for stack, frames in zip(self._layout.stacks, self._stacks, strict=True):
            is_still = self._random.random() < self._still
            frames.append(frames[-1] if is_still else self._frame(stack.frame_bytes))
            del frames[0]
        return self._observe(), self._left == 0

    def _frame(self, size: int) -> np.ndarray:
        # Few values, so that equal frames and bytes that look like NaN occur.
        return self._random.choice(np.array([0, 1, 127, 255], np.uint8), size)

    def _observe(self) -> np.ndarray:
        spec = self._layout.observation
        images = {
            stack.leaf.name: np.concatenate(frames).reshape(stack.leaf.shape)
            for stack, frames in zip(self._layout.stacks, self._stacks, strict=True)
        }
        vectors = {leaf.name: self._random.random(leaf.shape) for leaf in spec.leaves}
        row = np.zeros(spec.size, np.float32)
        spec.write(vectors | images, row)
        return row


def transitions_of(
    pictures: list[Pictures], steps: int, n_step: int = 1, lost: float = 0.0, seed: int = 0
) -> Iterator[tuple[Transitions, np.ndarray]]:
    """Step environments together; yield their transitions, and the environment of each.

    A share `lost` of steps is lost with its worker, and the environment starts again.
    """
    count, random = len(pictures), np.random.default_rng(seed)
    accumulator = NStepAccumulator(n_step, 0.99, count)
    rows = np.stack([each.row for each in pictures])
    for _ in range(steps):
        is_lost = random.random(count) < lost
        following, ended = (
            np.array(part) for part in zip(*(p.step() for p in pictures), strict=True)
        )
        accumulator.drop(is_lost)
        found, environments = accumulator.add(
            rows,
            random.standard_normal((count, 2)).astype(np.float32),
            random.standard_normal(count).astype(np.float32),
            ended & (random.random(count) < 0.5),
            ended,
            following,
            ~is_lost,
        )
        yield found, np.arange(count) if environments is None else environments
        rows = following.copy()
        for index in np.flatnonzero(ended | is_lost):
            rows[index] = pictures[index].reset()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers, because equal words may look like NaN."""
    return tensor.contiguous().view(torch.int32) if tensor.dtype == torch.float32 else tensor


SIZE = 6
"""Height and width of the frames of `Pixels`"""


class Pixels(gym.Env):
    """Frames of random bytes, in episodes of seven steps."""

    observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        return self._frame(), float(action), False, self.steps == 7, {}

    def _frame(self) -> np.ndarray:
        return self.np_random.integers(0, 256, (SIZE, SIZE), dtype=np.uint8)


def stacked_pixels() -> gym.Env:
    return gym.wrappers.FrameStackObservation(Pixels(), 4)
