"""The folder of a run: its lock, its checkpoints and its metadata."""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import hashlib
import io
import json
import math
import os
import platform
import re
import secrets
import stat
import subprocess
import sys
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING

from rl_training.checkpoints.files import PlainFolder, is_temporary
from rl_training.checkpoints.format import (
    CheckpointReader,
    checkpoint_folders,
    copy_checkpoint,
    has_only_checkpoint_files,
    plain_folder,
    read_json,
    remove_checkpoint,
    remove_leftovers,
    step_folder_name,
    step_of,
    write_file,
    write_json,
)
from rl_training.config_files import dump_yaml
from rl_training.errors import CheckpointError, ConfigError, RunLockedError, warn_user
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
MOST_TRIED = 8
"""Most checkpoints that are read until one is intact; a run keeps three"""
LOCK, BEST = ".lock", "best.json"
TRACKERS = "trackers.json"
"""Identifies the runs at experiment trackers, and counts the rows that they have"""
RUN = "run.json"
"""What is needed to start a run again that has no checkpoint yet"""
FILES = (LOCK, "config.yaml", "learning_curve.png", "metadata.json", "metrics.jsonl", RUN, TRACKERS)
"""Files of a run folder"""
_FIRST_FILES = (LOCK, "config.yaml", "metadata.json", RUN)
"""Those that are written while it is made"""
MAX_METRICS_BYTES, MAX_METRICS_ROWS, MAX_METRICS_VALUES = 256 * 2**20, 500_000, 5_000_000
"""Largest metrics that are drawn"""
MAX_ROW_BYTES, MAX_ROW_VALUES = 2**20, 10_000
"""Longest row of metrics that is parsed"""
METRICS_SEARCHED, LINES_TRIED = 4 * 2**20, 100
"""Bytes at the end of the metrics in which an overview looks for the last row, and most lines that
it parses"""
_HAD_CHECKPOINT = "had_checkpoint"
"""Key of `run.json`, true after the first save"""
_IN_METADATA = ("environment", "execution", "resume_level")
"""Keys of `run.json` that `metadata.json` repeats"""
_UNFINISHED = ".new-"
"""How the name of a run folder begins while it is being made"""
_RUN_NAME = re.compile(r"\w[\w.+=@-]{0,254}")
INNER_FOLDERS = ("checkpoints", "superseded", "tensorboard", "videos")
_UNFINISHED_NAME = re.compile(rf"{re.escape(_UNFINISHED)}[0-9a-f]{{32}}")
_ATTEMPTS = 10
"""How often a new folder is made if another process takes it for an abandoned one"""
MAX_ENVIRONMENT_NAME = 60
"""Characters of an environment's name in the name of a run folder"""


