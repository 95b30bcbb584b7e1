"""Continue runs from their checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_training.callbacks import Callback
from rl_training.checkpoints.format import CheckpointReader, step_folder_name
from rl_training.checkpoints.loading import load_policy, saved_modules
from rl_training.checkpoints.run_folder import RUN, RunFolder
from rl_training.datasets.opening import Arrays
from rl_training.envs import EnvironmentSource, VectorEnvironment
from rl_training.envs.tensors.vector import TensorVector
from rl_training.errors import (
    ERRORS_OF_ONE_RUN,
    CheckpointError,
    TrainingInterrupted,
    stop_signals,
)
from rl_training.execution.policy import Policy
from rl_training.execution.programs import Population
from rl_training.execution.random_streams import set_global_state
from rl_training.training.assembly import SeedSettings, assemble, build_parts
from rl_training.training.engine import stop_on_signals
from rl_training.training.initialization import initialize, require_same_policy
from rl_training.training.inputs import (
    check_regime,
    check_vectorization,
    open_inputs,
    require_same_data,
    run_factory,
)
from rl_training.training.relocation import relocated
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
from rl_training.types import ScheduleChoice, TrainResult


def resume_run(
    path: Path,
    *,
    total_timesteps: int | None = None,
    schedule: ScheduleChoice | None = None,
    environment: EnvironmentSource | None = None,
    dataset: Arrays | None = None,
    callbacks: Sequence[Callback] = (),
    changes: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Continue a run from a checkpoint, in the same run folder."""
    with contextlib.ExitStack() as resources:
        saved = open_saved_run(path, total_timesteps, schedule, environment, resources)
        run = relocated(saved, changes or {})
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
    changes: Mapping[str, Any] | None = None,
) -> list[TrainResult]:
    """Continue several runs; runs that were trained together are resumed together."""
    extended = total_timesteps is not None
    results: dict[Path, TrainResult] = {}
    first_error: Exception | None = None
    interruption: KeyboardInterrupt | None = None
    with contextlib.ExitStack() as resources:
        saved = [
            open_saved_run(path, total_timesteps, schedule, environment, resources)
            for path in paths
        ]
        runs = [relocated(run, changes or {}) for run in saved]
        try:
            for group in group_in_step(runs):
                own = [list(callbacks)]
                if len(runs) > 1:
                    own = [[each.for_seed(run.config.seed) for each in callbacks] for run in group]
                paths_of_group = [run.path for run in group]
                try:
                    done = _resume(group, environment, dataset, own, schedule, extended=extended)
                except TrainingInterrupted as stopped:
                    results |= zip(paths_of_group, stopped.results, strict=True)
                    raise
                except ERRORS_OF_ONE_RUN as error:
                    first_error = first_error or error
                    continue
                results |= zip(paths_of_group, done, strict=True)
        except KeyboardInterrupt as stopped:
            interruption = stopped
        if first_error is not None and interruption is None:
            raise first_error
        in_order = [results.get(run.path) or _unchanged(run) for run in runs]
    if interruption is not None:
        raise _of_all(interruption, in_order) from interruption.__cause__ or first_error
    return in_order


def _of_all(interruption: KeyboardInterrupt, results: Sequence[TrainResult]) -> TrainingInterrupted:
    """The interruption of one group of runs, with the results of all runs."""
    of_all = TrainingInterrupted(results, stop_signals(interruption))
    for note in getattr(interruption, "__notes__", ()):
        of_all.add_note(note)
    return of_all


def _unchanged(run: SavedRun) -> TrainResult:
    """The result of a run that failed, or was never reached because of an interruption."""
    folder = run.folder
    if folder is None:
        return saved_result(run.path, run.path, None, run.progress)
    return saved_result(folder.path, run.path, folder.best_checkpoint(), run.progress)


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
    factory, number_types = run_factory(config, environment, modules), first.number_types
    if factory is not None:
        factory = dataclasses.replace(factory, number_types=number_types)
    check_regime(config, arrays)
    check_vectorization(config)
    population = Population()
    if description.width > 1:
        slots = tuple(saved.description.slot for saved in saved_runs)
        population = Population(description.width, slots)
    with stop_on_signals() as signals, prepared_process(config.seed, execution) as resources:
        inputs = open_inputs(
            configs,
            factory,
            arrays,
            execution.vectorization,
            execution.device,
            resources,
            seed_every_reset=description.seeds_every_reset,
            number_types=number_types,
        )
        require_same_data(description.data, inputs, hint=data_hint(first.state))
        parts = build_parts(
            configs, factory, inputs, execution, population, description.planned_updates
        )
        for index, (saved, policy) in enumerate(zip(saved_runs, parts.policies, strict=True)):
            if saved.reader is None:
                _start_again(saved, policy, index, inputs.environment)
            else:
                trained = load_policy(saved.reader)
                policy.rewards = trained.rewards
                policy.wrapper_statistics = trained.wrapper_statistics
            check_learning_rates(policy.algorithm, saved, schedule)
        signals.save_first()
        settings, readers = [], []
        for saved, own in zip(saved_runs, callbacks, strict=True):
            folder, reader = saved.folder, saved.reader
            if folder is None:
                folder, reader = _adopt_copy(saved)
                resources.callback(folder.unlock)
            if reader is not None:
                set_newer_aside(folder, reader)
            settings.append(SeedSettings(saved.description, folder, own))
            readers.append(reader)
        engine = assemble(parts, settings)
        for reader, run in zip(readers, engine.runs, strict=True):
            if reader is not None:
                saver = saver_of(run)
                saver.restore(run, reader)
                saver.mark_if_best(run)
            continue_or_warn(run, extended=extended)
        return train_to_end(engine, parts, settings, signals)


def _start_again(
    saved: SavedRun,
    policy: Policy,
    seed_index: int,
    environment: VectorEnvironment | TensorVector | None,
) -> None:
    """Prepare a run without a checkpoint exactly as it was prepared when it was created."""
    if saved.config.init_from is not None:
        require_same_policy(saved.state.get("init_from"), saved.config.init_from)
        initialize(policy, seed_index, saved.config, environment)
    try:
        set_global_state(saved.state["global_streams"])
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{saved.path}: {RUN} is damaged ({error})") from None


def _adopt_copy(saved: SavedRun) -> tuple[RunFolder, CheckpointReader]:
    """Copy a checkpoint that was copied out of its run folder into a new one."""
    assert saved.reader is not None
    folder = RunFolder.create_for_copy(
        saved.config.with_changes(run_name=None),
        saved.description.model_dump(),
        saved.reader,
        saved.progress.position,
    )
    return folder, CheckpointReader(folder.checkpoints / step_folder_name(saved.progress.position))
