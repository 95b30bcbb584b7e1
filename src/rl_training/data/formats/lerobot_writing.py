"""Write recorded data in LeRobot's format v3.0, in bounded memory.

Beside LeRobot's own columns there are `next.terminated`, `next.truncated` and
`next.observation.state`, which make the written data complete: LeRobot knows one kind of end, and
it has no observation after the last action of an episode. Observations of several arrays of numbers
have a column for each, such as `observation.position`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.data.formats.lerobot_metadata import (
    ACTION,
    DATA,
    DONE,
    EPISODE,
    EPISODES,
    FRAME,
    INFO,
    META,
    OWN,
    REWARD,
    STATS,
    TASKS,
    TERMINATED,
    TRUNCATED,
    VERSION,
)
from rl_training.data.formats.lerobot_own import leaf_features, own_values
from rl_training.data.formats.moments import Moments
from rl_training.data.formats.parquet import NUMBERED_FILE, NumberedFiles
from rl_training.data.formats.recording import (
    CHUNK_ROWS,
    ProgressListener,
    Recording,
    RecordingInfo,
)
from rl_training.data.formats.stored import ACTION_TYPES, Arrays, stored_steps
from rl_training.data.leaves.columns import NEXT_OBSERVATIONS, OBSERVATIONS, leaf_key
from rl_training.errors import one_line
from rl_training.types import Json

FRAMES_PER_SECOND = 30
"""Frame rate to declare if the recorded system's is not known"""
FILES_PER_CHUNK, FILE_MEGABYTES, VIDEO_MEGABYTES = 1_000, 100, 200
EPISODES_AT_A_TIME = 500
MAX_TASK = 500
"""Most characters of the description of a task"""


def write_lerobot(
    recording: Recording,
    folder: Path,
    *,
    description: str,
    frames_per_second: int | None = None,
    provenance: Json | None = None,
    progress: ProgressListener | None = None,
) -> None:
    """Write all steps as a dataset into `folder`, which must not exist."""
    info = recording.info
    rate = frames_per_second or info.frames_per_second or FRAMES_PER_SECOND
    # From the name of a file, or from one: it may have characters that cannot be encoded.
    task = one_line(description if info.environment is None else info.environment["id"], MAX_TASK)
    (folder / META).mkdir(parents=True)
    writer = _Writer(folder, info, rate, task)
    for steps in _closed(stored_steps(recording)):
        writer.add(steps)
        if progress is not None:
            progress(writer.frames, info.max_rows)
    writer.finish()
    own = own_values(info, provenance, description)
    (folder / META / OWN).write_text(json.dumps(own, indent=2), encoding="utf-8")


