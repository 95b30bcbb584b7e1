"""Recorded data in D4RL's layout: flat arrays with one entry per step, from files or memory.

`terminals` marks terminations and `timeouts` marks truncations. Without `next_observations`, the
next observation of a step is the observation of the following step; for the last step of a
truncated episode it is unknown. In OGBench's arrays, `terminals` marks the end of a trajectory and
`masks` is 0 where it terminates. Observations of several arrays have one for each leaf, such as
`observations/camera`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rl_training.data.formats.recording import CHUNK_ROWS, RecordingInfo, Steps, leads_to
from rl_training.data.leaves.columns import (
    NEXT_OBSERVATIONS,
    OBSERVATIONS,
    Column,
    Openers,
    flat_arrays,
    open_observations,
)
from rl_training.data.leaves.description import ALL_LEAVES, LeafChoice
from rl_training.errors import DataError, warn_user
from rl_training.observations import ObservationSpec
from rl_training.types import ActionKind, Json

REQUIRED = ("observations", "actions", "rewards", "terminals")
BOUNDARIES = ("timeouts", "episode_terminals")
MASKS = "masks"
"""0 where a step terminates. If present, `terminals` only marks the end of an episode"""
VALIDS = "valids"
"""0 for rows that hold only the final observation of an episode"""
OTHERS = ("actions", "rewards", "terminals", *BOUNDARIES, MASKS, VALIDS)
"""All arrays that are not observations"""
BOUNDS = ("action_low", "action_high")
"""Action bounds, in files that this package wrote; one entry per action component, in the shape of
an action"""

CHOICES = "discrete_actions"
"""The smallest discrete action and how many there are, in files that this package wrote"""


class ArrayColumn:
    """An array in memory."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self, first: int, last: int) -> np.ndarray:
        return self._array[first:last]


class Boundaries(NamedTuple):
    """Ends of episodes, and the steps whose next observation is known."""

    terminated: np.ndarray
    ended: np.ndarray
    kept: np.ndarray | None
    jumps: bool = False
    """Whether episodes also end where next_obs differs from the following observation"""


class ColumnRecording:
    """A recording that is read from flat arrays."""

    def __init__(
        self,
        arrays: Openers,
        name: str,
        kind: str,
        *,
        leaves: LeafChoice = ALL_LEAVES,
        described: ObservationSpec | None = None,
        max_episode_steps: int | None = None,
        action_bounds: tuple[np.ndarray, np.ndarray] | None = None,
        choices: np.ndarray | None = None,
        provenance: Json | None = None,
    ) -> None:
        """`described` is what the data says about its observations, `choices` about actions."""
        require_columns(arrays, name)
        columns, self._observation = open_observations(arrays, name, leaves, described)
        columns |= {key: arrays[key]() for key in OTHERS if key in arrays}
        self._columns = columns
        rows = _check_columns(columns, name)
        actions = columns["actions"]
        kind_of_actions = _action_kind(actions, action_bounds)
        action_dim = math.prod(actions.shape[1:])
        shape = _action_shape(actions, kind_of_actions, action_bounds)
        low, high = _checked_bounds(action_bounds, shape, action_dim, name)
        if kind_of_actions == "multi_binary":
            low, high = np.zeros(action_dim, np.float32), np.ones(action_dim, np.float32)
        start = None
        if kind_of_actions == "discrete":
            start, action_dim = _checked_choices(choices, name)
        self._boundaries = _find_boundaries(columns, rows, name, max_episode_steps)
        kept = self._boundaries.kept
        self.info = RecordingInfo(
            name,
            kind,
            obs_dim=columns["observations"].shape[1],
            action_dim=action_dim,
            action_kind=kind_of_actions,
            max_rows=rows if kept is None else int(kept.sum()),
            action_low=low,
            action_high=high,
            action_shape=shape,
            action_start=start,
            provenance=provenance,
            given_observation=self._observation,
            lacks_last_observations=_lacks_last_observations(columns, self._boundaries.terminated),
        )
        self._rows = rows
        if not self.info.max_rows:
            raise DataError(f"{name}: contains no step whose next observation is known")

    def chunks(self) -> Iterator[Steps]:
        number, jumps = self.info.rows_at_a_time(CHUNK_ROWS), 0
        for first in range(0, self._rows, number):
            chunk = self._chunk(first, min(first + number, self._rows))
            marked = self._boundaries.ended[first : first + number]
            jumps += int((chunk.ended & ~marked).sum())
            yield chunk
        if jumps > self._rows / 2:
            warn_user(
                f"{self.info.name}: {jumps:,} of {self._rows:,} steps end an episode, because "
                "next_observations differs from the following observation; if these rows are "
                "consecutive steps, mark the last step of each episode in `timeouts`"
            )

    def _chunk(self, first: int, last: int) -> Steps:
        columns, (terminated, ended, kept, jumps) = self._columns, self._boundaries
        # One more row, if there is one: the next observation of the chunk's last step.
        following = columns["observations"].read(first, min(last + 1, self._rows))
        obs, known = following[: last - first], len(following) - 1
        if "next_observations" in columns:
            next_obs = columns["next_observations"].read(first, last)
        else:
            next_obs = obs.copy()  # placeholder, not used after a termination
            next_obs[:known] = following[1:]
        ends = ended[first:last]
        if jumps:
            ends = ends.copy()
            ends[:known] |= ~leads_to(next_obs[:known], following[1:], self._observation)
        return Steps(
            obs,
            columns["actions"].read(first, last).reshape(last - first, -1),
            columns["rewards"].read(first, last).reshape(-1),
            next_obs,
            terminated[first:last],
            ends,
            first_row=first,
            kept=None if kept is None else kept[first:last],
        )


