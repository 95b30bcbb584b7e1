"""A first look at an environment, before anything depends on it."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.wrapper_statistics import normalizes_observations
from rl_training.errors import EnvironmentSetupError


def check_environment(factory: EnvironmentFactory, *, trained_in: bool = True) -> None:
    """Make one environment and see that `reset` and `step` are Gymnasium's, or say what is not.

    One that is not `trained_in` must not need to be, to learn how to normalise observations.
    """
    environment = factory()
    try:
        if not trained_in and normalizes_observations(environment):
            raise EnvironmentSetupError(
                f"{factory.label}: NormalizeObservation learns its statistics in training, which "
                "recorded data does without; leave that wrapper out and set "
                "`normalize_observations: true`, which takes them from the data"
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
