"""A first look at an environment, before anything depends on it."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.wrapper_statistics import normalizes_observations
from rl_training.errors import EnvironmentSetupError


def check_environment(factory: EnvironmentFactory, *, reads_data: bool = False) -> None:
    """Make one environment and see that `reset` and `step` are Gymnasium's, or say what is not.

    `reads_data` says that the run learns from recorded observations too: a wrapper that normalises
    live ones would put the two on different scales.
    """
    environment = factory()
    try:
        if reads_data and normalizes_observations(environment):
            raise EnvironmentSetupError(
                f"{factory.label}: NormalizeObservation normalises live observations by what it "
                "sees, which is not how recorded ones were; leave that wrapper out and set "
                "`normalize_observations: true`, which takes its statistics from the data"
            )
        _check_reset(environment, factory.label)
        _check_step(environment, factory.label)
    finally:
        environment.close()


def _check_reset(environment: gym.Env[Any, Any], label: str) -> None:
    parameters = inspect.signature(environment.unwrapped.reset).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "seed" not in parameters and not takes_any:
        raise EnvironmentSetupError(
            f"{label}: reset must be `reset(self, *, seed=None, options=None)`; "
            f"this one takes ({', '.join(parameters)})"
        )
    result = environment.reset(seed=0)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EnvironmentSetupError(
            f"{label}: reset must return `observation, info`; this one returned {_kind(result)}"
        )


def _check_step(environment: gym.Env[Any, Any], label: str) -> None:
    environment.action_space.seed(0)
    result = environment.step(environment.action_space.sample())
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvironmentSetupError(
            f"{label}: step must return `observation, reward, terminated, truncated, info`; "
            f"this one returned {_kind(result)}"
        )


def _kind(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
