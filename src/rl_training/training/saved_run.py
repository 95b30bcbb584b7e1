"""Reads and checks what is needed to resume a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.hyperparameters import is_from_0_1
from rl_training.callbacks import Progress
from rl_training.checkpoints.completeness import check_environment_description
from rl_training.checkpoints.format import (
    STATE,
    CheckpointReader,
    checkpoint_folders,
    plain_folder,
    step_of,
)
from rl_training.checkpoints.loading import (
    check_algorithm,
    check_algorithm_name,
    find_checkpoint,
    find_run,
    saved_number_types,
)
from rl_training.checkpoints.run_folder import (
    RUN,
    RunFolder,
    package_versions,
    settle_unfinished,
)
from rl_training.config import TrainConfig
from rl_training.envs import EnvironmentSource
from rl_training.errors import (
    CheckpointError,
    ConfigError,
    MissingNetworksError,
    UserError,
    brief,
    warn_user,
)
from rl_training.execution.execution import Execution, resolve_device
from rl_training.models.custom_networks import current_networks
from rl_training.observations import NumberTypes
from rl_training.training.controls import StopEarly
from rl_training.training.engine import planned_updates
from rl_training.training.inputs import is_passed, own_number_types
from rl_training.training.saver import RunDescription
from rl_training.training.seed_run import SeedRun
from rl_training.types import FINISHED, Json, ResumeLevel, ScheduleChoice
from rl_training.validation import short
from rl_training.version import __version__

Checked = TypeVar("Checked", Execution, Progress)
MAX_THREADS = 1024
STATE_PARTS: dict[str, type] = {
    "callbacks": dict,
    "collector": dict,
    "evaluation": dict,
    "exploration": dict,
    "global_streams": dict,
    "replay": dict,
    "streams": dict,
    "train_metrics": dict,
}
MAX_COUNT = 10**15
"""Largest counter in a checkpoint"""


@dataclass(frozen=True)
class SavedRun:
    """The settings and progress of a run, read from its run folder or from a checkpoint."""

    reader: CheckpointReader | None
    """None if the run has no checkpoint yet"""
    folder: RunFolder | None
    """None if the checkpoint was copied out of its run folder"""
    state: Json
    """The content of the checkpoint's `state.json`; of `run.json` if there is no checkpoint"""
    config: TrainConfig
    description: RunDescription
    execution: Execution
    progress: Progress

    @property
    def path(self) -> Path:
        """The checkpoint from which the run continues, or the folder of a run without one."""
        if self.reader is not None:
            return self.reader.folder
        assert self.folder is not None
        return self.folder.path

    @property
    def number_types(self) -> NumberTypes | None:
        """The types in which the run stores numbers of observations; None: their own."""
        if self.reader is None:
            return own_number_types(self.config)
        return saved_number_types(self.reader)

    @property
    def is_extended(self) -> bool:
        """Whether this resume gives the run a larger total than it had."""
        before = self.state["config"].get("total_timesteps")
        return isinstance(before, int) and self.config.total_timesteps > before

    def continues_with(self, others: Sequence[SavedRun]) -> bool:
        """Whether it can be trained in lockstep with the others: equal settings and step."""
        return all(
            self._shared() == other._shared()
            and (self.description.width == 1 or self.description.slot != other.description.slot)
            for other in others
        )

    def _shared(self) -> tuple[object, ...]:
        """The settings that must be equal for runs that are trained in lockstep."""
        own = {"config", "slot"}
        config = self.config.with_changes(seed=0, seeds=None, run_name=None)
        rest = self.description.model_dump(exclude=own)
        progress = self.progress.position, self.progress.updates_left
        return config, rest, self.execution, self.number_types, *progress


def check_schedule_choice(schedule: ScheduleChoice | None) -> None:
    """Raise `ConfigError` for an unknown choice."""
    if schedule not in (None, *get_args(ScheduleChoice)):
        raise ConfigError(f"schedule = {schedule!r}: must be 'extend' or 'keep'")


