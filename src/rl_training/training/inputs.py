"""Opens what a run learns from: environments, recorded data, or both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl_training.algorithms.hyperparameters import (
    action_chunk,
    priority_exponent,
    return_after_truncation,
)
from rl_training.algorithms.spec import action_kinds, list_algorithm_specs
from rl_training.config import MAX_ON_HOST, TrainConfig
from rl_training.data.fingerprint import fingerprint_difference
from rl_training.data.hindsight.relabelling import Hindsight
from rl_training.data.hindsight.sampled import SampledHindsight
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.transforms import RewardTransform
from rl_training.datasets.opening import Arrays, build_dataset, check_sections
from rl_training.datasets.reading_progress import reading_progress
from rl_training.envs import (
    TRUSTED_MODULES,
    EnvironmentFactory,
    EnvironmentSource,
    VectorEnvironment,
    environment_factory,
    measure_step_seconds,
    probe_resume_level,
    suitable_backend,
)
from rl_training.envs.cores import available_cores
from rl_training.envs.goals import GoalEnvironment
from rl_training.envs.make import close_environment
from rl_training.envs.tensors.vector import TensorVector
from rl_training.envs.vector.backends import RAY, Backend, Placement
from rl_training.errors import (
    CheckpointError,
    ConfigError,
    EnvironmentSetupError,
    UnboundedActionsError,
    warn_user,
)
from rl_training.execution.random_streams import Stream, stream_seed
from rl_training.observations import ALL_FLOAT32, NumberTypes
from rl_training.types import ActionKind, Json, ResumeLevel, SpaceInfo

RECORDED = "recorded-data"
"""The label of a run without an environment"""


@dataclass(frozen=True)
class RunInputs:
    """The sources of transitions: an environment, a dataset, or both."""

    spaces: SpaceInfo
    environment: VectorEnvironment | TensorVector | None
    dataset: OfflineDataset | None
    goals: GoalEnvironment | None = None
    """The goal functions of the environment, if transitions are repeated with other goals"""

    @property
    def repeats_rows(self) -> bool:
        """Whether transitions are stored again with other goals."""
        return self.goals is not None and not self.goals.has_tensor_functions

    @property
    def fingerprint(self) -> Json | None:
        return None if self.dataset is None else self.dataset.fingerprint


def run_factory(
    config: TrainConfig, source: EnvironmentSource | None, modules: Sequence[str] = ()
) -> EnvironmentFactory | None:
    """The factory of a run's environments; None if it learns from data only.

    `modules` are those that a saved run was trained with.
    """
    if config.env_id is None and source is None and config.resolved_regime == "offline":
        return None
    return config_factory(config, source, modules)


def config_factory(
    config: TrainConfig, source: EnvironmentSource | None, modules: Sequence[str] = ()
) -> EnvironmentFactory:
    """The factory of a config's environments, or of those of `source` in the same wrappers."""
    return environment_factory(
        config.env_id,
        config.env_kwargs,
        source,
        wrappers=[section.model_dump() for section in config.wrappers],
        modules=modules,
        observation_keys=config.observation_keys,
        action_range=config.stated_action_range,
        training_wrappers=[section.model_dump() for section in config.training_wrappers],
        number_types=own_number_types(config),
    )


def own_number_types(config: TrainConfig) -> NumberTypes | None:
    """The types in which a new run stores numbers of observations; None: their own.

    Numbers that are normalized are stored as float32.
    """
    return ALL_FLOAT32 if config.normalizes_observations else None


def is_passed(environment: Json) -> bool:
    """Whether an environment, as described below, was passed in Python and must be again."""
    return environment["id"] is None and environment["label"] != RECORDED


def describe_environment(
    factory: EnvironmentFactory | None, config: TrainConfig, label: str | None = None
) -> Json:
    """Describe the environment for a checkpoint; one without an id must be passed on resume.

    `label` is the name of the environment that the factory makes.
    """
    if label is None:
        label = RECORDED if factory is None else factory.label
    known = factory is not None and factory.is_registered_id
    description: Json = {
        "id": config.env_id if known else None,
        "kwargs": config.env_kwargs,
        "label": label,
    }
    if config.wrappers:
        description["wrappers"] = [section.model_dump() for section in config.wrappers]
    if config.observation_keys is not None:
        description["observation_keys"] = config.observation_keys
    if config.stated_action_range is not None:
        description["action_range"] = list(config.stated_action_range)
    if TRUSTED_MODULES:  # only names: loading a checkpoint never imports them
        description["modules"] = list(TRUSTED_MODULES)
    return description


