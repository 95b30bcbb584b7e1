"""What a job needs, found out before it starts: disk, memory, and metrics of its environment."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rl_training.config import TrainConfig
from rl_training.envs import EnvironmentFactory
from rl_training.envs.snapshots.layers import foreign_code
from rl_training.envs.vector.sequential import CheckedEnvironment, make_environments
from rl_training.envs.vector.step_arrays import NO_SUCCESS
from rl_training.errors import EnvironmentSetupError, last_line
from rl_training.training.inputs import run_factory, spaces_of
from rl_training.training.needs import disk_bytes, memory_needs

PROBE_STEPS, PROBE_SECONDS = 2_000, 10.0
"""Limits of the episode that shows which metrics an environment gives"""


@dataclass(frozen=True)
class JobNeeds:
    """Bytes that a job needs at least."""

    disk: int
    memory: int


def job_needs(config: TrainConfig) -> JobNeeds:
    """Estimate the needs of a job with the `seeds` of the config.

    Makes its environment once, so that one that does not exist or does not fit is an error here.
    """
    factory = run_factory(config, None)
    if factory is None:
        return JobNeeds(0, 0)
    spaces = spaces_of(factory, config)
    seeds = config.seeds or [config.seed]
    online = config.resolved_regime != "offline"
    needs = memory_needs([config] * len(seeds), spaces, online=online)
    replay = needs.pop("buffer_capacity", 0)
    networks = needs["hidden_sizes"] + needs.get("num_critics", 0)
    saved = len(seeds) * disk_bytes(config, spaces, networks // len(seeds), online=online)
    return JobNeeds(saved, replay + sum(needs.values()))


def gives_success(config: TrainConfig) -> bool:
    """Whether evaluations in the environment of a config have a success rate.

    Plays an episode with random actions. If it does not end in time, the answer is True, since only
    the last step of an episode counts.
    """
    factory = run_factory(config, None)
    return factory is not None and _ends_with_success(factory)


def _ends_with_success(factory: EnvironmentFactory) -> bool:
    (environment,) = make_environments(factory, 1)

    def failed(error: BaseException) -> Exception:
        return EnvironmentSetupError(f"{factory.label} failed: {last_line(error)}")

    try:
        with foreign_code(failed):
            return not _play(environment) or environment.end_episode() != NO_SUCCESS
    finally:
        environment.close()


def _play(environment: CheckedEnvironment) -> bool:
    """Take random actions; return whether the episode has ended within the limits."""
    actions, deadline = environment.env.action_space, time.monotonic() + PROBE_SECONDS
    actions.seed(0)
    environment.reset(seed=0)
    for _ in range(PROBE_STEPS):
        _, _, terminated, truncated = environment.step(actions.sample())
        if terminated or truncated:
            return True
        if time.monotonic() > deadline:
            break
    return False
