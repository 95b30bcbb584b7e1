"""Read datasets in LeRobot's format v3.0 from their local files, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rl_training.data.formats.lerobot_metadata import (
    ACTION,
    DONE,
    EPISODE,
    FRAME,
    IMAGES,
    INFO,
    REWARD,
    STATE,
    SUCCESS,
    TERMINATED,
    TRUNCATED,
    Folder,
    LeRobotInfo,
    data_file,
    plain_file,
    read_episodes,
    read_info,
    read_own,
)
from rl_training.data.formats.lerobot_own import OwnValues, leaf_features
from rl_training.data.formats.parquet import ParquetColumns, joined, require_pyarrow
from rl_training.data.formats.recording import RecordingInfo, Steps
from rl_training.errors import DataError, one_line, warn_user
from rl_training.observations import ObservationSpec


class LeRobotRecording:
    """A dataset in LeRobot's format, read without the package lerobot.

    LeRobot's own reader converts all frames to its cache on disk first.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        *,
        observations: Sequence[str] | None = None,
        episode_end: str | None = None,
    ) -> None:
        """`episode_end` says what the end of an episode means: a "truncation", a "termination", or
        a termination only in case of "success". If it is None, the data says so itself, or else its
        ends are truncations.
        """
        require_pyarrow(f"{name}: a LeRobot dataset")
        about = read_info(folder, name)
        self._name, self._end = name, episode_end
        action = about.features.get(ACTION)
        if action is None or not action.is_vector:
            raise DataError(f"{name}: has no feature 'action' that is a vector of numbers")
        if episode_end == "success" and SUCCESS not in about.features:
            raise DataError(f"{name}: episode_end = 'success': has no feature {SUCCESS!r}")
        is_one = action.is_integer and action.shape == (1,)
        own = OwnValues.read(read_own(folder, name), action.shape[0], is_one, name)
        self._leaves = own.observation if observations is None else None
        if self._leaves is None:
            self._observations = _observation_features(about, observations, name)
        else:
            self._observations = _described_features(about, self._leaves, name)
        self._sizes = self._columns(about)
        self._episodes = read_episodes(folder, about, name)
        self._files = self._open_files(folder, about)
        self._starts = np.concatenate([[0], self._episodes.ends[:-1]])
        self.info = RecordingInfo(
            name,
            "lerobot",
            obs_dim=sum(self._sizes[key] for key in self._observations),
            action_dim=own.choices if own.action_kind == "discrete" else action.shape[0],
            action_kind=own.action_kind,
            max_rows=about.frames,
            action_low=own.action_low,
            action_high=own.action_high,
            action_shape=own.action_shape,
            action_start=own.action_start,
            environment=own.environment,
            reference_scores=own.reference_scores,
            frames_per_second=about.frames_per_second,
            provenance=own.provenance,
            given_observation=self._leaves,
            lacks_last_observations=not self._has_next and self._may_terminate(about),
        )

    def chunks(self) -> Iterator[Steps]:
        pending: _Frames | None = None
        for frames in self._frames():
            if pending is not None:
                yield pending.steps(frames)
            pending = frames
        if pending is not None:
            yield pending.steps(None)

    def _frames(self) -> Iterator[_Frames]:
        first = 0
        for file in self._files:
            for columns in file.batches(self._sizes):
                if len(columns[ACTION]):
                    yield self._checked(columns, first)
                    first += len(columns[ACTION])

    def _checked(self, columns: dict[str, np.ndarray], first: int) -> _Frames:
        """Find the ends of episodes in a batch, and check that its frames are in order."""
        numbers = np.arange(first, first + len(columns[ACTION]))
        ends = self._episodes.ends
        episode = np.searchsorted(ends, numbers, side="right")
        for key, expected in (
            (EPISODE, self._episodes.indices[episode]),
            (FRAME, numbers - self._starts[episode]),
        ):
            if key in columns and not np.array_equal(columns[key][:, 0], expected):
                row = int(np.flatnonzero(columns[key][:, 0] != expected)[0])
                raise DataError(
                    f"{self._name}: {key}[{first + row}] is {columns[key][row, 0]}, but the list "
                    f"of episodes says {expected[row]}; the dataset is damaged"
                )
        last = numbers + 1 == ends[episode]
        flags = {
            key: _flags(columns[key][:, 0], f"{self._name}: {key}", first)
            for key in (DONE, TERMINATED, TRUNCATED, SUCCESS)
            if key in columns
        }
        terminated = self._terminations(flags, last)
        ended = last | terminated
        for key in (DONE, TRUNCATED):
            ended |= flags.get(key, False)
        following = [f"next.{key}" for key in self._observations]
        return _Frames(
            obs=self._joined(columns, self._observations),
            action=columns[ACTION],
            reward=columns[REWARD][:, 0] if REWARD in columns else np.zeros(len(last), np.float32),
            next_obs=self._joined(columns, following) if self._has_next else None,
            terminated=terminated,
            ended=ended,
            first_row=first,
        )

    def _joined(self, columns: dict[str, np.ndarray], keys: Sequence[str]) -> np.ndarray:
        vectors = joined([columns[key] for key in keys])
        if self._leaves is None:
            return vectors
        with np.errstate(over="ignore"):  # values out of range become infinite, and are refused
            return vectors.astype(np.float32, copy=False)

    def _terminations(self, flags: dict[str, np.ndarray], last: np.ndarray) -> np.ndarray:
        if self._end == "termination":
            return flags.get(DONE, last)
        if self._end == "success":
            return flags[SUCCESS]
        if self._end is None and TERMINATED in flags:
            return flags[TERMINATED]
        if self._end is None and TRUNCATED in flags:
            return np.asarray(flags.get(DONE, last) & ~flags[TRUNCATED])
        return np.zeros(len(last), np.bool_)

    @property
    def _has_next(self) -> bool:
        """Whether there is a next observation for each frame."""
        return all(f"next.{key}" in self._sizes for key in self._observations)

    def _may_terminate(self, about: LeRobotInfo) -> bool:
        if self._end is not None:
            return self._end in ("termination", "success")
        return TERMINATED in about.features or TRUNCATED in about.features

    def _columns(self, about: LeRobotInfo) -> dict[str, int]:
        """The number of components of each column to read."""
        following = [f"next.{key}" for key in self._observations]
        sizes = {
            key: about.features[key].shape[0]
            for key in (*self._observations, ACTION, *following)
            if key in about.features and about.features[key].is_vector
        }
        for key, size in zip(following, map(sizes.get, self._observations), strict=True):
            if sizes.get(key, size) != size:
                raise DataError(f"{self._name}: {key} has {sizes[key]} components, not {size}")
        for key in (REWARD, DONE, TERMINATED, TRUNCATED, SUCCESS, EPISODE, FRAME):
            if key in about.features:
                if about.features[key].shape != (1,) or not about.features[key].is_vector:
                    raise DataError(f"{self._name}: {key} must be one number for each frame")
                sizes[key] = 1
        if EPISODE not in sizes:
            raise DataError(f"{self._name}: {INFO} has no feature {EPISODE!r}")
        if REWARD not in sizes:
            warn_user(
                f"{self._name}: has no rewards ({REWARD}); all rewards are 0, which is enough for "
                "behavior cloning only"
            )
        return sizes

    def _open_files(self, folder: Folder, about: LeRobotInfo) -> list[ParquetColumns]:
        paths = [
            "/".join(data_file(about.data_path, chunk, file, self._name))
            for chunk, file in self._episodes.files
        ]
        files = [
            ParquetColumns(partial(plain_file, folder, path, self._name), f"{self._name}: {path}")
            for path in paths
        ]
        found = sum(file.rows for file in files)
        if found != about.frames or len(set(paths)) != len(paths):
            raise DataError(
                f"{self._name}: its data files have {found:,} frames, but {INFO} declares "
                f"{about.frames:,}; the dataset is incomplete or damaged"
            )
        for file in files:
            file.check(self._sizes)
        return files


