"""Runs from their start, or from checkpoints, to their results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rl_training.config import TrainConfig
from rl_training.envs import EnvironmentSource, check_environment
from rl_training.errors import EnvironmentFault, TrainingFault
from rl_training.runtime.assembly import (
    MemberSettings,
    RunParts,
    assemble,
    build_parts,
)
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.controls import why_never_stopped_early
from rl_training.runtime.engine import Engine
from rl_training.runtime.execution import Execution, resolve_execution
from rl_training.runtime.experience import (
    Arrays,
    check_regime,
    choose_backend,
    describe_environment,
    environment_label,
    open_experience,
    require_same_data,
    run_factory,
    run_resume_level,
)
from rl_training.runtime.initialization import (
    carry_wrapper_statistics,
    inherit_normalization,
    initialize_from,
)
from rl_training.runtime.learning_curve import draw_learning_curve
from rl_training.runtime.locating import load_policy
from rl_training.runtime.member import INTERRUPTED, Member
from rl_training.runtime.population import Population
from rl_training.runtime.random_streams import isolated_global_streams
from rl_training.runtime.resuming import (
    SavedRun,
    check_learning_rates,
    data_hint,
    go_on,
    group_in_step,
    open_saved_run,
    set_newer_aside,
)
from rl_training.runtime.run_folder import RunFolder
from rl_training.runtime.run_state import CheckpointSaver, RunDescription
from rl_training.runtime.schedules import planned_updates, pretraining_updates
from rl_training.runtime.signals import stop_on_signals
from rl_training.types import EVALUATION_METRICS, Json, ResumeLevel, ScheduleChoice, TrainResult


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
    """Train the config's `seeds` together, each in a run folder of its own."""
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


