"""Starts runs and trains them to their results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from rl_training.algorithms.hyperparameters import RolloutHyperparameters
from rl_training.callbacks import Callback, Progress
from rl_training.checkpoints.run_folder import RunFolder, package_versions, short_name
from rl_training.config import TrainConfig
from rl_training.datasets.opening import Arrays
from rl_training.envs import EnvironmentFactory, EnvironmentSource, check_environment
from rl_training.errors import INTERRUPTED, ConfigError, TrainingInterrupted, warn_user
from rl_training.execution.execution import Execution, resolve_execution
from rl_training.execution.programs import Population
from rl_training.execution.random_streams import global_state, isolated_global_streams
from rl_training.internals import is_out_of_memory
from rl_training.models.custom_networks import current_networks, networks_name
from rl_training.reporting.learning_curve import draw_learning_curve
from rl_training.training.assembly import (
    RunParts,
    SeedSettings,
    assemble,
    build_parts,
    why_not_mapped,
)
from rl_training.training.controls import why_never_stopped_early
from rl_training.training.engine import (
    Engine,
    StopSignals,
    UpdateSchedule,
    planned_updates,
    stop_on_signals,
)
from rl_training.training.initialization import (
    inherit_normalization,
    initialize,
    trained_fingerprint,
    with_seed_in_path,
)
from rl_training.training.inputs import (
    RECORDED,
    check_regime,
    check_vectorization,
    choose_backend,
    describe_environment,
    environment_resume_level,
    is_passed,
    open_inputs,
    own_number_types,
    run_factory,
    run_resume_level,
)
from rl_training.training.needs import check_disk, check_memory, replay_is_on_host
from rl_training.training.saver import CheckpointSaver, RunDescription
from rl_training.training.seed_run import SeedRun
from rl_training.types import EVALUATION_METRICS, Json, ResumeLevel, TrainResult


def start_run(
    config: TrainConfig,
    *,
    environment: EnvironmentSource | None = None,
    dataset: Arrays | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Train one seed in a new run folder."""
    return _start([config], environment, dataset, [callbacks])[0]


