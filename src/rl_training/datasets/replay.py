"""Read the replay buffer in a run's checkpoint as recorded data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from rl_training.checkpoints.completeness import (
    keeps_returns,
    learns_from_rollouts,
    repeats_with_goals,
    saved_chunk,
    saved_frame_layout,
)
from rl_training.checkpoints.format import (
    EPISODES,
    POLICY,
    STATE,
    CheckpointReader,
    frame_segment_names,
    segment_names,
)
from rl_training.checkpoints.loading import find_checkpoint, load_policy
from rl_training.data.formats.recording import CHUNK_ROWS, RecordingInfo, Steps, leads_to
from rl_training.data.storage.rows import RowColumns
from rl_training.data.storage.stacks import FrameLayout
from rl_training.data.transforms import RewardTransform
from rl_training.errors import CheckpointError, DataError
from rl_training.observations import WORD_BYTES
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
        config = state.get("config")
        if isinstance(config, dict) and config.get("checkpoint_replay") == "none":
            raise DataError(
                f"{name}: its checkpoints do not contain the replay buffer (checkpoint_replay: "
                "none); record data with its policy instead (rl-training dataset record)"
            )
        if learns_from_rollouts(state):
            raise DataError(
                f"{name}: its algorithm learns from rollouts and has no replay buffer; record data "
                "with its policy instead (rl-training dataset record)"
            )
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
        if (chunk := saved_chunk(state)) > 1:
            raise DataError(
                f"{name}: its replay buffer has windows of {chunk} steps (action_chunk), which "
                "cannot be split into single steps; record data with its policy instead "
                "(rl-training dataset record)"
            )
        if repeats_with_goals(state) and not _has_single_rows(reader):
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
        layout = saved_frame_layout(spaces, state)
        by_episode = keeps_returns(state)
        if by_episode:  # then rows of different environments do not alternate
            self._num_envs = 1
        columns = RowColumns(spaces.observation, spaces.actions, layout, by_episode)
        if self._rows.shape[1] != columns.width:
            raise CheckpointError(f"{name}: replay rows do not fit its policy")
        self._ends = np.cumsum(columns.widths[:-1])
        self._first, self._added, self._frames = added - len(self._rows), added, None
        if layout is not None:
            self._frames = _SavedFrames(layout, reader)
            self._first += self._frames.first_complete(columns, self._rows, added, state)
        self.info = RecordingInfo.from_spaces(
            name, "run", spaces, added - self._first, _environment(reader)
        )

    def chunks(self) -> Iterator[Steps]:
        count = self._num_envs
        for environment in range(count):
            # Each step of the run added one row for every environment, in order.
            first_of_environment = self._first + (environment - self._first) % count
            positions = np.arange(first_of_environment, self._added, count) % len(self._rows)
            number = self.info.rows_at_a_time(CHUNK_ROWS)
            for first in range(0, len(positions), number):
                yield self._steps(positions, first, min(first + number, len(positions)))

    def _steps(self, positions: np.ndarray, first: int, last: int) -> Steps:
        rows = self._rows[positions[first : last + 1]]  # with the next row, if any
        obs, action, reward, discount, next_obs, *_ = np.split(rows, self._ends, axis=1)
        if self._frames is not None:
            obs, next_obs = self._frames.restore(obs), self._frames.restore(next_obs)
        ended = np.ones(last - first, np.bool_)
        # An episode continues where the next row starts from this row's next observation.
        within = min(last - first, len(rows) - 1)
        observation = self.info.given_observation
        ended[:within] = ~leads_to(next_obs[:within], obs[1 : within + 1], observation)
        if not self._spaces.is_continuous:
            action = action + self._spaces.first_choice
        kept = slice(last - first)
        terminated = discount[kept, 0] == 0.0
        return Steps(
            obs[kept],
            action[kept],
            self._rewards.undo(reward[kept, 0]),
            next_obs[kept],
            terminated,
            ended | terminated,
            first_row=first,
        )


class _SavedFrames:
    """The frames of a replay buffer in a checkpoint, from which images are put together."""

    def __init__(self, layout: FrameLayout, reader: CheckpointReader) -> None:
        self._layout, self._reader = layout, reader
        self._added = list(reader.json(STATE)["replay"]["frames_added"])
        self._frames = []
        for image in range(len(layout.stacks)):
            names = frame_segment_names(reader.files, image)
            self._frames.append(np.concatenate([_frames_in(reader, name) for name in names]))

    def first_complete(self, columns: RowColumns, rows: np.ndarray, added: int, state: Json) -> int:
        """Check rows; return the first one, by age, all of whose frames are there."""
        try:
            columns.check(torch.from_numpy(rows), [len(frames) for frames in self._frames])
        except ValueError as error:
            raise CheckpointError(f"{self._reader.folder}: {error}") from None
        last = rows[:, columns.next_obs][:, -len(self._frames) :]
        in_order = np.roll(last, -(added % len(rows)), axis=0)
        counts = np.ascontiguousarray(in_order).view(np.int32)
        capacity = int(state["config"]["algo_kwargs"]["buffer_capacity"])
        return self._layout.first_complete(counts, self._added, capacity)

    def restore(self, columns: np.ndarray) -> np.ndarray:
        """Return observations `(n, size)` from their columns."""
        spec, rest = self._layout.observation, self._layout.rest_columns
        rows = np.zeros((len(columns), spec.size), np.float32)
        rows[:, rest] = columns[:, : len(rest)]
        numbers = np.ascontiguousarray(columns).view(np.int32)
        stacks = zip(self._layout.stacks, self._layout.positions, self._frames, strict=True)
        for stack, place, frames in stacks:
            words = np.zeros((len(rows), stack.leaf.words * WORD_BYTES), np.uint8)
            images = frames[numbers[:, place]]
            words[:, : stack.leaf.numbers] = images.reshape(len(rows), stack.leaf.numbers)
            rows[:, spec.columns(stack.leaf.name)] = words.view(np.float32)
        return rows


def _has_single_rows(reader: CheckpointReader) -> bool:
    """Whether a run with hindsight stores each transition once, because it is relabelled later."""
    return EPISODES in reader.files and "marks" in reader.shapes(EPISODES)


def _frames_in(reader: CheckpointReader, name: str) -> np.ndarray:
    frames: np.ndarray = reader.tensors(name)["frames"].numpy()
    return frames


def _read_rows(reader: CheckpointReader, name: str) -> np.ndarray:
    """All saved rows, in the order of their segment files."""
    segments = segment_names(reader.files)
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
