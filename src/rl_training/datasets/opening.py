"""Build an `OfflineDataset` from the `dataset` sections of a config or from arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.loading import MODEL_FILES, find_checkpoint, load_policy
from rl_training.data.formats.columns import array_recording
from rl_training.data.formats.hdf5 import open_hdf5
from rl_training.data.formats.minari import open_minari
from rl_training.data.formats.npz import open_npz
from rl_training.data.formats.recording import ProgressListener, Recording
from rl_training.data.hindsight.relabelling import Hindsight
from rl_training.data.hindsight.sampled import SampledHindsight
from rl_training.data.leaves.description import ALL_LEAVES, LeafChoice
from rl_training.data.leaves.reordering import chosen_leaves
from rl_training.data.loading import DatasetPart, RewardOptions, load_dataset
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.sections import (
    DataSection,
    EpisodeEnd,
    Hdf5Section,
    LeRobotSection,
    MinariSection,
    NpzSection,
    PolicySection,
    RandomSection,
    RunSection,
    read_sections,
)
from rl_training.datasets.recipes import record_policy, record_random
from rl_training.datasets.replay import open_replay
from rl_training.envs import EnvironmentFactory
from rl_training.errors import ConfigError, DataError
from rl_training.observations import NumberTypes
from rl_training.types import ReturnAfterTruncation, SpaceInfo
from rl_training.validation import user_path

DatasetSource = DataSection | Mapping[str, Any]
"""A section, its plain values, or arrays in memory named as in D4RL's layout"""

Arrays = Mapping[str, Any]
"""Recorded data in memory, named as in D4RL's layout"""


def are_arrays(dataset: Any) -> bool:
    """Whether this is data in memory; a section of a config has a `kind` instead."""
    return isinstance(dataset, Mapping) and "kind" not in dataset


def build_dataset(
    sources: DatasetSource | Sequence[DatasetSource],
    *,
    factory: EnvironmentFactory | None = None,
    spaces: SpaceInfo | None = None,
    gamma: float = 0.99,
    n_step: int = 1,
    next_actions: bool = False,
    returns: ReturnAfterTruncation | None = None,
    action_chunk: int = 1,
    hindsight: Hindsight | SampledHindsight | None = None,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    progress: ProgressListener | None = None,
    observation_keys: Sequence[str] | None = None,
    number_types: NumberTypes | None = None,
) -> OfflineDataset:
    """Open one or more datasets, check them, and load them onto the device.

    `factory` creates the environments for recipes. `spaces` are the environment's; if None, the
    spaces of the first dataset are used. With `next_actions`, batches have a `next_action`, and
    with `returns` the return of the episode. With an `action_chunk`, rows are windows of that many
    steps. With `hindsight`, transitions are repeated with other goals, or get them when they are
    sampled. `observation_keys` select leaves of the observations (None: all). If `spaces` is
    None, `number_types` are the types in which their numbers are stored (None: those of the data).
    """
    several = [sources] if isinstance(sources, DataSection | Mapping) else list(sources)
    leaves = LeafChoice(observation_keys, None if spaces is None else spaces.observation)
    parts = [open_part(source, factory, leaves) for source in several]
    return load_dataset(
        parts,
        spaces,
        number_types=number_types,
        gamma=gamma,
        n_step=n_step,
        next_actions=next_actions,
        returns=returns,
        action_chunk=action_chunk,
        hindsight=hindsight,
        device=device,
        generator=generator,
        progress=progress,
        environment="the environment" if factory is None else factory.label,
    )


