"""R3: every write of a short run fails in turn, disks are full for a while, and reads fail.

Most trials fail the k-th file operation of a run, for every k and with two errors. The others have

- a period in which nothing can be written: injected errors, or a real limit on the size of files;
- two seeds that train together, with a failed operation or such a period;
- a file of the newest checkpoint that cannot be read when the run is resumed.
"""

from __future__ import annotations

import errno
import json
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import StopAt
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import rl_training
from rl_training.checkpoints.format import checkpoint_folders
from rl_training.training.saver import MAX_FAILURES

from .disk import Operation, watch
from .processes import Child, run_command, start
from .runner import Campaign, Figures, Trial, require
from .runs import (
    OF_FIRST_SEED,
    Config,
    Counter,
    Reference,
    count_steps_of_commands,
    digest,
    newest,
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

TRIALS, OTHERS = 1_160, 160
"""All trials, and the number of those before the ones that fail each operation in turn"""
OTHER_KINDS = ("period", "seeds", "period of seeds", "reads")
PLAIN = "operation"
ERRORS = (errno.EIO, errno.ENOSPC)
NEEDS_SPACE = ("open", "write", "mkdir", "link", "rename")
ALL_KINDS = (*NEEDS_SPACE, "open folder", "truncate", "fsync")
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

    @property
    def kinds(self) -> tuple[str, ...]:
        """The operations that can fail."""
        if self.error is None:
            return ("write",)
        return ALL_KINDS if self.first == self.last else NEEDS_SPACE

    def __str__(self) -> str:
        name = "file size limit" if self.error is None else errno.errorcode[self.error]
        return f"{name} at operations {self.first} to {self.last}"


def kind_of(trial: Trial) -> str:
    return OTHER_KINDS[trial.index % len(OTHER_KINDS)] if trial.index < OTHERS else PLAIN


def has_seeds(trial: Trial) -> bool:
    return "seeds" in kind_of(trial)


def fault_of(trial: Trial, operations: int) -> Fault:
    """Return the fault of a trial for a run with this number of operations."""
    generator, number = trial.random(), trial.index - OTHERS
    if 0 <= number < len(ERRORS) * operations:
        number, error = divmod(number, len(ERRORS))
        return Fault(number, number, ERRORS[error])
    first = generator.randrange(operations // 8, operations)
    if kind_of(trial) == "seeds":
        return Fault(first, first, generator.choice(ERRORS))
    length = generator.choice([3, 10, 30, 100, 100_000]) * (1 + has_seeds(trial))
    return Fault(first, first + length, generator.choice([errno.ENOSPC, None]))


def config_of(trial: Trial) -> Config:
    settings = {"learning_starts": 10, "batch_size": 8}
    seeds = {"seeds": [0, 1]} if has_seeds(trial) else {}
    return small(
        "sac",
        trial.folder / "runs",
        total_timesteps=TOTAL,
        checkpoint_interval=6,
        eval_interval=9,
        log_interval=3,
        algo_kwargs=settings,
        env_kwargs={"g": 9.0},
        **seeds,
    )


def run(trial: Trial) -> Figures:
    config = config_of(trial)
    expected = reference(trial, _reference_name(trial), config)
    if kind_of(trial) == "reads":
        return _check_reads(trial, config, expected)
    operations = expected.operations
    require(
        kind_of(trial) != PLAIN or len(ERRORS) * operations <= TRIALS - OTHERS,
        f"a run has {operations} operations: {TRIALS} trials are too few",
    )
    fault = fault_of(trial, operations)
    source, log = write_config(config, trial.folder / "config.yaml"), trial.folder / "output.txt"
    folders, note = run_folders(config), trial.folder / "fault.json"
    child = run_command(
        "train", "--config", source, log=log, prepare=lambda: _inject(config, fault, note)
    )
    failed = [] if not note.is_file() else [json.loads(line) for line in note.open()]
    if child.code == 0:
        require_clean(child, 0)
        _require_few_warnings(child, failed, folders, trial)
    else:
        require_clean(child, 1, 2)
        saves = _failed_saves(failed)
        require(_may_stop(failed), f"stopped after {saves} failed saves; first: {failed[:1]}")
    existing = [folder for folder in folders if folder.exists()]
    if child.code != 0 and not _stopped_cleaning_up(failed):
        for folder in existing:
            require_sound(folder)
    if child.code != 0 or _stopped_cleaning_up(failed):
        _recover(trial, config, existing, log)
    for folder, wanted in zip(folders, expected.digests, strict=True):
        require_sound(folder)
        # A seed whose folder could not be made is trained alone afterwards.
        alone = child.code != 0 and folder not in existing and bool(existing)
        require_same(digest(folder), wanted, OF_FIRST_SEED if alone else ())
    if child.code == 0 and any("tensorboard" in each["path"] for each in failed):
        for folder in folders:
            wanted_values = scalars(undisturbed(trial, folder))
            require(scalars(folder) == wanted_values, "TensorBoard's files lack values")
    return {"operations": float(operations)}


def _reference_name(trial: Trial) -> str:
    return "short-seeds" if has_seeds(trial) else "short"


def undisturbed(trial: Trial, folder: Path) -> Path:
    """Return the folder of the same run in which nothing failed."""
    return reference_folder(trial, _reference_name(trial)) / "runs" / folder.name


def _check_reads(trial: Trial, config: Config, expected: Reference) -> Figures:
    """A file of the newest checkpoint cannot be read: the checkpoint before is used."""
    (folder,), log = run_folders(config), trial.folder / "output.txt"
    generator = trial.random()
    stopped = start(lambda: _stop_at(config, generator.randrange(14, TOTAL)), log)
    stopped.wait()
    require_clean(stopped, 0)
    last = newest(folder)
    unreadable = generator.choice(sorted(path.name for path in last.iterdir()))

    def fail_reads() -> None:
        without_pictures()

        def act(operation: Operation) -> None:
            if operation.kind == "read" and operation.path.endswith(f"{last.name}/{unreadable}"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)

        watch(folder, act, reads=True)

    resumed = run_command("resume", folder, log=log, prepare=fail_reads)
    require_clean(resumed, 0)
    require(last.name in resumed.output, f"no warning about {last.name}")
    require_sound(folder)
    require_same(digest(folder), expected.digests[0])
    return {}


def _stop_at(config: Config, step: int) -> None:
    without_pictures()
    rl_training.train(config, callbacks=[StopAt(step)])


def _inject(config: Config, fault: Fault, note: Path) -> None:
    """Let operations of this process fail."""
    without_pictures()
    count, real_open, reached = -1, os.open, Counter()
    count_steps_of_commands(reached)
    folders = run_folders(config)

    def act(operation: Operation) -> None:
        nonlocal count
        count += 1
        is_due = fault.first <= count <= fault.last
        _limit_file_sizes(False)
        if not is_due or operation.kind not in fault.kinds:
            return
        sink = real_open(note, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        with os.fdopen(sink, "ab") as file:
            file.write(json.dumps(_describe(operation, folders, reached.value)).encode() + b"\n")
        if fault.error is None:
            _limit_file_sizes(True)
        else:
            raise OSError(fault.error, os.strerror(fault.error), operation.path)

    watch(Path(config["output_dir"]), act)


def _limit_file_sizes(is_due: bool) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FEW_BYTES if is_due else hard, hard))


def _describe(operation: Operation, folders: list[Path], step: int) -> dict[str, Any]:
    """What was about to happen, at which step, and whether the run was being set up."""
    is_set_up = all((folder / "checkpoints").is_dir() for folder in folders)
    return {
        "kind": operation.kind,
        "path": operation.path,
        "step": step,
        "setting_up": not is_set_up or Path(operation.path).name in SET_UP,
        "saving": "/checkpoints" in operation.path,
    }


def _may_stop(failed: list[dict[str, Any]]) -> bool:
    """A run may stop if it could not be set up, or after three failed saves."""
    return any(each["setting_up"] for each in failed) or _failed_saves(failed) >= MAX_FAILURES


def _failed_saves(failed: list[dict[str, Any]]) -> int:
    """Return how often the run with most failures could not be saved.

    A save can fail in several operations, so saves are told apart by their steps. Only the last one
    is tried again at once: each time under another temporary name, unless the folder of all
    checkpoints already fails.
    """
    saves: dict[str, set[Any]] = {}
    for number, each in enumerate(failed):
        if each["saving"]:
            run, _, entry = each["path"].partition("/checkpoints")
            attempt = entry.split("/")[1] if entry else number
            last = each["step"] >= TOTAL
            saves.setdefault(run, set()).add(attempt if last else each["step"])
    return max(map(len, saves.values()), default=0)


def _require_few_warnings(
    child: Child, failed: list[dict[str, Any]], folders: list[Path], trial: Trial
) -> None:
    """One failed operation gives one warning, or none if nothing was lost.

    For example, files that cannot be linked are copied.
    """
    if len(failed) != 1:
        return
    lines = [line for line in child.output.splitlines() if line.startswith("warning:")]
    warnings = [line for line in lines if "can be written again" not in line]
    require(len(warnings) <= 1, f"{len(warnings)} warnings about {failed[0]}")
    for folder in folders if not warnings else []:
        lost = _kept(undisturbed(trial, folder)) - _kept(folder)
        require(not lost, f"no warning, but {lost} are missing because of {failed[0]}")


def _kept(run: Path) -> set[str]:
    return {path.name for path in checkpoint_folders(run / "checkpoints")}


def _stopped_cleaning_up(failed: list[dict[str, Any]]) -> bool:
    """Whether temporary files could not be removed; the next `resume` removes them."""
    return any(each["kind"] == "open folder" and ".tmp-" in each["path"] for each in failed)


def _recover(trial: Trial, config: Config, existing: list[Path], log: Path) -> None:
    """Continue on a healthy disk: what exists is resumable, and nothing else is in the way."""
    if existing:
        done = run_command("resume", *existing, log=log, prepare=without_pictures)
        require_clean(done, 0)
    missing = [folder for folder in run_folders(config) if folder not in existing]
    if missing and existing:
        seeds = zip(config["seeds"], run_folders(config), strict=True)
        config = {**config, "seeds": [seed for seed, folder in seeds if folder in missing]}
    if missing:
        source = write_config(config, trial.folder / "again.yaml")
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
    """Return what a trial does. The fault is only known once the uninterrupted run was made."""
    if kind_of(trial) == "reads":
        return "a file of the newest checkpoint cannot be read"
    path = reference_folder(trial, _reference_name(trial)) / "reference.json"
    try:
        operations = json.loads(path.read_text())["operations"]
    except (OSError, ValueError):  # not made yet, or just being written
        return kind_of(trial)
    return f"{'two seeds, ' if has_seeds(trial) else ''}{fault_of(trial, operations)}"


CAMPAIGN = Campaign(
    name="R3",
    title="I/O error at the k-th write, full disks, and errors of reads",
    trials=TRIALS,
    run=run,
    describe=describe,
)
