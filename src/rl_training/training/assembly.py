"""Builds the parts of a run from its config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rl_training.algorithms.hyperparameters import (
    MixedHyperparameters,
    RolloutHyperparameters,
    action_chunk,
    memory_size,
    priority_exponent,
    return_after_truncation,
)
from rl_training.callbacks import Callback, Stopwatch
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.config import TrainConfig
from rl_training.data.hindsight.collected import EpisodeRelabeller
from rl_training.data.hindsight.returns import EpisodesWithReturns
from rl_training.data.hindsight.sampled import SampledHindsight
from rl_training.data.mixture import Mixture
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollouts.minibatches import Rollouts
from rl_training.data.rollouts.steps import RolloutSteps
from rl_training.data.source import Source
from rl_training.data.transforms import DeviceReturnScaler, ObservationNormalizer, ReturnScaler
from rl_training.envs import EnvironmentFactory
from rl_training.envs.tensors.vector import TensorVector
from rl_training.errors import ConfigError
from rl_training.evaluation.evaluator import Evaluator
from rl_training.execution.execution import Execution
from rl_training.execution.learner import ActionChooser, Explorer, Learner, SharedLearner
from rl_training.execution.policy import Policy
from rl_training.execution.programs import Population
from rl_training.execution.random_streams import Stream, stream_generator, stream_seed
from rl_training.models.custom_networks import current_networks
from rl_training.observations import ObservationSpec
from rl_training.reporting.logging import MetricsLog
from rl_training.training.collector import Collector, CollectorContract
from rl_training.training.controls import build_control_callbacks, planned_end
from rl_training.training.engine import Engine, learning_starts
from rl_training.training.inputs import RunInputs, hindsight_of, sampled_hindsight_of
from rl_training.training.needs import (
    frame_layout,
    memory_checked,
    online_hyperparameters,
    stored_transitions,
    transition_steps,
)
from rl_training.training.saver import CheckpointSaver, RunDescription
from rl_training.training.seed_run import SeedRun
from rl_training.types import ResumeLevel, SpaceInfo

if TYPE_CHECKING:
    from rl_training.reporting.trackers import Trackers


@dataclass(frozen=True)
class RunParts:
    """The parts of a run, built and checked before its run folders are created."""

    configs: list[TrainConfig]
    """One per seed; they differ only in the seed and the run name"""
    factory: EnvironmentFactory | None
    inputs: RunInputs
    policies: list[Policy]
    shared_learners: list[SharedLearner]
    execution: Execution


@dataclass(frozen=True)
class SeedSettings:
    """What belongs to one seed of a run."""

    description: RunDescription
    folder: RunFolder
    callbacks: Sequence[Callback]


def build_parts(
    configs: list[TrainConfig],
    factory: EnvironmentFactory | None,
    inputs: RunInputs,
    execution: Execution,
    population: Population,
    planned_updates: int,
) -> RunParts:
    """Build untrained policies, empty replay buffers and learners.

    Raises `ConfigError` if they do not fit into memory.
    """
    spaces, online = inputs.spaces, inputs.environment is not None
    width = population.width
    with memory_checked(
        configs,
        spaces,
        execution.device,
        online=online,
        width=width,
        replay_on_host=execution.replay_on_host,
        repeats_rows=inputs.repeats_rows,
    ):
        policies = [
            build_policy(each, spaces, execution.device, planned_updates) for each in configs
        ]
        for policy in policies:
            if inputs.dataset is not None and configs[0].reads_data:
                _fit_to_data(policy, inputs.dataset)
        if population.width > 1:
            shared_learners = [
                build_shared_learner(configs, policies, inputs, execution, population)
            ]
        else:
            shared_learners = []
            for config, policy in zip(configs, policies, strict=True):
                like = shared_learners[0].learner if shared_learners else None
                own = Population(first_seed=len(shared_learners))
                shared_learners.append(
                    build_shared_learner([config], [policy], inputs, execution, own, like)
                )
        return RunParts(configs, factory, inputs, policies, shared_learners, execution)


def build_shared_learner(
    configs: list[TrainConfig],
    policies: list[Policy],
    inputs: RunInputs,
    execution: Execution,
    population: Population,
    like: Learner | None = None,
) -> SharedLearner:
    """Build the replay buffer, learner and explorer of seeds that share a program."""
    seeds = [0] * population.width  # an unused slot gets any seed
    for slot, config in zip(population.slots, configs, strict=True):
        seeds[slot] = config.seed
    normalizers = [policy.normalizer for policy in policies if policy.normalizer is not None]
    scalers = build_scalers(configs, inputs, execution.device)
    replay = None
    if inputs.environment is not None:
        hindsight = sampled_hindsight_of(configs[0], inputs.goals, _scaled_as(policies[0]))
        replay = build_replay(configs[0], inputs.spaces, execution, population, hindsight)
    source = build_source(configs[0], replay, inputs.dataset)
    learner = Learner(
        [policy.algorithm for policy in policies],
        source,
        execution,
        population=population,
        generators=[stream_generator(s, Stream.UPDATE_NOISE, execution.device) for s in seeds],
        order_generators=[stream_generator(s, Stream.ROLLOUTS, execution.device) for s in seeds],
        normalizers=normalizers,
        scalers=scalers,
        like=like,
    )
    if replay is None:
        return SharedLearner(learner)
    explorer = _build_explorer(learner, configs[0], inputs, seeds, replay, normalizers)
    prior_data = source.offline_alone() if isinstance(source, Mixture) else None
    return SharedLearner(learner, explorer, replay, prior_data, scalers)


def _build_explorer(
    learner: Learner,
    config: TrainConfig,
    inputs: RunInputs,
    seeds: Sequence[int],
    replay: ReplayBuffer,
    normalizers: Sequence[ObservationNormalizer],
) -> ActionChooser:
    """Build what chooses actions: on the device for worlds that are tensors."""
    on_device = isinstance(inputs.environment, TensorVector)
    place = learner.execution.device if on_device else "cpu"
    generators = [stream_generator(seed, Stream.EXPLORATION, place) for seed in seeds]
    if on_device:
        from rl_training.execution.tensor_explorer import TensorExplorer  # few runs need it

        return TensorExplorer(learner, inputs.spaces, config.num_envs, generators)
    return Explorer(
        learner,
        inputs.spaces,
        config.num_envs,
        generators,
        replay=replay,
        normalizers=normalizers,
    )


def build_scalers(
    configs: list[TrainConfig], inputs: RunInputs, device: str = "cpu"
) -> list[ReturnScaler]:
    """Build what scales sampled rewards by the returns of each seed; empty if nothing does."""
    if inputs.environment is None:
        return []
    given = [config.hyperparameters.return_scaling() for config in configs]
    num_envs = configs[0].num_envs
    if isinstance(inputs.environment, TensorVector):
        return [DeviceReturnScaler(each, num_envs, device) for each in given if each is not None]
    return [ReturnScaler(each, num_envs) for each in given if each is not None]


def _scaled_as(policy: Policy) -> Callable[[Tensor], Tensor]:
    """Transform rewards as those of a policy, which may get its transform later."""
    return lambda rewards: rewards if policy.rewards is None else policy.rewards(rewards)


def build_source(
    config: TrainConfig, replay: ReplayBuffer | None, dataset: OfflineDataset | None
) -> Source:
    """The source of batches: the replay buffer, rollouts, the dataset, or a mixture."""
    if replay is None:
        assert dataset is not None
        return dataset
    chosen = config.algo_kwargs
    if isinstance(chosen, RolloutHyperparameters):
        return Rollouts(
            replay,
            chosen.minibatch_size(replay.capacity),
            chosen.epochs,
            sequence_steps=chosen.sequence_steps,
            num_envs=config.num_envs,
        )
    if dataset is None:
        return replay
    return Mixture(replay, dataset, mixed_hyperparameters(config).offline_batch_ratio)


def assemble(parts: RunParts, settings: Sequence[SeedSettings]) -> Engine:
    """Build the training loop and the run of every seed."""
    config, stopwatch = parts.configs[0], Stopwatch(on_gpu=parts.execution.device != "cpu")
    collector = _build_collector(parts, stopwatch)
    learners = [shared for shared in parts.shared_learners for _ in range(shared.num_seeds)]
    runs = [
        _build_seed_run(parts, seed_index, shared, own, collector, stopwatch)
        for seed_index, (shared, own) in enumerate(zip(learners, settings, strict=True))
    ]
    return Engine(
        config,
        runs,
        collector,
        schedule_timesteps=settings[0].description.schedule_timesteps,
        overlap=parts.execution.overlap,
        stopwatch=stopwatch,
    )


def _build_collector(parts: RunParts, stopwatch: Stopwatch) -> CollectorContract | None:
    """Build the collector; None if the run learns from data only."""
    config, environment = parts.configs[0], parts.inputs.environment
    if environment is None:
        return None
    hyperparameters = config.hyperparameters
    rollouts = isinstance(hyperparameters, RolloutHyperparameters)
    # A trained policy explores better than random actions.
    random_steps = 0 if _starts_trained(config) else learning_starts(config)
    # The learner updates those of rollouts, between two of them.
    normalizers = [p.normalizer for p in parts.policies if p.normalizer and not rollouts]
    replays = [shared.replay for shared in parts.shared_learners if shared.replay is not None]
    if isinstance(environment, TensorVector):
        return _build_tensor_collector(
            parts, environment, replays, random_steps, normalizers, stopwatch
        )
    explorers = [shared.explorer for shared in parts.shared_learners]
    return Collector(
        environment,
        [explorer for explorer in explorers if isinstance(explorer, Explorer)],
        replays,
        n_step=transition_steps(config),
        action_chunk=action_chunk(hyperparameters),
        gamma=hyperparameters.gamma,
        random_steps=random_steps,
        normalizers=normalizers,
        rewards=parts.policies[0].rewards,
        scalers=[scaler for shared in parts.shared_learners for scaler in shared.scalers],
        relabeller=_build_relabeller(parts),
        with_returns=_build_returns(parts, environment.total_envs),
        rollout_steps=RolloutSteps(hyperparameters.gamma) if rollouts else None,
        stopwatch=stopwatch,
    )


def _build_tensor_collector(
    parts: RunParts,
    vector: TensorVector,
    replays: Sequence[ReplayBuffer],
    random_steps: int,
    normalizers: Sequence[ObservationNormalizer],
    stopwatch: Stopwatch,
) -> CollectorContract:
    from rl_training.execution.tensor_explorer import TensorExplorer  # few runs need them
    from rl_training.training.tensors.collector import TensorCollector

    scalers = [scaler for shared in parts.shared_learners for scaler in shared.scalers]
    explorers = [shared.explorer for shared in parts.shared_learners]
    return TensorCollector(
        vector,
        [explorer for explorer in explorers if isinstance(explorer, TensorExplorer)],
        replays,
        n_step=transition_steps(parts.configs[0]),
        gamma=parts.configs[0].hyperparameters.gamma,
        random_steps=random_steps,
        normalizers=normalizers,
        rewards=parts.policies[0].rewards,
        scalers=[scaler for scaler in scalers if isinstance(scaler, DeviceReturnScaler)],
        stopwatch=stopwatch,
        graphed=parts.execution.graphed,
    )


def _build_relabeller(parts: RunParts) -> EpisodeRelabeller | None:
    """Build what repeats collected transitions with other goals; None if nothing does."""
    config = parts.configs[0]
    hindsight = hindsight_of(config, parts.inputs.goals, parts.policies[0].rewards)
    if hindsight is None:
        return None
    seeds = [stream_seed(each.seed, Stream.HINDSIGHT) for each in parts.configs]
    return EpisodeRelabeller(hindsight, seeds, config.num_envs, parts.inputs.spaces)


def _build_returns(parts: RunParts, num_envs: int) -> EpisodesWithReturns | None:
    """Build what gives collected transitions their returns; None if the algorithm uses none."""
    after = return_after_truncation(parts.configs[0].algo_kwargs)
    if after is None:
        return None
    chosen = online_hyperparameters(parts.configs[0])
    return EpisodesWithReturns(chosen.n_step, chosen.gamma, num_envs, parts.inputs.spaces, after)


def _starts_trained(config: TrainConfig) -> bool:
    return config.init_from is not None or config.pretraining_updates > 0


def _build_seed_run(
    parts: RunParts,
    seed_index: int,
    shared: SharedLearner,
    own: SeedSettings,
    collector: CollectorContract | None,
    stopwatch: Stopwatch,
) -> SeedRun:
    config = parts.configs[seed_index]
    streams = {"update": shared.learner.pool}
    if shared.explorer is not None:
        streams["exploration"] = shared.explorer.pool
    if shared.learner.rollouts is not None:
        streams["rollouts"] = shared.learner.orders
    evaluator = None
    if parts.factory is not None and parts.factory.can_evaluate:
        seed = stream_seed(config.seed, Stream.EVALUATION_ENVIRONMENT)
        # Where training environments are too slow for one process, so are those of evaluations.
        in_processes = parts.execution.vectorization == "async"
        evaluator = Evaluator(parts.factory, config.eval_episodes, seed, in_processes=in_processes)
    trackers = [_build_trackers(config, own)] if config.trackers else []
    listeners = [each.add for each in trackers]
    metrics_log = MetricsLog(own.folder, config.log_interval, stopwatch, listeners)
    videos = [] if config.video_interval is None else [_build_videos(config, parts.factory, own)]
    return SeedRun(
        config,
        seed_index=seed_index,
        run_dir=own.folder.path,
        policy=parts.policies[seed_index],
        shared=shared,
        collector=collector,
        evaluator=evaluator,
        saver=CheckpointSaver(own.folder, own.description, shared.replay, streams),
        log=metrics_log.add,
        planned_end=planned_end(config),
        # The metrics come last, so that a row contains what other callbacks log at the same event.
        callbacks=[
            *build_control_callbacks(config),
            *own.callbacks,
            metrics_log,
            *trackers,
            *videos,
        ],
        resume_level=ResumeLevel(own.description.resume_level),
        stopwatch=stopwatch,
    )


def _build_trackers(config: TrainConfig, own: SeedSettings) -> Trackers:
    from rl_training.reporting.trackers import Trackers  # few runs need it

    return Trackers(config, own.folder, own.description.environment["label"])


def _build_videos(
    config: TrainConfig, factory: EnvironmentFactory | None, own: SeedSettings
) -> Callback:
    from rl_training.reporting.videos import PeriodicVideos  # few runs need it

    return PeriodicVideos(config, factory, own.folder)


def mixed_hyperparameters(config: TrainConfig) -> MixedHyperparameters:
    """The hyper-parameters of an algorithm that mixes recorded and collected transitions."""
    assert isinstance(config.algo_kwargs, MixedHyperparameters), "the config allows this regime"
    return config.algo_kwargs


def build_replay(
    config: TrainConfig,
    spaces: SpaceInfo,
    execution: Execution,
    population: Population,
    hindsight: SampledHindsight | None = None,
) -> ReplayBuffer:
    """Build an empty replay buffer of the configured capacity for each seed."""
    return ReplayBuffer(
        stored_transitions(config),
        spaces.observation,
        spaces.actions.chunks_of(action_chunk(config.algo_kwargs)),
        frames=frame_layout(config, spaces, repeats_rows=hindsight is None),
        device=execution.device,
        on_host=execution.replay_on_host,
        slots=population.slots,
        width=population.width,
        first_seed=population.first_seed,
        priority_exponent=priority_exponent(config.algo_kwargs),
        returns=return_after_truncation(config.algo_kwargs) is not None,
        ended=isinstance(config.algo_kwargs, RolloutHyperparameters),
        memory=memory_size(config.algo_kwargs),
        hindsight=hindsight,
        num_envs=config.num_envs,
    )


def build_policy(
    config: TrainConfig, spaces: SpaceInfo, device: str, planned_updates: int
) -> Policy:
    """Build the untrained policy of a run."""
    algorithm = config.spec.algorithm(
        spaces.observation,
        spaces.actions,
        config.hyperparameters,
        seed=stream_seed(config.seed, Stream.INITIALIZATION),
        device=device,
        planned_updates=planned_updates,
        custom_networks=current_networks(),
    )
    normalizer = None
    if config.normalizes_observations:
        _check_normalizable(spaces.observation)
        normalizer = ObservationNormalizer(spaces.obs_dim)
    policy = Policy(algorithm, spaces, normalizer, algorithm_name=config.algo)
    policy.settings = config.algo_kwargs
    return policy


def why_not_mapped(config: TrainConfig, spaces: SpaceInfo) -> str | None:
    """Say why a user's networks can neither be mapped over seeds nor compiled."""
    return build_policy(config, spaces, "cpu", 1).algorithm.why_not_mapped()


def _check_normalizable(observation: ObservationSpec) -> None:
    if observation.is_numeric:
        return
    leaf = next(leaf for leaf in observation.leaves if leaf.kind != "numbers")
    raise ConfigError(
        f"normalize_observations: the {leaf.label} is {leaf.kind}, and only numbers can be "
        "normalized; set normalize_observations: false (images are scaled by their encoder)"
    )


def _fit_to_data(policy: Policy, dataset: OfflineDataset) -> None:
    """Set the observation normalizer and the reward transform from recorded data."""
    if policy.normalizer is not None:
        dataset.fit(policy.normalizer)
    policy.rewards = dataset.rewards
