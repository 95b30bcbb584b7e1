"""The `dataset` sections of a config: one model for each kind, and validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from rl_training.data.formats.minari import MINARI_ID
from rl_training.errors import ConfigError
from rl_training.validation import StrictModel, limited, short, suggestion, validate

MAX_SECTIONS = 100
Size = Annotated[int, Field(ge=1, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Bound = float | list[float] | None
EpisodeEnd = Literal["truncation", "termination", "success"]
RewardNormalization = Literal["none", "return_range"]


class DataSection(StrictModel):
    """Keys of every kind: sampling weight, action bounds and reward options."""

    kind: str
    """Kind of data; it determines the other keys"""
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """How often the dataset is sampled, relative to the weights of the other datasets"""
    action_low: Bound = None
    """Lower bound of the data's actions: a number, or a list with one per action component. Not
    set: the bound of the data's action space, else of the environment's"""
    action_high: Bound = None
    """Upper bound of the data's actions, in the same form as `action_low`"""
    clip_actions: bool = False
    """Clip actions that are out of bounds. If false, they are an error"""
    reward_normalization: RewardNormalization = "none"
    """Applied to rewards first. `return_range`: divide by the range of episode returns and multiply
    by 1000"""
    reward_scale: Annotated[float, Field(gt=0)] = 1.0
    """Rewards are multiplied by this, after `reward_normalization`"""
    reward_shift: float = 0.0
    """Added to rewards, after `reward_scale`"""
    reward_clip: Annotated[float, Field(gt=0)] | None = None
    """Rewards are clipped to plus and minus this, after `reward_shift`. Not set: no clipping"""
    top_episodes: Annotated[float, Field(gt=0, le=1)] | None = None
    """Use only this fraction of the episodes: those with the highest recorded returns. Not set: all
    episodes"""


class RandomSection(DataSection):
    """A recipe: uniformly random actions in the run's environment."""

    kind: Literal["random"] = "random"
    size: Size
    """Number of recorded steps"""
    seed: Seed = 0
    """Random seed of the environment and the actions"""


class PolicySection(DataSection):
    """A recipe: a trained policy's actions, with noise, in the run's environment."""

    kind: Literal["policy"] = "policy"
    checkpoint: str = Field(pattern=r"^[^\x00]+$", description="a run folder, checkpoint or policy")
    """Run folder, checkpoint or saved policy that acts"""
    size: Size
    """Number of recorded steps"""
    seed: Seed = 0
    """Random seed of the environment and the noise"""
    noise: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Standard deviation of the noise, relative to half the action range; for discrete actions, the
    fraction of random actions"""


class RunSection(DataSection):
    """The replay buffer of an earlier run."""

    kind: Literal["run"] = "run"
    path: str = Field(pattern=r"^[^\x00]+$", description="a run folder or a checkpoint")
    """Run folder or checkpoint with a replay buffer"""


class NpzSection(DataSection):
    """A NumPy archive of D4RL's arrays."""

    kind: Literal["npz"] = "npz"
    path: str = Field(pattern=r"^[^\x00]+$", description="the path of a file")
    """Path of the file"""
    max_episode_steps: Size | None = None
    """Episode length, for files that do not mark where episodes end. Not set: no limit"""


class Hdf5Section(DataSection):
    """An HDF5 file in D4RL's layout."""

    kind: Literal["hdf5"] = "hdf5"
    path: str = Field(pattern=r"^[^\x00]+$", description="the path of a file")
    """Path of the file"""
    max_episode_steps: Size | None = None
    """Episode length, for files that do not mark where episodes end. Not set: no limit"""


class MinariSection(DataSection):
    """A Minari dataset in the folder `MINARI_DATASETS_PATH`, or downloaded there."""

    kind: Literal["minari"] = "minari"
    id: str = Field(pattern=MINARI_ID, description="a Minari id such as D4RL/door/human-v2")
    """Minari id, such as `D4RL/door/human-v2`"""


class LeRobotSection(DataSection):
    """A folder in LeRobot's dataset format v3.0."""

    kind: Literal["lerobot"] = "lerobot"
    path: str = Field(pattern=r"^[^\x00]+$", description="the path of a folder")
    """Path of the folder"""
    observations: Annotated[list[str], Field(min_length=1, max_length=100)] | None = None
    """Features that are joined to the observation vector, in this order. Not set:
    `observation.state`"""
    episode_end: EpisodeEnd | None = None
    """What `next.done` means: `termination`, `truncation`, or `success` for a termination where
    `next.success` is true. Not set: what `next.terminated` or `next.truncated` say, else
    `truncation`"""


SECTIONS: dict[str, type[DataSection]] = {
    "random": RandomSection,
    "policy": PolicySection,
    "run": RunSection,
    "npz": NpzSection,
    "hdf5": Hdf5Section,
    "minari": MinariSection,
    "lerobot": LeRobotSection,
}


def read_sections(value: Any) -> DataSection | list[DataSection] | None:
    """Validate the `dataset` value of a config: one section or a list of sections.

    Raises `ConfigError` with all problems.
    """
    if value is None or isinstance(value, DataSection | Mapping):
        return None if value is None else _read_section(value, "dataset")
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise ConfigError(
            f"dataset = {short(value)}: must be a mapping with a kind, or a list of mappings"
        )
    if len(value) > MAX_SECTIONS:
        raise ConfigError(
            f"dataset: {len(value):,} sections, but at most {MAX_SECTIONS} can be mixed"
        )
    sections, problems = [], []
    for index, part in enumerate(value):
        try:
            sections.append(_read_section(part, f"dataset[{index}]"))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(limited(problems))
    return sections


def as_list(sections: DataSection | Sequence[DataSection] | None) -> list[DataSection]:
    """Return the sections as a list, which is empty for None."""
    if sections is None:
        return []
    return [sections] if isinstance(sections, DataSection) else list(sections)


def _read_section(value: Any, key: str) -> DataSection:
    if isinstance(value, DataSection):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} = {short(value)}: must be a mapping with a kind")
    kinds = ", ".join(SECTIONS)
    if "kind" not in value:
        raise ConfigError(f"{key}.kind: required; must be one of {kinds}")
    kind = value["kind"]
    if not isinstance(kind, str) or kind not in SECTIONS:
        hint = suggestion(kind, SECTIONS) if isinstance(kind, str) else ""
        raise ConfigError(f"{key}.kind = {short(kind)}: must be one of {kinds}{hint}")
    section = validate(SECTIONS[kind], value, section=key)
    _check_bounds(section, key)
    return section


def _check_bounds(section: DataSection, key: str) -> None:
    low, high = section.action_low, section.action_high
    if low is None and high is None:
        return
    if low is None or high is None:
        missing, given = ("low", "high") if low is None else ("high", "low")
        raise ConfigError(f"{key}.action_{missing}: required if action_{given} is given")
    try:
        ordered = bool(np.less(low, high).all())
    except ValueError:
        raise ConfigError(
            f"{key}.action_low = {short(low)}: must have the same length as "
            f"action_high = {short(high)}"
        ) from None
    if not ordered:
        raise ConfigError(
            f"{key}.action_low = {short(low)}: must be less than action_high = {short(high)}"
        )