def resume_run(
    path: Path,
    *,
    total_timesteps: int | None = None,
    schedule: ScheduleChoice | None = None,
    environment: EnvironmentSource | None = None,
    dataset: Arrays | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Continue a run where a checkpoint left it, in the same folder."""
    with contextlib.ExitStack() as resources:
        run = open_saved_run(path, total_timesteps, schedule, environment, resources)
        extended = total_timesteps is not None
        return _resume([run], environment, dataset, [callbacks], schedule, extended=extended)[0]


def resume_runs(
    paths: Sequence[Path],
    *,
    total_timesteps: int | None = None,
    schedule: ScheduleChoice | None = None,
    environment: EnvironmentSource | None = None,
    dataset: Arrays | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[TrainResult]:
    """Continue several runs; those that were trained together go on together."""
    extended = total_timesteps is not None
    results: dict[Path, TrainResult] = {}
    fault: Exception | None = None
    with contextlib.ExitStack() as resources:
        runs = [
            open_saved_run(path, total_timesteps, schedule, environment, resources)
            for path in paths
        ]
        for group in group_in_step(runs):
            own = [[callback.for_seed(run.config.seed) for callback in callbacks] for run in group]
            try:
                done = _resume(group, environment, dataset, own, schedule, extended=extended)
            except (EnvironmentFault, TrainingFault, OSError) as error:
                fault = fault or error
                continue
            results |= {run.reader.folder: result for run, result in zip(group, done, strict=True)}
            if any(result.stop_reason == INTERRUPTED for result in done):
                break
        if fault is not None:
            raise fault
        return [results.get(run.reader.folder) or _unchanged(run) for run in runs]


def _unchanged(run: SavedRun) -> TrainResult:
    """The result of a run whose turn an interruption kept from coming."""
    return TrainResult(
        run_dir=run.reader.folder if run.folder is None else run.folder.path,
        checkpoint_path=run.reader.folder,
        best_checkpoint_path=None if run.folder is None else run.folder.best_checkpoint(),
        metrics={
            "global_step": float(run.progress.global_step),
            "gradient_steps": float(run.progress.gradient_steps),
            **dict.fromkeys(EVALUATION_METRICS, math.nan),
        },
        stop_reason=INTERRUPTED,
    )


def _start(
    configs: list[TrainConfig],
    environment: EnvironmentSource | None,
    arrays: Arrays | None,
    callbacks: Sequence[Sequence[Callback]],
) -> list[TrainResult]:
    configs = [inherit_normalization(each) for each in configs]
    config = configs[0]
    factory = run_factory(config, environment)
    check_regime(config, arrays)
    updates = planned_updates(config)
    if updates == 0:
        warnings.warn(
            f"nothing will be learned: {config.total_timesteps} steps end before the first update",
            stacklevel=4,
        )
    if reason := why_never_stopped_early(config, can_evaluate=factory is not None):
        warnings.warn(f"early_stopping can never act: {reason}", stacklevel=4)
    execution = resolve_execution(config, updates)
    population = Population()
    if execution.batched and len(configs) > 1:
        population = Population(len(configs), tuple(range(len(configs))))
    with _prepared(config.seed, execution) as resources:
        if factory is not None:
            check_environment(factory, reads_data=config.reads_data)
        level = run_resume_level(factory, config)
        backend = choose_backend(factory, config, len(configs))
        execution = dataclasses.replace(execution, vectorization=backend)
        experience = open_experience(
            configs, factory, arrays, level, backend, execution.device, resources
        )
        parts = build_parts(configs, factory, experience, execution, population, updates)
        if config.init_from is not None:
            for policy in parts.policies:
                initialize_from(policy, config.init_from, scales_rewards=config.reads_data)
            carry_wrapper_statistics(parts.policies, config.init_from, experience.environment)
        descriptions = [
            RunDescription(
                config=each.to_mapping(),
                execution=execution.to_json(),
                environment=describe_environment(factory, each),
                data=experience.fingerprint,
                resume_level=level,
                schedule_timesteps=each.total_timesteps,
                planned_updates=updates,
                width=population.width,
                slot=index if population.width > 1 else 0,
            )
            for index, each in enumerate(configs)
        ]
        # All that can be refused has been: only now is anything created.
        folders = RunFolder.create_all(configs, environment_label(factory))
        settings = []
        for description, folder, own in zip(descriptions, folders, callbacks, strict=True):
            resources.callback(folder.unlock)
            folder.write_metadata(**_metadata(description))
            settings.append(MemberSettings(description, folder, own))
        return _train(assemble(parts, settings), parts, settings)


def _resume(
    runs: list[SavedRun],
    environment: EnvironmentSource | None,
    arrays: Arrays | None,
    callbacks: Sequence[Sequence[Callback]],
    schedule: ScheduleChoice | None,
    *,
    extended: bool,
) -> list[TrainResult]:
    """Continue runs of one program."""
    configs, first = [run.config for run in runs], runs[0]
    config, description, execution = first.config, first.description, first.execution
    factory = run_factory(config, environment)
    check_regime(config, arrays)
    population = Population()
    if description.width > 1:
        population = Population(description.width, tuple(run.description.slot for run in runs))
    with _prepared(config.seed, execution) as resources:
        level = ResumeLevel(description.resume_level)
        experience = open_experience(
            configs, factory, arrays, level, execution.vectorization, execution.device, resources
        )
        require_same_data(description.data, experience, hint=data_hint(first.reader))
        parts = build_parts(
            configs, factory, experience, execution, population, description.planned_updates
        )
        for run, policy in zip(runs, parts.policies, strict=True):
            saved = load_policy(run.reader)
            policy.rewards, policy.wrapper_statistics = saved.rewards, saved.wrapper_statistics
            check_learning_rates(policy.algorithm, run, schedule)
        settings, label = [], environment_label(factory)
        for run, own in zip(runs, callbacks, strict=True):
            folder = run.folder
            if folder is None:
                # A checkpoint that was copied out of its run starts a new one.
                folder = RunFolder.create(run.config.with_changes(run_name=None), label)
                resources.callback(folder.unlock)
                folder.write_metadata(**_metadata(run.description))
            set_newer_aside(folder, run.reader)
            settings.append(MemberSettings(run.description, folder, own))
        engine = assemble(parts, settings)
        for run, member in zip(runs, engine.members, strict=True):
            saver = _saver(member)
            saver.restore(member, run.reader)
            saver.mark_if_best(member)
            go_on(member, extended=extended)
        return _train(engine, parts, settings)


@contextlib.contextmanager
def _prepared(seed: int, execution: Execution) -> Iterator[contextlib.ExitStack]:
    """The process as the run needs it; threads, precision and streams as before afterwards.

    Gives a stack for what the run opens, to be closed however it ends.
    """
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with isolated_global_streams(seed), contextlib.ExitStack() as resources:
        execution.apply()
        try:
            yield resources
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)


def _train(
    engine: Engine, parts: RunParts, settings: Sequence[MemberSettings]
) -> list[TrainResult]:
    results: dict[int, TrainResult] = {}

    def finished(member: Member) -> None:
        folder = settings[member.index].folder
        _draw_curve(member.config, environment_label(parts.factory), folder)
        results[member.index] = _result(member, folder)

    try:
        with stop_on_signals(lambda: engine.request_stop(INTERRUPTED)):
            engine.run(finished)
    except BaseException as error:
        for member in engine.members:
            if member.index not in results:
                error.add_note(_where_it_stands(member))
        for result in results.values():
            error.add_note(f"finished: {result.run_dir}")
        raise
    finally:
        for member in engine.members:
            for callback in member.callbacks:
                callback.close()
    return [results[member.index] for member in engine.members]


def _where_it_stands(member: Member) -> str:
    return (
        f"at step {member.progress.global_step:,}; the last good checkpoint is "
        f"{_saver(member).latest}, and `rl-training resume {member.run_dir}` continues from it"
    )


def _saver(member: Member) -> CheckpointSaver:
    assert isinstance(member.saver, CheckpointSaver)
    return member.saver


def _result(member: Member, folder: RunFolder) -> TrainResult:
    latest = _saver(member).latest
    assert latest is not None
    return TrainResult(
        run_dir=folder.path,
        checkpoint_path=latest,
        best_checkpoint_path=folder.best_checkpoint(),
        metrics=_result_metrics(member),
        stop_reason=member.progress.stop_reason or "",
    )


def _draw_curve(config: TrainConfig, environment_label: str, folder: RunFolder) -> None:
    title = f"{config.spec.title} on {environment_label}, seed {config.seed}"
    try:
        draw_learning_curve(
            folder.metrics, folder.learning_curve, title, pretraining=pretraining_updates(config)
        )
    except Exception as error:  # a picture is not worth a finished run
        warnings.warn(f"the learning curve could not be drawn: {error}", stacklevel=2)


def _result_metrics(member: Member) -> dict[str, float]:
    evaluation = member.evaluation
    found = evaluation.metrics if evaluation else dict.fromkeys(EVALUATION_METRICS, math.nan)
    return {
        "global_step": float(member.progress.global_step),
        "gradient_steps": float(member.progress.gradient_steps),
        **found,
        **{f"rollout/{name}": value for name, value in member.rollout_metrics().items()},
        **{f"train/{name}": value for name, value in member.train_metrics().items()},
    }


def _metadata(description: RunDescription) -> Json:
    return {
        "environment": description.environment,
        "execution": description.execution,
        "resume_level": description.resume_level,
    }
