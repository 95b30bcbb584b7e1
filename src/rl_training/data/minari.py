"""Minari data sets, read episode by episode from the files that Minari keeps them in."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.data.hdf5 import check_in_file, numbers_at, open_file, told_of
from rl_training.data.recording import RecordingInfo, Steps
from rl_training.data.sections import MINARI_ID
from rl_training.errors import DataError
from rl_training.types import Json
from rl_training.validation import suggestion

METADATA, DATA = "metadata.json", "main_data.hdf5"
MAX_METADATA_BYTES = 16 * 2**20


def minari_root() -> Path:
    """The folder that Minari keeps data sets in."""
    folder = os.environ.get("MINARI_DATASETS_PATH")
    return Path(folder) if folder else Path.home() / ".minari" / "datasets"


def check_minari_id(dataset_id: str) -> None:
    """Refuse what is no id, and with it every path that would leave Minari's folder."""
    if not re.fullmatch(MINARI_ID.strip("^$"), dataset_id):
        raise DataError(f"{dataset_id!r}: must be a Minari id such as D4RL/door/human-v2")


def local_minari_ids(root: Path | None = None) -> list[str]:
    """The data sets that are in Minari's folder."""
    root = root or minari_root()
    found = (path.parent.parent for path in root.glob(f"**/data/{METADATA}"))
    return sorted(path.relative_to(root).as_posix() for path in found)


def open_minari(dataset_id: str, *, download: bool = True) -> MinariRecording:
    """A local data set, or one that is downloaded first."""
    check_minari_id(dataset_id)
    folder = minari_root() / dataset_id
    if not (folder / "data").is_dir():
        _download(dataset_id) if download else _raise_missing(dataset_id, "")
    return MinariRecording(folder, dataset_id)


def read_metadata(folder: Path, name: str) -> Json:
    """What Minari wrote about a data set in `folder`."""
    path = folder / "data" / METADATA
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise DataError(f"{name}: {path} is too large")
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{name}: is incomplete: {path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{name}: {path} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise DataError(f"{name}: {path} is damaged")
    return values


def reference_scores(metadata: Json) -> tuple[float, float] | None:
    """The returns that Minari's scores 0 and 1 stand for in this data set."""
    low, high = metadata.get("ref_min_score"), metadata.get("ref_max_score")
    if not isinstance(low, int | float) or not isinstance(high, int | float) or low >= high:
        return None
    return float(low), float(high)


class MinariRecording:
    """The steps of a data set in Minari's HDF5 format."""

    def __init__(self, folder: Path, name: str) -> None:
        metadata = read_metadata(folder, name)
        if metadata.get("data_format", "hdf5") != "hdf5":
            raise DataError(
                f"{name}: is stored as {metadata['data_format']!r}; only hdf5 can be read"
            )
        self._name = name
        self._file = open_file(folder / "data" / DATA)
        self._episodes = self._find_episodes()
        obs_dim = _space(metadata, "observation_space", name)["size"]
        actions = _space(metadata, "action_space", name)
        self._discrete, self._start = actions["discrete"], actions.get("start", 0)
        self.info = RecordingInfo(
            name,
            "minari",
            obs_dim=obs_dim,
            action_dim=actions["size"],
            discrete=self._discrete,
            max_rows=sum(self._steps_of(episode) for episode in self._episodes),
            action_low=actions.get("low"),
            action_high=actions.get("high"),
            environment=_environment(metadata),
            reference_scores=reference_scores(metadata),
        )
        if not self.info.max_rows:
            raise DataError(f"{name}: is empty: it holds no step")

    def chunks(self) -> Iterator[Steps]:
        for episode in self._episodes:
            if self._steps_of(episode):
                yield self._read(episode)

    def _find_episodes(self) -> list[str]:
        with told_of(self._name):
            names = [key for key in self._file if re.fullmatch(r"episode_\d+", key)]
            for name in names:
                check_in_file(self._file, name, self._name)
        return sorted(names, key=lambda name: int(name.removeprefix("episode_")))

    def _steps_of(self, episode: str) -> int:
        with told_of(self._name):
            shape = numbers_at(self._file[episode], "rewards", f"{self._name}: {episode}").shape
        return int(shape[0]) if shape else 0

    def _read(self, episode: str) -> Steps:
        name, number = f"{self._name}: {episode}", self._steps_of(episode)
        with told_of(name):
            group = self._file[episode]
            arrays = {
                key: numbers_at(group, key, name)
                for key in ("observations", "actions", "rewards", "terminations", "truncations")
            }
            expected = {
                "observations": (number + 1, self.info.obs_dim),
                "actions": (number,) if self._discrete else (number, self.info.action_dim),
                "rewards": (number,),
                "terminations": (number,),
                "truncations": (number,),
            }
            for key, shape in expected.items():
                if arrays[key].shape != shape:
                    raise DataError(f"{name}/{key} has shape {arrays[key].shape}; expected {shape}")
            obs, action, reward, terminated, truncated = (arrays[key][()] for key in expected)
        terminated = terminated != 0
        ended = terminated | (truncated != 0)
        ended[-1] = True  # one whose recording was cut short bootstraps from where it stood
        return Steps(
            obs[:-1],
            action.reshape(number, -1) - (self._start if self._discrete else 0),
            reward,
            obs[1:],
            terminated,
            ended,
            place=f"{episode}/",
        )


def _space(metadata: Json, key: str, name: str) -> Json:
    """Size, and bounds where there are any, of a space as Minari writes it."""
    try:
        space = json.loads(metadata[key])
        if space["type"] == "Discrete" and key == "action_space":
            return {"discrete": True, "size": int(space["n"]), "start": int(space["start"])}
        if space["type"] != "Box" or len(space["shape"]) != 1:
            shape = f" of shape {space['shape']}" if "shape" in space else ""
            raise DataError(
                f"{name}: the {key.replace('_', ' ')} is {space['type']}{shape}; only flat "
                "vectors (a one-dimensional Box) are supported"
            )
        (size,) = space["shape"]
        low, high = (np.asarray(space[end], np.float32) for end in ("low", "high"))
        if low.shape != (size,) or high.shape != (size,):
            raise ValueError(f"bounds of shape {low.shape}")
    except KeyError as error:
        raise DataError(f"{name}: its metadata has no {error}") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name}: its metadata's {key} cannot be read ({error})") from None
    return {"discrete": False, "size": int(size), "low": low, "high": high}


def _environment(metadata: Json) -> Json | None:
    """The environment's id and arguments, of those parts of its spec that name no code."""
    try:
        spec = json.loads(metadata["env_spec"])
        return {"id": str(spec["id"]), "kwargs": dict(spec.get("kwargs") or {})}
    except (KeyError, TypeError, ValueError):
        return None


def _download(dataset_id: str) -> None:
    try:
        import minari
    except ImportError:
        _raise_missing(dataset_id, 'to download it, run `pip install "rl-training[offline]"`')
    try:
        minari.download_dataset(dataset_id)
    except Exception as error:  # whatever the network and its libraries come up with
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
        _raise_missing(dataset_id, f"it could not be downloaded ({reason})")


def _raise_missing(dataset_id: str, reason: str) -> Any:
    local = local_minari_ids()
    known = suggestion(dataset_id, local) or f"; local ones: {', '.join(local[:20]) or 'none'}"
    because = f"; {reason}" if reason else ""
    raise DataError(
        f"Minari data set {dataset_id!r}: not in {minari_root()}{because}{known}"
    ) from None
