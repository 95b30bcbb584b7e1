"""Puts a run together from its config: everything is checked before anything is created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_training.algorithms.hyperparameters import (
    MixedHyperparameters,
    OnlineHyperparameters,
    priority_exponent,
)
from rl_training.config import TrainConfig
from rl_training.data.mixture import Mixture
from rl_training.data.normalization import ObservationNormalizer
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.source import Source
from rl_training.envs import EnvironmentFactory
from rl_training.errors import ConfigError
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.collector import Collector
from rl_training.runtime.controls import build_control_callbacks
from rl_training.runtime.engine import Engine
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.execution import Execution
from rl_training.runtime.experience import Experience
from rl_training.runtime.explorer import Explorer
from rl_training.runtime.learner import Learner
from rl_training.runtime.logging import MetricsLog
from rl_training.runtime.member import Member
from rl_training.runtime.policy import Policy
from rl_training.runtime.population import Population
from rl_training.runtime.random_streams import Stream, stream_generator, stream_seed
from rl_training.runtime.run_folder import RunFolder
from rl_training.runtime.run_state import CheckpointSaver, RunDescription
from rl_training.runtime.schedules import learning_starts, pretraining_updates
from rl_training.runtime.team import Team
from rl_training.types import ResumeLevel, SpaceInfo


@dataclass(frozen=True)
class RunParts:
    """What a run needs beside its folders; made, and found to fit, before those are created."""

    configs: list[TrainConfig]
    """One for each seed; they differ in nothing else"""
    factory: EnvironmentFactory | None
    experience: Experience
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
    factory: EnvironmentFactory | None,
    experience: Experience,
    execution: Execution,
    population: Population,
    planned_updates: int,
) -> RunParts:
    """Untrained policies, empty buffers and the programs for them."""
    spaces = experience.spaces
    policies = [build_policy(each, spaces, execution.device, planned_updates) for each in configs]
    for policy in policies:
        if experience.dataset is not None and configs[0].reads_data:
            _fit_to_data(policy, experience.dataset)
    if population.width > 1:
        teams = [build_team(configs, policies, experience, execution, population)]
    else:
        teams = []
        for config, policy in zip(configs, policies, strict=True):
            like = teams[0].learner if teams else None
            teams.append(build_team([config], [policy], experience, execution, population, like))
    return RunParts(configs, factory, experience, policies, teams, execution)


def build_team(
    configs: list[TrainConfig],
    policies: list[Policy],
    experience: Experience,
    execution: Execution,
    population: Population,
    like: Learner | None = None,
) -> Team:
    """The replay buffer, learner and explorer of seeds that share a program."""
    seeds = [0] * population.width  # a slot without a seed of its own gets any
    for slot, config in zip(population.slots, configs, strict=True):
        seeds[slot] = config.seed
    normalizers = [policy.normalizer for policy in policies if policy.normalizer is not None]
    replay = None
    if experience.environment is not None:
        replay = build_replay(configs[0], experience.spaces, execution.device, population)
    source = build_source(configs[0], replay, experience.dataset)
    learner = Learner(
        [policy.algorithm for policy in policies],
        source,
        execution,
        population=population,
        generators=[stream_generator(s, Stream.UPDATE_NOISE, execution.device) for s in seeds],
        normalizers=normalizers,
        like=like,
    )
    if replay is None:
        return Team(learner)
    explorer = Explorer(
        learner,
        experience.spaces,
        configs[0].num_envs,
        [stream_generator(seed, Stream.EXPLORATION) for seed in seeds],
        replay=replay,
        normalizers=normalizers,
    )
    prior_data = source.offline_alone() if isinstance(source, Mixture) else None
    return Team(learner, explorer, replay, prior_data)


def build_source(
    config: TrainConfig, replay: ReplayBuffer | None, dataset: OfflineDataset | None
) -> Source:
    """Where batches come from: live experience, recorded data, or both."""
    if replay is None:
        assert dataset is not None
        return dataset
    if dataset is None:
        return replay
    return Mixture(replay, dataset, mixed_hyperparameters(config).offline_batch_ratio)


def assemble(parts: RunParts, settings: Sequence[MemberSettings]) -> Engine:
    """Build the engine of a run; nothing in here names an algorithm."""
    config, collector = parts.configs[0], _build_collector(parts)
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


def _build_collector(parts: RunParts) -> Collector | None:
    """None where a run learns from data alone."""
    config, environment = parts.configs[0], parts.experience.environment
    if environment is None:
        return None
    hyperparameters = online_hyperparameters(config)
    return Collector(
        environment,
        parts.teams,
        n_step=hyperparameters.n_step,
        gamma=hyperparameters.gamma,
        # A policy that was trained before explores better than chance.
        random_steps=0 if _starts_trained(config) else learning_starts(config),
        normalizers=[policy.normalizer for policy in parts.policies if policy.normalizer],
        rewards=parts.policies[0].rewards,
    )


def _starts_trained(config: TrainConfig) -> bool:
    return config.init_from is not None or pretraining_updates(config) > 0


def _build_member(
    parts: RunParts,
    index: int,
    team: Team,
    place: int,
    its: MemberSettings,
    collector: Collector | None,
) -> Member:
    config = parts.configs[index]
    streams = {"update": team.learner.pool}
    if team.explorer is not None:
        streams["exploration"] = team.explorer.pool
    evaluator = None
    if parts.factory is not None:
        seed = stream_seed(config.seed, Stream.EVALUATION_ENVIRONMENT)
        evaluator = Evaluator(parts.factory, config.eval_episodes, seed)
    return Member(
        config,
        index=index,
        place=place,
        run_dir=its.folder.path,
        policy=parts.policies[index],
        team=team,
        collector=collector,
        evaluator=evaluator,
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
    if not isinstance(config.algo_kwargs, OnlineHyperparameters):
        raise ConfigError(f"regime = {config.resolved_regime!r}: {config.algo} cannot collect data")
    return config.algo_kwargs


def mixed_hyperparameters(config: TrainConfig) -> MixedHyperparameters:
    """The settings of an algorithm that learns from recorded data and live experience."""
    assert isinstance(config.algo_kwargs, MixedHyperparameters), "its spec offers no such regime"
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
        config.hyperparameters,
        seed=stream_seed(config.seed, Stream.INITIALIZATION),
        device=device,
        planned_updates=planned_updates,
    )
    normalizer = None
    if config.normalizes_observations:
        normalizer = ObservationNormalizer(spaces.obs_dim)
    policy = Policy(algorithm, spaces, normalizer, algorithm_name=config.algo)
    policy.settings = config.algo_kwargs
    return policy


def _fit_to_data(policy: Policy, dataset: OfflineDataset) -> None:
    """What recorded data says in advance: how observations spread, and how rewards are scaled."""
    if policy.normalizer is not None:
        dataset.fit(policy.normalizer)
    policy.rewards = dataset.rewards
