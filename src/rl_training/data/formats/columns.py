"""Recorded data as flat arrays, one entry per step: D4RL's layout, from whatever holds the arrays.

Terminations and truncations are told apart by two arrays. Where the next observations are not
recorded they are the following steps' observations; a truncated episode's last one is then unknown.
OGBench's arrays are read too: there `terminals` ends a trajectory, and `masks` terminates it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from rl_training.data.formats.recording import CHUNK_ROWS, RecordingInfo, Steps, leads_to
from rl_training.errors import DataError

REQUIRED = ("observations", "actions", "rewards", "terminals")
BOUNDARIES = ("timeouts", "episode_terminals")
MASKS = "masks"
"""0 where a step terminates; with it, `terminals` only ends an episode"""
VALIDS = "valids"
"""0 for an episode's final observation, which has no step of its own"""
COLUMNS = (*REQUIRED, *BOUNDARIES, MASKS, VALIDS, "next_observations")
BOUNDS = ("action_low", "action_high")
"""Not per step: the action space, in files that this package wrote"""


class Column(Protocol):
    """An array to be read from front to back."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def read(self, first: int, last: int) -> np.ndarray:
        """Rows `first` to `last`; `first` is where the last call ended, one before that, or 0."""
        ...


class ArrayColumn:
    """An array in memory."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self, first: int, last: int) -> np.ndarray:
        return self._array[first:last]


class Boundaries(NamedTuple):
    """Where episodes end, and which steps have a next observation."""

    terminated: np.ndarray
    ended: np.ndarray
    kept: np.ndarray | None
    jumps: bool = False
    """Whether episodes also end wherever a step does not lead to the following observation"""


