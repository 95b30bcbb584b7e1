"""Recorded observations with other leaves than those of the source, or in another order or type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rl_training.data.formats.recording import Recording, Steps
from rl_training.data.leaves.columns import NEXT_OBSERVATIONS, OBSERVATIONS, pack_leaves
from rl_training.data.leaves.description import LeafChoice
from rl_training.observations import NumberTypes, ObservationSpec


class LeavesRecording:
    """A recording with some leaves of its observations, in a given order.

    Numbers are stored in the given types (None: their own).
    """

    def __init__(
        self, recording: Recording, names: Sequence[str], types: NumberTypes | None = None
    ) -> None:
        self._recording = recording
        self._given = recording.info.observation.select(names)
        observation = self._given if types is None else self._given.stored_as(types)
        self._observation = observation
        self.info = replace(
            recording.info,
            obs_dim=observation.size,
            given_observation=None if observation.is_vector else observation,
        )
        self._words = recording.info.observation.words_of(names)

    def chunks(self) -> Iterator[Steps]:
        for steps in self._recording.chunks():
            yield steps._replace(
                obs=self._chosen(steps.obs, OBSERVATIONS, steps),
                next_obs=self._chosen(steps.next_obs, NEXT_OBSERVATIONS, steps),
            )

    def _chosen(self, rows: np.ndarray, key: str, steps: Steps) -> np.ndarray:
        chosen = np.ascontiguousarray(rows[:, self._words])
        if self._observation == self._given:
            return chosen
        name = f"{self.info.name}: {steps.place}{key}"
        return pack_leaves(self._observation, self._given.unpack(chosen), name, steps.first_row)


def reordered(recording: Recording, observation: ObservationSpec) -> Recording:
    """Return a recording whose leaves are in the order and the types of `observation`.

    It has the same leaves.
    """
    if recording.info.observation == observation:
        return recording
    names = [leaf.name for leaf in observation.leaves]
    return LeavesRecording(recording, names, observation.number_types)


def chosen_leaves(recording: Recording, choice: LeafChoice) -> Recording:
    """Return a recording with the chosen leaves of its observations."""
    info = recording.info
    names = [leaf.name for leaf in info.observation.leaves]
    chosen = choice.select(names, info.name)
    return recording if chosen == names else LeavesRecording(recording, chosen)
