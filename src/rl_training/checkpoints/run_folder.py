"""The folder of a run: its lock, its checkpoints and its metadata."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.format import (
    CheckpointReader,
    checkpoint_folders,
    plain_folder,
    read_json,
    remove_checkpoint,
    remove_leftovers,
    step_folder_name,
    write_json,
)
from rl_training.config_files import dump_yaml
from rl_training.errors import CheckpointError, ConfigError, RunLockedError
from rl_training.types import Json
from rl_training.validation import user_path
from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

try:
    import fcntl
except ImportError:  # Windows has no flock; there, runs are not locked
    fcntl = None  # type: ignore[assignment]

KEEP_LAST = 2
LOCK, BEST = ".lock", "best.json"
FILES = (LOCK, "config.yaml", "learning_curve.png", "metadata.json", "metrics.jsonl", "run.json")
"""Files of a run folder"""
MAX_METRICS_BYTES, MAX_METRICS_ROWS = 256 * 2**20, 500_000
"""Largest metrics that are drawn"""
METRICS_SEARCHED, LINES_TRIED = 4 * 2**20, 100
"""Bytes at the end of the metrics in which an overview looks for the last row, and most lines that
it parses"""
MAX_ENVIRONMENT_NAME = 60
"""Characters of an environment's name in the name of a run folder"""


class RunFolder:
    """The paths, the lock and the small files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.learning_curve = path / "learning_curve.png"
        self.plain = PlainFolder(path)
        """Opens the files of this folder"""
        self._lock: int | None = None

    @classmethod
    def create_all(cls, configs: Sequence[TrainConfig], environment_label: str) -> list[RunFolder]:
        """Create the folders of new runs; if one cannot be created, create none."""
        created: list[RunFolder] = []
        try:
            for config in configs:
                created.append(cls.create(config, environment_label))
        except BaseException:
            for folder in created:
                folder.unlock()
                shutil.rmtree(folder.path)
            raise
        return created

    @classmethod
    def create(cls, config: TrainConfig, environment_label: str) -> RunFolder:
        """Create the folder of a new run, lock it, and write the config to it."""
        name = config.run_name or default_run_name(config, environment_label)
        folder = cls(user_path(config.output_dir, "output_dir") / name)
        try:
            folder.path.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"run_name = {name!r}: {folder.path} already exists; continue it with "
                f"`rl-training resume {folder.path}` or choose another name"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"output_dir = {config.output_dir!r}: cannot be written ({error})"
            ) from None
        folder.lock()
        # Without the run name, so that the file can be used to start another run.
        text = dump_yaml({**config.to_mapping(), "run_name": None})
        folder.plain.write_new("config.yaml", text.encode())
        return folder

    def lock(self) -> None:
        """Lock the folder against other processes; the lock ends with this process.

        Raises `RunLockedError` if another process holds it, and `CheckpointError` if the folder
        contains a link.
        """
        self.check_plain()  # before the first write
        if fcntl is None:
            return
        with self.plain.open(LOCK, "w+b") as file:
            self._lock = os.dup(file.fileno())
        _LOCKED.add(self)
        try:
            if not _try_lock(self._lock):
                raise RunLockedError(
                    f"{self.path} is being trained by {_owner(self._lock)}; "
                    "wait for it or stop it first"
                )
            with contextlib.suppress(OSError):  # a full disk must not prevent a resume
                os.truncate(self._lock, 0)
                os.write(self._lock, f"{os.getpid()} {platform.node()}".encode())
            remove_leftovers(self.checkpoints)
        except BaseException:
            self.close_lock()
            raise

    def unlock(self) -> None:
        """Release the lock, if it is held."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                remove_leftovers(self.checkpoints)  # of a save that a second signal ended
        self.close_lock()

    def close_lock(self) -> None:
        """Close the file of the lock. A lock that was inherited stays with the parent process."""
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            os.close(descriptor)
        _LOCKED.discard(self)

    def is_locked(self) -> bool:
        """Return whether a process is training in this folder."""
        if fcntl is None or not self.plain.has_file(LOCK):
            return False
        with self.plain.open(LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def check_plain(self) -> None:
        """Raise `CheckpointError` for the first link or special file below this folder.

        A folder in the place of a file is an error too.
        """
        self.plain.check_plain()
        files = [(self.plain, name) for name in FILES]
        for folder, name in [*files, (self.plain.inner("checkpoints"), BEST)]:
            if folder.has_folder(name):
                raise CheckpointError(f"{folder.path / name}: is a folder; remove it")

    def best(self) -> Json | None:
        """Return the content of `best.json`: the best checkpoint's name, step and mean return.

        Returns None if the file is missing or damaged.
        """
        try:
            best = read_json(self.checkpoints / BEST)
        except CheckpointError:
            return None
        value = best.get("eval_return_mean")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (isinstance(best.get("checkpoint"), str) and is_number):
            return None
        try:
            return best if math.isfinite(best["eval_return_mean"]) else None
        except OverflowError:  # an integer that no float can hold
            return None

    def best_checkpoint(self) -> Path | None:
        """Return the folder of the best checkpoint, or None."""
        best = self.best()
        # Looked up among the folders, so that a name in the file cannot point outside of them.
        folders = {path.name: path for path in checkpoint_folders(self.checkpoints)}
        return folders.get(best["checkpoint"]) if best else None

    def mark_best(self, step: int, eval_return_mean: float) -> None:
        """Write `best.json`."""
        name = step_folder_name(step)
        values = {"checkpoint": name, "step": step, "eval_return_mean": eval_return_mean}
        write_json(self.checkpoints / BEST, values)

    def prune(self) -> None:
        """Remove all checkpoints except the newest ones and the best one."""
        best = self.best_checkpoint()
        for folder in checkpoint_folders(self.checkpoints)[KEEP_LAST:]:
            if folder != best:
                remove_checkpoint(folder)

    def latest_checkpoint(
        self, check: Callable[[CheckpointReader], object] = CheckpointReader.verify
    ) -> CheckpointReader:
        """Return the newest checkpoint that passes `check`; by default, all its files are intact.

        `check` raises `CheckpointError` for a damaged checkpoint. Warns about each one that is
        skipped.
        """
        problems = []
        for folder in checkpoint_folders(self.checkpoints):
            try:
                reader = CheckpointReader(folder)
                check(reader)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                warnings.warn(f"skipped a damaged checkpoint: {problem}", stacklevel=2)
            return reader
        detail = "".join(f"\n  {problem}" for problem in problems)
        raise CheckpointError(f"{self.path}: no usable checkpoint{detail}")

    def write_metadata(self, **values: object) -> None:
        """Write `metadata.json`: a description of the machine, and `values`."""
        write_json(self.path / "metadata.json", {**describe_machine(), **values})


_LOCKED: weakref.WeakSet[RunFolder] = weakref.WeakSet()
"""The folders that this process has locked"""


def _leave_locks_to_parent() -> None:
    """Close the locks that a forked process inherits; it would keep them after its parent died."""
    for folder in list(_LOCKED):
        folder.close_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks_to_parent)