class RunFolder:
    """The paths, the lock and the small files of one run."""

    def __init__(self, path: Path) -> None:
        self._lock: int | None = None
        self._checkpoint_noted = False
        self._set_path(path)

    def _set_path(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.learning_curve = path / "learning_curve.png"
        self.superseded = path / "superseded"
        self.videos = path / "videos"
        self.plain = PlainFolder(path)
        """Opens the files of this folder"""

    @classmethod
    def create_all(cls, configs: Sequence[TrainConfig], starts: Sequence[Json]) -> list[RunFolder]:
        """Create the locked folders of new runs; if one cannot be created, create none.

        A folder is made under a hidden name and then renamed, so that its run can be resumed from
        the moment the folder exists. `starts` holds the content of each `run.json`.
        """
        with _all_or_none(configs[0].output_dir) as made:
            paths = [
                _new_path(config, start["environment"]["label"])
                for config, start in zip(configs, starts, strict=True)
            ]
            # An earlier attempt that was killed here has not trained: this one takes its place,
            # unless some of its folders have their names and can be resumed.
            replaces = not any(map(os.path.lexists, paths))
            settle_unfinished(paths[0].parent, paths if replaces else ())
            destinations = [_free_path(path) for path in paths]
            for config, path, start in zip(configs, destinations, starts, strict=True):
                made.append(cls._make_hidden(path.parent))
                made[-1]._write_settings(config, start)
                made[-1]._write_start({**start, "name": path.name})
            for folder, path in zip(made, destinations, strict=True):
                folder._rename(path)
            PlainFolder(made[0].path.parent).sync()
        return made

    @classmethod
    def create_for_copy(
        cls, config: TrainConfig, description: Json, copied: CheckpointReader, step: int
    ) -> RunFolder:
        """Create the locked folder of a run that continues from a copied checkpoint.

        It contains the checkpoint of `step` from the moment it exists, and nothing to start the run
        from the beginning.
        """
        with _all_or_none(config.output_dir) as made:
            path = _free_path(_new_path(config, description["environment"]["label"]))
            made.append(cls._make_hidden(path.parent))
            made[0]._write_settings(config, description)
            copy_checkpoint(copied, made[0].checkpoints / step_folder_name(step))
            made[0]._rename(path)
            PlainFolder(path.parent).sync()
        return made[0]

    @classmethod
    def _make_hidden(cls, parent: Path) -> RunFolder:
        """Make a locked folder."""
        PlainFolder(parent).make()
        for _ in range(_ATTEMPTS):
            folder = cls(parent / f"{_UNFINISHED}{uuid.uuid4().hex}")
            folder.path.mkdir()
            try:
                # Before it is locked, another process may take it for an abandoned folder.
                with contextlib.suppress(FileNotFoundError, RunLockedError):
                    folder.lock()
                    if fcntl is None or folder.plain.has_file(LOCK):
                        return folder
            except BaseException:
                _discard(folder)
                raise
            _discard(folder)
        raise OSError(f"other processes removed {_ATTEMPTS} new folders in {parent}")

    def _write_settings(self, config: TrainConfig, description: Json) -> None:
        # Without the run name, so that the file can be used to start another run.
        text = dump_yaml({**config.to_mapping(), "run_name": None})
        write_file(self.path / "config.yaml", text.encode())
        self.write_metadata(description)

    def _write_start(self, start: Json) -> None:
        plain = json.loads(json.dumps(start, allow_nan=False))
        write_json(self.path / RUN, {**plain, "sha256": _digest(plain)})

    def _rename(self, destination: Path) -> None:
        try:
            self.path.rename(destination)
        except OSError:
            if os.path.lexists(destination):
                raise _name_taken(destination) from None
            raise
        self._set_path(destination)

    def start(self) -> Json:
        """Read `run.json`; raise `CheckpointError` if it is missing or damaged."""
        values = read_json(self.path / RUN)
        if values.pop("sha256", None) != _digest(values):
            raise CheckpointError(f"{self.path}: {RUN} is damaged (its hash differs)")
        return values

    def note_checkpoint(self) -> None:
        """Note in `run.json` that there is a checkpoint, so that the run is never started again."""
        if self._checkpoint_noted:
            return
        with contextlib.suppress(OSError, CheckpointError):  # tried again after the next save
            if self.plain.has_file(RUN) and not (start := self.start()).get(_HAD_CHECKPOINT):
                self._write_start({**start, _HAD_CHECKPOINT: True})
            self._checkpoint_noted = True

    def is_unstarted(self) -> bool:
        """Return whether the run was created but never had a checkpoint, also a damaged one."""
        return self.plain.has_file(RUN) and self._is_empty() and not self._had_checkpoint()

    def _is_empty(self) -> bool:
        if self.plain.mode(self.superseded.name) is not None:
            return False
        names = plain_folder(self.checkpoints).entries()
        return all(name.startswith(".") for name in names)  # of an unfinished save

    def _had_checkpoint(self) -> bool:
        try:
            return self.start().get(_HAD_CHECKPOINT) is True
        except CheckpointError:  # reported when the run is started
            return False

    def lock(self) -> bool:
        """Lock the folder against other processes; the lock ends with this process.

        Returns False where the operating system or the file system has no locks. Raises
        `RunLockedError` if another process holds the lock, and `CheckpointError` if the folder
        contains a link.
        """
        self.check_plain()  # before the first write
        if fcntl is None:
            return False
        with self.plain.open(LOCK, "w+b") as file:
            self._lock = os.dup(file.fileno())
        _LOCKED.add(self)
        try:
            self._take_lock(self._lock)
            self._remove_leftovers()
        except _LocksUnsupportedError as error:
            self.close_lock()
            _warn_without_locks(self.path, error)
            self._remove_leftovers()
            return False
        except BaseException:
            self.close_lock()
            raise
        return True

    def _remove_leftovers(self) -> None:
        """Remove what killed processes left."""
        for name in filter(is_temporary, self.plain.entries()):
            self.plain.remove(name)
        remove_leftovers(self.checkpoints)

    def has_settings(self) -> bool:
        """Return whether the files say that this is the folder of a run."""
        return any(map(self.plain.has_file, ("config.yaml", "metadata.json", RUN)))

    def _take_lock(self, lock: int) -> None:
        if not _try_lock(lock):
            raise RunLockedError(
                f"{self.path} is being trained by {_owner(lock)}; wait for it or stop it first"
            )
        with contextlib.suppress(OSError):  # a full disk must not prevent a resume
            os.truncate(lock, 0)
            os.write(lock, f"{os.getpid()} {platform.node()}".encode())

    def unlock(self) -> None:
        """Release the lock, if it is held."""
        try:
            if self._lock is not None:
                with contextlib.suppress(OSError, CheckpointError):
                    remove_leftovers(self.checkpoints)  # of a save that a second signal ended
        finally:
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
                return not _flock(file.fileno(), fcntl.LOCK_SH)
            except _LocksUnsupportedError:
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

    def prune(self, best: Path | None) -> None:
        """Remove all checkpoints except the newest ones and the best one, as far as possible."""
        with contextlib.suppress(OSError):
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
        for folder in checkpoint_folders(self.checkpoints)[:MOST_TRIED]:
            try:
                reader = CheckpointReader(folder)
                check(reader)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                warnings.warn(f"skipped a damaged checkpoint: {problem}", stacklevel=2)
            return reader
        if self._had_checkpoint() and not checkpoint_folders(self.checkpoints):
            raise CheckpointError(
                f"{self.path}: the checkpoints of this run are missing; restore the folder "
                f"`checkpoints` from a copy, or start a new run with `rl-training train --config "
                f"{self.path / 'config.yaml'}`"
            )
        if self.is_unstarted():
            raise CheckpointError(
                f"{self.path}: no checkpoint yet; `rl-training resume {self.path}` starts the run"
            )
        self.check_plain()  # a link may be the reason
        detail = "".join(f"\n  {problem}" for problem in problems)
        raise CheckpointError(f"{self.path}: no usable checkpoint{detail}")

    def write_metadata(self, description: Json) -> None:
        """Write `metadata.json`: the machine, and parts of the run's description."""
        values = {key: description[key] for key in _IN_METADATA}
        try:
            write_json(self.path / "metadata.json", {**describe_machine(), **values})
        except OSError as error:
            warn_user(f"metadata.json could not be written, training continues: {error}")


_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""Errors that mean that another process holds a lock"""
_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Errors that mean that a file system has no locks"""
_warned_without_locks = False
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


def _discard(folder: RunFolder) -> None:
    """Remove a run folder that could not be made, and release its lock only then."""
    try:
        PlainFolder(folder.path.parent).remove(folder.path.name)
    finally:
        folder.close_lock()


@contextlib.contextmanager
def _all_or_none(output_dir: str) -> Iterator[list[RunFolder]]:
    """Remove the run folders in the list that is yielded if one of them cannot be made."""
    made: list[RunFolder] = []
    try:
        yield made
    except BaseException as error:
        for folder in made:
            _discard(folder)
        if isinstance(error, OSError):
            raise ConfigError(f"output_dir = {output_dir!r}: cannot be written ({error})") from None
        raise


def _new_path(config: TrainConfig, environment_label: str) -> Path:
    """The path of a new run folder."""
    name = config.run_name or default_run_name(config, environment_label)
    if name in INNER_FOLDERS:
        raise ConfigError(f"run_name = {name!r}: is the name of a folder inside every run folder")
    return user_path(config.output_dir, "output_dir") / name


def _free_path(path: Path) -> Path:
    """Return `path`; raise `ConfigError` if it exists."""
    if os.path.lexists(path):
        raise _name_taken(path)
    return path


def _name_taken(path: Path) -> ConfigError:
    return ConfigError(
        f"run_name = {path.name!r}: {path} already exists; continue it with "
        f"`rl-training resume {path}` or choose another name"
    )


def settle_unfinished(parent: Path, replaced: Sequence[Path] = ()) -> None:
    """Rename or remove the unfinished run folders of processes that have ended.

    A folder that has everything but its name gets it, so that no seed of a population is lost. The
    others, and those that would become one of `replaced`, are removed. Anything else stays.
    """
    if fcntl is None:
        return
    for path in parent.glob(f"{_UNFINISHED}*"):
        if not _UNFINISHED_NAME.fullmatch(path.name) or not _is_unfinished_run(path):
            continue
        folder = RunFolder(path)
        with contextlib.suppress(OSError, CheckpointError, RunLockedError):
            if not folder.is_locked() and folder.lock():
                _settle(folder, replaced)
        folder.close_lock()


def _settle(folder: RunFolder, replaced: Sequence[Path]) -> None:
    name = folder.start().get("name") if folder.plain.has_file(RUN) else None
    if isinstance(name, str) and _RUN_NAME.fullmatch(name):
        destination = folder.path.with_name(name)
        if destination not in replaced and not os.path.lexists(destination):
            folder.path.rename(destination)
            return
    _discard(folder)


def _is_unfinished_run(path: Path) -> bool:
    """Whether a folder has nothing but what is written while a run folder is made."""
    folder = PlainFolder(path, path.parent)
    copied = folder.inner("checkpoints")
    try:
        return all(
            name == "checkpoints"
            or (stat.S_ISREG(mode) and (name in _FIRST_FILES or is_temporary(name)))
            for name, mode in folder.entries().items()
        ) and all(
            step_of(Path(name)) is not None and has_only_checkpoint_files(copied.inner(name))
            for name in copied.entries()
        )
    except (OSError, CheckpointError):  # cannot be read, or has a link
        return False


def _digest(values: Json) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_metrics(path: Path, key: str | None = None) -> list[Json]:
    """Read the rows of a `metrics.jsonl` file, up to the first line that is incomplete.

    With `key`, only the rows that have it are parsed and returned.
    """
    rows = []
    data = plain_folder(path.parent).read(path.name, MAX_METRICS_BYTES)
    if data.count(b"\n") > MAX_METRICS_ROWS:
        raise CheckpointError(f"{path}: has more than {MAX_METRICS_ROWS:,} rows")
    if _most_values(data) > MAX_METRICS_VALUES:
        raise CheckpointError(f"{path}: has more than {MAX_METRICS_VALUES:,} values")
    wanted = b"" if key is None else json.dumps(key).encode()
    for line in io.BytesIO(data):
        if wanted not in line:
            continue
        row = metrics_row(line)
        if row is None:
            break
        if key is None or key in row:
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
    """Parse a line of `metrics.jsonl`; None if it is not a row, or too long.

    Values that are not numbers are left out: they could take much more memory than the file.
    """
    if len(line) > MAX_ROW_BYTES or _most_values(line) > MAX_ROW_VALUES:
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    return {name: value for name, value in row.items() if type(value) in (int, float, NoneType)}


def _most_values(data: bytes) -> int:
    """Return an upper bound on the values in JSON, without parsing it."""
    return sum(map(data.count, (b",", b"[", b"{")))


def _try_lock(descriptor: int) -> bool:
    """Try several times to take the lock, because `is_locked` holds it for a moment."""
    for _ in range(4):
        if _flock(descriptor, fcntl.LOCK_EX):
            return True
        time.sleep(0.05)
    return False


def _flock(descriptor: int, kind: int) -> bool:
    """Try to take a lock; return False if another process holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno in _UNSUPPORTED:
            raise _LocksUnsupportedError(error.errno, error.strerror) from None
        raise
    return True


class _LocksUnsupportedError(OSError):
    """The file system has no locks, as some network file systems."""


def _warn_without_locks(path: Path, error: OSError) -> None:
    global _warned_without_locks
    if not _warned_without_locks:
        _warned_without_locks = True
        warn_user(
            f"{path}: this file system has no file locks ({error.strerror}), so nothing prevents "
            "two processes from training in the same run folder; resume a run only after the "
            "process that trains it has ended"
        )


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