def open_saved_run(
    path: Path,
    total_timesteps: int | None,
    schedule: ScheduleChoice | None,
    environment: EnvironmentSource | None,
    resources: contextlib.ExitStack,
) -> SavedRun:
    """Lock the run that `path` belongs to and read its settings."""
    if not os.path.lexists(path):
        settle_unfinished(path.parent)
    folder = find_run(path)
    if folder is not None and (folder.checkpoints.is_dir() or (folder.path / RUN).is_file()):
        # Lock first: no other process can then write a newer checkpoint.
        folder.lock()
        resources.callback(folder.unlock)
    _refuse_without_start(path if folder is None else folder.path)
    reader = None
    if folder is not None and folder.is_unstarted() and step_of(path) is None:
        state = _start_state(folder)
    else:
        reader = find_checkpoint(path)
        if STATE not in reader.files:
            raise CheckpointError(
                f"{path}: is a saved policy, not a run; use it in a new run with --from-checkpoint"
            )
        check_algorithm(reader)
        state = reader.json(STATE)
    config, description, execution, progress = _saved_settings(
        state, path if reader is None else reader.folder, total_timesteps, schedule
    )
    _warn_of_changed_versions(state)
    _warn_of_changed_algorithm(state, config)
    _require_environment(description, environment, path)
    _require_networks(description, path)
    return SavedRun(reader, folder, state, config, description, execution, progress)


def _start_state(folder: RunFolder) -> Json:
    """The state of a run that was created but has not trained yet."""
    state = {**folder.start(), "progress": Progress().to_json()}
    config = state.get("config")
    name = config.get("algo") if isinstance(config, dict) else None
    check_algorithm_name(name, state.get("environment"), folder.path)
    return state


def _refuse_without_start(path: Path) -> None:
    """Raise `CheckpointError` for a run of an earlier version that has no checkpoint."""
    config = path / "config.yaml"
    is_empty = not plain_folder(path / "checkpoints").entries()
    if is_empty and config.is_file() and not (path / RUN).is_file():
        raise CheckpointError(
            f"{path}: this run has no checkpoint, and {RUN}, which is needed to start it again, is "
            f"missing (earlier versions did not write it); start a new run with `rl-training train "
            f"--config {config}`"
        )


