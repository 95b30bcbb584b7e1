"""Read Minari datasets from their local files, episode by episode."""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.data.formats.hdf5 import (
    check_in_file,
    hdf5_errors,
    numbers_at,
    open_file,
    require_stored,
)
from rl_training.data.formats.recording import RecordingInfo, Steps
from rl_training.data.formats.stored import PROVENANCE, provenance_of
from rl_training.data.leaves.description import ALL_LEAVES, LeafChoice
from rl_training.data.leaves.minari_arrays import holds_files, read_observations
from rl_training.data.leaves.minari_spaces import read_actions, read_leaves
from rl_training.errors import DataError
from rl_training.observations import ObservationSpec
from rl_training.types import Json
from rl_training.validation import suggestion

MINARI_ID = r"^([A-Za-z0-9_][A-Za-z0-9_-]*/)*[A-Za-z0-9_][A-Za-z0-9_-]*-v[0-9]+$"
"""Ids contain no dot, so that no id can refer to a path outside the dataset folder"""

METADATA, DATA = "metadata.json", "main_data.hdf5"
MAX_METADATA_BYTES = 16 * 2**20
EPISODES_PER_OPENING = 64
CONNECT_SECONDS = 5.0
"""Time to wait for a connection before a download starts"""
SPELLING = 0.7
"""Similarity from which two words count as the same word, misspelled"""
EPISODE_ARRAYS = ("actions", "rewards", "terminations", "truncations")


def minari_root() -> Path:
    """The folder in which Minari stores datasets."""
    folder = os.environ.get("MINARI_DATASETS_PATH")
    return Path(folder) if folder else Path.home() / ".minari" / "datasets"


def check_minari_id(dataset_id: str) -> None:
    """Raise a `DataError` for an invalid id, such as a path outside Minari's folder."""
    if not re.fullmatch(MINARI_ID, dataset_id):
        raise DataError(f"{dataset_id!r}: must be a Minari id such as D4RL/door/human-v2")


def local_minari_ids(root: Path | None = None) -> list[str]:
    """Ids of the datasets in Minari's folder."""
    root = root or minari_root()
    found = (path.parent.parent for path in root.glob(f"**/data/{METADATA}"))
    return sorted(path.relative_to(root).as_posix() for path in found)


def open_minari(
    dataset_id: str, *, download: bool = True, leaves: LeafChoice = ALL_LEAVES
) -> MinariRecording:
    """Open a dataset; download it first if it is not local."""
    check_minari_id(dataset_id)
    folder = minari_root() / dataset_id
    if not (folder / "data").is_dir():
        if not download:
            _raise_missing(dataset_id, "")
        if meant := _misspelled(dataset_id, local_minari_ids()):
            raise DataError(
                f"Minari dataset {dataset_id!r}: not found in {minari_root()}; did you mean "
                f"{meant!r}? To download a dataset with exactly this id, run "
                f"`minari download {dataset_id}`"
            )
        _download(dataset_id)
    return MinariRecording(folder, dataset_id, leaves)


