"""Read and check the metadata of a dataset in LeRobot's format v3.0.

A dataset is a folder: `meta/info.json` describes the columns, `meta/episodes` lists the episodes,
and `data` holds one row for each frame. All of it may come from a stranger.
"""

from __future__ import annotations

import json
import re
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from rl_training.data.formats.parquet import MAX_COMPONENTS, ParquetColumns
from rl_training.errors import CheckpointError, DataError, brief, one_line
from rl_training.types import Json

META, INFO, EPISODES, DATA = "meta", "info.json", "episodes", "data"
TASKS, STATS = "tasks.parquet", "stats.json"
OWN = "rl_training.json"
"""What this package knows and LeRobot's files do not say, in `meta`"""
VERSION = "v3.0"
STATE, ACTION, REWARD, DONE = "observation.state", "action", "next.reward", "next.done"
SUCCESS, TERMINATED, TRUNCATED = "next.success", "next.terminated", "next.truncated"
EPISODE, FRAME = "episode_index", "frame_index"
IMAGES = ("image", "video")

MAX_JSON_BYTES = 16 * 2**20
MAX_FILES = 100_000
MAX_RATE = 1e9
_EPISODE_COLUMNS = (
    "episode_index",
    "dataset_from_index",
    "dataset_to_index",
    "data/chunk_index",
    "data/file_index",
)
_PLACEHOLDER = re.compile(r"\{(chunk_index|file_index)(?::0?(\d)d)?\}")
_NUMBER = re.compile(r"bool|u?int(8|16|32|64)|float(32|64)")


class Folder(Protocol):
    """A folder whose contents are never reached through a link."""

    path: Path

    def inner(self, name: str) -> Folder: ...

    def entries(self) -> dict[str, int]: ...

    def mode(self, name: str) -> int | None: ...

    def open(self, name: str) -> IO[bytes]: ...

    def read(self, name: str, limit: int) -> bytes: ...


@dataclass(frozen=True)
class Feature:
    """A column of the data."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_vector(self) -> bool:
        return len(self.shape) == 1 and _NUMBER.fullmatch(self.dtype) is not None

    @property
    def is_integer(self) -> bool:
        return "int" in self.dtype


@dataclass(frozen=True)
class LeRobotInfo:
    """The checked contents of `info.json`."""

    features: dict[str, Feature]
    frames: int
    episodes: int
    frames_per_second: float
    data_path: str


@dataclass(frozen=True)
class EpisodeList:
    """The episodes in the order of their rows, and the files that hold them."""

    indices: np.ndarray
    """The `episode_index` of each episode"""
    ends: np.ndarray
    """Exclusive end row of each episode"""
    files: list[tuple[int, int]]
    """Chunk index and file index of each data file, in the order of their rows"""


def is_lerobot(path: Path) -> bool:
    """Whether a folder looks like a dataset in LeRobot's format, of any version."""
    return (path / META / INFO).is_file()


def read_info(folder: Folder, name: str) -> LeRobotInfo:
    """Read `meta/info.json`."""
    values = _read_json(folder, INFO, name)
    version = values.get("codebase_version")
    if not isinstance(version, str) or not re.fullmatch(r"v3\.\d{1,3}", version):
        raise DataError(
            f"{name}: has version {_shown(version)} of LeRobot's format; only v3.0 can be read "
            "(LeRobot itself can convert v2.1 to v3.0)"
        )
    path = values.get("data_path")
    if not isinstance(path, str):
        raise DataError(f"{name}: data_path in {INFO} is {_shown(path)}; it must be text")
    rate = values.get("fps")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < MAX_RATE:
        raise DataError(f"{name}: fps in {INFO} is {_shown(rate)}; it must be positive")
    frames, episodes = (_count(values, key, name) for key in ("total_frames", "total_episodes"))
    if not frames or not episodes:
        raise DataError(f"{name}: contains no steps")
    return LeRobotInfo(_features(values, name), frames, episodes, float(rate), path)


def read_own(folder: Folder, name: str) -> Json:
    """Read what this package added when it wrote the dataset; empty for other datasets."""
    present = plain_folder(folder, (META,), name).mode(OWN) is not None
    return _read_json(folder, OWN, name) if present else {}


def read_episodes(folder: Folder, info: LeRobotInfo, name: str) -> EpisodeList:
    """Read `meta/episodes`, and check that its episodes follow each other without gaps."""
    tables = [
        ParquetColumns(partial(plain_file, folder, path, name), f"{name}: {path}")
        for path in _episode_files(folder, name)
    ]
    listed = sum(table.rows for table in tables)
    if listed != info.episodes:
        raise DataError(
            f"{name}: {META}/{EPISODES} lists {listed:,} episodes, but {INFO} declares "
            f"{info.episodes:,}; the dataset is incomplete or damaged"
        )
    sizes = dict.fromkeys(_EPISODE_COLUMNS, 1)
    for table in tables:
        table.check(sizes)
    batches = [batch for table in tables for batch in table.batches(sizes)]
    columns = []
    for key in _EPISODE_COLUMNS:
        values = np.concatenate([batch[key][:, 0] for batch in batches])
        if values.dtype.kind not in "iu" or (values < 0).any():
            raise DataError(f"{name}: {key} in {META}/{EPISODES} must be a number from 0")
        columns.append(values.astype(np.int64))
    order = np.argsort(columns[1], kind="stable")
    indices, firsts, ends, chunks, files = (values[order] for values in columns)
    if (
        (firsts != np.concatenate([[0], ends[:-1]])).any()
        or (ends <= firsts).any()
        or ends[-1] != info.frames
        or len(np.unique(indices)) != len(indices)
    ):
        raise DataError(
            f"{name}: the episodes in {META}/{EPISODES} do not add up to the {info.frames:,} "
            f"frames that {INFO} declares; the dataset is incomplete or damaged"
        )
    places = dict.fromkeys(zip(chunks.tolist(), files.tolist(), strict=True))
    return EpisodeList(indices, ends, list(places))