def array_recording(
    arrays: Mapping[str, Any],
    name: str = "arrays",
    *,
    max_episode_steps: int | None = None,
    leaves: LeafChoice = ALL_LEAVES,
) -> ColumnRecording:
    """Open arrays in memory, named as in D4RL's layout, as a recording.

    Observations may be dictionaries or tuples of arrays.
    """
    found: dict[str, np.ndarray] = {}
    for key, value in arrays.items():
        if key in OTHERS:
            found[key] = np.asarray(value)
        elif key.split("/")[0] in (OBSERVATIONS, NEXT_OBSERVATIONS):
            found |= flat_arrays(value, key, name)
    require_columns(found, name)
    bounds = None
    if all(key in arrays for key in BOUNDS):
        bounds = (np.asarray(arrays["action_low"]), np.asarray(arrays["action_high"]))
    return ColumnRecording(
        {key: partial(ArrayColumn, array) for key, array in found.items()},
        name,
        "arrays",
        leaves=leaves,
        max_episode_steps=max_episode_steps,
        action_bounds=bounds,
        choices=np.asarray(arrays[CHOICES]) if CHOICES in arrays else None,
    )


def _action_kind(actions: Column, bounds: tuple[np.ndarray, np.ndarray] | None) -> ActionKind:
    """Return what the type of the actions says about them.

    Integers with several components can be anything, unless their bounds are integers too.
    """
    per_step = actions.shape[1:]
    if actions.dtype.kind == "b" and per_step:
        return "multi_binary"
    if actions.dtype.kind not in "iu":
        return "continuous"
    if bounds is not None and all(bound.dtype.kind in "iu" for bound in bounds):
        return "multi_discrete"
    return "discrete" if per_step in ((), (1,)) else "continuous"


def _action_shape(
    actions: Column, kind: ActionKind, bounds: tuple[np.ndarray, np.ndarray] | None
) -> tuple[int, ...] | None:
    """Return the shape of an action that is not a vector.

    Actions without an axis are vectors of one component, unless their bounds have no axis either.
    """
    per_step = actions.shape[1:]
    is_number = per_step == () and bounds is not None and bounds[0].shape == ()
    if kind == "discrete" or not (is_number or len(per_step) > 1):
        return None
    return per_step


def require_columns(present: Collection[str], name: str) -> None:
    """Raise a `DataError` if a required array is missing."""
    known = {key.split("/")[0] if key.startswith("observations/") else key for key in present}
    missing = [key for key in REQUIRED if key not in known]
    if missing:
        found = ", ".join(sorted(map(str, present))[:20]) or "no arrays"
        raise DataError(f"{name}: {' and '.join(missing)} missing; found {found}")


def _check_columns(columns: Mapping[str, Column], name: str) -> int:
    """Check the shape and type of every array, and return the number of steps."""
    rows = columns["observations"].shape[0] if columns["observations"].shape else 0
    for key, column in columns.items():
        shape, per_step = column.shape, column.shape[1:]
        if column.dtype.kind not in "fiub":
            raise DataError(f"{name}: {key} has type {column.dtype}; it must be numeric")
        if len(shape) == 0 or shape[0] != rows:
            raise DataError(
                f"{name}: {key} has shape {shape}, observations {columns['observations'].shape}; "
                "each array must have one entry per step"
            )
        if key in ("observations", "next_observations"):
            fits = len(per_step) == 1 and per_step[0] > 0
            expected = "(steps, components), with at least one component"
        elif key == "actions":
            fits = 0 not in per_step
            expected = "(steps, action components)"
        else:
            fits, expected = per_step in ((), (1,)), "(steps,)"
        if not fits:
            raise DataError(f"{name}: {key} has shape {shape}; it must be {expected}")
    if not rows:
        raise DataError(f"{name}: contains no steps")
    following = columns.get("next_observations")
    if following is not None and following.shape != columns["observations"].shape:
        raise DataError(
            f"{name}: next_observations has shape {following.shape}, "
            f"observations {columns['observations'].shape}"
        )
    return rows