def group_in_step(runs: Sequence[SavedRun]) -> list[list[SavedRun]]:
    """Group the runs that can be trained in lockstep."""
    groups: list[list[SavedRun]] = []
    for run in runs:
        group = next((g for g in groups if run.continues_with(g)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def _saved_settings(
    state: Json, path: Path, total_timesteps: int | None, schedule: ScheduleChoice | None
) -> tuple[TrainConfig, RunDescription, Execution, Progress]:
    """Read the settings of the run, with the new total and schedule applied."""
    check_schedule_choice(schedule)
    try:
        fields = RunDescription.model_fields.items()
        known = (name for name, field in fields if field.is_required() or name in state)
        saved = RunDescription(**{name: state[name] for name in known})
        changes = {} if total_timesteps is None else {"total_timesteps": total_timesteps}
        config = TrainConfig.from_saved({**saved.config, **changes})
        execution = checked_fields(Execution(**saved.execution))
        ResumeLevel(saved.resume_level)
        check_environment_description(saved.environment)
        progress = checked_fields(Progress(**state["progress"]))
        step = progress.global_step
        if not 1 <= execution.num_threads <= MAX_THREADS:
            raise ValueError(f"num_threads = {execution.num_threads}")
        if execution.float32_precision not in ("highest", "high", "medium"):
            raise ValueError(f"float32_precision = {execution.float32_precision!r}")
        if saved.slot >= saved.width or (saved.width > 1 and not execution.batched):
            raise ValueError(f"slot {saved.slot} in a program of width {saved.width}")
        _check_parts(state, config)
        _check_complete(state, config)
        resolve_device(execution.device)  # raises if this machine does not have the device
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError) and total_timesteps is not None:
            raise
        raise CheckpointError(f"{path}: cannot be resumed ({brief(error)})") from None
    if total_timesteps is not None and total_timesteps < step:
        raise ConfigError(
            f"total_timesteps = {total_timesteps}: the run is already at step {step}; "
            "use a larger total"
        )
    description = saved.model_copy(update={"config": config.to_mapping()})
    if schedule == "extend":
        plan = {
            "schedule_timesteps": config.total_timesteps,
            "planned_updates": planned_updates(config),
        }
        description = description.model_copy(update=plan)
    return config, description, execution, progress


def _check_parts(state: Json, config: TrainConfig) -> None:
    """Raise `ValueError` if a part of the state cannot fit, before anything is built for it."""
    for name, kind in STATE_PARTS.items():
        if not isinstance(state.get(name), kind | None):
            raise ValueError(f"{name} is damaged")
    if "streams" in state and "update" not in state["streams"]:
        raise ValueError("streams has no 'update'")
    collector = state.get("collector") or {}
    episodes = (collector.get("environment") or {}).get("episode_numbers")
    if episodes is not None and len(episodes) != config.num_envs:
        raise ValueError(f"num_envs = {config.num_envs}, but {len(episodes)} were saved")


def _check_complete(state: Json, config: TrainConfig) -> None:
    """Raise `ValueError` if this version saved the run, but some settings or counters are missing.

    Those that earlier versions did not have get their default values.
    """
    if (state.get("versions") or {}).get("rl_training") != __version__:
        return
    complete: dict[str, tuple[Json, Iterable[str]]] = {
        "config": (state["config"], TrainConfig.model_fields),
        "algo_kwargs": (state["config"]["algo_kwargs"], type(config.algo_kwargs).model_fields),
        "execution": (state["execution"], Execution.__dataclass_fields__),
        "progress": (state["progress"], Progress.__dataclass_fields__),
    }
    for part, (saved, names) in complete.items():
        if missing := sorted(set(names) - set(saved)):
            raise ValueError(f"{part} has no {missing[0]!r}")


def checked_fields(instance: Checked) -> Checked:
    """Return a dataclass from a file; raise `ValueError` if a field has the wrong type."""
    for name, kind in get_type_hints(type(instance)).items():
        value = getattr(instance, name)
        if get_origin(kind) is Literal:
            fits = value in get_args(kind)
        else:
            fits = isinstance(value, kind) and (type(value) is not bool or kind is bool)
        if not fits or (isinstance(value, int) and not 0 <= value <= MAX_COUNT):
            raise ValueError(f"{name} = {short(value)} is damaged")
    return instance


def _warn_of_changed_versions(state: Json) -> None:
    saved, present = state.get("versions"), package_versions()
    if not isinstance(saved, dict):
        return
    # Changes of this package are reported by `_warn_of_changed_algorithm`.
    others = (name for name in present if name != "rl_training")
    names = [name for name in others if saved.get(name) != present[name]]
    if names:
        changes = ", ".join(f"{name} {saved.get(name)} -> {present[name]}" for name in names)
        warn_user(
            f"library versions have changed, so results may differ in the last bits: {changes}"
        )


def data_hint(state: Json) -> str:
    """Explain why a run of version 0.1 may report unchanged data as changed."""
    settings = state["config"].get("algo_kwargs") or {}
    if not is_from_0_1(settings):
        return ""
    return (
        " (this run was made by version 0.1, which ignored `masks` and `valids` and mistook "
        "rounding errors for episode ends; if the data has not changed, start a new run with "
        "init_from)"
    )


def _warn_of_changed_algorithm(state: Json, config: TrainConfig) -> None:
    saved = state["config"].get("algo_kwargs") or {}
    change = config.spec.hyperparameters_type.changes_since(saved)
    if change is not None:
        warn_user(f"{config.algo} has changed since this run: {change}")


def check_learning_rates(
    algorithm: Algorithm, run: SavedRun, schedule: ScheduleChoice | None
) -> None:
    """Warn if learning rates will be zero; raise `ConfigError` if an extended run has no others.

    The rest of a run that was extended before is not refused: its schedule was chosen then.
    """
    planned, last = run.description.planned_updates, planned_updates(run.config)
    if schedule is not None or last <= planned:
        return
    optimizers = algorithm.optimizers()

    def without_rate(updates: int) -> list[str]:
        """The optimizers whose learning rate is zero from this update on."""
        state = {"updates": torch.tensor(updates, device=algorithm.device)}
        return [
            name
            for name, optimizer in optimizers.items()
            if optimizer.scheduled
            and float(algorithm.learning_rate_factor(state, optimizer.delay)) == 0
        ]

    ended = without_rate(last)
    if not ended:
        return
    kind = algorithm.hyperparameters.decay
    ways = (
        "use `resume --schedule extend` or learn(n, schedule='extend') to stretch the schedule "
        "to the new total, or 'keep' to continue with the original schedule"
    )
    # The first update of a schedule for none still has the full rate.
    now = max(run.progress.gradient_steps, 1)
    if run.is_extended and len(without_rate(now)) == len(optimizers):
        raise ConfigError(
            f"learning_rate_schedule = {kind!r}: has ended, so every learning rate is zero and "
            f"further updates would change nothing; {ways}"
        )
    end = max(planned, algorithm.hyperparameters.warmup_steps)
    warn_user(
        f"the {kind} schedule ends after {end:,} updates; later updates do not change "
        f"{' and '.join(ended)}; {ways}"
    )


def _require_environment(
    description: RunDescription, environment: EnvironmentSource | None, path: Path
) -> None:
    if environment is None and is_passed(description.environment):
        label = description.environment["label"]
        raise CheckpointError(
            f"{path}: was trained in a custom environment ({label}); resume it from Python with "
            "resume_training(path, env=...)"
        )


def _require_networks(description: RunDescription, path: Path) -> None:
    given, name = current_networks(), description.custom_networks
    if name is not None and given is None:
        raise MissingNetworksError(path, name)
    if name is None and given is not None:
        raise UserError(f"{path}: was trained with built-in networks; leave out networks=...")


def set_newer_aside(folder: RunFolder, reader: CheckpointReader) -> None:
    """Move checkpoints that are newer than the resumed one to `superseded`."""
    chosen = step_of(reader.folder)
    for newer in checkpoint_folders(folder.checkpoints):
        if chosen is None or (step_of(newer) or 0) <= chosen:
            break
        aside = folder.plain.inner(folder.superseded.name)
        aside.make()
        taken = sum(name.startswith(newer.name) for name in aside.entries())
        name = f"{newer.name}-{taken}" if taken else newer.name
        folder.plain.inner(folder.checkpoints.name).rename(newer.name, name, aside)


def continue_or_warn(run: SeedRun, *, extended: bool) -> None:
    """Clear the stop reason if the run can continue; otherwise warn and say how to continue it."""
    progress, budget = run.progress, run.config.max_updates
    unfinished = progress.global_step < run.config.total_timesteps
    if budget is not None and progress.gradient_steps >= budget:
        advice = (
            f"all {budget:,} max_updates are used; start a new run with --from-checkpoint "
            "(init_from=... in Python)"
        )
    elif progress.stop_reason not in FINISHED or (extended and unfinished):
        if progress.stop_reason == "early_stopping":
            _renew_patience(run)
        progress.should_stop, progress.stop_reason = False, None
        return
    elif unfinished:
        total = run.config.total_timesteps
        advice = (
            f"pass --total-timesteps {total} (total_timesteps={total}) to continue; an agent "
            f"continues with learn({total - progress.global_step})"
        )
    else:
        advice = (
            "pass a larger --total-timesteps (total_timesteps=...) to continue; an agent trains n "
            "more steps with learn(n)"
        )
    reason, step = progress.stop_reason, progress.global_step
    repeated = "" if run.evaluator is None else ", and only its last evaluation is repeated"
    warn_user(f"this run has finished ({reason} at step {step:,}){repeated}; {advice}")


def _renew_patience(run: SeedRun) -> None:
    """Reset the patience, so that a run that stopped early does not stop again at once."""
    for callback in run.callbacks:
        if isinstance(callback, StopEarly):
            callback.evaluations_without_improvement = 0
