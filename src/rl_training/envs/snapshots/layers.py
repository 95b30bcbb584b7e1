"""Read and write the state of one layer: an environment or one of its wrappers."""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import NormalizeObservation, NormalizeReward

from rl_training.envs.snapshots.atari import EMULATOR_ATTRIBUTES, NotRepeatable, has_emulator
from rl_training.envs.snapshots.codec import Decoder, Encoder
from rl_training.envs.snapshots.mujoco import (
    check_simulation,
    has_mujoco_state,
    read_simulation,
    write_simulation,
)
from rl_training.errors import CheckpointError
from rl_training.types import Json

Environment = gym.Env[Any, Any]
Wrapper = gym.Wrapper[Any, Any, Any, Any]

_CONSTRUCTION = {
    "env",
    "spec",
    "_cached_spec",
    "metadata",
    "_metadata",
    "render_mode",
    "_saved_kwargs",
    "_ezpickle_args",
    "_ezpickle_kwargs",
    "fullpath",
}
"""Attributes set by the constructor; `fullpath` is a model file, whose path differs by machine"""

_DISPLAY = {
    "screen",
    "surf",
    "surface",
    "window",
    "window_surface",
    "viewer",
    "clock",
    "renderer",
    "mujoco_renderer",
}
"""Attributes used for rendering; one with a number or an array is still part of the state"""

_WALL_CLOCK = {"episode_start_time", "episode_start_times", "time_queue"}
"""Times that RecordEpisodeStatistics measures, which are meaningless in another process"""

_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
"""Code is not state: some wrappers have the function they apply as an attribute"""


class SnapshotUnsupported(Exception):
    """Part of the environment's state cannot be captured; the message names it."""


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def layers_of(env: Environment) -> list[Environment]:
    """Return the wrappers, outermost first, and the environment itself."""
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return layers


def has_own_snapshot(layer: Environment) -> bool:
    """Whether a layer defines the methods `snapshot` and `restore`."""
    return all(callable(getattr(type(layer), name, None)) for name in ("snapshot", "restore"))


class TrainingBoundary(gym.Wrapper[Any, Any, Any, Any]):
    """Lies between the wrappers of an environment and those that are for training only."""


def learning_wrappers(env: Environment) -> list[tuple[Wrapper, str]]:
    """Return the wrappers that learn while they run, outermost first, each with its kind.

    The kind is `own` for a wrapper with `snapshot` and `restore` methods, else `observation` or
    `reward` for Gymnasium's wrappers that normalize these. Wrappers that are for training only are
    left out, since evaluations do without them.
    """
    found: list[tuple[Wrapper, str]] = []
    for layer in layers_of(env):
        if isinstance(layer, TrainingBoundary):
            found.clear()
        if not isinstance(layer, gym.Wrapper):
            continue
        if has_own_snapshot(layer):
            found.append((layer, "own"))
        elif isinstance(layer, NormalizeObservation):
            found.append((layer, "observation"))
        elif isinstance(layer, NormalizeReward):
            found.append((layer, "reward"))
    return found


def normalizes_for_training_only(env: Environment) -> bool:
    """Whether a wrapper that is for training only normalizes observations."""
    layers = layers_of(env)
    inner = next((i for i, each in enumerate(layers) if isinstance(each, TrainingBoundary)), 0)
    return any(isinstance(layer, NormalizeObservation) for layer in layers[:inner])


def _has_simulation(layer: Environment) -> bool:
    return sys.modules.get("mujoco") is not None and has_mujoco_state(layer)


def _state_attributes(layer: Environment) -> dict[str, Any]:
    """Return the attributes of one layer that may change while it runs."""
    if has_own_snapshot(layer):
        return {name: value for name, value in vars(layer).items() if name == "_np_random"}
    excluded = _CONSTRUCTION | _WALL_CLOCK | _held_by_simulator(layer)
    return {
        name: value
        for name, value in vars(layer).items()
        if name not in excluded
        and not isinstance(value, (gym.Space, *_CODE))
        and not _is_display(name, value)
        and not _is_transition_table(layer, name)
    }


def _held_by_simulator(layer: Environment) -> frozenset[str]:
    """Attributes whose state is saved through a simulator or an emulator."""
    if has_emulator(layer):
        return EMULATOR_ATTRIBUTES
    return frozenset({"model", "data"} if _has_simulation(layer) else ())


def _is_display(name: str, value: object) -> bool:
    shows = name in _DISPLAY or name.endswith(("_img", "_imgs"))
    return shows and not isinstance(value, int | float | np.generic | np.ndarray)


def _is_transition_table(layer: Environment, name: str) -> bool:
    # It is constant, and by far the largest attribute of Gymnasium's tabular environments.
    return name == "P" and type(layer).__module__.startswith("gymnasium.envs.toy_text")


def _is_gymnasium_helper(value: object) -> bool:
    """Whether the value is a helper object of Gymnasium's wrappers, such as a running mean."""
    return (
        type(value).__module__.partition(".")[0] == "gymnasium"
        and not isinstance(value, gym.Env)
        and hasattr(value, "__dict__")
    )


def _nested_spaces(space: gym.Space[Any]) -> Iterator[gym.Space[Any]]:
    yield space
    inner = getattr(space, "spaces", ())
    for child in inner.values() if isinstance(inner, dict) else inner:
        yield from _nested_spaces(child)


def _own_spaces(layer: Environment) -> dict[str, gym.Space[Any]]:
    attributes = dict(vars(layer))
    if not isinstance(layer, gym.Wrapper):
        # Some environments declare their spaces on the class.
        for name in ("action_space", "observation_space"):
            attributes.setdefault(name, getattr(layer, name, None))
    return {name: value for name, value in attributes.items() if isinstance(value, gym.Space)}


