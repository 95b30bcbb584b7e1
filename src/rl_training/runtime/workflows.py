"""What users do with runs and policies: train, resume, evaluate, predict, save, record data.

The command line and the managed classes call nothing below this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from rl_training.callbacks import Callback, as_callbacks
from rl_training.checkpoints.format import (
    POLICY,
)
from rl_training.checkpoints.loading import (
    EVALUATION_FILES,
    cached_policy,
    find_checkpoint,
    load_policy,
    saved_config,
    saved_factory,
)
from rl_training.config import ConfigSource, TrainConfig
from rl_training.config_files import load_config
from rl_training.data.formats.writing import FORMATS, Format
from rl_training.data.scores import minari_ids, reference_scale
from rl_training.datasets.describing import summary_lines
from rl_training.datasets.opening import Arrays, are_arrays
from rl_training.datasets.reading_progress import reading_progress
from rl_training.datasets.selecting import filter_dataset, split_dataset
from rl_training.datasets.workflows import (
    convert_dataset,
    dataset_section,
    describe_dataset,
    record_dataset,
)
from rl_training.envs import EnvironmentFactory, EnvironmentSource
from rl_training.envs.packages import gymnasium_id
from rl_training.errors import CheckpointError, UserError
from rl_training.evaluation.evaluator import Evaluation, Evaluator
from rl_training.evaluation.offline import (
    FQE_UPDATES,
    HELD_OUT,
    EvaluationData,
    OfflineEvaluation,
    evaluate_on_data,
)
from rl_training.execution.policy import EpisodeStart, Policy
from rl_training.execution.random_streams import Stream, stream_seed
from rl_training.models.custom_networks import given_networks
from rl_training.reporting.progress import progress_callback, with_progress
from rl_training.runtime import jobs
from rl_training.runtime.job_folder import EXIT_PREEMPTED, JobStatus
from rl_training.runtime.jobs import JobResult
from rl_training.runtime.policies import (
    RunStatus,
    SavedPolicy,
    open_policy,
    planned_execution,
    read_policy,
    read_status,
    save_policy,
    untrained_policy,
)
from rl_training.training.inputs import config_factory
from rl_training.training.resume import resume_run, resume_runs
from rl_training.training.run import start_population, start_run
from rl_training.training.saved_run import check_schedule_choice
from rl_training.types import RecordedEpisode, ScheduleChoice, TrainResult, VideoSelection

__all__ = [
    "EXIT_PREEMPTED",
    "FORMATS",
    "FQE_UPDATES",
    "HELD_OUT",
    "Arrays",
    "EpisodeStart",
    "Format",
    "JobResult",
    "JobStatus",
    "Policy",
    "RunStatus",
    "SavedPolicy",
    "are_arrays",
    "check_schedule_choice",
    "convert_dataset",
    "dataset_section",
    "describe_dataset",
    "evaluate_checkpoint",
    "evaluate_offline",
    "evaluate_offline_at",
    "evaluate_policy",
    "evaluate_policy_at",
    "filter_dataset",
    "open_policy",
    "planned_execution",
    "predict_checkpoint",
    "play_policy",
    "progress_callback",
    "read_policy",
    "read_status",
    "reading_progress",
    "record_dataset",
    "record_policy_video",
    "record_video",
    "resume_together",
    "resume_training",
    "run_or_resume",
    "save_policy",
    "split_dataset",
    "summary_lines",
    "train",
    "untrained_policy",
]

DEFAULT_EPISODES = 10


def train(
    config: ConfigSource,
    *,
    callbacks: Sequence[Callback] | None = None,
    env: EnvironmentSource | None = None,
    dataset: Arrays | None = None,
    progress: bool | None = None,
    networks: object = None,
) -> TrainResult | list[TrainResult]:
    """Train a config. Returns one result, or a list of results if it has `seeds`.

    Several seeds are trained together; each has its own callbacks, made by `Callback.for_seed`.

    `env` is your own environment, environment class or factory, used instead of the config's
    `env_id`. `dataset` is recorded data in memory (arrays by D4RL's names) or a config section,
    used instead of the config's. `networks` is a class of your own networks. `progress` shows the
    run's progress on standard output; by default in a terminal or a notebook.
    """
    with given_networks(networks):
        resolved = load_config(config)
        if dataset is not None and not are_arrays(dataset):
            resolved, dataset = resolved.with_changes(dataset=dataset), None
        chosen = with_progress(as_callbacks(callbacks), progress)
        if resolved.seeds is None:
            return start_run(resolved, environment=env, dataset=dataset, callbacks=chosen)
        return start_population(resolved, environment=env, dataset=dataset, callbacks=chosen)


def resume_training(
    path_or_run_dir: str | Path,
    *,
    total_timesteps: int | None = None,
    schedule: ScheduleChoice | None = None,
    callbacks: Sequence[Callback] | None = None,
    env: EnvironmentSource | None = None,
    dataset: Arrays | None = None,
    progress: bool | None = None,
    changes: Mapping[str, Any] | None = None,
    networks: object = None,
) -> TrainResult:
    """Continue a run exactly from its latest (or the given) checkpoint.

    A larger `total_timesteps` extends the run. `schedule="extend"` stretches its schedules to
    the new total; `"keep"` leaves them unchanged. Without either they are unchanged too, but a run
    whose learning rates have all decayed to zero raises `ConfigError`. `progress` shows the run's
    progress; by default in a terminal or a notebook. `changes` move its environments, which does
    not change the results: `vectorization`, `env_workers`, `ray_address`, `env_timeout`, ....
    `env`, `dataset` and `networks` are those that the run was started with, if it had any.
    """
    with given_networks(networks):
        return resume_run(
            Path(path_or_run_dir),
            total_timesteps=total_timesteps,
            schedule=schedule,
            environment=env,
            dataset=dataset,
            callbacks=with_progress(as_callbacks(callbacks), progress),
            changes=changes,
        )


def resume_together(
    paths: Sequence[str | Path],
    *,
    total_timesteps: int | None = None,
    schedule: ScheduleChoice | None = None,
    callbacks: Sequence[Callback] | None = None,
    env: EnvironmentSource | None = None,
    dataset: Arrays | None = None,
    progress: bool | None = None,
    changes: Mapping[str, Any] | None = None,
    networks: object = None,
) -> list[TrainResult]:
    """Continue several runs; seeds that were trained together are resumed together."""
    with given_networks(networks):
        return resume_runs(
            [Path(path) for path in paths],
            total_timesteps=total_timesteps,
            schedule=schedule,
            environment=env,
            dataset=dataset,
            callbacks=with_progress(as_callbacks(callbacks), progress),
            changes=changes,
        )


def run_or_resume(
    config: ConfigSource,
    seeds: Sequence[int],
    folder: str | Path,
    *,
    callbacks: Sequence[Callback] | None = None,
    env: EnvironmentSource | None = None,
    progress: bool | None = None,
    networks: object = None,
) -> JobResult:
    """Start a job, continue it where it stopped, or find that it is finished.

    A job trains the `seeds` of one config in `folder`: one run folder per seed, `job.json` with
    everything resolved that its numbers depend on, and `status.json` with its state. Any number of
    processes may call this one after another, on any machine, and the result is that of a job that
    was never stopped. A second process at the same time waits a minute for the first one to end,
    and then raises `RunLockedError`.

    SIGTERM and SIGUSR1 save a checkpoint and return the state `preempted`, with the exit code 75.
    Ctrl-C raises `TrainingInterrupted`. `progress` shows the progress on standard output; by
    default in a terminal or a notebook.
    """
    with given_networks(networks):
        chosen = with_progress(as_callbacks(callbacks), progress)
        return jobs.run_or_resume(config, seeds, folder, callbacks=chosen, env=env)


def evaluate_checkpoint(
    path: str | Path,
    *,
    num_episodes: int | None = None,
    seed: int | None = None,
    best: bool = False,
    env: EnvironmentSource | None = None,
    networks: object = None,
) -> dict[str, float]:
    """Evaluate the deterministic policy on fresh episodes and return statistics of the returns.

    These are not the episodes of the run's own evaluations, which select its best checkpoint and
    stop it early. Equal seeds give equal episodes; the default is the seed of the run.

    If reference scores exist, the result includes `eval_d4rl_score` or `eval_minari_score`.
    """
    with given_networks(networks):
        result = evaluate_policy_at(path, num_episodes=num_episodes, seed=seed, best=best, env=env)
        if result.scale is None or result.score is None:
            return dict(result.metrics)
        return {**result.metrics, result.scale.metric: result.score}


def evaluate_policy_at(
    path: str | Path,
    *,
    num_episodes: int | None = None,
    seed: int | None = None,
    best: bool = False,
    env: EnvironmentSource | None = None,
) -> Evaluation:
    """Like `evaluate_checkpoint`, but return every episode's return and length."""
    reader = find_checkpoint(path, best=best, names=EVALUATION_FILES)
    config = saved_config(reader)
    environment = reader.json(POLICY).get("environment") or {}
    if env is None and environment.get("id") is None:
        raise CheckpointError(
            f"{path}: was trained in a custom environment ({environment.get('label')}); "
            "evaluate it from Python with evaluate_checkpoint(path, env=...)"
        )
    factory = saved_factory(environment, env)
    result = _play_fresh_episodes(
        load_policy(reader),
        factory,
        (config.eval_episodes if config else DEFAULT_EPISODES)
        if num_episodes is None
        else num_episodes,
        (config.seed if config else 0) if seed is None else seed,
    )
    recorded = config.to_mapping()["dataset"] if config else None
    # Reference scores hold for the environment itself: a wrapper may change its rewards.
    played = environment.get("id") if env is None and not factory.wrappers else None
    twin = gymnasium_id(played) if played is not None else None
    return replace(
        result,
        scale=reference_scale(twin, minari_ids(recorded)),
        played_in=None if twin == played else twin,
    )


def evaluate_offline(
    path: str | Path,
    dataset: EvaluationData | None = None,
    *,
    seed: int = 0,
    best: bool = False,
    held_out: float = HELD_OUT,
    fqe_updates: int = FQE_UPDATES,
    env: EnvironmentSource | None = None,
    networks: object = None,
) -> dict[str, float]:
    """Evaluate a policy on recorded data: losses, diagnostics and fitted Q evaluation.

    `dataset` is a file, a Minari id, a run folder, a `dataset` section or arrays in memory; by
    default the dataset of the run's config. The metrics are computed on the fraction `held_out`
    of its episodes; Q-functions are fitted to the others. `env` is needed only if the dataset is
    recorded in a custom environment.
    """
    with given_networks(networks):
        result = evaluate_offline_at(
            path,
            dataset,
            seed=seed,
            best=best,
            held_out=held_out,
            fqe_updates=fqe_updates,
            env=env,
        )
        return dict(result.metrics)


def evaluate_offline_at(
    path: str | Path,
    dataset: EvaluationData | None = None,
    *,
    seed: int = 0,
    best: bool = False,
    held_out: float = HELD_OUT,
    fqe_updates: int = FQE_UPDATES,
    env: EnvironmentSource | None = None,
) -> OfflineEvaluation:
    """Like `evaluate_offline`, with notes on how to read the metrics."""
    return evaluate_on_data(
        find_checkpoint(path, best=best, names=EVALUATION_FILES),
        dataset,
        seed=seed,
        held_out=held_out,
        fqe_updates=fqe_updates,
        env=env,
    )


def evaluate_policy(
    policy: Policy,
    config: TrainConfig,
    *,
    num_episodes: int | None = None,
    seed: int | None = None,
    env: EnvironmentSource | None = None,
) -> Evaluation:
    """Evaluate a policy in the environment of a config, or in your own `env`."""
    factory = config_factory(config, env)
    episodes = config.eval_episodes if num_episodes is None else num_episodes
    return _play_fresh_episodes(policy, factory, episodes, config.seed if seed is None else seed)


def _play_fresh_episodes(
    policy: Policy, factory: EnvironmentFactory, num_episodes: int, seed: int
) -> Evaluation:
    """Evaluate on episodes that no run uses to choose a checkpoint or to stop."""
    if seed < 0:
        raise UserError(f"seed = {seed}: must not be negative")
    stream = stream_seed(seed, Stream.REPORT_ENVIRONMENT)
    found = Evaluator(factory, num_episodes, stream).evaluate(policy)
    assert found is not None, "nothing stops it"
    return replace(found, seed=seed)


@overload
def predict_checkpoint(
    path: str | Path,
    obs: Any,
    *,
    deterministic: bool = ...,
    state: None = ...,
    episode_start: None = ...,
    networks: object = ...,
) -> np.ndarray: ...


@overload
def predict_checkpoint(
    path: str | Path,
    obs: Any,
    *,
    deterministic: bool = ...,
    state: np.ndarray,
    episode_start: EpisodeStart | None = ...,
    networks: object = ...,
) -> tuple[np.ndarray, np.ndarray]: ...


@overload
def predict_checkpoint(
    path: str | Path,
    obs: Any,
    *,
    deterministic: bool = ...,
    state: np.ndarray | None = ...,
    episode_start: EpisodeStart,
    networks: object = ...,
) -> tuple[np.ndarray, np.ndarray]: ...


def predict_checkpoint(
    path: str | Path,
    obs: Any,
    *,
    deterministic: bool = True,
    state: np.ndarray | None = None,
    episode_start: EpisodeStart | None = None,
    networks: object = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Return actions in environment units for one observation or a batch.

    With the setting `action_chunk`, an action has a leading axis of that length.
    With `state` or `episode_start`, return the actions and the next state. A recurrent policy needs
    one of them: `episode_start=True` in the first step of an episode, and then the `state` that the
    step before returned.
    The environment does not have to be installed. `networks` is the class of your own networks, if
    the policy was trained with one.
    """
    with given_networks(networks):
        policy = cached_policy(path)
        return policy.predict(
            obs, deterministic=deterministic, state=state, episode_start=episode_start
        )


def record_video(
    path: str | Path,
    out: str | Path,
    *,
    episodes: int = 3,
    best: bool = False,
    seed: int | None = None,
    select: VideoSelection = "all",
    fps: float | None = None,
    width: int | None = None,
    height: int | None = None,
    env: EnvironmentSource | None = None,
    networks: object = None,
) -> list[RecordedEpisode]:
    """Record the policy of a run folder, a checkpoint or a saved policy to an MP4 or GIF file.

    The policy acts without exploration noise. The episodes are those of `evaluate_checkpoint` with
    the same seed and number of episodes; the default seed is that of the run. `select` is `"all"`,
    or records only the `"best"` or the `"worst"` of them. `best` uses the best checkpoint of a run
    folder. `env` is your own environment, if the policy was trained in one.

    `fps` is by default the environment's own speed, and `width` and `height` are its own size.
    Returns the recorded episodes, with their returns and lengths.
    """
    with given_networks(networks):
        from rl_training.evaluation import video

        return video.record(
            path,
            out,
            episodes=episodes,
            best=best,
            seed=seed,
            select=select,
            fps=fps,
            width=width,
            height=height,
            env=env,
        )


def record_policy_video(
    policy: Policy,
    config: TrainConfig,
    out: str | Path,
    *,
    episodes: int = 3,
    seed: int | None = None,
    select: VideoSelection = "all",
    fps: float | None = None,
    width: int | None = None,
    height: int | None = None,
    env: EnvironmentSource | None = None,
) -> list[RecordedEpisode]:
    """Like `record_video`, for a policy in the environment of a config, or in your own `env`."""
    from rl_training.evaluation import video

    own_seed = video.fresh_seed(config.seed if seed is None else seed)
    return video.record_policy(
        video.Subject(policy, config_factory(config, env), own_seed),
        video.check_destination(out),
        episodes=episodes,
        select=select,
        options=video.VideoOptions(fps, width, height),
    )


def play_policy(
    path: str | Path,
    *,
    episodes: int = 3,
    best: bool = False,
    seed: int | None = None,
    env: EnvironmentSource | None = None,
    shown: Callable[[RecordedEpisode], None] = lambda episode: None,
) -> list[RecordedEpisode]:
    """Show a policy in a window; `shown` is called after each episode."""
    from rl_training.evaluation import video

    return video.play(path, episodes=episodes, best=best, seed=seed, env=env, shown=shown)