def data_file(template: str, chunk: int, file: int, name: str) -> tuple[str, ...]:
    """Return the parts of a data file's path inside the dataset.

    Only the two placeholders of LeRobot are replaced: Python's own formatting could read the
    attributes of objects, or make a text of any length.
    """
    numbers = {"chunk_index": chunk, "file_index": file}
    path = _PLACEHOLDER.sub(
        lambda found: f"{numbers[found[1]]:0{int(found[2] or 0)}d}", template[:1000]
    )
    parts = tuple(path.split("/"))
    if (
        any(part in ("", ".", "..") for part in parts)
        or not path.isprintable()
        or re.search(r"[{}\\:]", path)
    ):
        raise DataError(
            f"{name}: data_path in {INFO} is {_shown(template)}; it must be a path inside the "
            "dataset, such as data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        )
    return parts


def plain_file(folder: Folder, path: str, name: str) -> IO[bytes]:
    """Open a file inside the dataset; raise a `DataError` for a link or a missing file."""
    *parents, last = path.split("/")
    parent = plain_folder(folder, tuple(parents), name)
    _refuse_link(parent, last, name)
    try:
        return parent.open(last)
    except FileNotFoundError:
        raise DataError(f"{name}: is incomplete; {path} is missing") from None
    except (CheckpointError, OSError) as error:
        raise DataError(f"{name}: {path} cannot be opened ({brief(error)})") from None


def plain_folder(folder: Folder, parts: tuple[str, ...], name: str) -> Folder:
    """Return a folder inside the dataset; raise a `DataError` for a link."""
    for part in parts:
        _refuse_link(folder, part, name)
        folder = folder.inner(part)
    return folder


def _refuse_link(folder: Folder, entry: str, name: str) -> None:
    try:
        mode = folder.mode(entry)
    except (CheckpointError, OSError) as error:
        raise DataError(f"{name}: cannot be read ({brief(error)})") from None
    if mode is not None and stat.S_ISLNK(mode):
        raise DataError(
            f"{name}: {one_line(entry, 100)} is a link, and links are not followed; copy the "
            "dataset with `cp -rL`, or download it with `hf download --local-dir`"
        )


def _episode_files(folder: Folder, name: str) -> list[str]:
    episodes = plain_folder(folder, (META, EPISODES), name)
    found = []
    for chunk in _numbered(episodes, r"chunk-(\d{1,9})", name):
        inner = plain_folder(episodes, (chunk,), name)
        files = _numbered(inner, r"file-(\d{1,9})\.parquet", name)
        found += [f"{META}/{EPISODES}/{chunk}/{file}" for file in files]
        if len(found) > MAX_FILES:
            raise DataError(f"{name}: has more than {MAX_FILES:,} files")
    if not found:
        raise DataError(f"{name}: is incomplete; {META}/{EPISODES} has no files")
    return found


def _numbered(folder: Folder, pattern: str, name: str) -> list[str]:
    try:
        matches = [match for entry in folder.entries() if (match := re.fullmatch(pattern, entry))]
    except (CheckpointError, OSError) as error:
        raise DataError(f"{name}: cannot be read ({brief(error)})") from None
    return [match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


def _read_json(folder: Folder, file: str, name: str) -> Json:
    meta = plain_folder(folder, (META,), name)
    _refuse_link(meta, file, name)
    try:
        values = json.loads(meta.read(file, MAX_JSON_BYTES))
    except (CheckpointError, OSError, ValueError, RecursionError) as error:
        raise DataError(f"{name}: {META}/{file} cannot be read ({brief(error)})") from None
    if not isinstance(values, dict):
        raise DataError(f"{name}: {META}/{file} is damaged")
    return values


def _features(values: Json, name: str) -> dict[str, Feature]:
    listed, features = values.get("features"), {}
    if not isinstance(listed, dict):
        raise DataError(f"{name}: {INFO} does not describe any features")
    for key, feature in listed.items():
        about = feature if isinstance(feature, dict) else {}
        dtype, shape = about.get("dtype"), about.get("shape")
        if (
            not isinstance(dtype, str)
            or not isinstance(shape, list)
            or not all(type(length) is int and length > 0 for length in shape)
        ):
            raise DataError(f"{name}: feature {_shown(key)} in {INFO} has no valid dtype and shape")
        if len(shape) == 1 and shape[0] > MAX_COMPONENTS:
            raise DataError(
                f"{name}: feature {_shown(key)} has {shape[0]:,} components; at most "
                f"{MAX_COMPONENTS:,} are supported"
            )
        features[key] = Feature(dtype, tuple(shape))
    return features


def _count(values: Json, key: str, name: str) -> int:
    number = values.get(key)
    if type(number) is not int or not 0 <= number < 2**48:
        raise DataError(f"{name}: {key} in {INFO} is {_shown(number)}; it must be a count")
    return number


def _shown(value: Any) -> str:
    return one_line(repr(value), 80)
