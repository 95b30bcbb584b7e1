"""Read what wrappers learn in training, and use it in evaluation.

Gymnasium's `NormalizeObservation` and `NormalizeReward` learn running statistics. Custom wrappers
are supported if they define the methods `snapshot` and `restore` (see `snapshots/snapshot.py`). The
state of the environment itself is not included: it belongs to the current episode.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Sequence
from typing import Any, Literal, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import NormalizeReward
from pydantic import field_validator

from rl_training.envs.snapshots.codec import Decoder, Encoder
from rl_training.envs.snapshots.layers import (
    Environment,
    Wrapper,
    encode_own_snapshot,
    layers_of,
    learning_wrappers,
    restore_own_snapshot,
)
from rl_training.errors import CheckpointError
from rl_training.types import Json
from rl_training.validation import StrictModel

MAX_WRAPPERS = 64
"""Maximum number of wrappers in a policy file"""


class WrapperStatistics(StrictModel):
    """The statistics of one wrapper, as stored with a policy."""

    wrapper: str
    kind: Literal["own", "observation", "reward"]
    state: Any

    @field_validator("wrapper")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if len(value) > 200 or not value.isidentifier():
            raise ValueError(f"wrapper_statistics: {reprlib.repr(value)} is not a class name")
        return value


_RUNNING = {"observation": "obs_rms", "reward": "return_rms"}
"""By kind: the attribute of Gymnasium's wrappers that has the running mean, var and count"""


def use_statistics(env: Environment, statistics: Sequence[Json]) -> Environment:
    """Let every episode of `env` start from these statistics, and return unnormalized rewards."""
    kept = give_statistics(env, statistics, frozen=True)
    return _with_unnormalized_rewards(_KeptStatistics(env, kept) if kept else env)


def read_statistics(wrappers: Sequence[tuple[Wrapper, str]], *, started: bool) -> list[Json]:
    """Return the statistics of `learning_wrappers` as JSON, in the same order.

    `snapshot` methods are called only if the environment has `started`, that is, was reset before.
    Raises `SnapshotUnsupported` if one fails.
    """
    return [
        {"wrapper": type(layer).__name__, "kind": kind, "state": _read(layer, kind)}
        for layer, kind in wrappers
        if started or kind != "own"
    ]


def _read(layer: Wrapper, kind: str) -> Any:
    if kind == "own":
        return encode_own_snapshot(layer, Encoder())
    running = getattr(layer, _RUNNING[kind])
    return Encoder().encode({name: getattr(running, name) for name in ("mean", "var", "count")})


def first_not_finite(statistics: Sequence[Json]) -> str | None:
    """Name the first running mean or variance that is not finite.

    Gymnasium computes them in the type of the observations: in float32, the variance of
    observations around 1e20 overflows. Statistics of custom wrappers are not checked.
    """
    for saved in statistics:
        if saved["kind"] in _RUNNING:
            for name, value in Decoder().decode(saved["state"]).items():
                if not np.isfinite(value).all():
                    return f"{name} of {saved['wrapper']}"
    return None


def give_statistics(
    env: Environment, statistics: Sequence[Json], *, frozen: bool = False
) -> list[tuple[Wrapper, Json]]:
    """Set the statistics of the wrappers; with `frozen`, they are not updated any more.

    Returns the wrappers with a `restore` method, each with the statistics it was given. Raises
    `CheckpointError` if a wrapper is missing or the statistics do not fit it.
    """
    remaining, own = list(statistics), []
    if any(saved["kind"] == "own" for saved in remaining):
        env.reset(seed=0)  # `restore` may need attributes that are created by a reset
    for layer, kind in learning_wrappers(env):
        saved = _take(remaining, type(layer).__name__, kind)
        if saved is None:
            if frozen and kind == "observation":
                warnings.warn(
                    "the policy has no statistics of NormalizeObservation, so evaluation starts "
                    "without any; use `normalize_observations: true` to save them with the policy",
                    stacklevel=2,
                )
            continue
        if _write(layer, kind, saved) and kind == "own":
            own.append((layer, saved))
        if frozen and hasattr(layer, "update_running_mean"):
            layer.update_running_mean = False
    missing = [repr(saved["wrapper"]) for saved in remaining if saved["kind"] != "reward"]
    if missing:
        raise CheckpointError(
            f"the policy was trained with {' and '.join(missing)}, which this environment lacks; "
            "use an environment with the same wrappers"
        )
    return own


def _take(remaining: list[Json], wrapper: str, kind: str) -> Json | None:
    """Remove and return the first statistics of this wrapper and kind."""
    for index, saved in enumerate(remaining):
        if (saved["wrapper"], saved["kind"]) == (wrapper, kind):
            return remaining.pop(index)
    return None


def _write(layer: Wrapper, kind: str, saved: Json) -> bool:
    """Set the statistics of one wrapper; return False if its own `restore` method fails."""
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
        warnings.warn(f"{error}; it starts without its statistics from training", stacklevel=2)
        return False
    return True


def _write_running(running: Any, values: dict[str, Any]) -> None:
    found = {}
    for name in ("mean", "var", "count"):
        present, given = np.asarray(getattr(running, name)), np.asarray(values[name])
        if given.dtype.kind not in "fiu":
            raise ValueError(f"{name} is not numeric")
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
    """Restores the statistics of custom wrappers before every episode."""

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
    """Return the rewards before the innermost `NormalizeReward`, if there is one.

    Wrappers above it, such as clipping, are meant for normalized rewards and still receive them.
    """
    normalizers = [layer for layer in layers_of(env) if isinstance(layer, NormalizeReward)]
    if not normalizers:
        return env
    normalizers[-1].env = meter = _RewardMeter(normalizers[-1].env)
    return _MeteredReward(env, meter)


class _RewardMeter(gym.Wrapper[Any, Any, Any, Any]):
    """Adds up the rewards: a wrapper above it may take several steps at once."""

    total: Any = 0.0

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.total = self.total + reward
        return observation, reward, terminated, truncated, info


class _MeteredReward(gym.Wrapper[Any, Any, Any, Any]):
    """Returns the rewards that the meter added up in one step."""

    def __init__(self, env: Environment, meter: _RewardMeter) -> None:
        super().__init__(env)
        self._meter = meter

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        self._meter.total = 0.0
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, self._meter.total, terminated, truncated, info
