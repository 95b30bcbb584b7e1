"""Check recorded steps, scale their actions to [-1, 1], and pack them into rows."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from rl_training.data.formats.recording import (
    RecordingInfo,
    Steps,
    describe_value,
    require_finite,
)
from rl_training.data.leaves.description import difference
from rl_training.errors import DataError
from rl_training.observations import ObservationSpec
from rl_training.types import SpaceInfo

TOLERANCE = 1e-4
"""How far an action may exceed its bounds by rounding, as a fraction of half the range"""


@dataclass(frozen=True)
class RowLayout:
    """Columns of a row; without next actions, the same as in a replay buffer.

    Next actions and returns are filled in when all steps of a recording are known.
    """

    obs_dim: int
    action_width: int
    """Columns of an action: one if actions are discrete"""
    next_actions: bool = False
    """Whether the recorded action at the next observation follows the columns of a replay buffer"""
    returns: bool = False
    """Whether the last column is the return of the episode from the row on"""

    @property
    def widths(self) -> list[int]:
        next_action = [self.action_width] * self.next_actions
        return [self.obs_dim, self.action_width, 1, 1, self.obs_dim, *next_action] + (
            [1] * self.returns
        )

    @property
    def width(self) -> int:
        return sum(self.widths)

    @property
    def reward(self) -> int:
        """Column of the reward; the discount is in the next column."""
        return self.obs_dim + self.action_width

    @property
    def action(self) -> slice:
        return slice(self.obs_dim, self.reward)

    @property
    def next_obs(self) -> slice:
        return slice(self.reward + 2, self.reward + 2 + self.obs_dim)

    def number_columns(self, observation: ObservationSpec | None) -> np.ndarray | slice:
        """The columns of a replay buffer that are floats; None: observations are vectors."""
        if observation is None:
            return slice(None)
        numbers = observation.number_columns
        middle = np.arange(self.obs_dim, self.next_obs.start)
        return np.concatenate([numbers, middle, numbers + self.next_obs.start])

    @property
    def next_action(self) -> slice:
        """Columns of the next action; empty if there is none."""
        return slice(self.next_obs.stop, self.width - self.returns)


class RowPacker:
    """Check the steps of a recording and pack them into rows, chunk by chunk."""

    def __init__(
        self,
        info: RecordingInfo,
        spaces: SpaceInfo,
        gamma: float,
        bounds: tuple[np.ndarray, np.ndarray] | None,
        *,
        clip_actions: bool = False,
    ) -> None:
        """`bounds` are the low and high of the actions; None if in [-1, 1] already, or choices."""
        self.layout = RowLayout(spaces.obs_dim, spaces.actions.width)
        self._info, self._spaces, self._gamma = info, spaces, np.float32(gamma)
        self._bounds, self._clip_actions = bounds, clip_actions
        self.clipped = 0
        """Action components so far that were out of bounds and were clipped"""

    def pack(self, steps: Steps) -> np.ndarray:
        """Rows `(n, width)`, float32, of the steps that are kept."""
        layout = self.layout
        rows = np.empty((len(steps.reward), layout.width), np.float32)
        after_action = layout.reward
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            rows[:, : layout.obs_dim] = steps.obs
            rows[:, layout.obs_dim : after_action] = steps.action
            rows[:, after_action] = steps.reward
            rows[:, after_action + 1] = self._gamma * ~steps.terminated
            rows[:, layout.next_obs] = steps.next_obs
        if not self._are_possible(rows):
            require_finite(steps, self._info)
        self._finish_actions(rows[:, layout.obs_dim : after_action], steps)
        return rows if steps.kept is None else rows[steps.kept]

    def _are_possible(self, rows: np.ndarray) -> bool:
        layout, observation = self.layout, self._info.given_observation
        if observation is None:
            return bool(np.isfinite(rows).all())
        parts = (rows[:, : layout.obs_dim], rows[:, layout.next_obs])
        others = rows[:, layout.obs_dim : layout.next_obs.start]
        return bool(np.isfinite(others).all()) and all(
            observation.problem_in(part) is None for part in parts
        )

    def _finish_actions(self, actions: np.ndarray, steps: Steps) -> None:
        """Scale the actions in place: to [-1, 1], or to indices from 0 if they are choices."""
        if not self._spaces.is_continuous:
            actions -= self._first_choice()
            choices = self._spaces.actions.num_choices
            wrong = (actions < 0) | (actions >= choices) | (actions % 1 != 0)
        else:
            scaled = in_model_units(steps.action, self._bounds)
            wrong = out_of_bounds(scaled)
            np.clip(scaled, -1, 1, out=actions, casting="same_kind")
            if self._clip_actions:
                self.clipped += int(wrong.sum() if steps.kept is None else wrong[steps.kept].sum())
                return
        if wrong.any():
            row, component = map(int, np.argwhere(wrong)[0])
            value = steps.action[row, component]
            allowed = self._allowed(component)
            where = describe_value(steps, self._info.name, "actions", row, component)
            raise DataError(f"{where} is {value:g}; it must be {allowed}")

    def _first_choice(self) -> int | np.ndarray:
        """The data's number for index 0: that of the environment if the data does not say."""
        info = self._info
        if self._spaces.action_kind == "discrete":
            return self._spaces.action_start if info.action_start is None else info.action_start
        known = None if info.is_continuous else info.action_low
        return self._spaces.first_choice if known is None else known

    def _allowed(self, component: int) -> str:
        """Say which values a component of an action can have."""
        if self._spaces.action_kind == "discrete":
            first, number = int(self._first_choice()), self._spaces.action_dim
            return f"one of {number} discrete actions, {first} to {first + number - 1}"
        if not self._spaces.is_continuous:
            low = int(np.broadcast_to(self._first_choice(), self._spaces.action_dim)[component])
            return (
                f"an integer from {low} to {low + self._spaces.actions.num_choices[component] - 1}"
            )
        ends = self._bounds or (-np.ones(component + 1), np.ones(component + 1))
        lowest, highest = (bound[component] for bound in ends)
        return f"in [{lowest:g}, {highest:g}]; {self._how_to_clip()}"

    def _how_to_clip(self) -> str:
        if self._info.kind == "arrays":
            return "to clip such actions, use numpy.clip"
        return "to clip such actions, set clip_actions: true in the dataset section"


