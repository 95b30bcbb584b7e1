"""Choose whether environments run in this process or in workers, and start the workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_training.envs.make import EnvironmentFactory, close_environment
from rl_training.envs.snapshots.layers import Environment, foreign_code
from rl_training.envs.vector.signalling import Deadline
from rl_training.envs.vector.step_arrays import Field, step_layout, steps_per_round
from rl_training.envs.vector.transport import Launcher
from rl_training.envs.vector.worker_process import ProcessLauncher
from rl_training.envs.vector.worker_vector import WorkerVector
from rl_training.errors import EnvironmentSetupError, last_line
from rl_training.types import SpaceInfo

Backend = Literal["sync", "async", "ray", "ray-async", "tensors"]
"""`"sync"` steps all environments in this process, `"async"` in worker processes of this machine
and `"ray"` in Ray actors. `"ray-async"` is the same, but does not wait for the slower half.
`"tensors"` are worlds on the learner's device, which `TensorVector` steps."""
RAY: tuple[Backend, ...] = ("ray", "ray-async")

ROUND_SECONDS, WORKER_SECONDS = 40e-6, 5e-6
"""Overhead of a step with worker processes: per step, for cores that are shared or asleep, and per
worker, to signal it and to read its reply. Measured on two cores of a virtual machine."""
WORTHWHILE = 1.2
"""Minimum speedup: worker processes also need memory and take cores from the learner"""

_WARM_UP_STEPS, _MEASURED_STEPS = 8, 40


@dataclass(frozen=True)
class Placement:
    """How many workers there are, and where those in Ray actors run."""

    workers: int | None = None
    """None: one per core"""
    ray_address: str | None = None
    """The cluster of Ray actors; None: that of RAY_ADDRESS, or an embedded Ray"""
    cpus: float = 1.0
    """CPUs that Ray reserves for a worker"""


def start_workers(
    backend: Backend,
    factory: EnvironmentFactory,
    num_envs: int,
    num_seeds: int,
    placement: Placement,
    lose: Callable[[int, str], int],
    *,
    timeout: float | None,
    restarts: int,
    replays: bool,
) -> tuple[WorkerVector, SpaceInfo]:
    """Start workers with `num_envs` environments for each seed, and describe their spaces.

    Raises `EnvironmentSetupError` if one cannot be made or its spaces are not supported, and
    `UserError` if Ray is not installed or cannot be reached.
    """
    example = factory()
    try:
        spaces, total = factory.spaces_of(example), num_seeds * num_envs
        layout = step_layout(
            total, example.observation_space, example.action_space, spaces.observation
        )
        launcher = _launcher(backend, factory, layout, placement, Deadline(timeout))
        if backend == "ray-async":
            from rl_training.envs.vector.asynchronous import AsynchronousVector

            taken = steps_per_round(backend, num_envs)
            vector: WorkerVector = AsynchronousVector(
                launcher, layout, lose, num_envs, taken, restarts=restarts
            )
        else:
            vector = WorkerVector(launcher, layout, lose, restarts=restarts, replays=replays)
        return vector, spaces
    finally:
        close_environment(example)


def _launcher(
    backend: Backend,
    factory: EnvironmentFactory,
    layout: list[Field],
    placement: Placement,
    deadline: Deadline,
) -> Launcher:
    if backend not in RAY:
        return ProcessLauncher.prepare(factory, layout, deadline, placement.workers)
    from rl_training.envs.vector.ray_workers import RayLauncher

    return RayLauncher.prepare(
        factory,
        layout,
        deadline,
        placement.workers,
        address=placement.ray_address,
        cpus=placement.cpus,
        one_each=backend == "ray-async",
    )


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
