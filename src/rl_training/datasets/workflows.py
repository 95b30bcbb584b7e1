"""Record, describe and convert datasets; the functions behind `rl-training dataset`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_training.checkpoints.format import MANIFEST, POLICY
from rl_training.checkpoints.loading import (
    MODEL_FILES,
    find_checkpoint,
    find_run,
    load_policy,
    saved_factory,
)
from rl_training.config import read_wrappers
from rl_training.data.formats.hdf5 import open_hdf5
from rl_training.data.formats.lerobot_metadata import is_lerobot
from rl_training.data.formats.minari import (
    METADATA,
    MINARI_ID,
    MinariRecording,
    minari_root,
    open_minari,
)
from rl_training.data.formats.npz import open_npz
from rl_training.data.formats.recording import ProgressListener, Recording
from rl_training.data.formats.writing import (
    FORMATS,
    SUFFIXES,
    Format,
    check_destination,
    write_recording,
)
from rl_training.data.leaves.description import LeafChoice
from rl_training.data.leaves.reordering import chosen_leaves
from rl_training.data.packing import warn_about_clipping
from rl_training.data.sections import DataSection, read_sections
from rl_training.data.summary import Summary, summarize
from rl_training.data.transforms import ClippedRecording
from rl_training.datasets.opening import open_lerobot, open_section
from rl_training.datasets.picture import draw_summary
from rl_training.datasets.recipes import record_policy, record_random
from rl_training.datasets.replay import open_replay
from rl_training.envs import EnvironmentFactory, environment_factory
from rl_training.errors import CheckpointError, DataError, UserError, warn_user
from rl_training.observations import ObservationSpec
from rl_training.types import Json
from rl_training.validation import short, user_path

MAX_SEED = 2**32
RecordedSource = str | Path | Mapping[str, Any] | DataSection
"""A file, a folder, a Minari id, or a section of a config"""


def record_dataset(
    destination: str | Path | None,
    steps: int,
    *,
    checkpoint: str | Path | None = None,
    env_id: str | None = None,
    env_kwargs: Json | None = None,
    wrappers: Sequence[Any] = (),
    action_range: tuple[float, float] | None = None,
    num_envs: int | None = None,
    seed: int = 0,
    noise: float = 0.1,
    data_format: Format | None = None,
    dataset_id: str | None = None,
    frames_per_second: int | None = None,
    observation_keys: Sequence[str] | None = None,
    progress: ProgressListener | None = None,
) -> Path:
    """Record steps of a checkpoint's policy, or of random actions, and write them to disk.

    `wrappers` are put around the environment, `action_range` limits its actions, and
    `observation_keys` select leaves of its observations, as in a config. A checkpoint's policy is
    recorded in what it was trained with instead. For a Minari dataset, `destination` is a folder,
    by default Minari's own; for a LeRobot dataset, it is the dataset's own folder, and
    `frames_per_second` is its frame rate (default 30). Returns the path of the data.
    """
    for key, given in (
        ("wrappers", wrappers),
        ("action_range", action_range),
        ("observation_keys", observation_keys),
    ):
        if checkpoint is not None and given:
            raise UserError(f"{key}: a policy is recorded in the {key} that it was trained with")
    if action_range is not None and not -math.inf < action_range[0] < action_range[1] < math.inf:
        raise UserError(
            f"action_range = {list(action_range)}: must be two numbers, low before high"
        )
    for name, value in (("steps", steps), ("num_envs", num_envs)):
        if value is not None and value < 1:
            raise UserError(f"{name} = {value}: must be at least 1")
    if not 0 <= seed < MAX_SEED:
        raise UserError(f"seed = {seed}: must be between 0 and {MAX_SEED - 1}")
    if not 0 <= noise <= 1:
        raise UserError(f"noise = {noise}: must be between 0 and 1")
    target, chosen = choose_destination(destination, data_format, dataset_id, frames_per_second)
    recording: Recording
    if checkpoint is None:
        settings = [section.model_dump() for section in read_wrappers(wrappers)]
        factory = environment_factory(
            env_id,
            env_kwargs or {},
            None,
            wrappers=settings,
            observation_keys=observation_keys,
            action_range=action_range,
        )
        recording = record_random(factory, steps, seed, num_envs=num_envs, progress=progress)
        how = f"Uniformly random actions, seed {seed}."
    else:
        reader = find_checkpoint(checkpoint, names=MODEL_FILES)
        factory = _environment_of(reader.json(POLICY), checkpoint, env_id, env_kwargs)
        recording = record_policy(
            factory,
            load_policy(reader),
            steps,
            seed,
            noise=noise,
            name=reader.folder.name,
            num_envs=num_envs,
            progress=progress,
        )
        how = f"Actions of a trained policy with noise {noise:g}, seed {seed}."
    return write_recording(
        recording,
        target,
        chosen,
        dataset_id=dataset_id,
        description=how,
        frames_per_second=frames_per_second,
    )


def describe_dataset(
    source: RecordedSource,
    *,
    picture: str | Path | None = None,
    observation_keys: Sequence[str] | None = None,
    progress: ProgressListener | None = None,
) -> Summary:
    """Read a dataset and return its statistics; write a plot to `picture` if given."""
    summary = summarize(open_source(source, observation_keys), progress)
    if picture is not None:
        try:
            draw_summary(summary, Path(picture))
        except (OSError, ValueError) as error:  # matplotlib: an unknown file extension
            raise UserError(f"{picture}: cannot be written ({error})") from None
    return summary


def convert_dataset(
    source: RecordedSource,
    destination: str | Path | None,
    *,
    data_format: Format | None = None,
    dataset_id: str | None = None,
    clip_actions: bool = False,
    frames_per_second: int | None = None,
    observation_keys: Sequence[str] | None = None,
    progress: ProgressListener | None = None,
) -> Path:
    """Write a dataset in another format and return the path of the data.

    `observation_keys` select leaves of the observations (None: all). With `clip_actions`, actions
    are clipped to the bounds of the data's own action space.
    """
    target, chosen = choose_destination(destination, data_format, dataset_id, frames_per_second)
    recording = open_source(source, observation_keys)
    how = f"Converted from {recording.info.kind} {Path(recording.info.name).name}."
    if clip_actions:
        recording = ClippedRecording(recording)
    path = write_recording(
        recording,
        target,
        chosen,
        dataset_id=dataset_id,
        description=how,
        provenance=recording.info.provenance,
        frames_per_second=frames_per_second,
        progress=progress,
    )
    if recording.info.lacks_last_observations:
        warn_user(
            f"{recording.info.name}: has no observations after its terminal steps; {path.name} has "
            "placeholders there. They do not matter to learning, except for replay.hindsight, "
            "which must not be used with it"
        )
    if isinstance(recording, ClippedRecording):
        warn_about_clipping(recording.info.name, recording.clipped, recording.components)
    return path


def dataset_section(source: str, replaced: Any = None) -> Json:
    """Return the `dataset` section of a config that reads a file, a folder or a Minari id.

    Options of the section that it replaces, such as those for rewards, are kept.
    """
    if isinstance(replaced, list):
        raise UserError(f"dataset {source!r}: cannot replace several datasets; edit the config")
    path = user_path(source)
    if path.suffix in SUFFIXES:
        section = {"kind": SUFFIXES[path.suffix], "path": source}
    elif path.is_dir() and (find_run(path) is not None or (path / MANIFEST).is_file()):
        section = {"kind": "run", "path": source}
    elif is_lerobot(path):
        section = {"kind": "lerobot", "path": source}
    elif re.fullmatch(MINARI_ID, source):
        section = {"kind": "minari", "id": source}
    else:
        raise DataError(
            f"dataset {source!r}: must be a run folder, the folder of a LeRobot dataset, a Minari "
            f"id such as D4RL/door/human-v2 or a file whose name ends in {', '.join(SUFFIXES)}"
        )
    options = replaced if isinstance(replaced, dict) else {}
    return {**{key: options[key] for key in DataSection.model_fields if key in options}, **section}


def open_source(
    source: RecordedSource,
    observation_keys: Sequence[str] | None = None,
    *,
    expected: ObservationSpec | None = None,
) -> Recording:
    """Open recorded data: a file, a Minari id, or the folder of a run, checkpoint or dataset.

    A mapping, or a text such as `{kind: lerobot, path: FOLDER, episode_end: termination}`, is read
    as a section of a config. `observation_keys` select leaves of the observations (None: all), and
    `expected` is what they are if the data does not say.
    """
    leaves = LeafChoice(observation_keys, expected)
    if isinstance(source, str) and source.lstrip().startswith("{"):
        try:
            source = yaml.safe_load(source)
        except yaml.YAMLError:
            raise UserError(f"{short(source)}: cannot be read as a mapping") from None
    if isinstance(source, Mapping | DataSection):
        return _open_given_section(source, leaves)
    path = user_path(source)
    if path.is_file():
        opener = {"npz": open_npz, "hdf5": open_hdf5}.get(SUFFIXES.get(path.suffix, ""))
        if opener is None:
            raise DataError(f"{path}: not a data file; its name must end in {', '.join(SUFFIXES)}")
        return opener(path, leaves=leaves)
    if path.is_dir():
        if (path / "data" / METADATA).is_file():
            return MinariRecording(path, str(path), leaves)
        if find_run(path) is not None or (path / MANIFEST).is_file():
            return chosen_leaves(open_replay(path), leaves)
        if is_lerobot(path):
            return chosen_leaves(open_lerobot(path), leaves)
        if not re.fullmatch(MINARI_ID, str(source)):
            raise DataError(f"{path}: contains no Minari dataset, LeRobot dataset or run")
    if path.suffix in SUFFIXES:
        raise DataError(f"{path}: no such file")
    try:
        return open_minari(str(source), leaves=leaves)
    except DataError as error:
        raise DataError(f"{source}: no such file or run folder; as a Minari id: {error}") from None


def _open_given_section(source: Mapping[str, Any] | DataSection, leaves: LeafChoice) -> Recording:
    section = read_sections(source)
    assert isinstance(section, DataSection)
    for key, field in DataSection.model_fields.items():
        if key != "kind" and getattr(section, key) != field.default:
            raise UserError(f"{key}: is an option for training; it has no effect on stored data")
    return open_section(section, leaves=leaves)


def choose_destination(
    destination: str | Path | None,
    data_format: Format | None,
    dataset_id: str | None,
    frames_per_second: int | None = None,
) -> tuple[Path, Format]:
    """Choose the path and format, and check that they can be written."""
    path = None if destination is None else user_path(destination)
    if data_format is None:
        by_suffix = None if path is None else SUFFIXES.get(path.suffix)
        data_format = "minari" if dataset_id is not None else by_suffix
    if dataset_id is not None and data_format != "minari":
        raise UserError(f"id = {dataset_id!r}: only Minari datasets have an id")
    if path is None and data_format != "minari":
        raise UserError(
            f"no output; give the name of a file that ends in {', '.join(SUFFIXES)}, of a LeRobot "
            "folder with its format, or a Minari id"
        )
    if data_format is None:
        raise UserError(
            f"{destination}: unknown format; use a file name that ends in {', '.join(SUFFIXES)}, "
            f"or give a format ({', '.join(FORMATS)})"
        )
    if path is None:
        path = minari_root()
    check_destination(path, data_format, dataset_id, frames_per_second)
    return path, data_format


def _environment_of(
    policy: Json, checkpoint: str | Path, env_id: str | None, env_kwargs: Json | None
) -> EnvironmentFactory:
    environment: dict[str, Any] = policy.get("environment") or {}
    if env_id is None and environment.get("id") is None:
        raise CheckpointError(
            f"{checkpoint}: was trained in a custom environment "
            f"({environment.get('label')}); give the id of the environment to record in"
        )
    if env_id is not None:
        environment = {**environment, "id": env_id, "kwargs": env_kwargs or {}}
    return saved_factory(environment)
