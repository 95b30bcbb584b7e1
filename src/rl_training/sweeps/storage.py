"""Keep the folder of a job in a place that has neither locks nor renames, such as an object store.

    STORAGE/pendulum-0c1d2e3f4a5b/trial_0003/
      objects/SHA-256               the content of a file
      manifests/000001-000004.json  attempt and number; written last, names all files of the folder

A file is stored under the hash of its content, so that what has not changed is never sent again,
and nothing is ever overwritten. A folder is restored from the newest manifest whose files are all
intact.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from rl_training.checkpoints.files import TEMPORARY, temporary_name
from rl_training.errors import ConfigError, UserError, last_line, warn_user
from rl_training.sweeps.file import masked, without_password
from rl_training.types import Json
from rl_training.validation import short, user_path

UPLOAD_SECONDS = 5.0
"""How often a job that runs looks for new checkpoints to upload"""
KEPT_MANIFESTS = 2
MAX_MANIFEST_BYTES = 64 * 2**20
_ATTEMPTS = 5
"""How often a folder is read again if a file in it was removed meanwhile"""
_MANIFEST = re.compile(r"\d{6,}-\d{6,}\.json")
_HASH = re.compile(r"[0-9a-f]{64}")
_LEFT_OUT = (TEMPORARY, ".lock", ".lease-", ".new-")
"""How names begin that belong to a process, not to the job"""


class JobStorage:
    """The copies of one job's folder in a folder or at an fsspec URL."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._system, root = open_url(url)
        self._root = f"{root.rstrip('/')}/{name}"

    def publish(self, folder: Path, attempt: int, sequence: int) -> None:
        """Upload what is new in a folder; the manifest comes last."""
        files = self._upload(folder)
        for kind in ("objects", "manifests"):
            self._system.makedirs(f"{self._root}/{kind}", exist_ok=True)
        name = f"{attempt:06}-{sequence:06}.json"
        data = json.dumps({"files": files}).encode()
        self._system.pipe_file(f"{self._root}/manifests/{name}", data)
        self._remove_old(name)

    def explain(self, error: Exception) -> str:
        """What an error of the storage says, without passwords."""
        return _explained(error, self._url)

    def _upload(self, folder: Path) -> Json:
        """Upload the files of a folder that changes meanwhile, as they were at one moment."""
        for attempt in range(_ATTEMPTS):
            try:
                return {path: self._put(folder / path) for path in _paths(folder)}
            except FileNotFoundError:  # an old checkpoint was removed
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _put(self, path: Path) -> list[Any]:
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        target = f"{self._root}/objects/{digest}"
        if self._size(target) != len(data):
            self._system.makedirs(f"{self._root}/objects", exist_ok=True)
            self._system.pipe_file(target, data)
        return [digest, len(data)]

    def _size(self, path: str) -> int | None:
        try:
            return int(self._system.info(path)["size"])
        except FileNotFoundError:
            return None

    def _remove_old(self, newest: str) -> None:
        """Remove what only manifests before the last ones need."""
        names = self._manifests()
        kept = [name for name in names if name <= newest][:KEPT_MANIFESTS]
        kept += [name for name in names if name > newest]
        with contextlib.suppress(FileNotFoundError):  # another process cleans up too
            needed = {digest for name in kept for digest in self._digests(name)}
            for name in set(names) - set(kept):
                self._system.rm_file(f"{self._root}/manifests/{name}")
            for path in self._system.ls(f"{self._root}/objects", detail=False):
                if path.rpartition("/")[2] not in needed:
                    self._system.rm_file(path)

    def _digests(self, name: str) -> list[str]:
        """The objects that a manifest needs; none if it is damaged, since nothing restores it."""
        try:
            return [digest for digest, _ in self._read(name).values()]
        except ValueError:
            return []

    def restore(self, folder: Path) -> bool:
        """Download the newest intact copy into a folder; return False if there is none.

        What the folder has already under the same names is replaced. Raises `OSError` if the
        storage does not answer.
        """
        try:
            names = self._manifests()
        except Exception as error:  # each kind of storage has its own errors
            raise OSError(f"the storage cannot be read: {self.explain(error)}") from None
        for name in names:
            temporary = folder / temporary_name()
            try:
                self._download(self._read(name), temporary)
                _move_content(temporary, folder)
                return True
            except Exception as error:  # damage, or an error of the storage
                warn_user(
                    f"skipped a damaged copy of {folder.name} ({name}): {self.explain(error)}"
                )
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return False

    def _manifests(self) -> list[str]:
        """Names from newest to oldest."""
        try:
            found = self._system.ls(f"{self._root}/manifests", detail=False)
        except FileNotFoundError:
            return []
        names = (path.rpartition("/")[2] for path in found)
        return sorted((name for name in names if _MANIFEST.fullmatch(name)), reverse=True)

    def _read(self, name: str) -> dict[str, tuple[str, int]]:
        path = f"{self._root}/manifests/{name}"
        if (self._size(path) or 0) > MAX_MANIFEST_BYTES:
            raise ValueError("the manifest is too large")
        try:
            files = json.loads(self._system.cat_file(path))["files"]
            return {
                _checked(path): (str(digest), int(size)) for path, (digest, size) in files.items()
            }
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
            raise ValueError(f"the manifest is damaged ({last_line(error)})") from None

    def _download(self, files: dict[str, tuple[str, int]], folder: Path) -> None:
        for path, (digest, size) in files.items():
            if not _HASH.fullmatch(digest):
                raise ValueError(f"{path} has no valid hash")
            data = self._system.cat_file(f"{self._root}/objects/{digest}")
            if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
                raise ValueError(f"{path} is damaged")
            destination = folder / path
            destination.parent.mkdir(parents=True, exist_ok=True)
            destination.write_bytes(data)


