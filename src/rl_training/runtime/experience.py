"""What a run learns from: environments to step, recorded data, or both."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_training.algorithms.hyperparameters import OnlineHyperparameters
from rl_training.algorithms.spec import list_algorithm_specs
from rl_training.config import TrainConfig
from rl_training.data.fingerprint import fingerprint_difference
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.envs import (
    EnvironmentFactory,
    EnvironmentSource,
    VectorEnvironment,
    check_environment_id,
    describe_spaces,
    measure_step_seconds,
    probe_resume_level,
    suitable_backend,
)
from rl_training.envs.backends import Backend
from rl_training.envs.cores import available_cores
from rl_training.errors import CheckpointError, ConfigError, EnvironmentSetupError
from rl_training.runtime.datasets import build_dataset, check_sections
from rl_training.runtime.random_streams import Stream, stream_seed
from rl_training.runtime.reading_progress import reading_progress
from rl_training.types import Json, ResumeLevel, SpaceInfo

RECORDED = "recorded-data"
"""What a run without any environment is called after"""

Arrays = Mapping[str, Any]
"""Recorded data in memory, by D4RL's names"""


def are_arrays(dataset: Any) -> bool:
    """Whether this is data in memory, which is no part of a config; a section of one has a kind."""
    return isinstance(dataset, Mapping) and "kind" not in dataset


@dataclass(frozen=True)
class Experience:
    """Where transitions come from; at least one of the two is there."""

    spaces: SpaceInfo
    environment: VectorEnvironment | None
    dataset: OfflineDataset | None

    @property
    def fingerprint(self) -> Json | None:
        return None if self.dataset is None else self.dataset.fingerprint


def environment_factory(
    environment_id: str | None, kwargs: Json, source: EnvironmentSource | None
) -> EnvironmentFactory:
    """What makes the run's environments: the user's own object, or a registered id."""
    if source is not None:
        return EnvironmentFactory(source, kwargs)
    if environment_id is None:
        raise ConfigError(
            "env_id: required, but not given (a Gymnasium id such as Pendulum-v1); "
            "one of your own is handed over in Python: train(config, env=lambda: MyEnv())"
        )
    check_environment_id(environment_id)
    return EnvironmentFactory(environment_id, kwargs)


def run_factory(config: TrainConfig, source: EnvironmentSource | None) -> EnvironmentFactory | None:
    """What makes a run's environments; None where it learns from data alone."""
    if config.env_id is None and source is None and config.resolved_regime == "offline":
        return None
    return environment_factory(config.env_id, config.env_kwargs, source)


def environment_label(factory: EnvironmentFactory | None) -> str:
    return RECORDED if factory is None else factory.label


def describe_environment(factory: EnvironmentFactory | None, config: TrainConfig) -> Json:
    """How a checkpoint names its environment; one without an id must be handed in again."""
    known = factory is not None and factory.is_registered_id
    return {
        "id": config.env_id if known else None,
        "kwargs": config.env_kwargs,
        "label": environment_label(factory),
    }


def run_resume_level(factory: EnvironmentFactory | None, config: TrainConfig) -> ResumeLevel:
    """What can be promised for this run's continuation."""
    if factory is None or config.resolved_regime == "offline":
        return ResumeLevel.BIT_EXACT
    level = probe_resume_level(factory)
    if level is ResumeLevel.EPISODE_EXACT and config.num_envs > 1:
        # Several environments hardly ever begin an episode at the same step.
        return ResumeLevel.STATISTICAL
    return level


def choose_backend(factory: EnvironmentFactory | None, config: TrainConfig, seeds: int) -> Backend:
    """Where the environments run; every choice gives the same trajectories."""
    if config.vectorization != "auto":
        return config.vectorization
    total_envs = seeds * config.num_envs
    if factory is None or total_envs == 1 or config.resolved_regime == "offline":
        return "sync"
    return suitable_backend(measure_step_seconds(factory), total_envs, available_cores())