def _owner(lock: int) -> str:
    """Name the process that holds a lock; what the file says may be out of date or damaged."""
    words = os.read(lock, 128).decode(errors="replace")
    named = re.fullmatch(r"(\d{1,10})(?: ([\w.-]{1,64}))?", words.strip(), re.ASCII)
    if named is None:
        return "another process"
    process, host = int(named[1]), named[2]
    if host not in (None, platform.node()):
        return f"process {process} on {host}"
    return f"process {process}" if _is_running(process) else "another process"


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        pass
    return process > 0


def read_metrics(path: Path) -> list[Json]:
    """Read the rows of a `metrics.jsonl` file, up to the first line that is incomplete."""
    rows = []
    data = plain_folder(path.parent).read(path.name, MAX_METRICS_BYTES)
    if data.count(b"\n") > MAX_METRICS_ROWS:
        raise CheckpointError(f"{path}: has more than {MAX_METRICS_ROWS:,} rows")
    for line in data.splitlines():
        row = metrics_row(line)
        if row is None:
            break
        rows.append(row)
    return rows


def last_metrics(folder: RunFolder, key: str | None = None) -> Json:
    """Return the last row of a run's metrics, or the last one with `key`; empty if there is none.

    Only the end of the file is searched, so that it takes equally long for any run.
    """
    if folder.plain.mode(folder.metrics.name) is None:
        return {}
    with folder.plain.open(folder.metrics.name) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - METRICS_SEARCHED))
        lines = file.read(METRICS_SEARCHED).splitlines()
    wanted = (line for line in reversed(lines) if key is None or key.encode() in line)
    rows = (metrics_row(line) for line in islice(wanted, LINES_TRIED))
    return next((row for row in rows if row is not None and (key is None or key in row)), {})


def metrics_row(line: bytes) -> Json | None:
    """Parse a line of `metrics.jsonl`; None if it is not a row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _try_lock(descriptor: int) -> bool:
    """Try several times to take the lock, because `is_locked` holds it for a moment."""
    for _ in range(4):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.05)
        else:
            return True
    return False


def default_run_name(config: TrainConfig, environment_label: str) -> str:
    """Return `<algo>__<env>__seed<k>__<time>-<unique>`."""
    name = config.env_id if environment_label == config.env_id else short_name(environment_label)
    environment = "".join(c if c.isalnum() or c in "._-" else "-" for c in name or "")
    moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return (
        f"{config.algo}__{environment[:MAX_ENVIRONMENT_NAME]}__seed{config.seed}__"
        f"{moment}-{secrets.token_hex(3)}"
    )


def short_name(environment_label: str) -> str:
    """Return the name of a class without its module; other names stay as they are."""
    qualified = re.fullmatch(r"[\w.<>]+\.(\w+)", environment_label)
    return qualified[1] if qualified else environment_label


def describe_machine() -> Json:
    """Return the versions, the code and the hardware that a result was computed with."""
    import torch  # only here, so that an overview of runs does not need it

    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git_commit": git_commit(),
        "versions": package_versions(),
        "hardware": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cpu_count": os.cpu_count(),
            "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        },
    }


@functools.cache
def package_versions() -> dict[str, str | None]:
    """Return the versions of the packages that results depend on."""
    packages = ("torch", "gymnasium", "numpy", "mujoco", "safetensors", "pydantic")
    return {
        "rl_training": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def git_commit() -> str | None:
    """Return the commit of the current folder's repository, or None."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