def environment_resume_level(
    factory: EnvironmentFactory | None, config: TrainConfig
) -> ResumeLevel:
    """How exactly the environments of this run can be resumed."""
    if factory is None or config.resolved_regime == "offline":
        return ResumeLevel.BIT_EXACT
    if config.vectorization == "ray-async":
        warn_user(
            "vectorization = 'ray-async': which environments are ready first depends on timing, so "
            "the run can neither be repeated nor resumed exactly (resume level statistical); "
            "'ray' is exact"
        )
        return ResumeLevel.STATISTICAL
    if uses_tensors(factory, config):
        source = factory.tensor_source
        assert source is not None
        return source.resume_level
    level = probe_resume_level(factory)
    if level is ResumeLevel.EPISODE_EXACT and config.num_envs > 1:
        # Several environments are rarely at an episode boundary at the same time.
        return ResumeLevel.STATISTICAL
    return level


def run_resume_level(environments: ResumeLevel, config: TrainConfig) -> ResumeLevel:
    """How exactly this run can be resumed, if its environments can be resumed at this level."""
    lacks_replay = config.checkpoint_replay == "none" and config.resolved_regime != "offline"
    return ResumeLevel.STATISTICAL if lacks_replay else environments


def choose_backend(factory: EnvironmentFactory | None, config: TrainConfig, seeds: int) -> Backend:
    """Choose where environments run; the trajectories do not depend on it, except in ray-async."""
    if uses_tensors(factory, config):
        check_tensor_settings(config)
        return "tensors"
    if config.num_envs > MAX_ON_HOST:
        raise ConfigError(
            f"num_envs = {config.num_envs}: at most {MAX_ON_HOST:,} environments can be stepped "
            "outside of the device; more need a tensor environment, such as warp/HalfCheetah-v5"
        )
    if config.vectorization == "tensors":
        raise ConfigError(
            f"vectorization = 'tensors': {RECORDED if factory is None else factory.label} is no "
            "tensor environment; those of this package have ids such as tensors/Pendulum-v1 and "
            "warp/HalfCheetah-v5; use vectorization: auto"
        )
    if config.vectorization != "auto":
        return config.vectorization
    total_envs = seeds * config.num_envs
    if factory is None or total_envs == 1 or config.resolved_regime == "offline":
        return "sync"
    return suitable_backend(measure_step_seconds(factory), total_envs, available_cores())


def uses_tensors(factory: EnvironmentFactory | None, config: TrainConfig) -> bool:
    """Whether the run steps worlds that are tensors."""
    if factory is None or not factory.is_tensors or config.resolved_regime == "offline":
        return False
    return config.vectorization in ("auto", "tensors")


def check_tensor_settings(config: TrainConfig) -> None:
    """Raise `ConfigError` for settings that need environments on the host."""
    chosen = config.algo_kwargs
    refused = {
        "wrappers": bool(config.wrappers or config.training_wrappers),
        "observation_keys": config.observation_keys is not None,
        "action_range": config.action_range is not None,
        "replay.hindsight": config.hindsight is not None,
        "action_chunk": action_chunk(chosen) > 1,
        "algo": return_after_truncation(chosen) is not None,
        "replay_device": config.replay_device == "cpu",
    }
    if wrong := [key for key, is_set in refused.items() if is_set]:
        value = (
            f" = {config.algo!r} (it needs the returns of episodes)" if wrong[0] == "algo" else ""
        )
        raise ConfigError(
            f"{wrong[0]}{value}: does not work with tensor environments, whose transitions stay on "
            "the device; remove it, or use the Gymnasium environment of the same name"
        )


def check_vectorization(config: TrainConfig) -> None:
    """Raise `UserError` if the environments need Ray and it is not installed."""
    if config.vectorization in RAY and config.resolved_regime != "offline":
        from rl_training.ray_session import require_ray  # few runs need it

        require_ray(f"vectorization = {config.vectorization!r}")


