"""One run from start, or from a checkpoint, to its result."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rl_training.algorithms.base import Algorithm
from rl_training.config import TrainConfig
from rl_training.envs import EnvironmentSource, check_environment
from rl_training.errors import CheckpointError, ConfigError
from rl_training.runtime.assembly import (
    AssembledRun,
    RunParts,
    assemble,
    build_policy,
    build_replay,
    describe_environment,
    environment_factory,
    make_training_environment,
    run_resume_level,
)
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.checkpointing import (
    LEARNER,
    STATE,
    CheckpointReader,
    checkpoint_folders,
    step_of,
)
from rl_training.runtime.engine import FINISHED, INTERRUPTED, Engine
from rl_training.runtime.execution import Execution, resolve_device, resolve_execution
from rl_training.runtime.learning_curve import draw_learning_curve
from rl_training.runtime.locating import MODEL_FILES, find_checkpoint, find_run, load_policy
from rl_training.runtime.policy import Policy
from rl_training.runtime.random_streams import isolated_global_streams
from rl_training.runtime.run_folder import RunFolder, package_versions
from rl_training.runtime.run_state import RunDescription
from rl_training.runtime.schedules import planned_updates
from rl_training.runtime.signals import stop_on_signals
from rl_training.types import EVALUATION_METRICS, Json, ResumeLevel, TrainResult


def start_run(
    config: TrainConfig,
    *,
    environment: EnvironmentSource | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Train one seed in a new run folder."""
    factory = environment_factory(config.env_id, config.env_kwargs, environment)
    updates = planned_updates(config)
    if updates == 0:
        warnings.warn(
            f"nothing will be learned: {config.total_timesteps} steps end before the first update",
            stacklevel=3,
        )
    execution = resolve_execution(config, updates)
    with _prepared(config.seed, execution) as resources:
        check_environment(factory)
        level = run_resume_level(factory, config)
        training = resources.enter_context(make_training_environment(factory, config, level))
        policy = build_policy(config, training.spaces, execution.device, updates)
        if config.init_from is not None:
            _initialize_from(policy, config.init_from)
        description = RunDescription(
            config=config.to_mapping(),
            execution=execution.to_json(),
            environment=describe_environment(factory, config),
            resume_level=level,
            schedule_timesteps=config.total_timesteps,
            planned_updates=updates,
        )
        replay = build_replay(config, training.spaces, execution.device)
        # All that can be refused has been: only now is anything created.
        folder = RunFolder.create(config, factory.label)
        resources.callback(folder.unlock)
        folder.write_metadata(**_metadata(description))
        parts = RunParts(factory, training, policy, replay)
        return _train(assemble(config, parts, folder, description, execution, callbacks), folder)


def resume_run(
    path: Path,
    *,
    total_timesteps: int | None = None,
    environment: EnvironmentSource | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Continue a run where a checkpoint left it, in the same folder."""
    with contextlib.ExitStack() as resources:
        folder = find_run(path)
        if folder is not None and folder.checkpoints.is_dir():
            # Locked before looking, so that the newest checkpoint stays the newest.
            folder.lock()
            resources.callback(folder.unlock)
        reader = find_checkpoint(path)
        if STATE not in reader.files:
            raise CheckpointError(
                f"{path}: a saved policy is not a run; train on from it with --from-checkpoint"
            )
        config, description, execution = _saved_settings(reader, total_timesteps)
        _warn_of_other_versions(reader)
        _require_environment(description, environment, path)
        factory = environment_factory(config.env_id, config.env_kwargs, environment)
        resources.enter_context(_prepared(config.seed, execution))
        level = ResumeLevel(description.resume_level)
        training = resources.enter_context(make_training_environment(factory, config, level))
        policy = build_policy(
            config, training.spaces, execution.device, description.planned_updates
        )
        replay = build_replay(config, training.spaces, execution.device)
        if folder is None:
            # A checkpoint that was copied out of its run starts a new one.
            folder = RunFolder.create(config.with_changes(run_name=None), factory.label)
            resources.callback(folder.unlock)
            folder.write_metadata(**_metadata(description))
        _set_newer_aside(folder, reader)
        parts = RunParts(factory, training, policy, replay)
        run = assemble(config, parts, folder, description, execution, callbacks)
        run.saver.restore(run.engine, reader)
        run.saver.mark_if_best(run.engine)
        _clear_stop(run.engine, extended=total_timesteps is not None)
        _warn_if_finished(run.engine)
        return _train(run, folder)


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


def _train(run: AssembledRun, folder: RunFolder) -> TrainResult:
    engine = run.engine
    try:
        with stop_on_signals(lambda: engine.request_stop(INTERRUPTED)):
            engine.run()
        _draw_curve(run, folder)
    except BaseException as error:
        error.add_note(
            f"at step {engine.progress.global_step:,}; the last good checkpoint is "
            f"{run.saver.latest}, and `rl-training resume {folder.path}` continues from it"
        )
        raise
    finally:
        for callback in engine.callbacks:
            callback.close()
    assert run.saver.latest is not None
    return TrainResult(
        run_dir=folder.path,
        checkpoint_path=run.saver.latest,
        best_checkpoint_path=folder.best_checkpoint(),
        metrics=_result_metrics(engine),
        stop_reason=engine.progress.stop_reason or "",
    )


def _draw_curve(run: AssembledRun, folder: RunFolder) -> None:
    config = run.engine.config
    title = f"{config.spec.title} on {run.environment_label}, seed {config.seed}"
    try:
        draw_learning_curve(folder.metrics, folder.learning_curve, title)
    except Exception as error:  # a picture is not worth a finished run
        warnings.warn(f"the learning curve could not be drawn: {error}", stacklevel=2)


def _result_metrics(engine: Engine) -> dict[str, float]:
    evaluation = engine.evaluation
    found = evaluation.metrics if evaluation else dict.fromkeys(EVALUATION_METRICS, math.nan)
    return {
        "global_step": float(engine.progress.global_step),
        "gradient_steps": float(engine.progress.gradient_steps),
        **found,
        **{f"rollout/{name}": value for name, value in engine.rollout_metrics().items()},
        **{f"train/{name}": value for name, value in engine.train_metrics().items()},
    }


def _metadata(description: RunDescription) -> Json:
    return {
        "environment": description.environment,
        "execution": description.execution,
        "resume_level": description.resume_level,
    }


def _saved_settings(
    reader: CheckpointReader, total_timesteps: int | None
) -> tuple[TrainConfig, RunDescription, Execution]:
    """How the run was set up; a new total becomes part of it, its schedules' horizon does not."""
    state = reader.json(STATE)
    try:
        saved = RunDescription(**{name: state[name] for name in RunDescription.model_fields})
        changes = {} if total_timesteps is None else {"total_timesteps": total_timesteps}
        config = TrainConfig(**{**saved.config, **changes})
        execution = Execution(**saved.execution)
        ResumeLevel(saved.resume_level)
        saved.environment["label"], saved.environment["id"]
        step = int(state["progress"]["global_step"])
        resolve_device(execution.device)  # says so where this machine lacks the device
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError) and total_timesteps is not None:
            raise
        raise CheckpointError(f"{reader.folder}: cannot be resumed ({error})") from None
    if total_timesteps is not None and total_timesteps < step:
        raise ConfigError(
            f"total_timesteps = {total_timesteps}: the run is at step {step} already; give more"
        )
    return config, saved.model_copy(update={"config": config.to_mapping()}), execution


