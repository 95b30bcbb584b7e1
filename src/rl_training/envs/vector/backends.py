"""Choose whether environments run in this process or in worker processes."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from rl_training.envs.make import EnvironmentFactory, close_environment
from rl_training.envs.snapshots.layers import Environment, foreign_code
from rl_training.errors import EnvironmentSetupError, last_line

Backend = Literal["sync", "async"]
"""`"sync"` steps all environments in this process, `"async"` in worker processes"""

ROUND_SECONDS, WORKER_SECONDS = 40e-6, 5e-6
"""Overhead of a step with worker processes: per step, for cores that are shared or asleep, and per
worker, to signal it and to read its reply. Measured on two cores of a virtual machine."""
WORTHWHILE = 1.2
"""Minimum speedup: worker processes also need memory and take cores from the learner"""

_WARM_UP_STEPS, _MEASURED_STEPS = 8, 40


def suitable_backend(step_seconds: float, total_envs: int, cores: int) -> Backend:
    """Return `"async"` if stepping on several `cores` saves more time than signalling costs."""
    workers = min(total_envs, cores)
    alone = total_envs * step_seconds
    largest_share = -(-total_envs // workers)
    shared = largest_share * step_seconds + ROUND_SECONDS + workers * WORKER_SECONDS
    return "async" if workers > 1 and alone > WORTHWHILE * shared else "sync"


def measure_step_seconds(factory: EnvironmentFactory) -> float:
    """Return the median time of one environment step, measured with random actions."""
    environment = factory()
    try:
        with foreign_code(lambda error: _failure(factory.label, error)):
            return _median_step_seconds(environment)
    finally:
        close_environment(environment)


def _median_step_seconds(environment: Environment) -> float:
    environment.action_space.seed(0)
    environment.reset(seed=0)
    times = []
    for _ in range(_WARM_UP_STEPS + _MEASURED_STEPS):
        action = environment.action_space.sample()
        began = time.perf_counter()
        _, _, terminated, truncated, _ = environment.step(action)
        times.append(time.perf_counter() - began)
        if terminated or truncated:
            environment.reset()
    return float(np.median(times[_WARM_UP_STEPS:]))


def _failure(label: str, error: BaseException) -> EnvironmentSetupError:
    return EnvironmentSetupError(f"{label}: an environment step failed: {last_line(error)}")
