"""Record, describe and convert datasets; the functions behind `rl-training dataset`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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
from rl_training.data.formats.moments import Ranges
from rl_training.data.formats.npz import open_npz
from rl_training.data.formats.recording import ProgressListener, Recording
from rl_training.data.formats.writing import (
    FORMATS,
    SUFFIXES,
    Format,
    check_destination,
    write_recording,
)
from rl_training.data.packing import warn_about_clipping
from rl_training.data.sections import DataSection, read_sections
from rl_training.data.summary import Summary, summarize
from rl_training.data.transforms import ClippedRecording
from rl_training.datasets.opening import open_lerobot, open_section
from rl_training.datasets.picture import draw_summary
from rl_training.datasets.recipes import record_policy, record_random
from rl_training.datasets.replay import open_replay
from rl_training.envs import EnvironmentFactory, environment_factory
from rl_training.errors import CheckpointError, DataError, UserError, one_line
from rl_training.types import Json
from rl_training.validation import short, user_path

SHOWN_COMPONENTS = 12
LONGEST_NAME = 200
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
    progress: ProgressListener | None = None,
) -> Path:
    """Record steps of a checkpoint's policy, or of random actions, and write them to disk.

    `wrappers` are put around the environment, and `action_range` limits its actions, as in a
    config. A checkpoint's policy is recorded in what it was trained with instead. For a Minari
    dataset, `destination` is a folder, by default Minari's own; for a LeRobot dataset, it is the
    dataset's own folder, and `frames_per_second` is its frame rate (default 30). Returns the path
    of the data.
    """
    for key, given in (("wrappers", wrappers), ("action_range", action_range)):
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
            env_id, env_kwargs or {}, None, wrappers=settings, action_range=action_range
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
    progress: ProgressListener | None = None,
) -> Summary:
    """Read a dataset and return its statistics; write a plot to `picture` if given."""
    summary = summarize(open_source(source), progress)
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
    progress: ProgressListener | None = None,
) -> Path:
    """Write a dataset in another format and return the path of the data.

    With `clip_actions`, actions are clipped to the bounds of the data's own action space.
    """
    target, chosen = choose_destination(destination, data_format, dataset_id, frames_per_second)
    recording = open_source(source)
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


def open_source(source: RecordedSource) -> Recording:
    """Open recorded data: a file, a Minari id, or the folder of a run, checkpoint or dataset.

    A mapping, or a text such as `{kind: lerobot, path: FOLDER, episode_end: termination}`, is read
    as a section of a config.
    """
    if isinstance(source, str) and source.lstrip().startswith("{"):
        try:
            source = yaml.safe_load(source)
        except yaml.YAMLError:
            raise UserError(f"{short(source)}: cannot be read as a mapping") from None
    if isinstance(source, Mapping | DataSection):
        return _open_given_section(source)
    path = user_path(source)
    if path.is_file():
        opener = {"npz": open_npz, "hdf5": open_hdf5}.get(SUFFIXES.get(path.suffix, ""))
        if opener is None:
            raise DataError(f"{path}: not a data file; its name must end in {', '.join(SUFFIXES)}")
        return opener(path)
    if path.is_dir():
        if (path / "data" / METADATA).is_file():
            return MinariRecording(path, str(path))
        if find_run(path) is not None or (path / MANIFEST).is_file():
            return open_replay(path)
        if is_lerobot(path):
            return open_lerobot(path)
        if not re.fullmatch(MINARI_ID, str(source)):
            raise DataError(f"{path}: contains no Minari dataset, LeRobot dataset or run")
    if path.suffix in SUFFIXES:
        raise DataError(f"{path}: no such file")
    try:
        return open_minari(str(source))
    except DataError as error:
        raise DataError(f"{source}: no such file or run folder; as a Minari id: {error}") from None


def _open_given_section(source: Mapping[str, Any] | DataSection) -> Recording:
    section = read_sections(source)
    assert isinstance(section, DataSection)
    for key, field in DataSection.model_fields.items():
        if key != "kind" and getattr(section, key) != field.default:
            raise UserError(f"{key}: is an option for training; it has no effect on stored data")
    return open_section(section)


def summary_lines(summary: Summary) -> Iterator[str]:
    """Format a summary for the terminal, in lines of at most 80 columns."""
    info, returns, lengths = summary.info, summary.returns, summary.lengths
    yield f"{info.name} ({info.kind})"
    if info.environment is not None:
        yield f"environment   {one_line(str(info.environment['id']), LONGEST_NAME)}"
    if info.provenance is not None:
        yield f"made by       {_made_by(info.provenance)}"
    dropped = f" ({summary.dropped:,} without a next observation not counted)"
    yield f"steps         {summary.steps:,}{dropped if summary.dropped else ''}"
    cut = len(returns) - summary.terminated
    yield f"episodes      {len(returns):,}: {summary.terminated:,} terminated, {cut:,} truncated"
    yield f"return        {_spread(returns)}"
    yield f"length        {_spread(lengths)}"
    if info.reference_scores is not None:
        low, high = info.reference_scores
        score = 100 * (returns.mean() - low) / (high - low)
        yield f"score         mean {score:.1f} (Minari's scale: 0 at {low:g}, 100 at {high:g})"
    yield f"observations  {_numbers(info.obs_dim)}"
    yield from _range_lines(summary.observations)
    if info.action_kind == "discrete":
        choices = f"{info.action_dim} discrete actions" if info.action_dim else "integers"
        yield f"actions       {choices}"
        return
    if not info.is_continuous:
        yield f"actions       {_numbers(info.action_dim)}, {info.action_kind}"
        return
    bounds = ""
    if summary.at_bounds is not None:
        bounds = f"; {summary.at_bounds:.1%} of them within 1 % of a bound"
    units = ", scaled to [-1, 1]" if info.actions_scaled else ""
    yield f"actions       {_numbers(info.action_dim)}{units}{bounds}"
    if summary.beyond_bounds:
        components = f"{summary.beyond_bounds:,} of {summary.steps * info.action_dim:,} components"
        yield f"  {components} are out of bounds (clip_actions)"
    yield from _range_lines(summary.actions)


def _numbers(count: int) -> str:
    return "1 number" if count == 1 else f"{count} numbers"


def _made_by(provenance: Json) -> str:
    """Describe in one line how data was made from other data; the values are from a file."""
    command, source, fingerprint = (
        str(provenance.get(key, "?")) for key in ("command", "source", "source_sha256")
    )
    return one_line(f"{command} of {source} ({fingerprint:.12})", 60)


def _spread(values: np.ndarray) -> str:
    return (
        f"mean {values.mean():.2f} ± {values.std():.2f}, median {np.median(values):.2f}, "
        f"{values.min():.2f} to {values.max():.2f}"
    )


def _range_lines(ranges: Ranges) -> Iterator[str]:
    yield f"  {'':>4} {'lowest':>12} {'mean':>12} {'deviation':>12} {'highest':>12}"
    columns = zip(ranges.low, ranges.mean, ranges.std, ranges.high, strict=True)
    for index, numbers in enumerate(columns):
        if index == SHOWN_COMPONENTS and len(ranges.low) > SHOWN_COMPONENTS + 1:
            yield f"  {'...':>4} and {len(ranges.low) - index} more"
            return
        yield f"  {index:>4} " + " ".join(f"{number:>12.4g}" for number in numbers)


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