def in_model_units(actions: np.ndarray, bounds: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
    """Scale actions from `bounds` to [-1, 1]; None means that they are scaled already."""
    if bounds is None:
        return actions
    low, high = bounds
    # In double precision, so that the bounds map to exactly -1 and 1.
    width = high - low
    centred = (actions - low) - (high - actions)
    return np.asarray(np.where(width > 0, centred, 0.0) / np.where(width > 0, width, 1.0))


def out_of_bounds(scaled: np.ndarray) -> np.ndarray:
    """Which components of scaled actions exceed [-1, 1] by more than rounding."""
    return np.asarray(np.abs(scaled) > 1 + TOLERANCE)


def warn_about_clipping(name: str, clipped: int, components: int) -> None:
    """Warn how many action components were clipped, if any."""
    if clipped:
        warnings.warn(
            f"{name}: {clipped:,} of {components:,} action components were out of bounds and "
            "were clipped (clip_actions)",
            stacklevel=3,
        )


def fit_spaces(
    info: RecordingInfo, spaces: SpaceInfo | None, owner: str = "the environment"
) -> SpaceInfo:
    """Return `spaces` after checking that the data fits them; if None, the data's own spaces.

    `owner` names the owner of `spaces` in error messages.
    """
    if spaces is None:
        if info.action_kind == "discrete" and not info.action_dim:
            raise DataError(
                f"{info.name}: the number of discrete actions is unknown; set env_id to the "
                "environment of the data"
            )
        return SpaceInfo(
            info.obs_dim,
            info.action_dim,
            info.action_kind,
            action_low=info.action_low,
            action_high=info.action_high,
            action_start=info.action_start or 0,
            action_shape=info.action_shape,
            given_observation=info.given_observation,
        )
    name = info.name
    if info.environment is not None:
        name = f"{info.name} (recorded in {info.environment['id']})"
    if not (info.observation.is_vector and spaces.observation.is_vector):
        problem = difference(info.observation, spaces.observation, owner)
        if problem is not None:
            raise DataError(f"{name}: {problem}")
    elif info.obs_dim != spaces.obs_dim:
        raise DataError(
            f"{name}: observations have {info.obs_dim} components, {owner}'s have {spaces.obs_dim}"
        )
    if _may_be_any_kind(info) and spaces.action_kind != "discrete":
        number = info.action_dim or 1
        if number == spaces.action_dim:
            return spaces  # their values are checked when they are read
    if info.action_kind != spaces.action_kind:
        raise DataError(
            f"{name}: actions are {info.action_kind}, {owner}'s are {spaces.action_kind}"
        )
    if info.action_dim not in (0, spaces.action_dim):
        what = "discrete values" if info.action_kind == "discrete" else "components"
        raise DataError(
            f"{name}: actions have {info.action_dim} {what}, {owner}'s have {spaces.action_dim}"
        )
    own = fit_spaces(info, None).choices if info.action_kind == "multi_discrete" else ()
    if own != spaces.choices:
        raise DataError(f"{name}: actions have {own} choices, {owner}'s have {spaces.choices}")
    return spaces


def _may_be_any_kind(info: RecordingInfo) -> bool:
    """Whether numbers without bounds can be continuous actions as well as choices."""
    if info.action_kind == "discrete":
        return info.action_dim == 0
    return info.is_continuous and info.action_low is None and not info.actions_scaled


def action_bounds(
    info: RecordingInfo,
    spaces: SpaceInfo,
    given: tuple[np.ndarray, np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the action bounds: those given, or those of the data, or those of the environment.

    None if the actions need no scaling. Raises `DataError` if no finite bounds are known.
    """
    if given is not None and (not spaces.is_continuous or info.actions_scaled):
        is_scaled = spaces.is_continuous
        reason = "already scaled to [-1, 1]" if is_scaled else spaces.action_kind
        raise DataError(
            f"{info.name}: action_low and action_high must not be set; its actions are {reason}"
        )
    if not spaces.is_continuous or info.actions_scaled:
        return None
    for low, high in (
        given or (None, None),
        (info.action_low, info.action_high),
        (spaces.action_low, spaces.action_high),
    ):
        if low is None or high is None or not (np.isfinite(low).all() and np.isfinite(high).all()):
            continue
        try:
            shape = (spaces.action_dim,)
            bounds = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
        except ValueError:
            raise DataError(
                f"{info.name}: action_low and action_high have {np.size(low)} and {np.size(high)} "
                f"values, but actions have {spaces.action_dim} components"
            ) from None
        return bounds[0].astype(np.float64), bounds[1].astype(np.float64)
    raise DataError(f"{info.name}: its action bounds are unknown; set action_low and action_high")