def open_section(
    section: DataSection,
    factory: EnvironmentFactory | None = None,
    leaves: LeafChoice = ALL_LEAVES,
) -> Recording:
    """Open the recorded data of a section; a recipe records its data here."""
    if isinstance(section, NpzSection):
        return open_npz(section.path, max_episode_steps=section.max_episode_steps, leaves=leaves)
    if isinstance(section, Hdf5Section):
        return open_hdf5(section.path, max_episode_steps=section.max_episode_steps, leaves=leaves)
    if isinstance(section, MinariSection):
        return open_minari(section.id, leaves=leaves)
    if isinstance(section, LeRobotSection):
        recording = open_lerobot(
            section.path, observations=section.observations, episode_end=section.episode_end
        )
        return chosen_leaves(recording, leaves)
    if isinstance(section, RunSection):
        return chosen_leaves(open_replay(section.path), leaves)
    if factory is None:
        raise ConfigError(f"dataset.kind = {section.kind!r}: needs an environment (env_id)")
    if isinstance(section, RandomSection):
        return record_random(factory, section.size, section.seed)
    assert isinstance(section, PolicySection)
    policy = load_policy(find_checkpoint(section.checkpoint, names=MODEL_FILES))
    return record_policy(
        factory,
        policy,
        section.size,
        section.seed,
        noise=section.noise,
        name=Path(section.checkpoint).name,
    )


def open_lerobot(
    path: str | Path,
    *,
    observations: Sequence[str] | None = None,
    episode_end: EpisodeEnd | None = None,
) -> Recording:
    """Open a folder in LeRobot's dataset format v3.0 as a recording.

    `observations` are the features that form the observation vector, by default
    `observation.state`. `episode_end` says what `next.done` means in data that does not tell
    terminations from truncations; by default, a truncation.
    """
    from rl_training.data.formats.lerobot import LeRobotRecording
    from rl_training.data.formats.lerobot_metadata import is_lerobot

    folder = user_path(path)
    if not is_lerobot(folder):
        raise DataError(f"{folder}: is not a LeRobot dataset; it has no file meta/info.json")
    return LeRobotRecording(
        PlainFolder(folder), str(folder), observations=observations, episode_end=episode_end
    )


def open_part(
    source: DatasetSource,
    factory: EnvironmentFactory | None = None,
    leaves: LeafChoice = ALL_LEAVES,
) -> DatasetPart:
    """Open the data of a section or of arrays in memory, with its options."""
    if not isinstance(source, DataSection):
        if "kind" not in source:
            return DatasetPart(array_recording(source, leaves=leaves))
        section = read_sections(source)
        assert isinstance(section, DataSection)
        source = section
    bounds = None
    if source.action_low is not None and source.action_high is not None:
        bounds = (np.asarray(source.action_low), np.asarray(source.action_high))
    recording = open_section(source, factory, leaves)
    if source.top_episodes is not None:
        from rl_training.datasets.subsets import SubsetRecording, best_episodes, read_episodes

        table = read_episodes(recording)
        chosen = best_episodes(table, top=source.top_episodes)
        recording = SubsetRecording(recording, table, chosen)
    return DatasetPart(
        recording,
        source.weight,
        reward_options(source),
        bounds,
        clip_actions=source.clip_actions,
    )


def reward_options(section: DataSection) -> RewardOptions:
    return RewardOptions(
        section.reward_normalization == "return_range",
        section.reward_scale,
        section.reward_shift,
        section.reward_clip,
    )


def check_sections(sections: Sequence[DataSection]) -> None:
    """Raise an error for missing files, before anything is created or recorded."""
    for section in sections:
        if isinstance(section, NpzSection | Hdf5Section):
            path = user_path(section.path, "dataset.path")
            if not path.is_file():
                where = "" if path.is_absolute() else f" in {Path.cwd()}"
                raise DataError(f"dataset.path = {section.path!r}: no such file{where}")
        elif isinstance(section, LeRobotSection):
            path = user_path(section.path, "dataset.path")
            if not path.is_dir():
                where = "" if path.is_absolute() else f" in {Path.cwd()}"
                raise DataError(f"dataset.path = {section.path!r}: no such folder{where}")
        elif isinstance(section, RunSection):
            find_checkpoint(section.path, names=())
        elif isinstance(section, PolicySection):
            find_checkpoint(section.checkpoint, names=MODEL_FILES)