@dataclass(frozen=True)
class _Frames:
    """A batch of frames, whose last next observation may be in the next batch."""

    obs: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    next_obs: np.ndarray | None
    terminated: np.ndarray
    ended: np.ndarray
    first_row: int

    @property
    def kept(self) -> np.ndarray:
        """Which steps have a known next observation or terminate."""
        return np.asarray(self.terminated | ~self.ended)

    def steps(self, following: _Frames | None) -> Steps:
        """Return the steps of these frames; `following` is the next batch."""
        ended, next_obs, kept = self.ended, self.next_obs, None
        if next_obs is None:
            # At the end of an episode this is a placeholder, which is not used.
            after = self.obs[-1:] if following is None else following.obs[:1]
            next_obs = np.concatenate([self.obs[1:], after])
            kept = self.kept
            later = kept[1:] if following is None else np.append(kept[1:], following.kept[0])
            ended = ended.copy()
            ended[: len(later)] |= ~later  # the step before a dropped one ends its episode
        return Steps(
            self.obs,
            self.action,
            self.reward,
            next_obs,
            self.terminated,
            ended,
            first_row=self.first_row,
            kept=kept,
        )


def _observation_features(
    about: LeRobotInfo, chosen: Sequence[str] | None, name: str
) -> tuple[str, ...]:
    """Return the features to read as observations, and warn about those that are ignored."""
    available = {k: f for k, f in about.features.items() if k.startswith("observation.")}
    vectors = [key for key, feature in available.items() if feature.is_vector]
    images = [key for key, feature in available.items() if feature.dtype in IMAGES]
    if chosen is None:
        if STATE not in vectors:
            others = f"set observations to some of {_listed(vectors)}" if vectors else ""
            only = "it has only images, which are not supported yet" if images else "it has none"
            raise DataError(f"{name}: has no vector {STATE!r}; {others or only}")
        ignored = [key for key in available if key != STATE]
        if ignored:
            hint = "; to read more vectors, set observations" if len(vectors) > 1 else ""
            kinds = " (images are not supported yet)" if images else ""
            warn_user(f"{name}: reads {STATE} and ignores {_listed(ignored)}{kinds}{hint}")
        return (STATE,)
    for key in chosen:
        if key in images:
            raise DataError(f"{name}: {key} holds images, which are not supported yet")
        if key not in about.features or not about.features[key].is_vector:
            raise DataError(f"{name}: has no vector {key!r}; it has {_listed(vectors) or 'none'}")
    return tuple(chosen)


def _described_features(
    about: LeRobotInfo, observation: ObservationSpec, name: str
) -> tuple[str, ...]:
    """Return the features that hold the leaves of observations that this package wrote."""
    features = leaf_features(observation, name)
    for key, leaf in features.items():
        feature = about.features.get(key)
        if feature is None or not feature.is_vector or feature.shape != (leaf.numbers,):
            raise DataError(f"{name}: {key} in {INFO} is not a vector of {leaf.numbers} numbers")
    return tuple(features)


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return one_line(", ".join(keys[:8]), 300) + more


def _flags(values: np.ndarray, name: str, first: int) -> np.ndarray:
    """Return zeros and ones as bools."""
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(f"{name}[{first + row}] is {values[row]}; it must be 0 or 1")
    return np.asarray(values != 0)