def _warn_of_other_versions(reader: CheckpointReader) -> None:
    saved, present = reader.json(STATE).get("versions"), package_versions()
    if not isinstance(saved, dict):
        return
    names = [name for name in present if saved.get(name) != present[name]]
    if names:
        changes = ", ".join(f"{name} {saved.get(name)} -> {present[name]}" for name in names)
        warnings.warn(f"other versions than before, so not bit for bit: {changes}", stacklevel=3)


def _require_environment(
    description: RunDescription, environment: EnvironmentSource | None, path: Path
) -> None:
    if description.environment["id"] is None and environment is None:
        raise CheckpointError(
            f"{path}: was trained in an environment of your own "
            f"({description.environment['label']}); continue it from Python and hand that over: "
            "resume_training(path, env=...)"
        )


def _set_newer_aside(folder: RunFolder, reader: CheckpointReader) -> None:
    """Keep, but out of the way, what comes after the checkpoint that the user goes back to."""
    chosen = step_of(reader.folder)
    for newer in checkpoint_folders(folder.checkpoints):
        if chosen is None or (step_of(newer) or 0) <= chosen:
            break
        aside = folder.path / "superseded"
        aside.mkdir(exist_ok=True)
        taken = sum(1 for _ in aside.glob(f"{newer.name}*"))
        newer.rename(aside / (f"{newer.name}-{taken}" if taken else newer.name))


def _clear_stop(engine: Engine, *, extended: bool) -> None:
    """Forget what ended the run if it is to go on."""
    progress = engine.progress
    unfinished = progress.global_step < engine.config.total_timesteps
    if progress.stop_reason not in FINISHED or (extended and unfinished):
        progress.should_stop, progress.stop_reason = False, None


def _warn_if_finished(engine: Engine) -> None:
    progress = engine.progress
    if progress.should_stop:
        warnings.warn(
            f"this run is finished ({progress.stop_reason} at step {progress.global_step:,}); "
            "a larger total_timesteps makes it go on",
            stacklevel=3,
        )


def _initialize_from(policy: Policy, path: str) -> None:
    """Start from another policy's networks and normalisation, with a fresh optimiser.

    From a checkpoint, rather than an exported policy, targets and temperature come along.
    """
    algorithm = policy.algorithm
    reader = find_checkpoint(path, names=MODEL_FILES)
    policy.load_tensors(load_policy(reader).tensors())
    algorithm.load_state({**algorithm.state, **algorithm.initial_state()})
    if LEARNER in reader.files:
        saved = reader.verify([LEARNER]).tensors(LEARNER)
        learned = {k: v for k, v in saved.items() if _is_learned(k, algorithm)}
        algorithm.load_state({**algorithm.state, **learned})


def _is_learned(name: str, algorithm: Algorithm) -> bool:
    return name in algorithm.state and ".adam_" not in name and name != "updates"
