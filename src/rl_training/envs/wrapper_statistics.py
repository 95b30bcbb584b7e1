"""What wrappers learn while an environment is trained in, for evaluation to use as it is.

Gymnasium's `NormalizeObservation` and `NormalizeReward` keep running statistics; a wrapper of the
user's own takes part by the methods `snapshot` and `restore` that `snapshot.py` describes. Only
wrappers do: the state of an environment itself is its episode.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import NormalizeObservation, NormalizeReward

from rl_training.envs.make import Environment, EnvironmentFactory
from rl_training.envs.snapshot_codec import Decoder, Encoder
from rl_training.envs.snapshot_layers import (
    encode_own_snapshot,
    has_own_snapshot,
    layers_of,
    restore_own_snapshot,
)
from rl_training.errors import CheckpointError
from rl_training.types import Json

Wrapper = gym.Wrapper[Any, Any, Any, Any]

_RUNNING = {"observation": "obs_rms", "reward": "return_rms"}
"""By what they normalise: the attribute in which Gymnasium's wrappers keep mean, var and count"""


@dataclass(frozen=True)
class EvaluationFactory(EnvironmentFactory):
    """Makes environments to evaluate in, whose wrappers have these statistics and keep them.

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
            _freeze(environment, self.statistics)
        except BaseException:
            environment.close()
            raise
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


def normalizes_observations(env: Environment) -> bool:
    """Whether a wrapper of Gymnasium's does, by statistics of what it has seen."""
    return any(kind == "observation" for _, kind in _learning_layers(env))


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


def _freeze(env: Environment, statistics: Sequence[Json]) -> None:
    """Give each wrapper what its counterpart in training had learned, and let it learn no more."""
    waiting, layers = list(statistics), _learning_layers(env)
    if any(saved.get("kind") == "own" for saved in waiting):
        env.reset(seed=0)  # `restore` may expect attributes that a reset makes
    for layer, kind in layers:
        saved = _take(waiting, type(layer).__name__, kind)
        if saved is not None:
            _write(layer, kind, saved)
            if hasattr(layer, "update_running_mean"):
                layer.update_running_mean = False
        elif kind == "observation":
            warnings.warn(
                "the policy comes without the statistics of NormalizeObservation, which start anew "
                "in this evaluation; `normalize_observations: true` keeps them with the policy",
                stacklevel=2,
            )
    missing = [str(saved.get("wrapper")) for saved in waiting if saved.get("kind") != "reward"]
    if missing:
        raise CheckpointError(
            f"the policy was trained with {' and '.join(missing)}, which this environment lacks; "
            "evaluate it in an environment with the same wrappers"
        )


def _take(waiting: list[Json], wrapper: str, kind: str) -> Json | None:
    """The first of those waiting for such a wrapper, which then waits no more."""
    for index, saved in enumerate(waiting):
        if (saved.get("wrapper"), saved.get("kind")) == (wrapper, kind):
            return waiting.pop(index)
    return None


def _write(layer: Wrapper, kind: str, saved: Json) -> None:
    name = type(layer).__name__
    try:
        values = Decoder().decode(saved["state"])
        if kind != "own":
            _write_running(getattr(layer, _RUNNING[kind]), values)
            return
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the statistics of {name} do not fit it: {error}") from error
    restore_own_snapshot(layer, values)


def _write_running(running: Any, values: dict[str, Any]) -> None:
    for name in ("mean", "var", "count"):
        given = np.asarray(values[name], dtype=np.float64)
        if given.shape != np.shape(getattr(running, name)):
            raise ValueError(f"{name} has shape {given.shape}")
    running.mean, running.var, running.count = values["mean"], values["var"], values["count"]


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
