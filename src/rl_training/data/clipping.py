"""Recorded data with its actions brought within its own bounds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rl_training.data.packing import action_bounds, fit_spaces, in_model_units, lies_beyond
from rl_training.data.recording import Recording, Steps
from rl_training.errors import DataError


class ClippedRecording:
    """Steps of another recording, none of whose actions is beyond a bound."""

    def __init__(self, recording: Recording) -> None:
        self.info = recording.info
        if self.info.discrete:
            raise DataError(f"{self.info.name}: its actions are choices, which cannot be clipped")
        self._recording = recording
        self._bounds = action_bounds(self.info, fit_spaces(self.info, None), None)
        self.clipped = self.components = 0
        """Action components that were beyond a bound, and all there were, in the last reading"""

    def chunks(self) -> Iterator[Steps]:
        self.clipped = self.components = 0
        low, high = self._bounds or (np.float64(-1), np.float64(1))
        for steps in self._recording.chunks():
            kept = slice(None) if steps.kept is None else steps.kept
            beyond = lies_beyond(in_model_units(steps.action, self._bounds))[kept]
            self.clipped += int(beyond.sum())
            self.components += beyond.size
            yield steps._replace(action=np.clip(steps.action, low, high))
