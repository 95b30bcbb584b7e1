"""R3: every write of a short run fails in turn, and disks are full for a while.

The first trials fail the k-th file operation, for every k and with two errors. The others have a
period in which nothing can be written: injected errors, or a real limit on the size of files.
"""

from __future__ import annotations

import errno
import json
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from rl_training.checkpoints.format import checkpoint_folders

from .disk import Operation, watch
from .processes import Child, run_command
from .runner import Campaign, Figures, Trial, require
from .runs import (
    Config,
    Counter,
    count_steps_of_commands,
    digest,
    reference,
    reference_folder,
    require_clean,
    require_same,
    require_sound,
    run_folders,
    small,
    without_pictures,
    write_config,
)

TRIALS, PERIODS = 1_000, 60
"""All trials, and the least number of those with a period of errors"""
ERRORS = (errno.EIO, errno.ENOSPC)
NEEDS_SPACE = ("open", "write", "mkdir", "link", "rename")
TOTAL = 18
SET_UP = ("config.yaml", "metadata.json", "run.json", ".lock")
FEW_BYTES = 600
"""A limit on the size of files that small files meet and no checkpoint does"""


@dataclass(frozen=True)
class Fault:
    """Which operations of a run fail, counted from 0, and how."""

    first: int
    last: int
    error: int | None
    """None: the system refuses to let files grow"""

    def __str__(self) -> str:
        name = "file size limit" if self.error is None else errno.errorcode[self.error]
        return f"{name} at operations {self.first} to {self.last}"


def fault_of(trial: Trial, operations: int) -> Fault:
    """Return the fault of a trial for a run with this number of operations."""
    require(
        len(ERRORS) * operations + PERIODS <= TRIALS,
        f"a run has {operations} operations: {TRIALS} trials are too few",
    )
    if trial.index < len(ERRORS) * operations:
        number, error = divmod(trial.index, len(ERRORS))
        return Fault(number, number, ERRORS[error])
    generator = trial.random()
    first = generator.randrange(operations // 8, operations)
    length = generator.choice([3, 10, 30, 100, 100_000])
    return Fault(first, first + length, generator.choice([errno.ENOSPC, None]))


def config_of(trial: Trial) -> Config:
    settings = {"learning_starts": 10, "batch_size": 8}
    return small(
        "sac",
        trial.folder / "runs",
        total_timesteps=TOTAL,
        checkpoint_interval=6,
        eval_interval=9,
        log_interval=3,
        algo_kwargs=settings,
        env_kwargs={"g": 9.0},
    )


def run(trial: Trial) -> Figures:
    config = config_of(trial)
    expected = reference(trial, "short", config)
    fault = fault_of(trial, expected.operations)
    source, log = write_config(config, trial.folder / "config.yaml"), trial.folder / "output.txt"
    (folder,) = run_folders(config)
    note = trial.folder / "fault.json"
    child = run_command(
        "train", "--config", source, log=log, prepare=lambda: _inject(config, fault, note)
    )
    failed = [] if not note.is_file() else [json.loads(line) for line in note.open()]
    if child.code == 0:
        require_clean(child, 0)
        _require_few_warnings(child, failed, folder, trial)
    else:
        require_clean(child, 1, 2)
        require(_may_stop(failed), f"stopped because of {failed[:1]}")
    if child.code != 0 and folder.exists() and not _stopped_cleaning_up(failed):
        require_sound(folder)
    if child.code != 0 or _stopped_cleaning_up(failed):
        _recover(source, folder, log)
    require_sound(folder)
    require_same(digest(folder), expected.digests[0])
    if child.code == 0 and any("tensorboard" in each["path"] for each in failed):
        wanted = scalars(undisturbed(trial))
        require(scalars(folder) == wanted, "TensorBoard's files lack values")
    return {"operations": float(expected.operations)}


def undisturbed(trial: Trial) -> Path:
    """Return the folder of the run in which nothing failed."""
    (folder,) = (reference_folder(trial, "short") / "runs").iterdir()
    return folder


def _inject(config: Config, fault: Fault, note: Path) -> None:
    """Let operations of this process fail."""
    without_pictures()
    count, real_open, reached = -1, os.open, Counter()
    count_steps_of_commands(reached)
    (folder,) = run_folders(config)

    def act(operation: Operation) -> None:
        nonlocal count
        count += 1
        is_due = fault.first <= count <= fault.last
        _limit_file_sizes(False)
        if not is_due or (fault.first < fault.last and operation.kind not in NEEDS_SPACE):
            return
        sink = real_open(note, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        with os.fdopen(sink, "ab") as file:
            file.write(json.dumps(_describe(operation, folder, reached.value)).encode() + b"\n")
        if fault.error is None:
            _limit_file_sizes(True)
        else:
            raise OSError(fault.error, os.strerror(fault.error), operation.path)

    watch(Path(config["output_dir"]), act)


def _limit_file_sizes(is_due: bool) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FEW_BYTES if is_due else hard, hard))