class _Writer:
    """Collects the frames of episodes and writes them when there are enough."""

    def __init__(self, folder: Path, info: RecordingInfo, rate: float, task: str) -> None:
        self._folder, self._rate, self._task = folder, rate, task
        self._leaves = leaf_features(info.observation, info.name)
        self._features = _features(info)
        schema = _data_schema(self._features)
        self._data = NumberedFiles(folder / DATA, schema, FILES_PER_CHUNK)
        self._lists = NumberedFiles(
            folder / META / EPISODES, _episode_schema(self._features), FILES_PER_CHUNK
        )
        self._row_bytes = 4 * (2 * info.obs_dim + max(info.action_dim, 2) + 12)
        self._buffer: list[Arrays] = []
        self._episodes: list[Json] = []
        self._totals = {key: Moments() for key in self._features}
        self._moments: dict[str, Moments] = {}
        self.frames = self._episode = self._frame = self._waiting = 0

    def add(self, steps: Arrays) -> None:
        """Add steps; the last of them may belong to an episode that is not complete yet."""
        ends = np.flatnonzero(steps["terminals"] | steps["timeouts"]) + 1
        first = 0
        for stop in [*ends.tolist(), *([len(steps["rewards"])] if self._is_open(steps) else [])]:
            self._add_piece({key: values[first:stop] for key, values in steps.items()})
            first = stop
        if self._waiting >= CHUNK_ROWS:
            self._flush()

    def finish(self) -> None:
        """Write what is left, and the metadata of all episodes."""
        self._flush()
        self._flush_episodes()
        self._data.close()
        self._lists.close()
        _write_tasks(self._folder / META / TASKS, self._task)
        stats = {key: _statistics(moments) for key, moments in self._totals.items()}
        _write_json(self._folder / META / STATS, stats)
        about = {
            "codebase_version": VERSION,
            "robot_type": None,
            "total_episodes": self._episode,
            "total_frames": self.frames,
            "total_tasks": 1,
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": FILE_MEGABYTES,
            "video_files_size_in_mb": VIDEO_MEGABYTES,
            "fps": int(self._rate) if self._rate == int(self._rate) else self._rate,
            "splits": {"train": f"0:{self._episode}"},
            "data_path": f"{DATA}/{NUMBERED_FILE}",
            "video_path": None,
            "features": self._features,
        }
        _write_json(self._folder / META / INFO, about)

    @staticmethod
    def _is_open(steps: Arrays) -> bool:
        return bool(len(steps["rewards"])) and not (steps["terminals"][-1] or steps["timeouts"][-1])

    def _add_piece(self, steps: Arrays) -> None:
        """Add steps of one episode, up to its end or to the end of the chunk."""
        rows = len(steps["rewards"])
        if not self._frame:
            self._start_episode()
        frames = np.arange(self._frame, self._frame + rows)
        ended = steps["terminals"] | steps["timeouts"]
        columns = {
            **self._observations(steps, OBSERVATIONS, ""),
            ACTION: steps["actions"],
            REWARD: steps["rewards"],
            DONE: ended,
            TERMINATED: steps["terminals"],
            TRUNCATED: steps["timeouts"],
            **self._observations(steps, NEXT_OBSERVATIONS, "next."),
            "timestamp": (frames / self._rate).astype(np.float32),
            FRAME: frames,
            EPISODE: np.full(rows, self._episode),
            "index": np.arange(self.frames, self.frames + rows),
            "task_index": np.zeros(rows, np.int64),
        }
        for key, values in columns.items():
            self._moments[key].add(values.reshape(rows, -1))
        self._buffer.append(columns)
        self._waiting += rows
        self._frame += rows
        self.frames += rows
        if ended[-1]:
            self._finish_episode()

    def _observations(self, steps: Arrays, key: str, prefix: str) -> Arrays:
        """The columns of the leaves of observations, each a vector."""
        columns = {
            f"{prefix}{feature}": steps[leaf_key(key, leaf.name)].reshape(-1, leaf.numbers)
            for feature, leaf in self._leaves.items()
        }
        return {name: values.astype(np.float32, copy=False) for name, values in columns.items()}

    def _start_episode(self) -> None:
        """Begin a new data file if the current one is full: an episode is never split."""
        self._moments = {key: Moments() for key in self._features}
        if (self._data.rows + self._waiting) * self._row_bytes >= FILE_MEGABYTES * 2**20:
            self._flush()
            self._data.next_file()

    def _finish_episode(self) -> None:
        episode: Json = {
            "episode_index": self._episode,
            "tasks": [self._task],
            "length": self._frame,
            "dataset_from_index": self.frames - self._frame,
            "dataset_to_index": self.frames,
            "data/chunk_index": self._data.chunk,
            "data/file_index": self._data.file,
        }
        for key, moments in self._moments.items():
            self._totals[key].merge(moments)
            for name, values in _statistics(moments).items():
                episode[f"stats/{key}/{name}"] = values
        self._episodes.append(episode)
        self._episode, self._frame = self._episode + 1, 0
        if len(self._episodes) >= EPISODES_AT_A_TIME:
            self._flush_episodes()

    def _flush(self) -> None:
        if self._buffer:
            joined = {
                key: np.concatenate([columns[key] for columns in self._buffer])
                for key in self._features
            }
            self._buffer, self._waiting = [], 0
            self._data.write(joined)

    def _flush_episodes(self) -> None:
        if self._episodes:
            if self._lists.bytes >= FILE_MEGABYTES * 2**20:
                self._lists.next_file()
            for episode in self._episodes:
                episode["meta/episodes/chunk_index"] = self._lists.chunk
                episode["meta/episodes/file_index"] = self._lists.file
            self._lists.write_rows(self._episodes)
            self._episodes = []


