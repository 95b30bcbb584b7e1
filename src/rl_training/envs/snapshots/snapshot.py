"""The state of an environment and all its wrappers as JSON, and back, bit for bit.

Works by itself for environments whose state is plain attributes (numbers, text, arrays, lists,
dicts, NumPy generators) or a MuJoCo simulation. An environment or wrapper that keeps its state
elsewhere takes part by defining two methods:

    def snapshot(self): ...            # any plain value: numbers, arrays, lists, dicts
    def restore(self, snapshot): ...   # puts it back

They replace the attributes of that layer; `np_random` and the spaces' generators are kept for it.
A wrapper's are also how evaluation comes to what it has learned: see `wrapper_statistics.py`.

What is saved of a group of environments, and how it is told from something else.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.snapshots.codec import Decoder, Encoder
from rl_training.envs.snapshots.layers import (
    SnapshotUnsupported,
    apply_layer,
    decode_layer,
    encode_layer,
    layers_of,
)
from rl_training.errors import CheckpointError
from rl_training.types import Json, ResumeLevel

__all__ = [
    "SnapshotUnsupported",
    "probe_resume_level",
    "restore_environment",
    "snapshot_environment",
]

Environment = gym.Env[Any, Any]

_STEPS_BEFORE, _STEPS_AFTER, _SEED = 7, 20, 12345
"""Of the probe: steps until its snapshot, steps compared after it, and where it starts."""


def snapshot_environment(env: Environment) -> Json:
    """All state of `env` and its wrappers, outermost first, as plain JSON.

    Raises `SnapshotUnsupported` where an attribute cannot be captured.
    """
    encoder = Encoder()
    return {"layers": [encode_layer(layer, encoder) for layer in layers_of(env)]}


def restore_environment(env: Environment, snapshot: Json) -> None:
    """Put `env` into the state `snapshot_environment` captured from one made in the same way.

    Raises `CheckpointError`, and sets nothing of it, unless the snapshot has exactly the layers
    and attributes that `env` has itself, if need be after a reset and a step.
    """
    _grow_attributes(env, snapshot)
    decoder = Decoder()
    layers = layers_of(env)
    try:
        saved = [
            decode_layer(layer, encoded, decoder)
            for layer, encoded in zip(layers, snapshot["layers"], strict=True)
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The environment's snapshot is damaged: {error}.") from error
    for layer, values in zip(layers, saved, strict=True):
        apply_layer(layer, values)


def _grow_attributes(env: Environment, snapshot: Json) -> None:
    """Bring `env` to having the snapshot's attributes: some appear with a reset or a step."""
    wanted = _outline(snapshot)
    if _own_outline(env) == wanted:
        return
    env.reset(seed=0)
    if _own_outline(env) == wanted:
        return
    env.step(env.action_space.sample())
    found = _own_outline(env)
    if found != wanted:
        raise CheckpointError(
            "The snapshot is of another environment, or of one made in another way: "
            f"{_difference(wanted, found)}."
        )


def _own_outline(env: Environment) -> list[Json]:
    try:
        layers = [encode_layer(layer, Encoder(), values=False) for layer in layers_of(env)]
        return _outline({"layers": layers})
    except SnapshotUnsupported as error:
        raise CheckpointError(f"This environment cannot be restored: {error}") from error


def _outline(snapshot: Json) -> list[Json]:
    """Which layers, attributes and helpers a snapshot has, without their values."""
    try:
        return [_layer_outline(layer) for layer in snapshot["layers"]]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The environment's snapshot is damaged: {error!r}.") from error


def _layer_outline(layer: Json) -> Json:
    return {
        "type": layer["type"],
        "parts": sorted(layer),
        "attributes": {
            name: _attribute_outline(value) for name, value in layer["attributes"].items()
        },
        "spaces": {name: len(generators) for name, generators in layer["spaces"].items()},
    }


def _difference(wanted: list[Json], found: list[Json]) -> str:
    """The first thing in which two outlines differ, in words."""
    wanted_types, found_types = ([layer["type"] for layer in side] for side in (wanted, found))
    if wanted_types != found_types:
        return f"it has the layers {wanted_types}, this one {found_types}"
    for saved, own in zip(wanted, found, strict=True):
        names = sorted(saved["attributes"].keys() ^ own["attributes"].keys())
        if names:
            return f"{own['type']} differs in the attributes {', '.join(map(repr, names))}"
    return "its layers have other parts"


def _attribute_outline(value: Any) -> Any:
    if isinstance(value, dict) and "helper" in value:
        return {name: _attribute_outline(inner) for name, inner in value["helper"].items()}
    return None


def probe_resume_level(factory: EnvironmentFactory) -> ResumeLevel:
    """The strongest level at which a fresh environment repeats what another one did.

    Bit-exact: from a snapshot in mid-episode. Episode-exact: from the seed of an episode, whatever
    the environment did before. Statistical: neither. Never raises: what fails does not repeat.
    """
    if _repeats(factory, _repeats_from_snapshot):
        return ResumeLevel.BIT_EXACT
    if _repeats(factory, _repeats_from_seed):
        return ResumeLevel.EPISODE_EXACT
    return ResumeLevel.STATISTICAL