def _describe(operation: Operation, folder: Path, step: int) -> dict[str, Any]:
    """What was about to happen, and whether the run was being set up or was at its end."""
    is_set_up = (folder / "checkpoints").is_dir() and Path(operation.path).name not in SET_UP
    return {
        "kind": operation.kind,
        "path": operation.path,
        "setting_up": not is_set_up,
        "ending": step >= TOTAL,
        "saving": "/checkpoints" in operation.path,
    }


def _may_stop(failed: list[dict[str, Any]]) -> bool:
    """A run may stop if it could not be set up, at its end, or after three failed saves."""
    if any(each["setting_up"] or (each["ending"] and each["saving"]) for each in failed):
        return True
    return sum(each["saving"] is True for each in failed) >= 3 and len(failed) > 1


def _require_few_warnings(
    child: Child, failed: list[dict[str, Any]], folder: Path, trial: Trial
) -> None:
    """One failed operation gives one warning, or none if nothing was lost.

    For example, files that cannot be linked are copied.
    """
    if len(failed) != 1:
        return
    lines = [line for line in child.output.splitlines() if line.startswith("warning:")]
    warnings = [line for line in lines if "can be written again" not in line]
    require(len(warnings) <= 1, f"{len(warnings)} warnings about {failed[0]}")
    if not warnings:
        lost = _kept(undisturbed(trial)) - _kept(folder)
        require(not lost, f"no warning, but {lost} are missing because of {failed[0]}")


def _kept(run: Path) -> set[str]:
    return {path.name for path in checkpoint_folders(run / "checkpoints")}


def _stopped_cleaning_up(failed: list[dict[str, Any]]) -> bool:
    """Whether temporary files could not be removed; the next `resume` removes them."""
    return any(each["kind"] == "open folder" and ".tmp-" in each["path"] for each in failed)


def _recover(source: Path, folder: Path, log: Path) -> None:
    """Continue on a healthy disk: what exists is resumable, and nothing else is in the way."""
    if folder.exists():
        done = run_command("resume", folder, log=log, prepare=without_pictures)
    else:
        done = run_command("train", "--config", source, log=log, prepare=without_pictures)
    require_clean(done, 0)


def scalars(run: Path) -> set[tuple[str, int, float]]:
    """Return the values that TensorBoard shows for a run, without times."""
    found = set()
    for path in sorted((run / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if not value.tag.startswith("time/"):
                    found.add((value.tag, event.step, tuple(value.tensor.float_val)))
    return found


def describe(trial: Trial) -> str:
    operations = _known_operations(trial)
    return str(fault_of(trial, operations)) if operations else ""


def _known_operations(trial: Trial) -> int:
    path = reference_folder(trial, "short") / "reference.json"
    return int(json.loads(path.read_text())["operations"]) if path.is_file() else 0


CAMPAIGN = Campaign(
    name="R3",
    title="I/O error at the k-th write, and full disks",
    trials=TRIALS,
    run=run,
    describe=describe,
)
