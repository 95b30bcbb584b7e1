"""From a config's `dataset` section, or arrays in memory, to the data set that is sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.checkpoints.loading import MODEL_FILES, find_checkpoint, load_policy
from rl_training.data.formats.columns import array_recording
from rl_training.data.formats.hdf5 import open_hdf5
from rl_training.data.formats.minari import open_minari
from rl_training.data.formats.npz import open_npz
from rl_training.data.formats.recording import ProgressListener, Recording
from rl_training.data.loading import DatasetPart, RewardOptions, load_dataset
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.sections import (
    DataSection,
    Hdf5Section,
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
from rl_training.types import SpaceInfo

DatasetSource = DataSection | Mapping[str, Any]
"""A section, its plain values, or arrays in memory by D4RL's names"""


Arrays = Mapping[str, Any]
"""Recorded data in memory, by D4RL's names"""


def are_arrays(dataset: Any) -> bool:
    """Whether this is data in memory, which is no part of a config; a section of one has a kind."""
    return isinstance(dataset, Mapping) and "kind" not in dataset


def build_dataset(
    sources: DatasetSource | Sequence[DatasetSource],
    *,
    factory: EnvironmentFactory | None = None,
    spaces: SpaceInfo | None = None,
    gamma: float = 0.99,
    n_step: int = 1,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    progress: ProgressListener | None = None,
) -> OfflineDataset:
    """Open, check, mix and load data sets onto the device.

    `factory` makes the environments that recipes play in. `spaces` are the environment's; without
    them the first data set's own are taken.
    """
    several = [sources] if isinstance(sources, DataSection | Mapping) else list(sources)
    parts = [open_part(source, factory) for source in several]
    return load_dataset(
        parts,
        spaces,
        gamma=gamma,
        n_step=n_step,
        device=device,
        generator=generator,
        progress=progress,
    )


def open_section(section: DataSection, factory: EnvironmentFactory | None = None) -> Recording:
    """The recorded data that a section means; a recipe is followed here and now."""
    if isinstance(section, NpzSection):
        return open_npz(section.path, max_episode_steps=section.max_episode_steps)
    if isinstance(section, Hdf5Section):
        return open_hdf5(section.path, max_episode_steps=section.max_episode_steps)
    if isinstance(section, MinariSection):
        return open_minari(section.id)
    if isinstance(section, RunSection):
        return open_replay(section.path)
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


def open_part(source: DatasetSource, factory: EnvironmentFactory | None = None) -> DatasetPart:
    """Recorded data, opened, with what its section says is to be done with it."""
    if not isinstance(source, DataSection):
        if "kind" not in source:
            return DatasetPart(array_recording(source))
        section = read_sections(source)
        assert isinstance(section, DataSection)
        source = section
    bounds = None
    if source.action_low is not None and source.action_high is not None:
        bounds = (np.asarray(source.action_low), np.asarray(source.action_high))
    return DatasetPart(
        open_section(source, factory),
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
    """Refuse what is missing on disk, before anything is created or any recipe followed."""
    for section in sections:
        if isinstance(section, NpzSection | Hdf5Section):
            if not Path(section.path).expanduser().is_file():
                where = "" if Path(section.path).expanduser().is_absolute() else f" in {Path.cwd()}"
                raise DataError(f"dataset.path = {section.path!r}: no such file{where}")
        elif isinstance(section, RunSection):
            find_checkpoint(section.path, names=())
        elif isinstance(section, PolicySection):
            find_checkpoint(section.checkpoint, names=MODEL_FILES)