def _repeats(factory: EnvironmentFactory, check: Callable[..., bool]) -> bool:
    with ExitStack() as stack:
        try:
            first = factory()
            stack.callback(_close, first)
            second = factory()
            stack.callback(_close, second)
            return check(first, second)
        except Exception:  # an odd environment may raise anything, and then it is not repeatable
            return False


def _close(env: Environment) -> None:
    with suppress(Exception):  # a scratch environment's last words do not matter
        env.close()


def _repeats_from_snapshot(first: Environment, second: Environment) -> bool:
    actions = _fixed_actions(first, _STEPS_BEFORE + _STEPS_AFTER)
    first.reset(seed=_SEED)
    _play(first, actions[:_STEPS_BEFORE])
    snapshot = json.loads(json.dumps(snapshot_environment(first)))
    remaining = actions[_STEPS_BEFORE:]
    expected = _play(first, remaining) + _play_new_episode(first, remaining)
    restore_environment(second, snapshot)
    return expected == _play(second, remaining) + _play_new_episode(second, remaining)


def _repeats_from_seed(first: Environment, second: Environment) -> bool:
    """Whether an episode depends on its seed alone, and not on the episodes before it."""
    actions = _fixed_actions(first, _STEPS_AFTER)
    first.reset(seed=_SEED)
    _play(first, actions)
    return _play_new_episode(first, actions, _SEED + 1) == _play_new_episode(
        second, actions, _SEED + 1
    )


def _fixed_actions(env: Environment, count: int) -> list[Any]:
    action_space = copy.deepcopy(env.action_space)  # sampling must not move the environment's own
    action_space.seed(_SEED)
    return [action_space.sample() for _ in range(count)]


def _play_new_episode(env: Environment, actions: list[Any], seed: int | None = None) -> list[str]:
    observation, _ = env.reset(seed=seed)
    return [_exact_text(observation), *_play(env, actions)]


def _play(env: Environment, actions: list[Any]) -> list[str]:
    """What `env` returns for `actions`, bit for bit, starting new episodes where one ends."""
    seen = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append(_exact_text((observation, reward, terminated, truncated)))
        if terminated or truncated:
            observation, _ = env.reset()
            seen.append(_exact_text(observation))
    return seen


def _exact_text(value: object) -> str:
    return json.dumps(Encoder().encode(value))


@dataclass(frozen=True)
class SeedSnapshot:
    """The state of `num_envs` environments, one row each, whatever else ran beside them."""

    episode_numbers: np.ndarray
    episode_returns: np.ndarray
    episode_lengths: np.ndarray
    obs: np.ndarray
    """`(num_envs, obs_dim)` float32"""
    environments: list[Json]

    def to_json(self) -> Json:
        return {
            "seed_every_reset": False,
            "episode_numbers": self.episode_numbers.tolist(),
            "episode_returns": self.episode_returns.tolist(),
            "episode_lengths": self.episode_lengths.tolist(),
            "observations": Encoder().encode(self.obs),
            "environments": self.environments,
        }

    @classmethod
    def from_json(cls, snapshot: Json, num_envs: int, obs_dim: int) -> SeedSnapshot:
        """KeyError, TypeError, ValueError or OverflowError where the snapshot does not fit."""
        _check_seeding(snapshot, seed_every_reset=False)
        states = snapshot["environments"]
        if not isinstance(states, list) or len(states) != num_envs:
            raise ValueError(f"it is not of {num_envs} environments")
        obs, expected = Decoder().decode(snapshot["observations"]), (num_envs, obs_dim)
        if not isinstance(obs, np.ndarray) or obs.shape != expected or obs.dtype != np.float32:
            raise ValueError(f"its observations are not float32 of shape {expected}")
        if not np.isfinite(obs).all():
            raise ValueError("its observations are not finite")
        return cls(
            _counters(snapshot["episode_numbers"], np.int64, num_envs),
            _counters(snapshot["episode_returns"], np.float64, num_envs),
            _counters(snapshot["episode_lengths"], np.int64, num_envs),
            obs,
            states,
        )


def seeded_snapshot(episodes_begun: np.ndarray) -> Json:
    """Of environments whose episodes follow from their seeds: which one each comes to next."""
    return {"seed_every_reset": True, "episode_numbers": episodes_begun.tolist()}


def seeded_numbers(snapshot: Json, num_envs: int) -> np.ndarray:
    """What `seeded_snapshot` was given; raises as `SeedSnapshot.from_json` does."""
    _check_seeding(snapshot, seed_every_reset=True)
    return _counters(snapshot["episode_numbers"], np.int64, num_envs)


def _check_seeding(snapshot: Json, *, seed_every_reset: bool) -> None:
    if snapshot["seed_every_reset"] is not seed_every_reset:
        raise ValueError("it was taken with another setting of seed_every_reset")


def _counters(values: object, dtype: type[np.generic], num_envs: int) -> np.ndarray:
    counters = np.array(values, dtype=dtype)
    if counters.shape != (num_envs,) or not np.isfinite(counters).all():
        raise ValueError(f"{values!r} are not counters of {num_envs} environments")
    return counters
