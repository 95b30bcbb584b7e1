"""What wrappers learn while an environment is trained in, for evaluation to use as it is.

Gymnasium's `NormalizeObservation` and `NormalizeReward` keep running statistics; a wrapper of the
user's own takes part by the methods `snapshot` and `restore` that `snapshot.py` describes. Only
wrappers do: the state of an environment itself is its episode.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from pydantic import field_validator

from rl_training.envs.make import Environment, EnvironmentFactory
from rl_training.envs.snapshots.codec import Decoder, Encoder
from rl_training.envs.snapshots.layers import (
    encode_own_snapshot,
    has_own_snapshot,
    layers_of,
    restore_own_snapshot,
)
from rl_training.errors import CheckpointError
from rl_training.types import Json
from rl_training.validation import StrictModel

Wrapper = gym.Wrapper[Any, Any, Any, Any]

MAX_WRAPPERS = 64


class WrapperStatistics(StrictModel):
    """What a policy keeps of one wrapper."""

    wrapper: str
    kind: Literal["own", "observation", "reward"]
    state: Any

    @field_validator("wrapper")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if len(value) > 200 or not value.isidentifier():
            raise ValueError(f"wrapper_statistics: {reprlib.repr(value)} is not a class's name")
        return value


_RUNNING = {"observation": "obs_rms", "reward": "return_rms"}
"""By what they normalise: the attribute in which Gymnasium's wrappers keep mean, var and count"""


@dataclass(frozen=True)
class EvaluationFactory(EnvironmentFactory):
    """Makes environments to evaluate in, in which every episode starts from these statistics.

    Rewards are those before `NormalizeReward`, if there is one.
    """

    statistics: Sequence[Json] = ()

    @classmethod
    def like(
        cls, factory: EnvironmentFactory, statistics: Sequence[Json] | None
    ) -> EvaluationFactory:
        return cls(factory.source, factory.kwargs, statistics or ())

    def __call__(self) -> Environment:
        environment = super().__call__()
        try:
            kept = give_statistics(environment, self.statistics, frozen=True)
        except BaseException:
            environment.close()
            raise
        if kept:
            environment = _KeptStatistics(environment, kept)
        return _with_unnormalized_rewards(environment)


def read_statistics(env: Environment, *, started: bool) -> list[Json]:
    """What each wrapper that learns has learned, outermost first, as plain JSON.

    Before an environment is `started` by a first reset, `snapshot` methods may not work yet. Raises
    `SnapshotUnsupported` where one fails.
    """
    return [
        {"wrapper": type(layer).__name__, "kind": kind, "state": _read(layer, kind)}
        for layer, kind in _learning_layers(env)
        if started or kind != "own"
    ]


def _learning_layers(env: Environment) -> list[tuple[Wrapper, str]]:
    """The wrappers that learn, outermost first, and what kind each is."""
    found = []
    for layer in layers_of(env):
        if not isinstance(layer, gym.Wrapper):
            continue
        if has_own_snapshot(layer):
            found.append((layer, "own"))
        elif isinstance(layer, NormalizeObservation):
            found.append((layer, "observation"))
        elif isinstance(layer, NormalizeReward):
            found.append((layer, "reward"))
    return found


def _read(layer: Wrapper, kind: str) -> Any:
    if kind == "own":
        return encode_own_snapshot(layer, Encoder())
    running = getattr(layer, _RUNNING[kind])
    return Encoder().encode({name: getattr(running, name) for name in ("mean", "var", "count")})