def read_metadata(folder: Path, name: str) -> Json:
    """Read the metadata of the dataset in `folder`."""
    path = folder / "data" / METADATA
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise DataError(f"{name}: {path} is too large")
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{name}: is incomplete; {path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{name}: {path} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise DataError(f"{name}: {path} is damaged")
    return values


def reference_scores(metadata: Json) -> tuple[float, float] | None:
    """The returns that correspond to Minari's scores 0 and 1 for this dataset."""
    low, high = metadata.get("ref_min_score"), metadata.get("ref_max_score")
    if not isinstance(low, int | float) or not isinstance(high, int | float) or low >= high:
        return None
    return float(low), float(high)


def local_reference_scores(dataset_id: str) -> tuple[float, float] | None:
    """The `reference_scores` of the dataset with this id; None if it is not local."""
    try:
        check_minari_id(dataset_id)
        return reference_scores(read_metadata(minari_root() / dataset_id, dataset_id))
    except DataError:
        return None


def local_environment(dataset_id: object) -> Json | None:
    """The environment in which a local dataset was recorded; None if it is not known."""
    try:
        check_minari_id(str(dataset_id))
        return _environment(read_metadata(minari_root() / str(dataset_id), str(dataset_id)))
    except DataError:
        return None


class MinariRecording:
    """A dataset in Minari's HDF5 format.

    Minari's own reader is not used because it is not safe for untrusted files: it follows links to
    other files, accepts ids that are paths outside its folder, and creates the environment from the
    metadata if a space is missing, which imports the module named there. It also reads all infos,
    and its memory grows with the number of episodes. `benchmarks/readers.py` compares the two.
    """

    def __init__(self, folder: Path, name: str, leaves: LeafChoice = ALL_LEAVES) -> None:
        metadata = read_metadata(folder, name)
        if metadata.get("data_format", "hdf5") != "hdf5":
            raise DataError(
                f"{name}: is stored as {metadata['data_format']!r}; only hdf5 can be read"
            )
        self._name, self._path = name, folder / "data" / DATA
        self._episodes = self._find_episodes()
        self._leaves = read_leaves(metadata, name, leaves)
        self._observation = ObservationSpec(tuple(each.leaf for each in self._leaves))
        actions = read_actions(metadata, name)
        self._action_shape: tuple[int, ...] = actions["shape"]
        self.info = RecordingInfo(
            name,
            "minari",
            obs_dim=self._observation.size,
            action_dim=actions["size"],
            action_kind=actions["kind"],
            max_rows=_total_steps(metadata, name),
            action_low=actions.get("low"),
            action_high=actions.get("high"),
            action_shape=actions["given_shape"],
            action_start=actions.get("start"),
            environment=_environment(metadata),
            reference_scores=reference_scores(metadata),
            provenance=provenance_of(metadata.get(PROVENANCE)),
            given_observation=None if self._observation.is_vector else self._observation,
            lossy_images=self._has_files(),
        )

    def chunks(self) -> Iterator[Steps]:
        count = 0
        for first in range(0, len(self._episodes), EPISODES_PER_OPENING):
            # HDF5 caches the metadata of every episode until the file is closed.
            with open_file(self._path) as file:
                for episode in self._episodes[first : first + EPISODES_PER_OPENING]:
                    steps = self._read(file, episode)
                    count += len(steps.reward)
                    if count > self.info.max_rows:
                        raise DataError(
                            f"{self._name}: contains more than the {self.info.max_rows} steps "
                            "that its metadata declares"
                        )
                    if len(steps.reward):
                        yield steps

    def _find_episodes(self) -> list[str]:
        with hdf5_errors(self._name), open_file(self._path) as file:
            names = [key for key in file if re.fullmatch(r"episode_\d+", key)]
        return sorted(names, key=lambda name: int(name.removeprefix("episode_")))

    def _has_files(self) -> bool:
        """Whether images are stored as JPEG files, in the first episode and so in all."""
        images = [each for each in self._leaves if each.leaf.kind == "image"]
        if not images or not self._episodes:
            return False
        name = f"{self._name}: {self._episodes[0]}"
        with hdf5_errors(name), open_file(self._path) as file:
            check_in_file(file, self._episodes[0], self._name)
            return any(holds_files(file[self._episodes[0]], each, name) for each in images)

    def _read(self, file: Any, episode: str) -> Steps:
        name = f"{self._name}: {episode}"
        with hdf5_errors(name):
            check_in_file(file, episode, self._name)
            group = file[episode]
            arrays = {key: numbers_at(group, key, name) for key in EPISODE_ARRAYS}
            number = arrays["rewards"].shape[0] if arrays["rewards"].shape else 0
            action = (number, *self._action_shape)
            expected = [action, *[(number,)] * 3]
            for (key, array), shape in zip(arrays.items(), expected, strict=True):
                if array.shape != shape:
                    raise DataError(f"{name}/{key} has shape {array.shape}; expected {shape}")
                require_stored(array, f"{name}/{key}")
            obs = self._read_observations(group, number + 1, name)
            action, reward, terminated, truncated = (array[()] for array in arrays.values())
        terminated = terminated != 0
        ended = terminated | (truncated != 0)
        ended[-1:] = True  # an incomplete episode counts as truncated
        return Steps(
            obs[:-1],
            action.reshape(number, -1),
            reward,
            obs[1:],
            terminated,
            ended,
            place=f"{episode}/",
        )

    def _read_observations(self, group: Any, number: int, name: str) -> np.ndarray:
        if not self._observation.is_vector:
            return read_observations(group, self._leaves, self._observation, number, name)
        array, expected = numbers_at(group, "observations", name), (number, self._observation.size)
        if array.shape != expected:
            raise DataError(f"{name}/observations has shape {array.shape}; expected {expected}")
        require_stored(array, f"{name}/observations")
        return np.asarray(array[()])


def _total_steps(metadata: Json, name: str) -> int:
    steps = metadata.get("total_steps")
    if type(steps) is not int or steps < 0:
        raise DataError(f"{name}: total_steps in its metadata is {steps!r:.80}; it must be a count")
    if not steps:
        raise DataError(f"{name}: contains no steps")
    return steps


def _environment(metadata: Json) -> Json | None:
    """The environment of the data. Its spec stays text; nothing in it is executed."""
    try:
        spec = json.loads(metadata["env_spec"])
        kwargs = dict(spec.get("kwargs") or {})
        return {"id": str(spec["id"]), "kwargs": kwargs, "spec": metadata["env_spec"]}
    except (KeyError, TypeError, ValueError):
        return None


def _misspelled(dataset_id: str, known: list[str]) -> str | None:
    """Return the known id that differs only in the spelling of a word; versions are the same."""
    words = re.split("[/-]", dataset_id)
    for other in known:
        others = re.split("[/-]", other)
        if len(words) == len(others) and words[-1] == others[-1]:
            ratios = [
                difflib.SequenceMatcher(None, word.lower(), its.lower()).ratio()
                for word, its in zip(words, others, strict=True)
            ]
            if min(ratios) >= SPELLING:
                return other
    return None


def _download(dataset_id: str) -> None:
    try:
        import minari
    except ImportError:
        _raise_missing(dataset_id, 'to download it, run `pip install "rl-training[offline]"`')
    if reason := _unreachable():
        _raise_missing(dataset_id, f"download failed ({reason})")
    try:
        minari.download_dataset(dataset_id)
    except Exception as error:  # network libraries raise many types
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
        _raise_missing(dataset_id, f"download failed ({reason})")


def _unreachable() -> str | None:
    """Return why the server cannot be reached. Its own library retries for half a minute."""
    remote = os.environ.get("MINARI_REMOTE", "hf://")
    if not remote.startswith("hf://") or urllib.request.getproxies():
        return None
    address = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), CONNECT_SECONDS).close()
    except OSError as error:
        return f"{address.hostname}: {error.strerror or error}"
    return None


def _raise_missing(dataset_id: str, reason: str) -> Any:
    local = local_minari_ids()
    known = suggestion(dataset_id, local) or f"; local datasets: {', '.join(local[:20]) or 'none'}"
    because = f"; {reason}" if reason else ""
    raise DataError(
        f"Minari dataset {dataset_id!r}: not found in {minari_root()}{because}{known}"
    ) from None
