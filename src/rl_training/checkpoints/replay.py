"""The replay buffer in a checkpoint: segments of rows and frames, and their counters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_training.checkpoints.format import (
    EPISODES,
    PRIORITIES,
    CheckpointReader,
    Content,
    frame_segment_name,
    frame_segment_names,
    segment_name,
    segment_names,
)
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.errors import CheckpointError
from rl_training.types import Json, State


@dataclass(frozen=True)
class SavedReplay:
    """A checkpoint of this run, and how much its replay buffer had received by then."""

    reader: CheckpointReader
    rows_added: int
    frames_added: Sequence[int] = ()
    """Frames of each image"""

    @classmethod
    def now(cls, reader: CheckpointReader, replay: ReplayBuffer | None, seed: int) -> SavedReplay:
        """Describe a checkpoint of what the replay buffer of a seed has now."""
        if replay is None:
            return cls(reader, 0)
        return cls(reader, replay.rows_added(seed), replay.frames_added(seed))

    @classmethod
    def read(cls, reader: CheckpointReader, saved: Json) -> SavedReplay:
        """Read the counters of a checkpoint."""
        return cls(reader, int(saved["rows_added"]), _frames_added(saved))

    def shares(self, name: str, other: SavedReplay) -> bool:
        """Whether a file of both checkpoints is one file on the disk."""
        mine, theirs = self.reader.folder / name, other.reader.folder / name
        return theirs.exists() and mine.samefile(theirs)


def replay_counters(replay: ReplayBuffer, seed_index: int) -> Json:
    """The counters of a seed's replay buffer for `state.json`."""
    frames = replay.frames_added(seed_index)
    counters: Json = {"rows_added": replay.rows_added(seed_index)}
    return counters | ({"frames_added": frames} if frames else {})


def replay_contents(
    replay: ReplayBuffer, seed_index: int, source: SavedReplay | None, neighbor: SavedReplay | None
) -> dict[str, Content]:
    """Rows and frames as segments: new ones, or links to unchanged ones of `source`.

    The new checkpoint may share no file with `neighbor`.
    """
    contents: dict[str, Content] = {}
    for name, tensors, changed in _segments(replay, source, seed_index):
        if source is not None and not changed and _may_link(source, name, neighbor):
            contents[name] = source.reader.link(name)
        else:
            contents[name] = tensors
    priorities, episodes = replay.priority_state(seed_index), replay.episode_state(seed_index)
    contents |= {PRIORITIES: priorities} if priorities else {}
    return contents | ({EPISODES: episodes} if episodes else {})


def load_replay(
    replay: ReplayBuffer, reader: CheckpointReader, saved: Json, seed_index: int
) -> None:
    """Restore the replay buffer of a seed; raise `CheckpointError` for impossible contents."""
    frames = _frames_added(saved)
    if len(frames) != len(replay.frames_added(seed_index)):
        raise ValueError(f"frames of {len(frames)} images were saved")
    for image, added in enumerate(frames):
        names = frame_segment_names(reader.files, image)
        with naming(reader.folder / frame_segment_name(image, 0)):
            parts = [reader.tensors(name)["frames"] for name in names]
            replay.load_frames(image, parts, added, seed_index)
    segments = []
    for name in segment_names(reader.files):
        segments.append(reader.tensors(name)["rows"])
        with naming(reader.folder / name):
            replay.check_rows(segments[-1], frames)
    replay.load_segments(segments, int(saved["rows_added"]), seed_index)
    if PRIORITIES in reader.files:
        with naming(reader.folder / PRIORITIES):
            replay.load_priority_state(reader.tensors(PRIORITIES), seed_index)
    if replay.relabels:
        with naming(reader.folder / EPISODES):
            replay.load_episode_state(reader.tensors(EPISODES), seed_index)


def _segments(
    replay: ReplayBuffer, source: SavedReplay | None, seed_index: int
) -> Iterator[tuple[str, State, bool]]:
    """Yield the files of a replay buffer, and whether each has changed since `source`."""
    since = None if source is None else source.rows_added
    for index, rows, changed in replay.segments(since, seed_index):
        yield segment_name(index), {"rows": rows}, changed
    for image in range(len(replay.frames_added(seed_index))):
        before = None if source is None else source.frames_added[image]
        for index, frames, changed in replay.frame_segments(image, before, seed_index):
            yield frame_segment_name(image, index), {"frames": frames}, changed


def _frames_added(saved: Json) -> list[int]:
    return [int(added) for added in saved.get("frames_added", [])]


def _may_link(source: SavedReplay, name: str, neighbor: SavedReplay | None) -> bool:
    """Whether a file of `source` exists and is not also a file of `neighbor`.

    Earlier versions linked each checkpoint to the previous one.
    """
    return source.reader.has(name) and (neighbor is None or not source.shares(name, neighbor))


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Name the file whose content raised `ValueError`."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: {error}") from None