def start_population(
    config: TrainConfig,
    *,
    environment: EnvironmentSource | None = None,
    dataset: Arrays | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[TrainResult]:
    """Train the `seeds` of a config together, each in its own run folder."""
    configs = [
        config.with_changes(
            seed=seed,
            seeds=None,
            run_name=f"{config.run_name}__seed{seed}" if config.run_name else None,
        )
        for seed in config.seeds or [config.seed]
    ]
    copies = [[callback.for_seed(each.seed) for callback in callbacks] for each in configs]
    return _start(configs, environment, dataset, copies)


def _start(
    configs: list[TrainConfig],
    environment: EnvironmentSource | None,
    arrays: Arrays | None,
    callbacks: Sequence[Sequence[Callback]],
) -> list[TrainResult]:
    if configs[0].init_from is not None:
        configs = [inherit_normalization(with_seed_in_path(each)) for each in configs]
    config = configs[0]
    factory = run_factory(config, environment)
    check_regime(config, arrays)
    check_vectorization(config)
    if config.trackers:
        from rl_training.reporting.trackers import check_trackers  # few runs need it

        check_trackers(config)
    updates = planned_updates(config)
    if updates == 0:
        warn_user(_why_nothing_is_learned(config))
    if reason := why_never_stopped_early(config, can_evaluate=_can_evaluate(factory)):
        warn_user(f"early_stopping has no effect: {reason}")
    execution = resolve_execution(config, updates)
    population = Population()
    if execution.batched and len(configs) > 1:
        population = Population(len(configs), tuple(range(len(configs))))
    with stop_on_signals() as signals, prepared_process(config.seed, execution) as resources:
        label = RECORDED
        if factory is not None:
            label = check_environment(factory, reads_data=config.reads_data)
        level = environment_resume_level(factory, config)
        seed_every_reset = level is not ResumeLevel.BIT_EXACT
        check_memory(configs, factory, execution.device)
        backend = choose_backend(factory, config, len(configs))
        execution = dataclasses.replace(execution, vectorization=backend)
        if backend == "tensors":  # nothing runs on the host that updates could overlap with
            execution = dataclasses.replace(execution, overlap=False)
        inputs = open_inputs(
            configs,
            factory,
            arrays,
            backend,
            execution.device,
            resources,
            seed_every_reset=seed_every_reset,
            number_types=own_number_types(config),
        )
        if current_networks() is not None and (reason := why_not_mapped(config, inputs.spaces)):
            warn_user(
                f"networks: {reason}; updates are not compiled, and seeds are trained one at a time"
            )
            execution = dataclasses.replace(execution, compiled=False, graphed=False, batched=False)
            population = Population()
        on_host = replay_is_on_host(
            configs,
            inputs.spaces,
            execution.device,
            online=inputs.environment is not None,
            width=population.width,
            repeats_rows=inputs.repeats_rows,
        )
        if on_host and backend == "tensors":
            raise ConfigError(
                "algo_kwargs.buffer_capacity: the replay buffer does not fit on the device, where "
                "the transitions of tensor environments stay; use a smaller one"
            )
        execution = dataclasses.replace(execution, replay_on_host=on_host)
        parts = build_parts(configs, factory, inputs, execution, population, updates)
        check_disk(
            configs,
            inputs.spaces,
            sum(tensor.nbytes for tensor in parts.policies[0].algorithm.state.values()),
            online=inputs.environment is not None,
            repeats_rows=inputs.repeats_rows,
        )
        if config.init_from is not None:
            for index, policy in enumerate(parts.policies):
                initialize(policy, index, configs[index], inputs.environment)
        descriptions = [
            RunDescription(
                config=each.to_mapping(),
                execution=execution.to_json(),
                environment=describe_environment(factory, each, label),
                data=inputs.fingerprint,
                resume_level=run_resume_level(level, each),
                seed_every_reset=seed_every_reset,
                schedule_timesteps=each.total_timesteps,
                planned_updates=updates,
                width=population.width,
                slot=index if population.width > 1 else 0,
                custom_networks=networks_name(current_networks()),
            )
            for index, each in enumerate(configs)
        ]
        # Everything has been checked. Nothing is created before this point.
        signals.save_first()
        starts = [start_of(each, own) for each, own in zip(descriptions, configs, strict=True)]
        folders = RunFolder.create_all(configs, starts)
        settings = []
        for description, folder, own in zip(descriptions, folders, callbacks, strict=True):
            resources.callback(folder.unlock)
            settings.append(SeedSettings(description, folder, own))
        return train_to_end(assemble(parts, settings), parts, settings, signals)


def _can_evaluate(factory: EnvironmentFactory | None) -> bool:
    return factory is not None and factory.can_evaluate


def _why_nothing_is_learned(config: TrainConfig) -> str:
    schedule = UpdateSchedule.of(config)
    if isinstance(config.algo_kwargs, RolloutHyperparameters):
        return (
            "nothing will be learned: the run ends before its first rollout is complete "
            f"(total_timesteps = {config.total_timesteps:,}, rollout_steps = "
            f"{config.algo_kwargs.rollout_steps:,} of num_envs = {config.num_envs:,}); train "
            "longer, or set a smaller rollout_steps"
        )
    message = (
        "nothing will be learned: the run ends before the first update "
        f"(total_timesteps = {config.total_timesteps:,}, "
        f"learning_starts = {schedule.learning_starts:,}"
    )
    if config.total_timesteps > schedule.learning_starts:
        return (
            f"{message}, train_frequency = {schedule.train_frequency:,}); "
            "train longer, or set a smaller train_frequency"
        )
    return f"{message}); train longer, or set a smaller learning_starts"


@contextlib.contextmanager
def prepared_process(seed: int, execution: Execution) -> Iterator[contextlib.ExitStack]:
    """Apply the settings of a run to the process, and restore the previous ones afterwards.

    Yields a stack that closes what the run opens.
    """
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with isolated_global_streams(seed), contextlib.ExitStack() as resources:
        execution.apply()
        try:
            yield resources
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)


def train_to_end(
    engine: Engine, parts: RunParts, settings: Sequence[SeedSettings], signals: StopSignals
) -> list[TrainResult]:
    """Train until every run has stopped; raise `TrainingInterrupted` if a signal stopped them."""
    results: dict[int, TrainResult] = {}

    def finished(run: SeedRun) -> None:
        folder, description = settings[run.seed_index].folder, settings[run.seed_index].description
        if not signals.received:  # a picture of many rows takes seconds
            _draw_curve(run.config, description.environment["label"], folder)
        results[run.seed_index] = _result(run, folder)

    try:
        signals.stop(engine)
        engine.run(finished)
    except BaseException as error:
        for run in engine.runs:
            if run.seed_index not in results:
                error.add_note(_where_it_stands(run))
        for result in results.values():
            error.add_note(f"finished: {result.run_dir}")
        if is_out_of_memory(error):
            from rl_training.training.memory import training_memory_error

            settings_of_run = parts.configs[0].algo_kwargs
            raise training_memory_error(settings_of_run, parts.execution.device, error) from error
        if signals.received:
            _raise_interruption(engine, settings, results, signals, error)
        raise
    finally:
        _close_callbacks(engine.runs)
    signals.results = [results[run.seed_index] for run in engine.runs]
    return signals.results