def check_regime(config: TrainConfig, arrays: Arrays | None) -> None:
    """Refuse a run that has no data to learn from, or data that it would not use."""
    regime = config.resolved_regime
    if regime == "online" and arrays is not None:
        raise ConfigError(f"dataset: {config.algo} learns online here and takes no data set")
    if regime != "online" and config.dataset is None and arrays is None:
        raise ConfigError(
            f"dataset: {config.algo} learns from recorded data (regime {regime}) and needs a data "
            "set, such as dataset: {kind: minari, id: D4RL/door/human-v2}"
        )
    if config.dataset is not None and arrays is not None:
        raise ConfigError("dataset: given in the config and as arrays; which is meant?")
    if regime == "online" and config.dataset is not None:
        warnings.warn("dataset: not used, since regime is 'online'", stacklevel=5)
        return
    check_sections(config.dataset_sections)


def open_experience(
    configs: Sequence[TrainConfig],
    factory: EnvironmentFactory | None,
    arrays: Arrays | None,
    level: ResumeLevel,
    backend: Backend,
    device: str,
    resources: contextlib.ExitStack,
) -> Experience:
    """Environments, started, and data, loaded, that fit the algorithm and each other."""
    config, environment, spaces = configs[0], None, None
    if factory is not None and config.resolved_regime == "offline":
        spaces = _spaces_of(factory)
        _check_fit(config, factory.label, spaces)
    elif factory is not None:
        environment = _training_environment(factory, configs, level, backend)
        resources.enter_context(environment)
        spaces = environment.spaces
    dataset = None
    if config.resolved_regime != "online":
        dataset = _load_dataset(config, factory, spaces, arrays, device)
        spaces = dataset.spaces if spaces is None else spaces
        _check_fit(config, "the data set", dataset.spaces)
        if environment is not None and dataset.rewards is None:
            raise ConfigError(
                "dataset: its sections change rewards differently, so that live rewards cannot be "
                "made like them; give all sections the same reward_scale, reward_shift and "
                "reward_clip, and no reward_normalization"
            )
    assert spaces is not None
    return Experience(spaces, environment, dataset)


def require_same_data(saved: Json | None, experience: Experience, *, hint: str = "") -> None:
    """A run goes on with the data it was started on, or not at all."""
    present = experience.fingerprint
    if saved is None and present is None:
        return
    difference = fingerprint_difference(saved or {}, present or {})
    if difference is not None:
        raise CheckpointError(f"not the data that this run was started on: {difference}{hint}")


def _training_environment(
    factory: EnvironmentFactory,
    configs: Sequence[TrainConfig],
    level: ResumeLevel,
    backend: Backend,
) -> VectorEnvironment:
    """The environments to train in, a group for each seed, found to fit the algorithm."""
    config = configs[0]
    environment = VectorEnvironment(
        factory,
        config.num_envs,
        [stream_seed(each.seed, Stream.TRAINING_ENVIRONMENT) for each in configs],
        backend=backend,
        seed_every_reset=level is not ResumeLevel.BIT_EXACT,
    )
    try:
        _check_fit(config, factory.label, environment.spaces)
    except EnvironmentSetupError:
        environment.close()
        raise
    return environment


def _load_dataset(
    config: TrainConfig,
    factory: EnvironmentFactory | None,
    spaces: SpaceInfo | None,
    arrays: Arrays | None,
    device: str,
) -> OfflineDataset:
    hyperparameters = config.algo_kwargs
    n_step = hyperparameters.n_step if isinstance(hyperparameters, OnlineHyperparameters) else 1
    with reading_progress("reading data") as progress:
        return build_dataset(
            config.dataset_sections if arrays is None else arrays,
            factory=factory,
            spaces=spaces,
            gamma=hyperparameters.gamma,
            n_step=n_step,
            device=device,
            progress=progress,
        )


def _spaces_of(factory: EnvironmentFactory) -> SpaceInfo:
    environment = factory()
    try:
        return describe_spaces(environment)
    finally:
        environment.close()


def _check_fit(config: TrainConfig, label: str, spaces: SpaceInfo) -> None:
    if config.spec.fits(spaces):
        return
    fitting = [spec.name for spec in list_algorithm_specs() if spec.fits(spaces)]
    actions = "discrete" if spaces.discrete else "continuous"
    raise EnvironmentSetupError(
        f"algo = {config.algo!r} needs {config.spec.action_kind} actions, but {label} has "
        f"{actions} ones; algorithms that fit: {', '.join(fitting) or 'none is registered'}"
    )
