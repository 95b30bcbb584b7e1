"""Where environments are stepped: in this process or in several, and which of them pays."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.spaces import describe_spaces
from rl_training.envs.vector.processes import ProcessVector
from rl_training.envs.vector.sequential import (
    SequentialVector,
    make_environments,
)
from rl_training.envs.vector.step_arrays import (
    StepArrays,
    buffer_size,
    step_layout,
)
from rl_training.types import SpaceInfo

Backend = Literal["sync", "async"]

ROUND_SECONDS, WORKER_SECONDS = 40e-6, 5e-6
"""What a step costs beside the environments' own: once, for cores that are shared or asleep, and
for each worker that is told and heard. Measured on two cores of a virtual machine."""
WORTHWHILE = 1.2
"""How much faster several processes must be: they also take memory, and cores from the learner"""

_WARM_UP_STEPS, _MEASURED_STEPS = 8, 40


def make_vector(
    factory: EnvironmentFactory, number: int, backend: Backend
) -> tuple[SequentialVector | ProcessVector, SpaceInfo]:
    """`number` environments and what they observe and accept.

    Raises `EnvironmentSetupError` where one cannot be made or its spaces are not supported.
    """
    environments = make_environments(factory, number if backend == "sync" else 1)
    example = environments[0].env
    try:
        spaces = describe_spaces(example)
        layout = step_layout(number, example.observation_space, example.action_space)
        if backend == "async":
            return ProcessVector(factory, number, layout), spaces
    except BaseException:
        for environment in environments:
            environment.close()
        raise
    finally:
        if backend == "async":
            example.close()
    buffer = np.zeros(buffer_size(layout), np.uint8)
    return SequentialVector(environments, StepArrays.view(buffer, layout)), spaces


def suitable_backend(step_seconds: float, total_envs: int, cores: int) -> Backend:
    """`"async"` where sharing the steps out over `cores` saves more than telling workers costs."""
    workers = min(total_envs, cores)
    alone = total_envs * step_seconds
    largest_share = -(-total_envs // workers)
    shared = largest_share * step_seconds + ROUND_SECONDS + workers * WORKER_SECONDS
    return "async" if workers > 1 and alone > WORTHWHILE * shared else "sync"


def measure_step_seconds(factory: EnvironmentFactory) -> float:
    """How long a step of one environment takes: the median of a few dozen random ones."""
    environment = factory()
    try:
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
    finally:
        environment.close()