def _features(info: RecordingInfo) -> Json:
    """The `features` of `info.json`, in the order of the columns."""

    def feature(dtype: str, size: int = 1, names: str | None = None) -> Json:
        listed = None if names is None else [f"{names}_{index}" for index in range(size)]
        return {"dtype": dtype, "shape": [size], "names": listed}

    if info.action_kind == "discrete":
        action = feature("int64")
    else:
        stored = np.dtype(ACTION_TYPES[info.action_kind]).name
        action = feature(stored, info.action_dim, "action")
    flags = {key: feature("bool") for key in (DONE, TERMINATED, TRUNCATED)}
    integers = (FRAME, EPISODE, "index", "task_index")
    leaves = leaf_features(info.observation, info.name).items()
    obs = {key: feature("float32", leaf.numbers, "observation") for key, leaf in leaves}
    return {
        **obs,
        ACTION: action,
        REWARD: feature("float32"),
        **flags,
        **{f"next.{key}": value for key, value in obs.items()},
        "timestamp": feature("float32"),
        **{key: feature("int64") for key in integers},
    }


def _data_schema(features: Json) -> Any:
    import pyarrow

    def kind(feature: Json) -> Any:
        value = pyarrow.bool_() if feature["dtype"] == "bool" else feature["dtype"]
        value = pyarrow.type_for_alias(value) if isinstance(value, str) else value
        (size,) = feature["shape"]
        return value if size == 1 else pyarrow.list_(value, size)  # as LeRobot stores them

    return pyarrow.schema([(key, kind(feature)) for key, feature in features.items()])


def _episode_schema(features: Json) -> Any:
    import pyarrow

    whole, vector = pyarrow.int64(), pyarrow.list_(pyarrow.float64())
    numbers = ("length", "dataset_from_index", "dataset_to_index")
    places = ("data/chunk_index", "data/file_index")
    own = ("meta/episodes/chunk_index", "meta/episodes/file_index")
    return pyarrow.schema(
        [
            ("episode_index", whole),
            ("tasks", pyarrow.list_(pyarrow.string())),
            *((key, whole) for key in (*numbers, *places)),
            *(
                (f"stats/{key}/{name}", pyarrow.list_(whole) if name == "count" else vector)
                for key in features
                for name in ("min", "max", "mean", "std", "count")
            ),
            *((key, whole) for key in own),
        ]
    )


def _statistics(moments: Moments) -> Json:
    ranges = moments.ranges()
    return {
        "min": ranges.low.tolist(),
        "max": ranges.high.tolist(),
        "mean": ranges.mean.tolist(),
        "std": ranges.std.tolist(),
        "count": [moments.count],
    }


def _write_tasks(path: Path, task: str) -> None:
    """Write the table of tasks, which LeRobot reads with pandas: the task is its index."""
    import pyarrow
    import pyarrow.parquet

    index = {"name": "task", "field_name": "task", "pandas_type": "unicode"}
    column = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64"}
    about = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {**column, "numpy_type": "int64", "metadata": None},
            {**index, "numpy_type": "object", "metadata": None},
        ],
        "creator": {"library": "pyarrow", "version": pyarrow.__version__},
        "pandas_version": None,
    }
    table = pyarrow.table({"task_index": pyarrow.array([0], pyarrow.int64()), "task": [task]})
    table = table.replace_schema_metadata({"pandas": json.dumps(about)})
    pyarrow.parquet.write_table(table, path)


def _write_json(path: Path, values: Json) -> None:
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")


def _closed(chunks: Iterable[Arrays]) -> Iterator[Arrays]:
    """Yield all chunks; an episode that is still open at the end of the data is truncated."""
    pending: Arrays | None = None
    for chunk in chunks:
        if not len(chunk["rewards"]):
            continue
        if pending is not None:
            yield pending
        pending = chunk
    if pending is not None:
        timeouts = pending["timeouts"].copy()
        timeouts[-1] |= not pending["terminals"][-1]
        yield {**pending, "timeouts": timeouts}
