"""Recorded observations with other leaves than those of the source, or in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rl_training.data.formats.recording import Recording, Steps
from rl_training.data.leaves.description import LeafChoice
from rl_training.observations import ObservationSpec


class LeavesRecording:
    """A recording with some leaves of its observations, in a given order."""

    def __init__(self, recording: Recording, names: Sequence[str]) -> None:
        self._recording = recording
        observation = recording.info.observation.select(names)
        self.info = replace(
            recording.info,
            obs_dim=observation.size,
            given_observation=None if observation.is_vector else observation,
        )
        self._words = recording.info.observation.words_of(names)

    def chunks(self) -> Iterator[Steps]:
        for steps in self._recording.chunks():
            obs, next_obs = (self._chosen(rows) for rows in (steps.obs, steps.next_obs))
            yield steps._replace(obs=obs, next_obs=next_obs)

    def _chosen(self, rows: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(rows[:, self._words])


def reordered(recording: Recording, observation: ObservationSpec) -> Recording:
    """Return a recording whose leaves are in the order of `observation`, which has the same."""
    names = [leaf.name for leaf in observation.leaves]
    if names == [leaf.name for leaf in recording.info.observation.leaves]:
        return recording
    return LeavesRecording(recording, names)


def chosen_leaves(recording: Recording, choice: LeafChoice) -> Recording:
    """Return a recording with the chosen leaves of its observations."""
    info = recording.info
    names = [leaf.name for leaf in info.observation.leaves]
    chosen = choice.select(names, info.name)
    return recording if chosen == names else LeavesRecording(recording, chosen)
