"""The common interface of all formats: steps in time order, read in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from rl_training.data.leaves.columns import (
    NEXT_OBSERVATIONS,
    OBSERVATIONS,
    leaf_key,
    require_possible,
)
from rl_training.errors import DataError
from rl_training.observations import ObservationSpec
from rl_training.types import ActionKind, Json, SpaceInfo

CHUNK_ROWS = 8_192
"""Steps read at a time; small compared with the memory of a dataset"""
CHUNK_WORDS = 2**21
"""Most words of the observations that are read at a time, if they are not vectors"""

ProgressListener = Callable[[int, int], None]
"""Called with the number of steps read so far and the total"""

ROUNDINGS = 4
"""Units in the last place by which two copies of an observation may differ"""


class Steps(NamedTuple):
    """A chunk of consecutive recorded steps; actions are in the units of the data.

    The steps of an episode are consecutive, within a chunk and from one chunk to the next.
    """

    obs: np.ndarray
    """`(n, obs_dim)`: vectors in any numeric type, or rows of words as `ObservationSpec` says"""
    action: np.ndarray
    """`(n, action_dim)`; `(n, 1)` if actions are discrete"""
    reward: np.ndarray
    """`(n,)`"""
    next_obs: np.ndarray
    """`(n, obs_dim)`: the observation after the action, also at the end of an episode"""
    terminated: np.ndarray
    """`(n,)` bool"""
    ended: np.ndarray
    """`(n,)` bool: last step of an episode, terminated or truncated"""
    first_row: int = 0
    """Row number of the first step in the source, for error messages"""
    place: str = ""
    """Location of the steps in the source, such as `episode_3/`, for error messages"""
    kept: np.ndarray | None = None
    """`(n,)` bool: steps to train on; the others have no next observation. None means all"""


@dataclass(frozen=True)
class RecordingInfo:
    """Description of recorded data that is known before its steps are read."""

    name: str
    """Path or id, used in messages"""
    kind: str
    obs_dim: int
    action_dim: int
    """Number of action components; if `discrete`, number of actions, or 0 if unknown"""
    action_kind: ActionKind
    max_rows: int
    """Upper bound on the number of steps that are kept"""
    action_low: np.ndarray | None = None
    """Bounds of the data's own action space, if known. Actions of several choices are the integers
    between their bounds"""
    action_high: np.ndarray | None = None
    actions_scaled: bool = False
    """Whether actions are already scaled to [-1, 1]"""
    action_shape: tuple[int, ...] | None = None
    """Shape of an action in the environment, as in `SpaceInfo`; `Steps` have vectors"""
    action_start: int | None = None
    """Smallest discrete action in the data, if known"""
    environment: Json | None = None
    """`id`, `kwargs` and Gymnasium `spec` of the environment of the data, if known"""
    reference_scores: tuple[float, float] | None = None
    """Returns that correspond to scores of 0 and 100, if known"""
    frames_per_second: float | None = None
    """Steps per second of the recorded system, if known"""
    provenance: Json | None = None
    """How the data was made from other data, if known"""
    given_observation: ObservationSpec | None = None
    """The leaves of an observation; None: one vector of `obs_dim` numbers"""
    lacks_last_observations: bool = False
    """Whether the observation after some terminal steps is unknown. Their next observation is then
    a placeholder, of which nothing can be learned: not even which goal was reached"""
    lossy_images: bool = False
    """Whether images were compressed so that they differ from those that were recorded"""

    @cached_property
    def observation(self) -> ObservationSpec:
        """The leaves of an observation."""
        return self.given_observation or ObservationSpec.vector(self.obs_dim)

    def rows_at_a_time(self, most: int) -> int:
        """Return how many steps to read at a time: fewer than `most` if observations are large."""
        if self.given_observation is None:
            return most
        return max(1, min(most, CHUNK_WORDS // self.obs_dim))

    @property
    def is_continuous(self) -> bool:
        return self.action_kind == "continuous"

    @classmethod
    def from_spaces(
        cls, name: str, kind: str, spaces: SpaceInfo, max_rows: int, environment: Json | None
    ) -> RecordingInfo:
        """Describe data that was recorded in these spaces, with continuous actions in [-1, 1]."""
        return cls(
            name,
            kind,
            spaces.obs_dim,
            spaces.action_dim,
            spaces.action_kind,
            max_rows,
            action_low=spaces.action_low,
            action_high=spaces.action_high,
            actions_scaled=spaces.is_continuous,
            action_shape=spaces.action_shape,
            action_start=spaces.action_start if spaces.action_kind == "discrete" else None,
            environment=environment,
            given_observation=spaces.given_observation,
        )


class Recording(Protocol):
    """Recorded data that is open for reading."""

    info: RecordingInfo

    def chunks(self) -> Iterator[Steps]:
        """Yield all steps from the first; can be called more than once."""
        ...


def leads_to(
    next_obs: np.ndarray, following: np.ndarray, observation: ObservationSpec | None = None
) -> np.ndarray:
    """Whether each `next_obs` equals the following observation, up to rounding, bool `(n,)`.

    Two copies of an observation can differ by rounding if they were stored in different types.
    Differences below float32 precision are ignored, because training uses float32. `observation`
    describes rows; None: vectors in any type.
    """
    if observation is not None and not observation.is_float32:
        numbers = observation.number_columns
        others = np.setdiff1d(np.arange(observation.size), numbers)
        one, other = (rows[:, others].view(np.uint32) for rows in (next_obs, following))
        same = (one == other).all(axis=1)
        return np.asarray(same & leads_to(next_obs[:, numbers], following[:, numbers]))
    types = {next_obs.dtype, following.dtype}
    if all(dtype.kind in "iub" for dtype in types):
        differs = next_obs != following
    else:
        floats = [dtype for dtype in (*types, np.dtype(np.float32)) if dtype.kind == "f"]
        coarsest = max((np.finfo(dtype) for dtype in floats), key=lambda limits: limits.eps)
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # non-finite values are refused elsewhere
            one, other = next_obs.astype(np.float64), following.astype(np.float64)
            size = np.maximum(np.abs(one), np.abs(other))
            allowed = ROUNDINGS * float(coarsest.eps) * size + float(coarsest.smallest_subnormal)
            differs = ~(np.abs(one - other) <= allowed)
    return np.asarray(~differs.any(axis=1))


def require_finite(steps: Steps, info: RecordingInfo) -> None:
    """Raise a `DataError` that names the first value that is not a finite float32.

    In observations of other kinds it names the first value that is not possible.
    """
    named = {
        OBSERVATIONS: steps.obs,
        "actions": steps.action,
        "rewards": steps.reward[:, None],
        NEXT_OBSERVATIONS: steps.next_obs,
    }
    name = info.name
    for key, values in named.items():
        if key in (OBSERVATIONS, NEXT_OBSERVATIONS) and info.given_observation is not None:
            _require_possible_rows(
                info.given_observation, values, f"{name}: {steps.place}{key}", steps.first_row
            )
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            finite = np.isfinite(values.astype(np.float32, copy=False))
        if not finite.all():
            row, component = map(int, np.argwhere(~finite)[0])
            where = describe_value(steps, name, key, row, None if key == "rewards" else component)
            raise DataError(f"{where} is {values[row, component]}, not a finite number")


def _require_possible_rows(
    observation: ObservationSpec, rows: np.ndarray, name: str, first_row: int
) -> None:
    if observation.problem_in(rows) is not None:
        for key, values in observation.unpack(rows).items():
            require_possible(observation.leaf(key), values, leaf_key(name, key), first_row)


def describe_value(steps: Steps, name: str, key: str, row: int, component: int | None) -> str:
    place = f"{steps.first_row + row}" + ("" if component is None else f", {component}")
    return f"{name}: {steps.place}{key}[{place}]"


def episode_lengths(ends: np.ndarray) -> np.ndarray:
    return np.diff(ends, prepend=0)
