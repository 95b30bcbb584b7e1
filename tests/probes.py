"""Small environments whose values are known exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box


class Probe(gym.Env):
    """Base class with one-dimensional observations and actions. Subclasses define `step`."""

    observation_space = Box(-1.0, 1.0, (1,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def observe(self, value: float) -> np.ndarray:
        return np.array([value], dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.observe(0.0), {}


class ConstantReward(Probe):
    """One state, one step, reward 1: Q is 1."""

    def step(self, action: np.ndarray) -> Any:
        return self.observe(0.0), 1.0, True, False, {}


class HugeReward(Probe):
    """One state, one step, a finite reward whose square overflows float32."""

    def step(self, action: np.ndarray) -> Any:
        return self.observe(0.0), 1e30, True, False, {}


class ObservationReward(Probe):
    """One step whose reward is the observation: Q is the observation."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.shown = float(self.np_random.choice([-1.0, 1.0]))
        return self.observe(self.shown), {}

    def step(self, action: np.ndarray) -> Any:
        return self.observe(0.0), self.shown, True, False, {}


class DelayedReward(Probe):
    """Two steps, reward 1 at the end: Q is gamma in the first state and 1 in the second."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(0.0), {}

    def step(self, action: np.ndarray) -> Any:
        self.steps += 1
        ended = self.steps == 2
        return self.observe(1.0), float(ended), ended, False, {}


class ActionReward(Probe):
    """One step with reward -(a - 0.5)^2: the best action is 0.5 and its Q is 0."""

    def step(self, action: np.ndarray) -> Any:
        return self.observe(0.0), -float((action[0] - 0.5) ** 2), True, False, {}


class TruncatedReward(Probe):
    """Reward 1, truncated after every step: Q is 1 / (1 - gamma) if truncation bootstraps."""

    def step(self, action: np.ndarray) -> Any:
        return self.observe(0.0), 1.0, False, True, {}


class Countdown(Probe):
    """Observations are (episode, step). Odd episodes terminate, even ones are truncated.

    Episode lengths grow with `length`, so that several environments end at different times.
    """

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, length: int = 3) -> None:
        self.length, self.episode, self.steps = length, -1, 0

    def look(self) -> np.ndarray:
        return np.array([self.episode, self.steps], dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self.look(), {}

    def step(self, action: np.ndarray) -> Any:
        self.steps += 1
        ended = self.steps >= self.length
        odd = self.episode % 2 == 1
        return self.look(), float(self.steps), ended and odd, ended and not odd, {}


class Discrete(gym.ActionWrapper):
    """Discrete version: each choice is one of several evenly spaced actions."""

    CHOICES = 5

    def __init__(self, environment: Probe) -> None:
        super().__init__(environment)
        self.action_space = gym.spaces.Discrete(self.CHOICES)

    @classmethod
    def of(cls, environment: type[Probe]) -> Callable[[], Discrete]:
        return lambda: cls(environment())

    @classmethod
    def value(cls, choice: int) -> float:
        return 2.0 * choice / (cls.CHOICES - 1) - 1.0

    @classmethod
    def choice(cls, action: float) -> int:
        return round((action + 1.0) / 2.0 * (cls.CHOICES - 1))

    def action(self, action: int) -> np.ndarray:
        return np.array([self.value(action)], dtype=np.float32)
