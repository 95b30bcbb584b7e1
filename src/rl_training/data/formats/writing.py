"""Write recorded data as `.npz` or HDF5 in D4RL's layout, or as a Minari or LeRobot dataset.

Files are written under a temporary name and then renamed, so that the final file is complete.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from rl_training.data.formats.columns import BOUNDS, CHOICES
from rl_training.data.formats.hdf5 import require_h5py
from rl_training.data.formats.minari import DATA, METADATA, check_minari_id
from rl_training.data.formats.parquet import require_pyarrow
from rl_training.data.formats.recording import (
    ProgressListener,
    Recording,
    RecordingInfo,
    episode_lengths,
)
from rl_training.data.formats.stored import PROVENANCE, Arrays, stored_steps, stored_types
from rl_training.data.leaves.columns import NEXT_OBSERVATIONS, OBSERVATIONS, leaf_key
from rl_training.data.leaves.description import DESCRIPTION, write_description
from rl_training.data.leaves.minari_arrays import write_observations
from rl_training.data.leaves.minari_spaces import minari_leaves, minari_space
from rl_training.errors import DataError
from rl_training.types import Json

Format = Literal["npz", "hdf5", "minari", "lerobot"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES: dict[str, Format] = {".npz": "npz", ".hdf5": "hdf5", ".h5": "hdf5"}
MINARI_VERSION = "0.5.3"
"""Version to write into the metadata if Minari is not installed"""


def write_recording(
    recording: Recording,
    destination: Path,
    data_format: Format,
    *,
    dataset_id: str | None = None,
    description: str = "",
    provenance: Json | None = None,
    frames_per_second: int | None = None,
    progress: ProgressListener | None = None,
) -> Path:
    """Write all steps to a file, as LeRobot dataset, or as Minari dataset `dataset_id` in a folder.

    `provenance` says how the data was made from other data; it is stored with the data.
    Returns the path of the data.
    """
    check_destination(destination, data_format, dataset_id, frames_per_second)
    if data_format == "lerobot":
        from rl_training.data.formats.lerobot_writing import write_lerobot

        with _moved_into_place(destination) as temporary:
            write_lerobot(
                recording,
                temporary,
                description=description,
                frames_per_second=frames_per_second,
                provenance=provenance,
                progress=progress,
            )
        return destination
    if data_format != "npz":
        _check_names(recording.info)
    arrays = collect(recording, progress)
    if data_format == "minari":
        assert dataset_id is not None
        return _write_minari(
            arrays, recording.info, destination, dataset_id, description, provenance
        )
    with _moved_into_place(destination) as temporary:
        if data_format == "npz":
            if provenance is not None:
                arrays[PROVENANCE] = np.asarray(json.dumps(provenance))
            if recording.info.given_observation is not None:
                arrays[DESCRIPTION] = np.asarray(write_description(recording.info.observation))
            with temporary.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        else:
            _write_hdf5(arrays, recording.info, temporary, provenance)
    return destination


def check_destination(
    destination: Path,
    data_format: Format,
    dataset_id: str | None,
    frames_per_second: int | None = None,
) -> None:
    """Raise a `DataError` if the destination cannot be written, before any data is recorded."""
    if frames_per_second is not None and data_format != "lerobot":
        raise DataError(f"frames per second = {frames_per_second}: only LeRobot datasets have them")
    if frames_per_second is not None and frames_per_second < 1:
        raise DataError(f"frames per second = {frames_per_second}: must be at least 1")
    if data_format == "minari":
        if dataset_id is None:
            raise DataError("a Minari dataset needs an id, such as my-data/pendulum/random-v0")
        check_minari_id(dataset_id)
        if "data" in dataset_id.split("/"):
            raise DataError(f"{dataset_id!r}: no part of a Minari id may be 'data'")
        if len(dataset_id.rpartition("/")[0]) == 1:
            raise DataError(
                f"{dataset_id!r}: Minari refuses namespaces of one letter; use a longer one, such "
                "as my-data/pendulum/random-v0"
            )
        require_h5py("Minari datasets")
        destination = destination / dataset_id
    elif data_format == "hdf5":
        require_h5py("HDF5 files")
    elif data_format == "lerobot":
        require_pyarrow("a LeRobot dataset")
    if destination.exists():
        raise DataError(f"{destination}: already exists; choose another name")


def collect(recording: Recording, progress: ProgressListener | None = None) -> Arrays:
    """Read all steps of a recording into D4RL's arrays; actions in the environment's units."""
    info, count = recording.info, 0
    rows = info.max_rows
    arrays: Arrays = {
        key: np.empty((rows, *shape), dtype) for key, (shape, dtype) in stored_types(info).items()
    }
    for steps in stored_steps(recording):
        first, count = count, count + len(steps["rewards"])
        for key, values in steps.items():
            arrays[key][first:count] = values
        if progress is not None:
            progress(count, rows)
    arrays = {key: values[:count] for key, values in arrays.items()}
    if info.action_kind == "discrete":
        arrays["actions"] = arrays["actions"][:, 0]
        if info.action_start is not None and info.action_dim:
            arrays[CHOICES] = np.array([info.action_start, info.action_dim])
        return arrays
    shape = _action_shape(info)
    arrays["actions"] = arrays["actions"].reshape(count, *shape)
    if info.action_low is not None and info.action_high is not None:
        # Bounds that are integers say that the actions between them are choices.
        bound_type = np.int64 if info.action_kind == "multi_discrete" else np.float32
        arrays["action_low"] = info.action_low.astype(bound_type).reshape(shape)
        arrays["action_high"] = info.action_high.astype(bound_type).reshape(shape)
    return arrays


def _action_shape(info: RecordingInfo) -> tuple[int, ...]:
    return (info.action_dim,) if info.action_shape is None else info.action_shape


def _check_names(info: RecordingInfo) -> None:
    """Raise a `DataError` for names that HDF5 would change."""
    for leaf in info.observation.leaves:
        if "." in leaf.path or "\0" in leaf.name:
            raise DataError(
                f"{info.name}: {leaf.name!r} cannot be a name in HDF5; write a .npz file"
            )


def _write_hdf5(arrays: Arrays, info: RecordingInfo, path: Path, provenance: Json | None) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for key, values in arrays.items():
            if key in (*BOUNDS, CHOICES):
                file.attrs[key] = values
            else:
                file.create_dataset(key, data=values)
        if info.given_observation is not None:
            # Not an attribute, which HDF5 limits to 64 KiB.
            file[DESCRIPTION] = np.bytes_(write_description(info.given_observation))
        if info.environment is not None:
            file.attrs["env_id"] = info.environment["id"]
        if provenance is not None:
            file.attrs[PROVENANCE] = json.dumps(provenance)


def _write_minari(
    arrays: Arrays,
    info: RecordingInfo,
    root: Path,
    dataset_id: str,
    description: str,
    provenance: Json | None,
) -> Path:
    import h5py

    destination, leaves = root / dataset_id, minari_leaves(info.observation)
    ended = arrays["terminals"] | arrays["timeouts"]
    ended[-1] = True
    ends = np.flatnonzero(ended) + 1
    with _moved_into_place(destination, parent=root) as temporary:
        data = temporary / "data"
        data.mkdir(parents=True)
        with h5py.File(data / DATA, "w", track_order=True) as file:
            for number, (last, length) in enumerate(zip(ends, episode_lengths(ends), strict=True)):
                group = file.create_group(f"episode_{number}")
                group.attrs.update({"id": number, "total_steps": int(length)})
                rows = slice(last - length, last)
                write_observations(group, leaves, _episode_observations(arrays, info, rows))
                group["actions"] = arrays["actions"][rows]
                group["rewards"] = arrays["rewards"][rows]
                group["terminations"] = arrays["terminals"][rows]
                group["truncations"] = (ended & ~arrays["terminals"])[rows]
        about: Json = {
            "dataset_id": dataset_id,
            "total_episodes": len(ends),
            "total_steps": int(ends[-1]),
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "observation_space": json.dumps(minari_space(info.observation)),
            "action_space": json.dumps(_action_space(arrays, info)),
            "dataset_size": round((data / DATA).stat().st_size / 1e6, 1),
            "minari_version": _minari_version(),
            "description": description,
        }
        if provenance is not None:
            about[PROVENANCE] = provenance
        if info.environment is not None and info.environment.get("spec"):
            about["env_spec"] = info.environment["spec"]
        if info.reference_scores is not None:
            about["ref_min_score"], about["ref_max_score"] = info.reference_scores
        (data / METADATA).write_text(json.dumps(about))
    return destination


def _episode_observations(arrays: Arrays, info: RecordingInfo, rows: slice) -> Arrays:
    """The leaves of the observations of an episode, with the one after its last action."""
    found = {}
    for leaf in info.observation.leaves:
        obs = arrays[leaf_key(OBSERVATIONS, leaf.name)][rows]
        final = arrays[leaf_key(NEXT_OBSERVATIONS, leaf.name)][rows.stop - 1 : rows.stop]
        found[leaf.name] = np.concatenate([obs, final])
    return found


def _action_space(arrays: Mapping[str, np.ndarray], info: RecordingInfo) -> Json:
    if info.is_continuous:
        return _box(_action_shape(info), info.action_low, info.action_high)
    if info.action_kind == "multi_binary":
        return {"type": "MultiBinary", "n": list(_action_shape(info))}
    if info.action_kind == "multi_discrete":
        bounds = (np.asarray(bound, np.int64) for bound in (info.action_low, info.action_high))
        low, high = (bound.reshape(_action_shape(info)) for bound in bounds)
        nvec, start = (high - low + 1).tolist(), low.tolist()
        return {"type": "MultiDiscrete", "dtype": "int64", "nvec": nvec, "start": start}
    start = info.action_start
    if start is None:  # actions usually count from 0
        start = min(0, int(arrays["actions"].min()))
    choices = info.action_dim or int(arrays["actions"].max()) + 1 - start
    return {"type": "Discrete", "dtype": "int64", "start": start, "n": choices}


def _box(shape: tuple[int, ...], low: np.ndarray | None, high: np.ndarray | None) -> Json:
    lowest = np.full(shape, -np.inf) if low is None else low.reshape(shape)
    highest = np.full(shape, np.inf) if high is None else high.reshape(shape)
    return {
        "type": "Box",
        "dtype": "float32",
        "shape": list(shape),
        "low": lowest.tolist(),
        "high": highest.tolist(),
    }


def _minari_version() -> str:
    try:
        return metadata.version("minari")
    except metadata.PackageNotFoundError:
        return MINARI_VERSION


@contextlib.contextmanager
def _moved_into_place(destination: Path, parent: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `destination` if no error is raised."""
    parent = parent or destination.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary = parent / f".tmp-{uuid.uuid4().hex}{destination.suffix}"
        try:
            yield temporary
            destination.parent.mkdir(parents=True, exist_ok=True)
            if destination.exists():
                raise DataError(f"{destination}: already exists; choose another name")
            temporary.rename(destination)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{destination}: cannot be written ({error})") from None