def give_statistics(
    env: Environment, statistics: Sequence[Json], *, frozen: bool = False
) -> list[tuple[Wrapper, Json]]:
    """Give each wrapper what its counterpart had learned; `frozen` ones then learn no more.

    Returns the wrappers with a `restore` of their own, and what they were given. Raises
    `CheckpointError` where a wrapper is missing, or the statistics are not a wrapper's.
    """
    waiting, own = list(statistics), []
    if any(saved["kind"] == "own" for saved in waiting):
        env.reset(seed=0)  # `restore` may expect attributes that a reset makes
    for layer, kind in _learning_layers(env):
        saved = _take(waiting, type(layer).__name__, kind)
        if saved is None:
            if frozen and kind == "observation":
                warnings.warn(
                    "the policy has no statistics of NormalizeObservation, which starts from none "
                    "in this evaluation; `normalize_observations: true` keeps them with a policy",
                    stacklevel=2,
                )
            continue
        if _write(layer, kind, saved) and kind == "own":
            own.append((layer, saved))
        if frozen and hasattr(layer, "update_running_mean"):
            layer.update_running_mean = False
    missing = [repr(saved["wrapper"]) for saved in waiting if saved["kind"] != "reward"]
    if missing:
        raise CheckpointError(
            f"the policy was trained with {' and '.join(missing)}, which this environment lacks; "
            "use an environment with the same wrappers"
        )
    return own


def _take(waiting: list[Json], wrapper: str, kind: str) -> Json | None:
    """The first of those waiting for such a wrapper, which then waits no more."""
    for index, saved in enumerate(waiting):
        if (saved["wrapper"], saved["kind"]) == (wrapper, kind):
            return waiting.pop(index)
    return None


def _write(layer: Wrapper, kind: str, saved: Json) -> bool:
    """Whether the wrapper took what was saved: a `restore` of the user's own may do otherwise."""
    name = type(layer).__name__
    try:
        values = Decoder().decode(saved["state"])
        if kind != "own":
            _write_running(getattr(layer, _RUNNING[kind]), values)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        problem = str(error)[:200]
        raise CheckpointError(f"the statistics of {name} do not fit it: {problem}") from error
    if kind != "own":
        return True
    try:
        restore_own_snapshot(layer, values)
    except CheckpointError as error:
        warnings.warn(f"{error}; it starts without what it learned in training", stacklevel=2)
        return False
    return True


def _write_running(running: Any, values: dict[str, Any]) -> None:
    found = {}
    for name in ("mean", "var", "count"):
        present, given = np.asarray(getattr(running, name)), np.asarray(values[name])
        if given.dtype.kind not in "fiu":
            raise ValueError(f"{name} is not numbers")
        if given.shape != present.shape:
            raise ValueError(f"{name} has shape {given.shape}")
        found[name] = given.astype(np.float64)
        if not np.isfinite(found[name]).all():
            raise ValueError(f"{name} is not finite")
    if (found["var"] < 0).any() or found["count"] <= 0:
        raise ValueError("var must not be negative, count must be positive")
    for name, value in found.items():
        present = getattr(running, name)
        setattr(running, name, value.astype(present.dtype) if value.ndim else float(value))


class _KeptStatistics(gym.Wrapper[Any, Any, Any, Any]):
    """Starts every episode with what wrappers of the user's own had learned in training."""

    def __init__(self, env: Environment, kept: Sequence[tuple[Wrapper, Json]]) -> None:
        super().__init__(env)
        self._kept = kept

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        for layer, saved in self._kept:
            restore_own_snapshot(layer, Decoder().decode(saved["state"]))
        return self.env.reset(seed=seed, options=options)


def _with_unnormalized_rewards(env: Environment) -> Environment:
    """Rewards as they come to the innermost `NormalizeReward`.

    What lies above it, such as clipping, is meant for normalised rewards, and goes on seeing them.
    """
    normalizers = [layer for layer in layers_of(env) if isinstance(layer, NormalizeReward)]
    if not normalizers:
        return env
    normalizers[-1].env = meter = _RewardMeter(normalizers[-1].env)
    return _MeteredReward(env, meter)


class _RewardMeter(gym.Wrapper[Any, Any, Any, Any]):
    """Adds up the rewards that pass through; a wrapper above may take several steps as one."""

    total: Any = 0.0

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.total = self.total + reward
        return observation, reward, terminated, truncated, info


class _MeteredReward(gym.Wrapper[Any, Any, Any, Any]):
    """Returns what passed through the meter in a step as the reward."""

    def __init__(self, env: Environment, meter: _RewardMeter) -> None:
        super().__init__(env)
        self._meter = meter

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        self._meter.total = 0.0
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, self._meter.total, terminated, truncated, info