def check_regime(config: TrainConfig, arrays: Arrays | None) -> None:
    """Raise `ConfigError` if the data that the regime needs is missing, or cannot be used."""
    regime = config.resolved_regime
    if regime == "online" and arrays is not None:
        raise ConfigError(f"dataset: {config.algo} learns online and uses no dataset")
    if regime != "online" and config.dataset is None and arrays is None:
        raise ConfigError(
            f"dataset: {config.algo} learns from recorded data (regime {regime}) and needs a "
            "dataset, such as dataset: {kind: minari, id: D4RL/door/human-v2}"
        )
    if config.dataset is not None and arrays is not None:
        raise ConfigError("dataset: given both in the config and as arrays; use one of them")
    if regime != "online":
        check_sections(config.dataset_sections)
    elif config.dataset is not None:
        warn_user("dataset: not used, because the regime is 'online'")


def open_inputs(
    configs: Sequence[TrainConfig],
    factory: EnvironmentFactory | None,
    arrays: Arrays | None,
    backend: Backend,
    device: str,
    resources: contextlib.ExitStack,
    *,
    seed_every_reset: bool,
    number_types: NumberTypes | None,
) -> RunInputs:
    """Start the environments and load the data, and check that they fit the algorithm.

    With `seed_every_reset`, every episode starts from its own seed, which environments need whose
    state cannot be saved. `number_types` are the types in which numbers of observations are stored
    if there is no environment.
    """
    config, environment, spaces = configs[0], None, None
    goals = None if config.hindsight is None else _open_goals(config, factory, resources)
    if factory is not None and config.resolved_regime == "offline":
        spaces = spaces_of(factory, config)
    elif factory is not None:
        environment = _training_environment(
            factory, configs, backend, device, seed_every_reset=seed_every_reset
        )
        resources.enter_context(environment)
        spaces = environment.spaces
    dataset = None
    if config.resolved_regime != "online":
        dataset = _load_dataset(config, factory, spaces, arrays, goals, device, number_types)
        spaces = dataset.spaces if spaces is None else spaces
        check_fit(config, "the dataset", dataset.spaces.action_kind)
        if environment is not None and dataset.rewards is None:
            raise ConfigError(
                "dataset: its sections transform rewards differently, so new rewards cannot be "
                "transformed to match; use the same reward_scale, reward_shift and reward_clip in "
                "all sections, and no reward_normalization"
            )
    assert spaces is not None
    return RunInputs(spaces, environment, dataset, goals)


def _open_goals(
    config: TrainConfig, factory: EnvironmentFactory | None, resources: contextlib.ExitStack
) -> GoalEnvironment:
    """Make an environment for its goal functions, in this process, wherever the others run."""
    if factory is None:
        raise ConfigError(
            "replay.hindsight: needs an environment (env_id), whose compute_reward gives the "
            "rewards for other goals"
        )
    goals = GoalEnvironment(factory)
    resources.callback(goals.close)
    if goals.has_tensor_functions:
        _check_sampled(config, factory.label)
    return goals


def _check_sampled(config: TrainConfig, label: str) -> None:
    """Raise `ConfigError` if transitions cannot get other goals when they are sampled."""
    problems = {
        f"n_step = {getattr(config.algo_kwargs, 'n_step', 1)}": (
            getattr(config.algo_kwargs, "n_step", 1) > 1,
            "use n_step: 1",
        ),
        "prioritized = True": (
            priority_exponent(config.algo_kwargs) is not None,
            "use prioritized: false",
        ),
        "vectorization = 'ray-async'": (config.vectorization == "ray-async", "use ray"),
    }
    for setting, (is_set, advice) in problems.items():
        if is_set:
            raise ConfigError(
                f"{setting}: {label} has compute_reward_torch, so that transitions get other goals "
                f"when they are sampled (replay.hindsight), which does not work with it; {advice}, "
                "or an environment with compute_reward alone"
            )


def sampled_hindsight_of(
    config: TrainConfig,
    goals: GoalEnvironment | None,
    rewards: Callable[[Tensor], Tensor] | None = None,
) -> SampledHindsight | None:
    """How transitions get other goals when they are sampled; None: not at all."""
    if config.hindsight is None or goals is None or not goals.has_tensor_functions:
        return None
    return SampledHindsight(
        goals,
        config.hindsight.strategy,
        config.hindsight.per_transition,
        gamma=config.algo_kwargs.gamma,
        transform=rewards,
    )


