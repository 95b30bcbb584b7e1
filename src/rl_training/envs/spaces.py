"""Sizes and bounds of an environment's spaces, and scaling of actions to and from [-1, 1]."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Env, Wrapper
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from rl_training.errors import EnvironmentSetupError, UnboundedActionsError, warn_user
from rl_training.observations import (
    MAX_AXES,
    MAX_WORDS,
    WORD_BYTES,
    NumberTypes,
    ObservationLeaf,
    ObservationSpec,
    box_leaf,
    select_names,
)
from rl_training.types import ActionKind, SpaceInfo
from rl_training.validation import suggestion

LEAF_SPACES = (Box, Discrete, MultiDiscrete, MultiBinary)
"""Spaces of the parts of an observation that are supported"""
MAX_DISCRETE = 2**31 - 1
"""Largest value of a discrete observation, which is stored as int32"""
EXACT_INTEGER = 2**24
"""Up to here, float32 has all whole numbers"""


def describe_spaces(
    env: Env[Any, Any],
    observation_keys: Sequence[str] | None = None,
    number_types: NumberTypes | None = None,
) -> SpaceInfo:
    """Return the sizes and bounds of an environment's spaces.

    `observation_keys` selects leaves of the observation (None: all). `number_types` are the types
    in which their numbers are stored (None: those of the space). Raises `EnvironmentSetupError` for
    unsupported spaces.
    """
    spaces = env.observation_space, env.action_space
    return describe_space_pair(*spaces, observation_keys, number_types)


def describe_space_pair(
    observation_space: Space[Any],
    action_space: Space[Any],
    observation_keys: Sequence[str] | None = None,
    number_types: NumberTypes | None = None,
) -> SpaceInfo:
    """Same as `describe_spaces`, for a pair of spaces without an environment."""
    observation = describe_observations(observation_space, observation_keys, number_types)
    obs_dim, given = observation.size, None if observation.is_vector else observation
    if isinstance(action_space, Discrete):
        start = int(action_space.start)
        return SpaceInfo(
            obs_dim,
            int(action_space.n),
            "discrete",
            action_start=start,
            given_observation=given,
        )
    kind, low, high = _bounded_actions(action_space)
    if not low.size:
        raise EnvironmentSetupError(f"The action space {action_space} is empty.")
    if low.ndim > MAX_AXES:
        raise EnvironmentSetupError(
            f"An action has {low.ndim} axes; at most {MAX_AXES} are supported. Reshape it with a "
            "wrapper."
        )
    shape = tuple(int(size) for size in low.shape)
    return SpaceInfo(
        obs_dim,
        low.size,
        kind,
        action_low=low.reshape(-1).astype(np.float32),
        action_high=high.reshape(-1).astype(np.float32),
        action_shape=None if len(shape) == 1 else shape,
        given_observation=given,
    )


def _bounded_actions(space: Space[Any]) -> tuple[ActionKind, np.ndarray, np.ndarray]:
    """Return the kind of the actions and their bounds, in the shape of an action."""
    if isinstance(space, MultiDiscrete):
        return "multi_discrete", space.start, space.start + space.nvec - 1
    if isinstance(space, MultiBinary):
        return "multi_binary", np.zeros(space.shape), np.ones(space.shape)
    if not isinstance(space, Box):
        raise EnvironmentSetupError(
            f"The action space is {space}; only Box, Discrete, MultiDiscrete and MultiBinary "
            "action spaces are supported."
        )
    if not np.issubdtype(space.dtype, np.floating):
        raise EnvironmentSetupError(
            f"The action space {space} has whole numbers, but policies for Box choose any numbers "
            "of a range. Use MultiDiscrete, or a wrapper with a Box of float32 that rounds actions."
        )
    if not _finite_bounds(space).all():
        raise UnboundedActionsError(
            f"The action space {space} has no finite bounds, but policies choose actions in a "
            "finite range. Set `action_range` to that range: `action_range: 3.0` for [-3, 3], or "
            "`action_range: [low, high]`."
        )
    return "continuous", space.low, space.high


def _finite_bounds(space: Box) -> np.ndarray:
    """Which components of an action have two bounds that are finite in float32, as actions are."""
    with np.errstate(over="ignore"):
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    return np.asarray(np.isfinite(low) & np.isfinite(high))


def describe_observations(
    space: Space[Any],
    keys: Sequence[str] | None = None,
    number_types: NumberTypes | None = None,
) -> ObservationSpec:
    """Return the leaves of an observation space, or only those that `keys` select.

    A key is the name of a leaf, such as "camera/left", or of a dictionary or tuple with all its
    leaves. `number_types` are the types in which numbers are stored (None: their own). Raises
    `EnvironmentSetupError` if a selected leaf is not supported.
    """
    spaces = dict(_leaf_spaces(space))
    try:
        chosen = select_names(list(spaces), keys)
    except KeyError as missing:
        (key,) = missing.args
        raise EnvironmentSetupError(
            f"observation_keys: the environment has no observation {key!r}"
            f"{suggestion(key, list(spaces)) or ''} (it has {_listed(spaces)})"
        ) from None
    supported = [name for name, part in spaces.items() if isinstance(part, LEAF_SPACES)]
    leaves = tuple(_leaf(name, spaces[name], supported) for name in chosen)
    if not sum(leaf.words for leaf in leaves):
        raise EnvironmentSetupError(f"The observation space {space} is empty.")
    for leaf in leaves:
        if not leaf.words:
            others = [other.name for other in leaves if other.words]
            raise EnvironmentSetupError(
                f"{leaf.name!r} of the observation has the shape {leaf.shape}, which is empty. "
                f"{_selection_of(others)}"
            )
    _require_storable(leaves)
    observation = ObservationSpec(leaves)
    return observation if number_types is None else observation.stored_as(number_types)


def _require_storable(leaves: Sequence[ObservationLeaf]) -> None:
    """Raise `EnvironmentSetupError` for observations that files cannot describe."""
    for leaf in leaves:
        if len(leaf.shape) > MAX_AXES:
            raise EnvironmentSetupError(
                f"The {leaf.label} has {len(leaf.shape)} axes; at most {MAX_AXES} are supported. "
                "Reshape it with a wrapper."
            )
    largest, words = max(leaves, key=lambda leaf: leaf.words), sum(leaf.words for leaf in leaves)
    if words > MAX_WORDS:
        raise EnvironmentSetupError(
            f"An observation has {WORD_BYTES * words:,} bytes, most of them in the {largest.label} "
            f"of shape {largest.shape}; at most {WORD_BYTES * MAX_WORDS:,} are supported. Make it "
            "smaller with a wrapper."
        )


def _leaf_spaces(space: Space[Any], prefix: str = "") -> Iterator[tuple[str, Space[Any]]]:
    """Yield the name and space of each leaf, in the order of the space."""
    parts: dict[str, Space[Any]] = {}
    if isinstance(space, Dict):
        parts = dict(space.spaces)
    elif isinstance(space, Tuple):
        parts = {str(index): part for index, part in enumerate(space.spaces)}
    else:
        yield prefix, space
        return
    for key, part in parts.items():
        if not isinstance(key, str) or "/" in key or not key:
            raise EnvironmentSetupError(
                f"The observation space has the key {key!r}; keys with '/', empty keys and keys "
                "that are not strings are not supported. Rename it with a wrapper."
            )
        yield from _leaf_spaces(part, f"{prefix}/{key}" if prefix else key)


def _leaf(name: str, space: Space[Any], supported: list[str]) -> ObservationLeaf:
    if isinstance(space, Box):
        if np.issubdtype(space.dtype, np.integer) and space.low.size:
            _warn_of_rounding(name, max(-int(space.low.min()), int(space.high.max())))
        return box_leaf(name, space.dtype, space.shape)
    if isinstance(space, Discrete):
        return _discrete_leaf(name, (), [int(space.n)], [int(space.start)])
    if isinstance(space, MultiDiscrete):
        choices, starts = (np.asarray(each).reshape(-1) for each in (space.nvec, space.start))
        return _discrete_leaf(name, space.shape, choices.tolist(), starts.tolist())
    if isinstance(space, MultiBinary):
        return ObservationLeaf(name, "binary", tuple(space.shape))
    advice = "Wrap the environment so that it returns numbers."
    if supported:
        advice = _selection_of(supported)
    what = f"{name!r} of the observation" if name else "The observation space"
    raise EnvironmentSetupError(
        f"{what} is {type(space).__name__}, which is not supported; Box, Discrete, MultiDiscrete, "
        f"MultiBinary, and Dict and Tuple of them are. {advice}"
    )


@functools.cache  # once, although spaces are described several times in a run
def _warn_of_rounding(name: str, largest: int) -> None:
    if largest > EXACT_INTEGER:
        what = f"{name!r} of the observation" if name else "the observation"
        warn_user(
            f"{what} is a Box of whole numbers up to {largest:,}, and networks get numbers as "
            f"float32, which rounds those beyond {EXACT_INTEGER:,}; if it has such numbers, scale "
            "or split them with a wrapper"
        )


def _selection_of(names: Sequence[str]) -> str:
    return f"Select the others with observation_keys: [{', '.join(names)}]."


def _discrete_leaf(
    name: str, shape: tuple[int, ...], choices: list[int], starts: list[int]
) -> ObservationLeaf:
    leaf = ObservationLeaf(name, "discrete", tuple(shape), tuple(choices), tuple(starts))
    largest = max(start + number for start, number in zip(starts, choices, strict=True))
    if largest > MAX_DISCRETE or min(starts) < -MAX_DISCRETE:
        raise EnvironmentSetupError(
            f"The discrete {leaf.label} has values from {min(starts):,} to {largest - 1:,}; only "
            f"those from {-MAX_DISCRETE:,} to {MAX_DISCRETE - 1:,} are supported. Wrap the "
            "environment so that it counts from 0."
        )
    return leaf


def _listed(spaces: Mapping[str, Space[Any]]) -> str:
    return ", ".join(map(repr, spaces)) if list(spaces) != [""] else "one array without a name"


class StatedActionRange(Wrapper[Any, Any, Any, Any]):
    """Gives the components of an action that have no finite bounds the ones of `action_range`.

    A component that is bounded on one side gets the part of the range on its side of the bound.
    """

    def __init__(self, env: Env[Any, Any], action_range: tuple[float, float]) -> None:
        super().__init__(env)
        space = env.action_space
        if not isinstance(space, Box) or _finite_bounds(space).all():
            raise EnvironmentSetupError(
                f"action_range = {list(action_range)}: is for action spaces without finite bounds, "
                f"but the action space is {space}; remove action_range"
            )
        finite = _finite_bounds(space)
        low, high = (
            np.where(finite, bound, np.clip(bound, *action_range))
            for bound in (space.low, space.high)
        )
        if not (low < high)[~finite].all():
            raise EnvironmentSetupError(
                f"action_range = {list(action_range)}: leaves no range for some components of the "
                f"action space {space}"
            )
        self.action_space = Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)


class ActionScaler:
    """Scales actions between [-1, 1], the range of policies, and the bounds of an action space.

    `low` and `high` are finite, `(action_dim,)`. Actions are `(action_dim,)` or
    `(n, action_dim)`. The bounds map exactly; actions out of range are clipped.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray) -> None:
        # Actions are float32, so the bounds are rounded to float32 too.
        self._high32 = np.asarray(high, dtype=np.float32)
        self.low = np.asarray(low, dtype=np.float32).astype(np.float64)
        self.high = self._high32.astype(np.float64)
        self._half_low, self._half_high = 0.5 * self.low, 0.5 * self.high
        self._symmetric = bool((self.low == -self.high).all())
        self._unit_high = np.ones_like(self._high32)
        self._unit_low = -self._unit_high

    def to_environment(self, action: np.ndarray) -> np.ndarray:
        """Scale from [-1, 1] to [low, high], float32."""
        if self._symmetric:  # the common case, in half the time
            clipped: np.ndarray = np.minimum(np.maximum(action, self._unit_low), self._unit_high)
            return (clipped * self._high32).astype(np.float32, copy=False)
        action = np.asarray(action, dtype=np.float64)
        # A weighted mean of the bounds, since `low + (high - low)` can differ from `high`.
        scaled = (1.0 - action) * self._half_low + (1.0 + action) * self._half_high
        return np.minimum(np.maximum(scaled, self.low), self.high).astype(np.float32)

    def from_environment(self, action: np.ndarray) -> np.ndarray:
        """Scale from [low, high] to [-1, 1], float32; 0 where `low == high`."""
        action = np.asarray(action, dtype=np.float64)
        width = self.high - self.low
        centred = (action - self.low) - (self.high - action)
        scaled = np.where(width > 0, centred, 0.0) / np.where(width > 0, width, 1.0)
        return np.clip(scaled, -1.0, 1.0).astype(np.float32)
