"""What every format of recorded data is read as: steps in the order of time, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from rl_training.types import Json

CHUNK_ROWS = 8_192
"""Steps read at once: few enough that a piece adds nothing to speak of to the whole's memory"""

ProgressListener = Callable[[int, int], None]
"""Is told how many steps of how many were read"""


ROUNDINGS = 4
"""Units in the last place by which copies of one observation may differ"""


class Steps(NamedTuple):
    """Consecutive steps as they were recorded; actions in the data's own units.

    An episode's steps follow one another, within a piece and from one piece to the next.
    """

    obs: np.ndarray
    """`(n, obs_dim)`"""
    action: np.ndarray
    """`(n, action_dim)`; `(n, 1)` of the environment's choices where actions are discrete"""
    reward: np.ndarray
    """`(n,)`"""
    next_obs: np.ndarray
    """`(n, obs_dim)`: where the action led, also at an episode's end"""
    terminated: np.ndarray
    """`(n,)` bool"""
    ended: np.ndarray
    """`(n,)` bool: the episode's last step, terminated or truncated"""
    first_row: int = 0
    """What the source calls the first of these, to name a bad one"""
    place: str = ""
    """Where in the source these are, such as `episode_3/`"""
    kept: np.ndarray | None = None
    """`(n,)` bool: steps to learn from; the others lack a next observation. None: all"""


@dataclass(frozen=True)
class RecordingInfo:
    """What is known of recorded data before its steps are read."""

    name: str
    """A path or an id, as in messages"""
    kind: str
    obs_dim: int
    action_dim: int
    """Number of action components; of choices where `discrete`, 0 if the data does not say"""
    discrete: bool
    max_rows: int
    """At least as many as there are steps to keep"""
    action_low: np.ndarray | None = None
    """The data's own action space, where it has one"""
    action_high: np.ndarray | None = None
    actions_scaled: bool = False
    """Whether actions are in [-1, 1] already, whatever the bounds"""
    action_start: int | None = None
    """What the data calls the first choice, where it says"""
    environment: Json | None = None
    """`id`, `kwargs` and Gymnasium's `spec` of the environment that it is from, where known"""
    reference_scores: tuple[float, float] | None = None
    """Returns that a score of 0 and of 100 stand for, where the data says"""


class Recording(Protocol):
    """Recorded data that is open for reading."""

    info: RecordingInfo

    def chunks(self) -> Iterator[Steps]:
        """All steps, from the first; can be called again."""
        ...


def leads_to(next_obs: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Whether steps `(n,)` led to the observations that follow them, and not to an episode's end.

    Copies of an observation may differ by rounding: one may have been stored in a coarser type
    before. Differences below float32's precision never count, since learners use float32.
    """
    types = {next_obs.dtype, following.dtype}
    if all(dtype.kind in "iub" for dtype in types):
        differs = next_obs != following
    else:
        floats = [dtype for dtype in (*types, np.dtype(np.float32)) if dtype.kind == "f"]
        coarsest = max((np.finfo(dtype) for dtype in floats), key=lambda limits: limits.eps)
        with np.errstate(over="ignore", invalid="ignore"):  # not finite: refused elsewhere
            one, other = next_obs.astype(np.float64), following.astype(np.float64)
            size = np.maximum(np.abs(one), np.abs(other))
            allowed = ROUNDINGS * float(coarsest.eps) * size + float(coarsest.smallest_subnormal)
            differs = ~(np.abs(one - other) <= allowed)
    return np.asarray(~differs.any(axis=1))
