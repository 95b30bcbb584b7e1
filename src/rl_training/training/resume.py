"""Continue runs from their checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from rl_training.callbacks import Callback
from rl_training.checkpoints.loading import load_policy, saved_modules
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.datasets.opening import Arrays
from rl_training.envs import EnvironmentSource
from rl_training.errors import (
    INTERRUPTED,
    EnvironmentRuntimeError,
    TrainingError,
    TrainingInterrupted,
)
from rl_training.execution.programs import Population
from rl_training.training.assembly import SeedSettings, assemble, build_parts
from rl_training.training.engine import stop_on_signals
from rl_training.training.inputs import (
    check_regime,
    open_inputs,
    require_same_data,
    run_factory,
)
from rl_training.training.run import prepared_process, saved_result, saver_of, train_to_end
from rl_training.training.saved_run import (
    SavedRun,
    check_learning_rates,
    continue_or_warn,
    data_hint,
    group_in_step,
    open_saved_run,
    set_newer_aside,
)
from rl_training.training.saver import metadata
from rl_training.types import ResumeLevel, ScheduleChoice, TrainResult


def resume_run(
    path: Path,
    *,
    total_timesteps: int | None = None,
    schedule: ScheduleChoice | None = None,
    environment: EnvironmentSource | None = None,
    dataset: Arrays | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Continue a run from a checkpoint, in the same run folder."""
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
    """Continue several runs; runs that were trained together are resumed together."""
    extended = total_timesteps is not None
    results: dict[Path, TrainResult] = {}
    first_error: Exception | None = None
    interruption: KeyboardInterrupt | None = None
    with contextlib.ExitStack() as resources:
        runs = [
            open_saved_run(path, total_timesteps, schedule, environment, resources)
            for path in paths
        ]
        try:
            for group in group_in_step(runs):
                own = [list(callbacks)]
                if len(runs) > 1:
                    own = [[each.for_seed(run.config.seed) for each in callbacks] for run in group]
                folders = [run.reader.folder for run in group]
                try:
                    done = _resume(group, environment, dataset, own, schedule, extended=extended)
                except TrainingInterrupted as stopped:
                    results |= zip(folders, stopped.results, strict=True)
                    raise
                except (EnvironmentRuntimeError, TrainingError, OSError) as error:
                    first_error = first_error or error
                    continue
                results |= zip(folders, done, strict=True)
                if any(result.stop_reason == INTERRUPTED for result in done):
                    break
        except KeyboardInterrupt as stopped:
            interruption = stopped
        if first_error is not None and interruption is None:
            raise first_error
        in_order = [results.get(run.reader.folder) or _unchanged(run) for run in runs]
    if interruption is not None:
        raise _of_all(interruption, in_order) from interruption.__cause__ or first_error
    return in_order


def _of_all(interruption: KeyboardInterrupt, results: Sequence[TrainResult]) -> TrainingInterrupted:
    """The interruption of one group of runs, with the results of all runs."""
    of_all = TrainingInterrupted(results)
    for note in getattr(interruption, "__notes__", ()):
        of_all.add_note(note)
    return of_all


def _unchanged(run: SavedRun) -> TrainResult:
    """The result of a run that failed, or was never reached because of an interruption."""
    folder, checkpoint = run.folder, run.reader.folder
    if folder is None:
        return saved_result(checkpoint, checkpoint, None, run.progress)
    return saved_result(folder.path, checkpoint, folder.best_checkpoint(), run.progress)


def _resume(
    saved_runs: list[SavedRun],
    environment: EnvironmentSource | None,
    arrays: Arrays | None,
    callbacks: Sequence[Sequence[Callback]],
    schedule: ScheduleChoice | None,
    *,
    extended: bool,
) -> list[TrainResult]:
    """Continue runs that are trained in lockstep."""
    configs, first = [saved.config for saved in saved_runs], saved_runs[0]
    config, description, execution = first.config, first.description, first.execution
    modules = saved_modules(description.environment)
    factory = run_factory(config, environment, modules)
    check_regime(config, arrays)
    population = Population()
    if description.width > 1:
        slots = tuple(saved.description.slot for saved in saved_runs)
        population = Population(description.width, slots)
    with stop_on_signals() as signals, prepared_process(config.seed, execution) as resources:
        level = ResumeLevel(description.resume_level)
        inputs = open_inputs(
            configs, factory, arrays, level, execution.vectorization, execution.device, resources
        )
        require_same_data(description.data, inputs, hint=data_hint(first.reader))
        parts = build_parts(
            configs, factory, inputs, execution, population, description.planned_updates
        )
        for saved, policy in zip(saved_runs, parts.policies, strict=True):
            trained = load_policy(saved.reader)
            policy.rewards, policy.wrapper_statistics = trained.rewards, trained.wrapper_statistics
            check_learning_rates(policy.algorithm, saved, schedule)
        signals.save_first()
        settings = []
        for saved, own in zip(saved_runs, callbacks, strict=True):
            folder = saved.folder
            if folder is None:
                # A checkpoint that was copied out of its run folder gets a new one.
                label = saved.description.environment["label"]
                folder = RunFolder.create(saved.config.with_changes(run_name=None), label)
                resources.callback(folder.unlock)
                folder.write_metadata(**metadata(saved.description))
            set_newer_aside(folder, saved.reader)
            settings.append(SeedSettings(saved.description, folder, own))
        engine = assemble(parts, settings)
        for saved, run in zip(saved_runs, engine.runs, strict=True):
            saver = saver_of(run)
            saver.restore(run, saved.reader)
            saver.mark_if_best(run)
            continue_or_warn(run, extended=extended)
        return train_to_end(engine, parts, settings, signals)
