"""Read the replay buffer in a run's checkpoint as recorded data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rl_training.checkpoints.completeness import repeats_with_goals
from rl_training.checkpoints.format import POLICY, STATE, CheckpointReader
from rl_training.checkpoints.loading import find_checkpoint, load_policy
from rl_training.data.formats.recording import CHUNK_ROWS, RecordingInfo, Steps, leads_to
from rl_training.data.transforms import RewardTransform
from rl_training.errors import CheckpointError, DataError
from rl_training.types import Json


def open_replay(path: str | Path) -> ReplayRecording:
    """Open the replay buffer of a checkpoint, or of the newest checkpoint of a run."""
    reader = find_checkpoint(path)
    if not reader.has(STATE):
        raise DataError(
            f"{path}: a saved policy has no replay buffer; use a run folder or a checkpoint"
        )
    return ReplayRecording(reader)


class ReplayRecording:
    """The rows of a replay buffer, ordered by environment and then by time."""

    def __init__(self, reader: CheckpointReader) -> None:
        name, state = str(reader.folder), reader.json(STATE)
        self._rows = _read_rows(reader, name)
        try:
            config = state["config"]
            hyperparameters, self._num_envs = config["algo_kwargs"], int(config["num_envs"])
            n_step, gamma = int(hyperparameters.get("n_step", 1)), float(hyperparameters["gamma"])
            added = int(state["replay"]["rows_added"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{name}: its state does not describe the replay buffer ({error})"
            ) from None
        if n_step != 1 or gamma == 0.0:
            raise DataError(
                f"{name}: its replay buffer has {n_step}-step returns with gamma {gamma:g}, which "
                "cannot be split into single steps; record data with its policy instead "
                "(rl-training dataset record)"
            )
        if repeats_with_goals(state):
            raise DataError(
                f"{name}: its replay buffer has transitions with other goals than their episode's "
                "(replay.hindsight); record data with its policy instead (rl-training dataset "
                "record)"
            )
        policy = load_policy(reader)
        spaces, self._rewards = policy.spaces, policy.rewards or RewardTransform()
        self._spaces = spaces
        if self._rewards.clip is not None:
            raise DataError(
                f"{name}: its replay buffer has rewards clipped to ±{self._rewards.clip:g}; record "
                "data with its policy instead (rl-training dataset record)"
            )
        if self._rows.shape[1] != 2 * spaces.obs_dim + spaces.actions.width + 2:
            raise CheckpointError(f"{name}: replay rows do not fit its policy")
        self._oldest = added % len(self._rows) if added > len(self._rows) else 0
        self._first = added - len(self._rows)
        self.info = RecordingInfo.from_spaces(
            name, "run", spaces, len(self._rows), _environment(reader)
        )

    def chunks(self) -> Iterator[Steps]:
        total, count = len(self._rows), self._num_envs
        for environment in range(count):
            # Each step of the run added one row for every environment, in order.
            order = np.arange((environment - self._first) % count, total, count)
            positions = (order + self._oldest) % total
            number = self.info.rows_at_a_time(CHUNK_ROWS)
            for first in range(0, len(positions), number):
                yield self._steps(positions, first, min(first + number, len(positions)))

    def _steps(self, positions: np.ndarray, first: int, last: int) -> Steps:
        rows = self._rows[positions[first : last + 1]]  # with the next row, if any
        dim, width = self.info.obs_dim, rows.shape[1]
        next_obs = rows[:, width - dim :]
        ended = np.ones(last - first, np.bool_)
        # An episode continues where the next row starts from this row's next observation.
        within = min(last - first, len(rows) - 1)
        observation = self.info.given_observation
        ended[:within] = ~leads_to(next_obs[:within], rows[1 : within + 1, :dim], observation)
        rows, next_obs = rows[: last - first], next_obs[: last - first]
        terminated = rows[:, width - dim - 1] == 0.0
        action = rows[:, dim : width - dim - 2]
        if not self._spaces.is_continuous:
            action = action + self._spaces.first_choice
        return Steps(
            rows[:, :dim],
            action,
            self._rewards.undo(rows[:, width - dim - 2]),
            next_obs,
            terminated,
            ended | terminated,
            first_row=first,
        )


def _read_rows(reader: CheckpointReader, name: str) -> np.ndarray:
    """All saved rows, in the order of their segment files."""
    segments = sorted(file for file in reader.files if file.startswith("replay-"))
    tensors = [reader.tensors(segment).get("rows") for segment in segments]
    rows = [tensor.numpy() for tensor in tensors if tensor is not None and tensor.ndim == 2]
    if len(rows) < len(segments) or len({part.shape[1] for part in rows}) > 1:
        raise CheckpointError(f"{name}: replay segments are damaged")
    if not rows or not sum(map(len, rows)):
        raise DataError(f"{name}: its replay buffer is empty")
    return np.concatenate(rows) if len(rows) > 1 else rows[0]


def _environment(reader: CheckpointReader) -> Json | None:
    environment = reader.json(POLICY).get("environment") or {}
    if environment.get("id") is None:
        return None
    return {"id": environment["id"], "kwargs": environment.get("kwargs") or {}}
