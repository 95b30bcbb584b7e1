"""Puts a run together from its config: everything is checked before anything is created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_training.algorithms.hyperparameters import OnlineHyperparameters
from rl_training.algorithms.spec import list_algorithm_specs
from rl_training.config import TrainConfig
from rl_training.data.normalization import ObservationNormalizer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs import (
    EnvironmentFactory,
    EnvironmentSource,
    VectorEnvironment,
    check_environment_id,
    probe_resume_level,
)
from rl_training.errors import ConfigError, EnvironmentSetupError
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.collector import Collector
from rl_training.runtime.controls import build_control_callbacks
from rl_training.runtime.engine import Engine
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.execution import Execution
from rl_training.runtime.learner import Learner
from rl_training.runtime.logging import MetricsLog
from rl_training.runtime.policy import Policy
from rl_training.runtime.random_streams import Stream, stream_generator, stream_seed
from rl_training.runtime.run_folder import RunFolder
from rl_training.runtime.run_state import CheckpointSaver, RunDescription
from rl_training.types import Json, ResumeLevel, SpaceInfo


@dataclass(frozen=True)
class AssembledRun:
    """A run ready to go."""

    engine: Engine
    saver: CheckpointSaver
    environment_label: str


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


def describe_environment(factory: EnvironmentFactory, config: TrainConfig) -> Json:
    """How a checkpoint names its environment; one without an id must be handed in again."""
    environment_id = config.env_id if factory.is_registered_id else None
    return {"id": environment_id, "kwargs": config.env_kwargs, "label": factory.label}


def run_resume_level(factory: EnvironmentFactory, config: TrainConfig) -> ResumeLevel:
    """What can be promised for this run's continuation."""
    level = probe_resume_level(factory)
    if level is ResumeLevel.EPISODE_EXACT and config.num_envs > 1:
        # Several environments hardly ever begin an episode at the same step.
        return ResumeLevel.STATISTICAL
    return level


def make_training_environment(
    factory: EnvironmentFactory, config: TrainConfig, level: ResumeLevel
) -> VectorEnvironment:
    """The environments to train in, found to fit the algorithm."""
    environment = VectorEnvironment(
        factory,
        config.num_envs,
        stream_seed(config.seed, Stream.TRAINING_ENVIRONMENT),
        backend=config.vectorization,
        seed_every_reset=level is not ResumeLevel.BIT_EXACT,
    )
    try:
        _check_fit(config, factory.label, environment.spaces)
    except EnvironmentSetupError:
        environment.close()
        raise
    return environment


@dataclass(frozen=True)
class RunParts:
    """What a run needs beside its folder; made, and found to fit, before that is created."""

    factory: EnvironmentFactory
    environment: VectorEnvironment
    policy: Policy
    replay: ReplayBuffer


def assemble(
    config: TrainConfig,
    parts: RunParts,
    folder: RunFolder,
    description: RunDescription,
    execution: Execution,
    callbacks: Sequence[Callback] = (),
) -> AssembledRun:
    """Build the engine of an online run; nothing in here names an algorithm."""
    hyperparameters, policy = online_hyperparameters(config), parts.policy
    exploration = stream_generator(config.seed, Stream.EXPLORATION, execution.device)
    sampling = stream_generator(config.seed, Stream.SAMPLING, execution.device)
    parts.replay.generator = sampling
    streams = {
        "exploration": exploration,
        "sampling": sampling,
        "update_noise": policy.algorithm.generator,
    }
    collector = Collector(
        parts.environment,
        policy,
        parts.replay,
        generator=exploration,
        n_step=hyperparameters.n_step,
        gamma=hyperparameters.gamma,
        # A policy that was trained before explores better than chance.
        random_steps=0 if config.init_from else hyperparameters.learning_starts,
    )
    saver = CheckpointSaver(folder, description, parts.replay, streams)
    log = MetricsLog(folder, config.log_interval)
    seed = stream_seed(config.seed, Stream.EVALUATION_ENVIRONMENT)
    engine = Engine(
        config,
        run_dir=folder.path,
        learner=Learner(policy.algorithm, execution, policy.normalizer),
        policy=policy,
        source=parts.replay,
        collector=collector,
        evaluator=Evaluator(parts.factory, config.eval_episodes, seed),
        saver=saver,
        callbacks=[log, *build_control_callbacks(config), *callbacks],
        schedule_timesteps=description.schedule_timesteps,
        resume_level=ResumeLevel(description.resume_level),
    )
    return AssembledRun(engine, saver, parts.factory.label)


def online_hyperparameters(config: TrainConfig) -> OnlineHyperparameters:
    """The settings of an algorithm that collects its own experience."""
    if config.resolved_regime != "online" or not isinstance(
        config.algo_kwargs, OnlineHyperparameters
    ):
        raise ConfigError(
            f"regime = {config.resolved_regime!r}: this version of rl_training trains online only"
        )
    return config.algo_kwargs


def build_replay(config: TrainConfig, spaces: SpaceInfo, device: str) -> ReplayBuffer:
    """An empty buffer of the config's capacity."""
    capacity = online_hyperparameters(config).buffer_capacity
    try:
        return ReplayBuffer(
            capacity,
            spaces.obs_dim,
            spaces.action_dim,
            discrete=spaces.discrete,
            device=device,
        )
    except (RuntimeError, MemoryError):
        raise ConfigError(
            f"algo_kwargs.buffer_capacity = {capacity}: does not fit into memory; make it smaller"
        ) from None


def build_policy(
    config: TrainConfig, spaces: SpaceInfo, device: str, planned_updates: int
) -> Policy:
    """The untrained policy that a run with this config starts from."""
    algorithm = config.spec.algorithm(
        spaces.obs_dim,
        spaces.action_dim,
        config.algo_kwargs,
        seed=stream_seed(config.seed, Stream.INITIALIZATION),
        device=device,
        planned_updates=planned_updates,
    )
    algorithm.generator.manual_seed(stream_seed(config.seed, Stream.UPDATE_NOISE))
    normalizer = None
    if config.normalize_observations:
        normalizer = ObservationNormalizer(spaces.obs_dim, torch.device(device))
    return Policy(algorithm, spaces, normalizer, algorithm_name=config.algo)


def _check_fit(config: TrainConfig, label: str, spaces: SpaceInfo) -> None:
    if config.spec.fits(spaces):
        return
    fitting = [spec.name for spec in list_algorithm_specs() if spec.fits(spaces)]
    actions = "discrete" if spaces.discrete else "continuous"
    raise EnvironmentSetupError(
        f"algo = {config.algo!r} needs {config.spec.action_kind} actions, but {label} has "
        f"{actions} ones; algorithms that fit: {', '.join(fitting) or 'none is registered'}"
    )
