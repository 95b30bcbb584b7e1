"""The folder of a job: the seeds of one config, what their numbers depend on, and their state.

FOLDER/
  job.json       the config, with everything resolved that its numbers depend on
  status.json    queued, running, preempted, failed or finished; step, best, heartbeat
  .lease-000001  the process that owns the folder
  sac__seed0/    the run folder of each seed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rl_training.checkpoints.files import is_temporary
from rl_training.checkpoints.format import read_json, step_of, write_json
from rl_training.config import ConfigSource, TrainConfig
from rl_training.config_files import load_config
from rl_training.errors import CheckpointError, ConfigError
from rl_training.execution.execution import resolve_execution
from rl_training.training.engine import planned_updates
from rl_training.types import Json
from rl_training.validation import short, user_path

JobState = Literal["queued", "running", "preempted", "failed", "finished"]
JOB, STATUS = "job.json", "status.json"
EXIT_PREEMPTED = 75
"""Exit code of a job that a scheduler interrupted: start it again"""
_OF_THE_PLACE = ("output_dir", "run_name")
"""Settings that the folder of a job replaces"""
_OF_THE_MACHINE = ("device", "compile", "float32_precision", "num_threads", "overlap")
"""Settings whose `auto` is resolved once, when the job is made"""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "state": lambda value: isinstance(value, str) and value in get_args(JobState),
    "step": _is_count,
    "total_timesteps": _is_count,
    "best": _is_number,
    "attempt": _is_count,
    "heartbeat": _is_number,
    "host": _is_text,
    "process": lambda value: value is None or _is_count(value),
    "message": lambda value: isinstance(value, str),
}
"""What the values of `status.json` must be"""


@dataclass(frozen=True)
class JobStatus:
    """What `status.json` says."""

    state: JobState
    step: int = 0
    total_timesteps: int = 0
    best: float | None = None
    """Mean over seeds of their best evaluation so far"""
    attempt: int = 0
    """How many processes have worked on the job"""
    heartbeat: float | None = None
    """When the job was last alive, in seconds since 1970"""
    host: str | None = None
    process: int | None = None
    message: str = ""
    """Why the job failed"""

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def exit_code(self) -> int:
        """The exit code of a process that leaves the job in this state."""
        return {"finished": 0, "preempted": EXIT_PREEMPTED}.get(self.state, 1)


def prepare_job(
    config: ConfigSource, seeds: Sequence[int], folder: str | Path, *, device: str | None = None
) -> TrainConfig:
    """Resolve what the numbers of a job depend on, and store it in its folder as `queued`.

    Every later run of the job computes the same numbers: the device, the number of threads,
    compilation and precision are no longer `auto`. `device` says that another machine will run it,
    with `cpu` or `cuda`; by default they are resolved for this one. If the folder already has this
    job, the settings that were stored are returned.

    Raises `ConfigError` if the folder has another job.
    """
    path = user_path(folder, "folder")
    given = _placed(load_config(config), seeds, path)
    if (path / JOB).exists():
        stored = read_job(path)
        _require_same(given, stored, path)
        return stored
    # A process that was killed here has left nothing but a file that is not complete.
    if path.is_dir() and not all(is_temporary(each.name) for each in path.iterdir()):
        raise ConfigError(f"folder = {str(path)!r}: is not empty and has no {JOB}; choose another")
    resolved = _resolved(given, device)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"folder = {str(path)!r}: cannot be created ({error.strerror}); choose another"
        ) from None
    write_json(path / JOB, {"config": resolved.to_mapping()})
    write_status(path, JobStatus("queued", total_timesteps=resolved.total_timesteps))
    return resolved


def read_job(folder: Path) -> TrainConfig:
    """Return the resolved config of a job."""
    values = read_json(folder / JOB).get("config")
    if not isinstance(values, dict):
        raise CheckpointError(f"{folder / JOB}: is damaged")
    # The folder may have been moved, or copied to another machine.
    return TrainConfig.from_saved({**values, "output_dir": str(folder)})


def read_job_status(folder: str | Path) -> JobStatus:
    """Return what `status.json` says; raise `CheckpointError` if it is missing or damaged."""
    values = read_json(Path(folder) / STATUS)
    known = {key: values[key] for key in JobStatus.__dataclass_fields__ if key in values}
    for key, value in known.items():
        if not _KINDS[key](value):
            raise CheckpointError(f"{Path(folder) / STATUS}: is damaged ({key} = {short(value)})")
    if "state" not in known:
        raise CheckpointError(f"{Path(folder) / STATUS}: is damaged (it has no state)")
    return JobStatus(**known)


def run_folders_of(path: Path, config: TrainConfig) -> list[Path]:
    """The run folders of a job, one per seed."""
    return [path / f"{config.run_name}__seed{seed}" for seed in config.seeds or ()]


def saved_step(path: Path) -> int:
    """The step of the newest checkpoint of any seed of a job; 0 if there is none."""
    found = (step_of(each) for each in path.glob("*/checkpoints/step_*"))
    return max((step for step in found if step is not None), default=0)


def write_status(path: Path, status: JobStatus) -> None:
    write_json(path / STATUS, status.to_json())


def _placed(config: TrainConfig, seeds: Sequence[int], path: Path) -> TrainConfig:
    """The config with the seeds and the folder of a job."""
    chosen = [int(seed) for seed in seeds]
    if not chosen:
        raise ConfigError("seeds: a job needs at least one seed")
    return config.with_changes(
        seed=chosen[0], seeds=chosen, output_dir=str(path), run_name=config.algo
    )


def _resolved(config: TrainConfig, device: str | None) -> TrainConfig:
    execution = resolve_execution(config, planned_updates(config), elsewhere=device)
    return config.with_changes(
        # Not its index: any GPU of a machine computes the same numbers.
        device="cuda" if execution.device.startswith("cuda") else execution.device,
        compile="on" if execution.compiled else "off",
        float32_precision=execution.float32_precision,
        num_threads=execution.num_threads,
        overlap="on" if execution.overlap else "off",
    )


def _require_same(given: TrainConfig, stored: TrainConfig, path: Path) -> None:
    """Raise `ConfigError` if a folder has another job; a setting that is `auto` fits any value."""
    wanted, present = _flat(given), _flat(stored)
    for key in dict.fromkeys((*wanted, *present)):
        there, now = present.get(key), wanted.get(key)
        if key in _OF_THE_PLACE or (key in _OF_THE_MACHINE and now in ("auto", None)):
            continue
        if there != now:
            raise ConfigError(
                f"folder = {str(path)!r}: has another job ({key} = {short(there)} there, "
                f"{short(now)} now); choose another folder"
            )


def _flat(config: TrainConfig) -> Json:
    """All settings; hyper-parameters have keys such as `algo_kwargs.tau`."""
    values = config.to_mapping()
    own = values.pop("algo_kwargs")
    return {**values, **{f"algo_kwargs.{key}": value for key, value in own.items()}}