def _close_callbacks(runs: Sequence[SeedRun]) -> None:
    """Close all callbacks, in order, even if one raises an error."""
    callbacks = [callback for run in runs for callback in run.callbacks]
    with contextlib.ExitStack() as closing:
        for callback in reversed(callbacks):  # the last one that is added is closed first
            closing.callback(callback.close)


def _raise_interruption(
    engine: Engine,
    settings: Sequence[SeedSettings],
    results: Mapping[int, TrainResult],
    signals: StopSignals,
    error: BaseException,
) -> NoReturn:
    """Report the latest checkpoints after a second signal, or an error after the first one."""
    interruption = KeyboardInterrupt(*signals.received[:1])
    if all(saver_of(run).latest for run in engine.runs):
        signals.results = [
            results.get(run.seed_index) or _left_result(run, settings[run.seed_index].folder)
            for run in engine.runs
        ]
        interruption = TrainingInterrupted(signals.results, signals.received)
    for note in getattr(error, "__notes__", ()):
        interruption.add_note(note)
    raise interruption from (error if isinstance(error, Exception) else None)


def _left_result(run: SeedRun, folder: RunFolder) -> TrainResult:
    saver = saver_of(run)
    assert saver.latest is not None
    return saved_result(folder.path, saver.latest, saver.best_checkpoint, saver.saved_progress)


def saved_result(
    run_dir: Path, checkpoint: Path, best_checkpoint: Path | None, progress: Progress
) -> TrainResult:
    """The result of a run that was not trained beyond a checkpoint because of an interruption."""
    return TrainResult(
        run_dir=run_dir,
        checkpoint_path=checkpoint,
        best_checkpoint_path=best_checkpoint,
        metrics={
            "global_step": float(progress.global_step),
            "gradient_steps": float(progress.gradient_steps),
            **dict.fromkeys(EVALUATION_METRICS, math.nan),
        },
        stop_reason=INTERRUPTED,
    )


def _where_it_stands(run: SeedRun) -> str:
    step, latest = run.progress.global_step, saver_of(run).latest
    if latest is None:
        return f"at step {step:,}; no checkpoint was saved; `{_command(run)}` starts it again"
    return f"at step {step:,}; the last checkpoint is {latest}; `{_command(run)}` continues from it"


def _command(run: SeedRun) -> str:
    """What resumes a run: the command line does not know an environment that was passed."""
    environment = saver_of(run).environment
    if is_passed(environment):
        return f"resume_training({str(run.run_dir)!r}, env=...)"
    modules = (f" --import {name}" for name in environment.get("modules", ()))
    return f"rl-training resume {run.run_dir}{''.join(modules)}"


def saver_of(run: SeedRun) -> CheckpointSaver:
    assert isinstance(run.saver, CheckpointSaver)
    return run.saver


def _result(run: SeedRun, folder: RunFolder) -> TrainResult:
    latest = saver_of(run).latest
    assert latest is not None
    return TrainResult(
        run_dir=folder.path,
        checkpoint_path=latest,
        best_checkpoint_path=saver_of(run).best_checkpoint,
        metrics=_result_metrics(run),
        stop_reason=run.progress.stop_reason or "",
        evaluation_due=_must_evaluate(run),
    )


def _must_evaluate(run: SeedRun) -> bool:
    """Whether training has ended, but an interruption prevented or ended the last evaluation."""
    return run.lacks_evaluation and run.progress.stop_reason != INTERRUPTED


def _draw_curve(config: TrainConfig, environment_label: str, folder: RunFolder) -> None:
    title = f"{config.spec.title} on {short_name(environment_label)}, seed {config.seed}"
    try:
        draw_learning_curve(
            folder.metrics,
            folder.learning_curve,
            title,
            pretraining=config.pretraining_updates,
            offline=config.resolved_regime == "offline",
        )
    except Exception as error:  # a failed plot must not fail the run
        warn_user(f"the learning curve could not be drawn: {error}")


def _result_metrics(run: SeedRun) -> dict[str, float]:
    evaluation = None if _must_evaluate(run) else run.evaluation
    found = evaluation.metrics if evaluation else dict.fromkeys(EVALUATION_METRICS, math.nan)
    return {
        "global_step": float(run.progress.global_step),
        "gradient_steps": float(run.progress.gradient_steps),
        **found,
        **{f"rollout/{name}": value for name, value in run.rollout_metrics().items()},
        **{f"train/{name}": value for name, value in run.train_metrics().items()},
    }


def start_of(description: RunDescription, config: TrainConfig) -> Json:
    """The content of `run.json`, which starts the run again if it has no checkpoint."""
    trained = None if config.init_from is None else trained_fingerprint(config.init_from)
    return {
        **description.model_dump(),
        "versions": package_versions(),
        "global_streams": global_state(),
        "init_from": trained,
    }