def _find_boundaries(
    columns: Mapping[str, Column], rows: int, name: str, max_episode_steps: int | None
) -> Boundaries:
    flags = {
        key: _flags(columns[key], rows, f"{name}: {key}")
        for key in ("terminals", *BOUNDARIES, MASKS, VALIDS)
        if key in columns
    }
    terminated = ~flags[MASKS] if MASKS in flags else flags["terminals"]
    ended = terminated.copy()
    for key in ("terminals", *BOUNDARIES):
        ended |= flags.get(key, False)
    if max_episode_steps is not None:
        _end_long_episodes(ended, max_episode_steps)
    marked = max_episode_steps is not None or any(key in flags for key in (*BOUNDARIES, MASKS))
    recorded = "next_observations" in columns
    if not marked and not recorded and not ended.any():
        raise DataError(
            f"{name}: episode ends are not marked: no terminal step, no timeouts, no "
            "episode_terminals and no next_observations; add one of them, or set "
            "max_episode_steps"
        )
    ended[-1] = True
    kept = _kept_steps(flags.get(VALIDS), terminated, ended, recorded)
    if kept is not None:
        ended[:-1] |= ~kept[1:]  # the step before a dropped row ends its episode
    return Boundaries(terminated, ended, kept, jumps=recorded and not marked)


def _kept_steps(
    valid: np.ndarray | None, terminated: np.ndarray, ended: np.ndarray, recorded: bool
) -> np.ndarray | None:
    """Which steps have a known next observation or terminate; None for all."""
    if recorded:
        return valid
    if valid is None:
        return np.asarray(terminated | ~ended)
    # The row after a valid step holds its next observation, even at the end of an episode.
    kept = valid.copy()
    kept[-1] &= terminated[-1]
    return kept


def _lacks_last_observations(columns: Mapping[str, Column], terminated: np.ndarray) -> bool:
    """Whether no row holds the observation after some terminal step."""
    if NEXT_OBSERVATIONS in columns:
        return False
    # With `valids`, the row after a terminal step holds it, if there is a row.
    return bool(terminated[-1] if VALIDS in columns else terminated.any())


def _end_long_episodes(ended: np.ndarray, max_steps: int) -> None:
    """Split episodes that are longer than `max_steps`, in place."""
    first = 0
    for last in [*(np.flatnonzero(ended) + 1).tolist(), len(ended)]:
        ended[first + max_steps - 1 : last : max_steps] = True
        first = last


def _flags(column: Column, rows: int, name: str) -> np.ndarray:
    """Read an array of zeros and ones as bools."""
    flags = np.empty(rows, dtype=np.bool_)
    for first in range(0, rows, CHUNK_ROWS):
        values = column.read(first, min(first + CHUNK_ROWS, rows)).reshape(-1)
        if values.dtype.kind != "b":
            wrong = np.flatnonzero((values != 0) & (values != 1))
            if len(wrong):
                row = int(wrong[0])
                raise DataError(f"{name}[{first + row}] is {values[row]}; it must be 0 or 1")
        flags[first : first + len(values)] = values != 0
    return flags


def _checked_choices(choices: np.ndarray | None, name: str) -> tuple[int | None, int]:
    """Return the smallest discrete action and the number of them; None and 0 if unknown."""
    if choices is None:
        return None, 0
    if choices.dtype.kind not in "iu" or choices.shape != (2,) or choices[1] < 1:
        raise DataError(
            f"{name}: {CHOICES} must be two integers: the smallest action and how many there are"
        )
    return int(choices[0]), int(choices[1])


def _checked_bounds(
    bounds: tuple[np.ndarray, np.ndarray] | None,
    action_shape: tuple[int, ...] | None,
    action_dim: int,
    name: str,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    if bounds is None:
        return None, None
    low, high = (np.asarray(bound) for bound in bounds)
    for key, bound in zip(BOUNDS, (low, high), strict=True):
        if bound.dtype.kind not in "fiu" or bound.shape not in (
            (action_dim,),
            action_shape,
        ):
            raise DataError(
                f"{name}: {key} has type {bound.dtype} and shape {bound.shape}; expected "
                f"one number for each of the {action_dim} action components"
            )
    return low.reshape(-1).astype(np.float32), high.reshape(-1).astype(np.float32)
