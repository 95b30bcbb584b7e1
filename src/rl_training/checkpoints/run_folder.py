"""The folder of a run: its lock, its checkpoints and its metadata."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rl_training.checkpoints.format import (
    CheckpointReader,
    checkpoint_folders,
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
LOCK = ".lock"
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
        (folder.path / "config.yaml").write_text(text, encoding="utf-8")
        return folder

    def lock(self) -> None:
        """Lock the folder against other processes; the lock ends with this process.

        Raises `RunLockedError` if another process holds it.
        """
        if fcntl is None:
            return
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        if not _try_lock(descriptor):
            owner = os.read(descriptor, 64).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunLockedError(
                f"{self.path} is being trained by process {owner}; wait for it or stop it first"
            )
        os.truncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        self._lock = descriptor
        remove_leftovers(self.checkpoints)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def is_locked(self) -> bool:
        """Return whether a process is training in this folder."""
        if fcntl is None or not (self.path / LOCK).exists():
            return False
        descriptor = os.open(self.path / LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def best(self) -> Json | None:
        """Return the content of `best.json`: the best checkpoint's name, step and mean return.

        Returns None if the file is missing or damaged.
        """
        try:
            best = read_json(self.checkpoints / "best.json")
        except CheckpointError:
            return None
        value = best.get("eval_return_mean")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return best if isinstance(best.get("checkpoint"), str) and is_number else None

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
        write_json(self.checkpoints / "best.json", values)

    def prune(self) -> None:
        """Remove all checkpoints except the newest ones and the best one."""
        best = self.best_checkpoint()
        for folder in checkpoint_folders(self.checkpoints)[KEEP_LAST:]:
            if folder != best:
                remove_checkpoint(folder)

    def latest_checkpoint(self, names: Iterable[str] | None = None) -> CheckpointReader:
        """Return the newest checkpoint whose files (all, or `names`) are intact.

        Warns about each damaged checkpoint that is skipped.
        """
        problems = []
        for folder in checkpoint_folders(self.checkpoints):
            try:
                reader = CheckpointReader(folder).verify(names)
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


def read_metrics(path: Path) -> list[Json]:
    """Read the rows of a `metrics.jsonl` file, without a last line that is incomplete."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


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
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607 (the user's own git)
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
