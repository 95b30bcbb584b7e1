"""Puts a run together from its config: everything is checked before anything is created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_training.algorithms.hyperparameters import OnlineHyperparameters, priority_exponent
from rl_training.algorithms.spec import list_algorithm_specs
from rl_training.config import TrainConfig
from rl_training.data.normalization import ObservationNormalizer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs import (
    EnvironmentFactory,
    EnvironmentSource,
    VectorEnvironment,
    check_environment_id,
    measure_step_seconds,
    probe_resume_level,
    suitable_backend,
)
from rl_training.envs.backends import Backend
from rl_training.envs.processes import available_cores
from rl_training.errors import ConfigError, EnvironmentSetupError
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.collector import Collector
from rl_training.runtime.controls import build_control_callbacks
from rl_training.runtime.engine import Engine
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.execution import Execution
from rl_training.runtime.explorer import Explorer
from rl_training.runtime.learner import Learner
from rl_training.runtime.logging import MetricsLog
from rl_training.runtime.member import Member
from rl_training.runtime.policy import Policy
from rl_training.runtime.population import Population
from rl_training.runtime.random_streams import Stream, stream_generator, stream_seed
from rl_training.runtime.run_folder import RunFolder
from rl_training.runtime.run_state import CheckpointSaver, RunDescription
from rl_training.runtime.team import Team
from rl_training.types import Json, ResumeLevel, SpaceInfo


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


def choose_backend(factory: EnvironmentFactory, config: TrainConfig, seeds: int) -> Backend:
    """Where the environments run; every choice gives the same trajectories."""
    if config.vectorization != "auto":
        return config.vectorization
    total_envs = seeds * config.num_envs
    if total_envs == 1:
        return "sync"
    return suitable_backend(measure_step_seconds(factory), total_envs, available_cores())


def make_training_environment(
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


@dataclass(frozen=True)
class RunParts:
    """What a run needs beside its folders; made, and found to fit, before those are created."""

    configs: list[TrainConfig]
    """One for each seed; they differ in nothing else"""
    factory: EnvironmentFactory
    environment: VectorEnvironment
    policies: list[Policy]
    teams: list[Team]
    execution: Execution


@dataclass(frozen=True)
class MemberSettings:
    """What one seed of a run has for itself."""

    description: RunDescription
    folder: RunFolder
    callbacks: Sequence[Callback]


def build_parts(
    configs: list[TrainConfig],
    factory: EnvironmentFactory,
    environment: VectorEnvironment,
    execution: Execution,
    population: Population,
    planned_updates: int,
) -> RunParts:
    """Untrained policies, empty buffers and the programs for them."""
    spaces = environment.spaces
    policies = [build_policy(each, spaces, execution.device, planned_updates) for each in configs]
    if population.width > 1:
        teams = [build_team(configs, policies, spaces, execution, population)]
    else:
        teams = []
        for config, policy in zip(configs, policies, strict=True):
            like = teams[0].learner if teams else None
            teams.append(build_team([config], [policy], spaces, execution, population, like))
    return RunParts(configs, factory, environment, policies, teams, execution)


def build_team(
    configs: list[TrainConfig],
    policies: list[Policy],
    spaces: SpaceInfo,
    execution: Execution,
    population: Population,
    like: Learner | None = None,
) -> Team:
    """The replay buffer, learner and explorer of seeds that share a program."""
    seeds = [0] * population.width  # a slot without a seed of its own gets any
    for slot, config in zip(population.slots, configs, strict=True):
        seeds[slot] = config.seed
    normalizers = [policy.normalizer for policy in policies if policy.normalizer is not None]
    replay = build_replay(configs[0], spaces, execution.device, population)
    learner = Learner(
        [policy.algorithm for policy in policies],
        replay,
        execution,
        population=population,
        generators=[stream_generator(s, Stream.UPDATE_NOISE, execution.device) for s in seeds],
        normalizers=normalizers,
        like=like,
    )
    explorer = Explorer(
        learner,
        spaces,
        configs[0].num_envs,
        [stream_generator(seed, Stream.EXPLORATION) for seed in seeds],
        replay=replay,
        normalizers=normalizers,
    )
    return Team(learner, explorer, replay)


def assemble(parts: RunParts, settings: Sequence[MemberSettings]) -> Engine:
    """Build the engine of an online run; nothing in here names an algorithm."""
    config = parts.configs[0]
    hyperparameters = online_hyperparameters(config)
    collector = Collector(
        parts.environment,
        parts.teams,
        n_step=hyperparameters.n_step,
        gamma=hyperparameters.gamma,
        # A policy that was trained before explores better than chance.
        random_steps=0 if config.init_from else hyperparameters.learning_starts,
        normalizers=[policy.normalizer for policy in parts.policies if policy.normalizer],
    )
    seats = [(team, place) for team in parts.teams for place in range(team.size)]
    members = [
        _build_member(parts, index, team, place, its, collector)
        for index, ((team, place), its) in enumerate(zip(seats, settings, strict=True))
    ]
    return Engine(
        config,
        members,
        collector,
        schedule_timesteps=settings[0].description.schedule_timesteps,
        overlap=parts.execution.overlap,
    )


def _build_member(
    parts: RunParts,
    index: int,
    team: Team,
    place: int,
    its: MemberSettings,
    collector: Collector,
) -> Member:
    config = parts.configs[index]
    seed = stream_seed(config.seed, Stream.EVALUATION_ENVIRONMENT)
    streams = {"exploration": team.explorer.pool, "update": team.learner.pool}
    return Member(
        config,
        index=index,
        place=place,
        run_dir=its.folder.path,
        policy=parts.policies[index],
        team=team,
        collector=collector,
        evaluator=Evaluator(parts.factory, config.eval_episodes, seed),
        saver=CheckpointSaver(its.folder, its.description, team.replay, streams),
        callbacks=[
            MetricsLog(its.folder, config.log_interval),
            *build_control_callbacks(config),
            *its.callbacks,
        ],
        resume_level=ResumeLevel(its.description.resume_level),
    )


def online_hyperparameters(config: TrainConfig) -> OnlineHyperparameters:
    """The settings of an algorithm that collects its own experience."""
    if config.resolved_regime != "online" or not isinstance(
        config.algo_kwargs, OnlineHyperparameters
    ):
        raise ConfigError(
            f"regime = {config.resolved_regime!r}: this version of rl_training trains online only"
        )
    return config.algo_kwargs


def build_replay(
    config: TrainConfig, spaces: SpaceInfo, device: str, population: Population
) -> ReplayBuffer:
    """An empty buffer of the config's capacity for each seed."""
    capacity = online_hyperparameters(config).buffer_capacity
    try:
        return ReplayBuffer(
            capacity,
            spaces.obs_dim,
            spaces.action_dim,
            discrete=spaces.discrete,
            device=device,
            slots=population.slots,
            width=population.width,
            priority_exponent=priority_exponent(config.algo_kwargs),
        )
    except (RuntimeError, MemoryError):
        seeds = len(population.slots)
        which = f" for {seeds} seeds" if seeds > 1 else ""
        raise ConfigError(
            f"algo_kwargs.buffer_capacity = {capacity}{which}: does not fit into memory; "
            f"make it smaller{' or train fewer seeds at once' if which else ''}"
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
    normalizer = None
    if config.normalize_observations:
        normalizer = ObservationNormalizer(spaces.obs_dim)
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
