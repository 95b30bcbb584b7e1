"""Save the complete state of environments as JSON, and restore it bit for bit.

This works automatically if the state of the environment and its wrappers is in attributes (numbers,
text, arrays, lists, dicts, NumPy generators) or in a MuJoCo simulation. Other environments and
wrappers can define two methods:

    def snapshot(self): ...            # returns numbers, arrays, lists or dicts
    def restore(self, snapshot): ...   # restores that state

The methods replace the attributes of that layer, except `np_random` and the generators of its
spaces, which are always saved. Evaluation uses the methods of a wrapper to get its statistics: see
`wrapper_statistics.py`.

`SeedSnapshot` is the state of all environments of one seed. `probe_resume_level` tests how exactly
an environment can be resumed.
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

from rl_training.envs.snapshots.codec import Decoder, Encoder
from rl_training.envs.snapshots.layers import (
    SnapshotUnsupported,
    apply_layer,
    decode_layer,
    encode_layer,
    foreign_code,
    layers_of,
)
from rl_training.errors import CheckpointError, EnvironmentRuntimeError
from rl_training.observations import ObservationSpec
from rl_training.types import Json, ResumeLevel

__all__ = [
    "SnapshotUnsupported",
    "probe_resume_level",
    "restore_environment",
    "snapshot_environment",
]

Environment = gym.Env[Any, Any]

_STEPS_BEFORE, _STEPS_AFTER, _SEED = 7, 20, 12345
"""Used by `probe_resume_level`: steps before the snapshot, steps compared after it, and the seed"""


def snapshot_environment(env: Environment) -> Json:
    """Return the state of `env` and its wrappers, outermost first, as JSON.

    Raises `SnapshotUnsupported` if an attribute cannot be captured.
    """
    encoder = Encoder()
    return {"layers": [encode_layer(layer, encoder) for layer in layers_of(env)]}


def restore_environment(env: Environment, snapshot: Json) -> None:
    """Restore a state that `snapshot_environment` captured from an environment like `env`.

    Raises `CheckpointError`, before any state is set, unless `env` has exactly the layers and
    attributes of the snapshot. If they differ at first, `env` is reset and stepped.
    """
    _create_attributes(env, snapshot)
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


def _create_attributes(env: Environment, snapshot: Json) -> None:
    """Reset and step `env` if it lacks attributes that only a reset or a step creates."""
    wanted = _outline(snapshot)
    if _environment_outline(env) == wanted:
        return
    env.reset(seed=0)
    if _environment_outline(env) == wanted:
        return
    env.step(env.action_space.sample())
    found = _environment_outline(env)
    if found != wanted:
        raise CheckpointError(
            "The snapshot is from a different environment or from different arguments: "
            f"{_difference(wanted, found)}."
        )


def _environment_outline(env: Environment) -> list[Json]:
    try:
        layers = [encode_layer(layer, Encoder(), values=False) for layer in layers_of(env)]
        return _outline({"layers": layers})
    except SnapshotUnsupported as error:
        raise CheckpointError(f"This environment cannot be restored: {error}") from error


def _outline(snapshot: Json) -> list[Json]:
    """Return the layers, attributes and helpers of a snapshot without their values."""
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
    """Describe the first difference between two outlines."""
    wanted_types, found_types = ([layer["type"] for layer in side] for side in (wanted, found))
    if wanted_types != found_types:
        return f"it has the layers {wanted_types}, the environment has {found_types}"
    for saved, own in zip(wanted, found, strict=True):
        names = sorted(saved["attributes"].keys() ^ own["attributes"].keys())
        if names:
            return f"{own['type']} differs in the attributes {', '.join(map(repr, names))}"
    return "the parts of its layers differ"


def _attribute_outline(value: Any) -> Any:
    if isinstance(value, dict) and "helper" in value:
        return {name: _attribute_outline(inner) for name, inner in value["helper"].items()}
    return None


@dataclass(frozen=True)
class SeedSnapshot:
    """The state of the environments of one seed; the arrays have one row per environment."""

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
    def from_json(cls, snapshot: Json, num_envs: int, observation: ObservationSpec) -> SeedSnapshot:
        """Read what `to_json` returned.

        Raises KeyError, TypeError, ValueError or OverflowError if the snapshot does not fit.
        """
        _check_seeding(snapshot, seed_every_reset=False)
        states = snapshot["environments"]
        if not isinstance(states, list) or len(states) != num_envs:
            raise ValueError(f"it does not have {num_envs} environments")
        obs, expected = Decoder().decode(snapshot["observations"]), (num_envs, observation.size)
        if not isinstance(obs, np.ndarray) or obs.shape != expected or obs.dtype != np.float32:
            raise ValueError(f"its observations are not float32 of shape {expected}")
        if problem := observation.problem_in(obs):
            raise ValueError(f"its observations: {problem}")
        return cls(
            _counters(snapshot["episode_numbers"], np.int64, num_envs),
            _counters(snapshot["episode_returns"], np.float64, num_envs),
            _counters(snapshot["episode_lengths"], np.int64, num_envs),
            obs,
            states,
        )


def seeded_snapshot(episode_numbers: np.ndarray) -> Json:
    """Return the snapshot of environments that are seeded at every reset: the episode numbers."""
    return {"seed_every_reset": True, "episode_numbers": episode_numbers.tolist()}


def seeded_numbers(snapshot: Json, num_envs: int) -> np.ndarray:
    """Return the episode numbers of a `seeded_snapshot`; raises like `SeedSnapshot.from_json`."""
    _check_seeding(snapshot, seed_every_reset=True)
    return _counters(snapshot["episode_numbers"], np.int64, num_envs)


def _check_seeding(snapshot: Json, *, seed_every_reset: bool) -> None:
    if snapshot["seed_every_reset"] is not seed_every_reset:
        raise ValueError("it was taken with a different setting of seed_every_reset")


def _counters(values: object, dtype: type[np.generic], num_envs: int) -> np.ndarray:
    counters = np.array(values, dtype=dtype)
    if counters.shape != (num_envs,) or not np.isfinite(counters).all():
        raise ValueError(f"{values!r} are not counters of {num_envs} environments")
    return counters


def probe_resume_level(factory: Callable[[], Environment]) -> ResumeLevel:
    """Return the highest resume level at which a second environment reproduces the first.

    Bit-exact: from a snapshot within an episode. Episode-exact: from the seed of an episode.
    Statistical: neither. Never raises: an environment that fails is not repeatable.
    """
    if _repeats(factory, _repeats_from_snapshot):
        return ResumeLevel.BIT_EXACT
    if _repeats(factory, _repeats_from_seed):
        return ResumeLevel.EPISODE_EXACT
    return ResumeLevel.STATISTICAL


def _repeats(factory: Callable[[], Environment], check: Callable[..., bool]) -> bool:
    with ExitStack() as stack:
        try:
            first = factory()
            stack.callback(_close, first)
            second = factory()
            stack.callback(_close, second)
            return check(first, second)
        except KeyboardInterrupt:
            raise
        except BaseException:  # an environment may raise anything, even SystemExit
            return False


def _close(env: Environment) -> None:
    # Errors of a temporary environment do not matter.
    with suppress(EnvironmentRuntimeError), foreign_code(lambda _: EnvironmentRuntimeError()):
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
    """Whether an episode depends only on its seed, not on the episodes before it."""
    actions = _fixed_actions(first, _STEPS_AFTER)
    first.reset(seed=_SEED)
    _play(first, actions)
    return _play_new_episode(first, actions, _SEED + 1) == _play_new_episode(
        second, actions, _SEED + 1
    )


def _fixed_actions(env: Environment, count: int) -> list[Any]:
    action_space = copy.deepcopy(env.action_space)  # sampling changes a space's random state
    action_space.seed(_SEED)
    return [action_space.sample() for _ in range(count)]


def _play_new_episode(env: Environment, actions: list[Any], seed: int | None = None) -> list[str]:
    observation, _ = env.reset(seed=seed)
    return [_exact_text(observation), *_play(env, actions)]


def _play(env: Environment, actions: list[Any]) -> list[str]:
    """Return the exact results of `actions`; a new episode starts where one ends."""
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