def open_url(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a folder or URL, and the path in it."""
    import fsspec  # PyTorch needs it too

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"storage: cannot be used ({_explained(error, url)})") from None
    except Exception as error:  # some kinds connect at once
        raise OSError(f"the storage cannot be reached: {_explained(error, url)}") from None
    return system, str(path)


def _explained(error: Exception, url: str) -> str:
    return without_password(last_line(error), url)


def absolute_url(url: str) -> str:
    """Return a URL that means the same place in processes with another working folder."""
    return url if "://" in url or "::" in url else str(user_path(url, "storage").absolute())


def check_storage(url: str) -> None:
    """Raise `UserError` if nothing can be written there."""
    try:
        system, path = open_url(url)
        if "memory" in (system.protocol, *system.protocol):
            raise ConfigError(
                f"storage = {short(masked(url))}: is the memory of one process; use a folder or a "
                "URL that all machines can reach"
            )
        system.makedirs(path, exist_ok=True)
        probe = f"{path.rstrip('/')}/{temporary_name()}"
        system.pipe_file(probe, b"")
        system.rm_file(probe)
    except ConfigError:
        raise
    except Exception as error:  # each kind of storage has its own errors
        raise UserError(f"storage: cannot be written ({_explained(error, url)})") from None


@contextlib.contextmanager
def published(storage: JobStorage, folder: Path, attempt: int) -> Iterator[None]:
    """Upload new checkpoints of a job while it runs, and all that is left at its end."""
    sequence, seen, ended = 0, _checkpoints(folder), threading.Event()

    def upload() -> None:
        nonlocal sequence, seen
        while not ended.wait(UPLOAD_SECONDS):
            if (now := _checkpoints(folder)) != seen:
                try:
                    sequence += 1
                    storage.publish(folder, attempt, sequence)
                    seen = now
                except Exception as error:  # tried again; the job itself goes on
                    message = storage.explain(error)
                    warn_user(f"a checkpoint was not uploaded, trying again: {message}")

    thread = threading.Thread(target=upload, name="upload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        try:
            storage.publish(folder, attempt, sequence + 1)
        except Exception as error:  # each kind of storage has its own errors
            raise OSError(f"the runs were not uploaded: {storage.explain(error)}") from None


def _checkpoints(folder: Path) -> set[str]:
    return {str(path) for path in folder.glob("*/checkpoints/step_*")}


def _paths(folder: Path) -> list[str]:
    """The files of a job's folder, in an order in which a copy of a running job is consistent.

    What names a checkpoint is read before the checkpoints, and what a checkpoint needs after them.
    """
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(_LEFT_OUT))
        for name in sorted(names):
            path = Path(parent) / name
            if not name.startswith(_LEFT_OUT) and stat.S_ISREG(path.lstat().st_mode):
                found.append(path.relative_to(folder).as_posix())
    return sorted(found, key=lambda path: (_turn(path), path))


def _turn(path: str) -> int:
    if path.endswith("/best.json"):
        return 0
    return 1 if "/checkpoints/" in path else 2


def _checked(path: str) -> str:
    parts = PurePosixPath(path).parts
    if (
        not parts
        or PurePosixPath(path).is_absolute()
        or ".." in parts
        or "\\" in path
        or ":" in path
    ):
        raise ValueError(f"the manifest names a file outside of its folder: {path!r}")
    return path


def _move_content(source: Path, destination: Path) -> None:
    for entry in source.iterdir():
        target = destination / entry.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        entry.replace(target)