def hindsight_of(
    config: TrainConfig, goals: GoalEnvironment | None, rewards: RewardTransform | None = None
) -> Hindsight | None:
    """How transitions are repeated with other goals when they are stored; None: not at all."""
    if config.hindsight is None:
        return None
    assert goals is not None
    if goals.has_tensor_functions:
        return None
    return Hindsight(
        goals,
        config.hindsight.strategy,
        config.hindsight.per_transition,
        gamma=config.algo_kwargs.gamma,
        n_step=getattr(config.algo_kwargs, "n_step", 1),
        transform=rewards,
    )


def require_same_data(saved: Json | None, inputs: RunInputs, *, hint: str = "") -> None:
    """Raise `CheckpointError` if the data differs from the data that the run started with."""
    present = inputs.fingerprint
    if saved is None and present is None:
        return
    difference = fingerprint_difference(saved or {}, present or {})
    if difference is not None:
        raise CheckpointError(
            f"the data has changed since this run was started: {difference}{hint}"
        )


def _training_environment(
    factory: EnvironmentFactory,
    configs: Sequence[TrainConfig],
    backend: Backend,
    device: str,
    *,
    seed_every_reset: bool,
) -> VectorEnvironment | TensorVector:
    """Start the training environments of all seeds and check that they fit the algorithm."""
    config = configs[0]
    seeds = [stream_seed(each.seed, Stream.TRAINING_ENVIRONMENT) for each in configs]
    environment: VectorEnvironment | TensorVector
    with _unbounded_actions_fit(config, factory):
        if backend == "tensors":
            environment = TensorVector(factory, config.num_envs, seeds, device)
        else:
            environment = VectorEnvironment(
                factory,
                config.num_envs,
                seeds,
                backend=backend,
                seed_every_reset=seed_every_reset,
                timeout=config.env_timeout,
                restarts=config.env_restarts,
                placement=Placement(config.env_workers, config.ray_address, config.env_worker_cpus),
            )
    try:
        check_fit(config, factory.label, environment.spaces.action_kind)
    except EnvironmentSetupError:
        environment.close()
        raise
    return environment


def _load_dataset(
    config: TrainConfig,
    factory: EnvironmentFactory | None,
    spaces: SpaceInfo | None,
    arrays: Arrays | None,
    goals: GoalEnvironment | None,
    device: str,
    number_types: NumberTypes | None,
) -> OfflineDataset:
    hyperparameters = config.algo_kwargs
    with reading_progress("reading data") as progress:
        return build_dataset(
            config.dataset_sections if arrays is None else arrays,
            factory=factory,
            spaces=spaces,
            gamma=hyperparameters.gamma,
            n_step=getattr(hyperparameters, "n_step", 1),
            next_actions=config.spec.uses_next_actions,
            returns=return_after_truncation(hyperparameters),
            action_chunk=action_chunk(hyperparameters),
            hindsight=hindsight_of(config, goals) or sampled_hindsight_of(config, goals),
            device=device,
            progress=progress,
            observation_keys=config.observation_keys,
            number_types=number_types,
        )


def spaces_of(factory: EnvironmentFactory, config: TrainConfig) -> SpaceInfo:
    """Return the spaces of an environment; raise if the algorithm has no use for its actions."""
    environment = factory()
    try:
        with _unbounded_actions_fit(config, factory):
            spaces = factory.spaces_of(environment)
    finally:
        close_environment(environment)
    check_fit(config, factory.label, spaces.action_kind)
    return spaces


@contextlib.contextmanager
def _unbounded_actions_fit(config: TrainConfig, factory: EnvironmentFactory) -> Iterator[None]:
    """Advise a range of unbounded actions only where it can be set and is of use."""
    try:
        yield
    except UnboundedActionsError:
        check_fit(config, factory.label, "continuous")
        if not factory.is_tensors:
            raise
        raise EnvironmentSetupError(
            f"{factory.label}: its action space has no finite bounds, but policies choose actions "
            "in a finite range; give it bounds"
        ) from None


def check_fit(config: TrainConfig, label: str, kind: ActionKind) -> None:
    """Raise `EnvironmentSetupError` if the algorithm has no use for this kind of actions."""
    if kind in config.spec.actions:
        return
    fitting = [spec.name for spec in list_algorithm_specs() if kind in spec.actions]
    raise EnvironmentSetupError(
        f"algo = {config.algo!r} needs {action_kinds(config.spec.actions, ' or ')} actions, but "
        f"{label} has {kind} actions; algorithms that fit: {', '.join(fitting) or 'none'}"
    ) from None