def encode_layer(layer: Environment, encoder: Encoder, *, values: bool = True) -> Json:
    """Return the state of one layer as JSON; without `values`, neither its own nor an emulator's.

    Reading these may fail before the first reset. Names are sorted here and in `decode_layer`, so
    that references between values do not depend on the order of keys in the JSON file.
    """
    encoded: Json = {"type": _type_name(layer)}
    encoded["attributes"] = {
        name: _encode_attribute(layer, name, value, encoder)
        for name, value in sorted(_state_attributes(layer).items())
    }
    encoded["spaces"] = {
        name: [
            _encode_attribute(layer, name, part._np_random, encoder)
            for part in _nested_spaces(space)
        ]
        for name, space in sorted(_own_spaces(layer).items())
    }
    if _has_simulation(layer) and not has_own_snapshot(layer):
        encoded["mujoco"] = encoder.encode(read_simulation(layer))
    if has_emulator(layer):
        encoded["atari"] = _encode_emulator(layer, encoder) if values else None
    if has_own_snapshot(layer):
        encoded["own"] = encode_own_snapshot(layer, encoder) if values else None
    return encoded


def _encode_emulator(layer: Any, encoder: Encoder) -> Any:
    try:
        return encoder.encode(layer.ale.read())
    except NotRepeatable as error:
        raise SnapshotUnsupported(f"{_type_name(layer)} cannot be captured: {error}.") from error


def encode_own_snapshot(layer: Environment, encoder: Encoder) -> Any:
    """Return the result of a layer's `snapshot` method as JSON."""
    try:
        own = layer.snapshot()  # type: ignore[attr-defined]
    except Exception as error:  # the user's method may raise anything
        raise SnapshotUnsupported(f"{_type_name(layer)}.snapshot() failed: {error!r}") from error
    return _encode_attribute(layer, "snapshot()", own, encoder)


def _encode_attribute(layer: Environment, name: str, value: object, encoder: Encoder) -> Any:
    if _is_gymnasium_helper(value):
        return {
            "helper": {
                inner_name: _encode_attribute(layer, f"{name}.{inner_name}", inner, encoder)
                for inner_name, inner in sorted(vars(value).items())
            }
        }
    try:
        return encoder.encode(value)
    except (TypeError, RecursionError) as error:
        raise SnapshotUnsupported(
            f"{_type_name(layer)}.{name} cannot be captured: {error}. Give the environment "
            "`snapshot()` and `restore(snapshot)` methods to make it resumable."
        ) from error


def decode_layer(layer: Environment, encoded: Json, decoder: Decoder) -> Json:
    """Return the values for `apply_layer`; raises ValueError, among others, if they are damaged."""
    values: Json = {
        "attributes": {
            name: _decode_attribute(vars(layer)[name], value, decoder)
            for name, value in sorted(encoded["attributes"].items())
        }
    }
    values["spaces"] = {
        name: [_generator_or_none(decoder.decode(part)) for part in parts]
        for name, parts in sorted(encoded["spaces"].items())
    }
    if "mujoco" in encoded:
        values["mujoco"] = decoder.decode(encoded["mujoco"])
        check_simulation(layer, values["mujoco"])
    if "atari" in encoded:
        values["atari"] = decoder.decode(encoded["atari"])
        layer.ale.check(values["atari"])  # type: ignore[attr-defined]
    if "own" in encoded:
        values["own"] = decoder.decode(encoded["own"])
    return values


def _decode_attribute(current: object, encoded: Any, decoder: Decoder) -> Any:
    if not (isinstance(encoded, dict) and "helper" in encoded):
        return decoder.decode(encoded)
    # Copies the environment's own helper: a file must never choose a class.
    helper = copy.copy(current)
    for name, value in sorted(encoded["helper"].items()):
        setattr(helper, name, _decode_attribute(getattr(current, name), value, decoder))
    return helper


def _generator_or_none(value: object) -> np.random.Generator | None:
    if value is not None and not isinstance(value, np.random.Generator):
        raise ValueError("the random generator of a space is not a NumPy generator")
    return value


def apply_layer(layer: Environment, values: Json) -> None:
    """Set the values that `decode_layer` returned."""
    if "atari" in values:  # first: loading the game replaces its random generator
        layer.ale.replay(values["atari"])  # type: ignore[attr-defined]
    vars(layer).update(values["attributes"])
    for name, space in _own_spaces(layer).items():
        for part, generator in zip(_nested_spaces(space), values["spaces"][name], strict=True):
            part._np_random = generator
    if "mujoco" in values:
        write_simulation(layer, values["mujoco"])
    if "own" in values:
        restore_own_snapshot(layer, values["own"])


def restore_own_snapshot(layer: Environment, value: Any) -> None:
    """Pass a value to a layer's `restore` method; `CheckpointError` if it raises."""
    try:
        layer.restore(value)  # type: ignore[attr-defined]
    except Exception as error:  # the user's method may raise anything
        raise CheckpointError(
            f"{_type_name(layer)}.restore refused the snapshot: {error!r}"
        ) from error


@contextlib.contextmanager
def foreign_code(describe: Callable[[BaseException], Exception]) -> Iterator[None]:
    """Run code of another package, which may raise anything; errors become those of `describe`.

    `sys.exit` is an error too: an environment must not end a run. Only Ctrl-C passes.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        described = describe(error)
        if described is error:
            raise
        raise described from error