class ColumnRecording:
    """Steps out of flat arrays."""

    def __init__(
        self,
        columns: Mapping[str, Column],
        name: str,
        kind: str,
        *,
        max_episode_steps: int | None = None,
        action_bounds: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self._columns = columns
        rows = _check_columns(columns, name)
        actions = columns["actions"]
        discrete = actions.dtype.kind in "iu" and actions.shape[1:] in ((), (1,))
        action_dim = 1 if len(actions.shape) == 1 else actions.shape[1]
        low, high = _checked_bounds(action_bounds, action_dim, name)
        self._boundaries = _find_boundaries(columns, rows, name, max_episode_steps)
        kept = self._boundaries.kept
        self.info = RecordingInfo(
            name,
            kind,
            obs_dim=columns["observations"].shape[1],
            action_dim=0 if discrete else action_dim,
            discrete=discrete,
            max_rows=rows if kept is None else int(kept.sum()),
            action_low=low,
            action_high=high,
        )
        self._rows = rows
        if not self.info.max_rows:
            raise DataError(f"{name}: no step is left whose next observation is known")

    def chunks(self) -> Iterator[Steps]:
        for first in range(0, self._rows, CHUNK_ROWS):
            yield self._chunk(first, min(first + CHUNK_ROWS, self._rows))

    def _chunk(self, first: int, last: int) -> Steps:
        columns, (terminated, ended, kept, jumps) = self._columns, self._boundaries
        # One observation more, if there is one: where the last action of the piece led.
        following = columns["observations"].read(first, min(last + 1, self._rows))
        obs, known = following[: last - first], len(following) - 1
        if "next_observations" in columns:
            next_obs = columns["next_observations"].read(first, last)
        else:
            next_obs = obs.copy()  # where an episode terminated nobody asks for it
            next_obs[:known] = following[1:]
        its_ends = ended[first:last]
        if jumps:
            its_ends = its_ends.copy()
            its_ends[:known] |= ~leads_to(next_obs[:known], following[1:])
        return Steps(
            obs,
            columns["actions"].read(first, last).reshape(last - first, -1),
            columns["rewards"].read(first, last).reshape(-1),
            next_obs,
            terminated[first:last],
            its_ends,
            first_row=first,
            kept=None if kept is None else kept[first:last],
        )


def array_recording(
    arrays: Mapping[str, np.ndarray], name: str = "arrays", **options: int | None
) -> ColumnRecording:
    """Steps out of arrays in memory, by D4RL's names."""
    columns = {key: ArrayColumn(np.asarray(arrays[key])) for key in COLUMNS if key in arrays}
    _require(columns, sorted(map(str, arrays)), name)
    bounds = None
    if all(key in arrays for key in BOUNDS):
        bounds = (np.asarray(arrays["action_low"]), np.asarray(arrays["action_high"]))
    return ColumnRecording(columns, name, "arrays", action_bounds=bounds, **options)


def _require(columns: Mapping[str, Column], present: list[str], name: str) -> None:
    missing = [key for key in REQUIRED if key not in columns]
    if missing:
        there = ", ".join(present[:20]) or "nothing"
        raise DataError(f"{name}: {' and '.join(missing)} missing; it holds {there}")


def _check_columns(columns: Mapping[str, Column], name: str) -> int:
    """The number of steps, after checking every array's shape and type."""
    _require(columns, sorted(columns), name)
    rows = columns["observations"].shape[0] if columns["observations"].shape else 0
    for key, column in columns.items():
        shape, per_step = column.shape, column.shape[1:]
        if column.dtype.kind not in "fiub":
            raise DataError(f"{name}: {key} holds {column.dtype}, not numbers")
        if len(shape) == 0 or shape[0] != rows:
            raise DataError(
                f"{name}: {key} has shape {shape}, observations {columns['observations'].shape}; "
                "each array has one entry per step"
            )
        if key in ("observations", "next_observations"):
            fits = len(per_step) == 1 and per_step[0] > 0
            expected = "(steps, numbers): only flat vector observations are supported"
        elif key == "actions":
            fits = len(per_step) <= 1 and per_step != (0,)
            expected = "(steps, action components)"
        else:
            fits, expected = per_step in ((), (1,)), "(steps,)"
        if not fits:
            raise DataError(f"{name}: {key} has shape {shape}; it must be {expected}")
    if not rows:
        raise DataError(f"{name}: is empty: it holds no step")
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
            f"{name}: does not say where episodes end: no terminal step, no timeouts, no "
            "episode_terminals and no next_observations; add one of them, or set "
            "max_episode_steps"
        )
    ended[-1] = True
    kept = _kept_steps(flags.get(VALIDS), terminated, ended, recorded)
    if kept is not None:
        ended[:-1] |= ~kept[1:]  # the step before one that is left out is its episode's last
    return Boundaries(terminated, ended, kept, jumps=recorded and not marked)


def _kept_steps(
    valid: np.ndarray | None, terminated: np.ndarray, ended: np.ndarray, recorded: bool
) -> np.ndarray | None:
    """Which steps lead somewhere that is known, or nowhere; None for all."""
    if recorded:
        return valid
    if valid is None:
        return np.asarray(terminated | ~ended)
    # What follows a valid step is its own next observation, also where its episode ends.
    kept = valid.copy()
    kept[-1] &= terminated[-1]
    return kept


def _end_long_episodes(ended: np.ndarray, max_steps: int) -> None:
    """End every episode that has so many steps, in place."""
    first = 0
    for last in [*(np.flatnonzero(ended) + 1).tolist(), len(ended)]:
        ended[first + max_steps - 1 : last : max_steps] = True
        first = last


def _flags(column: Column, rows: int, name: str) -> np.ndarray:
    """An array of zeros and ones as bools."""
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


def _checked_bounds(
    bounds: tuple[np.ndarray, np.ndarray] | None, action_dim: int, name: str
) -> tuple[np.ndarray | None, np.ndarray | None]:
    if bounds is None:
        return None, None
    low, high = (np.asarray(bound) for bound in bounds)
    for key, bound in zip(BOUNDS, (low, high), strict=True):
        if bound.dtype.kind not in "fiu" or bound.shape != (action_dim,):
            raise DataError(
                f"{name}: {key} is {bound.dtype} of shape {bound.shape}; there are {action_dim} "
                "action components"
            )
    return low.astype(np.float32), high.astype(np.float32)
