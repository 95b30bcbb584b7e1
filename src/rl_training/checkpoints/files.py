"""Opens the files of a run folder, a checkpoint or a saved policy; no other module opens them.

Such a folder may come from a stranger. So nothing inside it is reached through a link, only regular
files are opened, and never more bytes are read than the caller allows. The folder that the user
named may be a link, and so may everything above it: clusters link `runs` to a large disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from rl_training.errors import CheckpointError

if TYPE_CHECKING:
    from io import BufferedRandom

TEMPORARY = ".tmp-"
"""Prefix of files and folders that are not complete yet"""
MAX_ENTRIES, MAX_DEPTH = 200_000, 8
"""Most files and folders below a run folder, and how deep they may be nested"""
_RELATIVE = os.name == "posix" and hasattr(os, "O_NOFOLLOW")
"""Whether files can be opened relative to an opened folder; Windows cannot do that.

Not looked up in `os.supports_dir_fd`, which does not know an `os.open` that a tool has replaced."""
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_MODES = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "w+b": os.O_RDWR | os.O_CREAT,  # not truncated: the caller may not own the file yet
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


class PlainFolder:
    """A folder whose contents are never reached through a link.

    Every operation opens the folder first: `base` as the user named it, then each folder below it
    without following links. Names are then looked up in the opened folder, so that a folder that is
    replaced by a link at the wrong moment is not followed either.
    """

    def __init__(self, path: Path, base: Path | None = None) -> None:
        """`base` is `path` itself or a folder above it; it may be a link."""
        self.path = path
        self._base = path if base is None else base

    def inner(self, name: str) -> PlainFolder:
        """Return a folder inside this one, which may not be a link."""
        return PlainFolder(self.path / name, self._base)

    def exists(self) -> bool:
        """Return whether there is a folder. Raises `CheckpointError` if a link leads to it."""
        try:
            with self._opened():
                return True
        except FileNotFoundError:
            return False

    def make(self) -> None:
        """Create the folder if it does not exist, and those above it."""
        missing = [self.path]
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                PlainFolder(path.parent).sync()  # or a crash could lose the new name
        self.exists()

    def make_inner(self, name: str) -> PlainFolder:
        """Create a folder inside this one; raise `FileExistsError` if the name is taken."""
        with self._opened() as at:
            os.mkdir(self._name(name, at), dir_fd=at)
        return self.inner(name)

    def entries(self) -> dict[str, int]:
        """Return the names in the folder, with the kind of each as in `st_mode`.

        Links are not followed. There are none if the folder does not exist.
        """
        found: dict[str, int] = {}
        try:
            with self._opened() as at, os.scandir(self.path if at is None else at) as entries:
                for entry in entries:
                    if len(found) == MAX_ENTRIES:
                        raise CheckpointError(f"{self.path}: has more than {MAX_ENTRIES:,} entries")
                    found[entry.name] = _kind(entry)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return found

    def mode(self, name: str) -> int | None:
        """Return the `st_mode` of an entry, or None if there is none; links are not followed."""
        try:
            with self._opened() as at:
                return self._mode(name, at)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def stamp(self, name: str) -> tuple[int, int] | None:
        """Return the time of change and the inode of a regular file; None if there is none."""
        if not self.has_file(name):
            return None
        with self.open(name) as file:
            found = os.fstat(file.fileno())
        return found.st_mtime_ns, found.st_ino

    def has_file(self, name: str) -> bool:
        """Return whether there is a regular file of that name."""
        mode = self.mode(name)
        return mode is not None and stat.S_ISREG(mode)

    def has_folder(self, name: str) -> bool:
        """Return whether there is a folder of that name, which is not a link."""
        mode = self.mode(name)
        return mode is not None and stat.S_ISDIR(mode)

    def open(self, name: str, mode: str = "rb") -> BufferedRandom:
        """Open a regular file.

        The mode is `rb`, `r+b`, `ab`, `xb` (a new file), or `w+b`, which keeps the content.
        Raises `CheckpointError` for anything but a regular file. So does a file with a second name
        that would be written in place: the other name may belong to another folder.
        """
        with self._opened() as at:
            descriptor = self._descriptor(name, mode, at)
        file: IO[bytes] = os.fdopen(descriptor, mode.replace("w+", "r+").replace("x", "w"))
        return cast("BufferedRandom", file)

    def size(self, name: str) -> int:
        """Return the size of a regular file in bytes; raise `CheckpointError` if that fails."""
        with self.reading(name) as file:
            return os.fstat(file.fileno()).st_size

    def read(self, name: str, limit: int) -> bytes:
        """Read a file of at most `limit` bytes; raise `CheckpointError` if that fails."""
        with self.reading(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(
                    f"{self.path}: {name} has {size:,} bytes; at most {limit:,} are read"
                )
            return file.read(size)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[BufferedRandom]:
        """Open a file to read it; an error of the disk is then a `CheckpointError` too."""
        try:
            with self.open(name) as file:
                yield file
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: {name} is missing") from None
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"{self.path}: {name} cannot be read ({reason})") from None

    def write_new(self, name: str, data: bytes) -> None:
        """Write a new file and flush it to disk."""
        with self.open(name, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def replace(self, name: str, data: bytes) -> None:
        """Write a file atomically: readers see the old content or the new one."""
        temporary = temporary_name()
        try:
            self.write_new(temporary, data)
            self.rename(temporary, name)
        except BaseException:
            self.remove(temporary)
            raise
        self.sync()

    def rename(self, name: str, new_name: str, destination: PlainFolder | None = None) -> None:
        """Rename an entry, or move it to another folder; a link is moved itself."""
        to = self if destination is None else destination
        with self._opened() as source, to._opened() as target:
            os.replace(
                self._name(name, source),
                to._name(new_name, target),
                src_dir_fd=source,
                dst_dir_fd=target,
            )

    def link(self, name: str, source: PlainFolder, source_name: str) -> None:
        """Give a regular file of another folder a second name here."""
        if not source.has_file(source_name):
            raise FileNotFoundError(errno.ENOENT, "no such file", str(source.path / source_name))
        with source._opened() as there, self._opened() as here:
            os.link(
                source._name(source_name, there),
                self._name(name, here),
                src_dir_fd=there,
                dst_dir_fd=here,
                follow_symlinks=not _RELATIVE,
            )

    def remove(self, name: str) -> None:
        """Remove a file, a link or a folder as far as possible, but nothing behind a link."""
        with contextlib.suppress(OSError), self._opened() as at:
            mode = self._mode(name, at)
            if mode is None:
                return
            if stat.S_ISDIR(mode):
                shutil.rmtree(self._name(name, at), ignore_errors=True, dir_fd=at)
            else:
                os.unlink(self._name(name, at), dir_fd=at)

    def sync(self) -> None:
        """Flush the folder's list of names to disk."""
        with self._opened() as at:
            if at is not None:
                os.fsync(at)

    def check_plain(self) -> None:
        """Raise `CheckpointError` if an entry below is neither a regular file nor a folder."""
        left, waiting = MAX_ENTRIES, [(self, 1)]
        while waiting:
            folder, depth = waiting.pop()
            for name, mode in sorted(folder.entries().items()):
                path, left = folder.path / name, left - 1
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise CheckpointError(_refusal(path, mode))
                if left < 0 or depth > MAX_DEPTH:
                    raise CheckpointError(
                        f"{self.path}: has more than {MAX_ENTRIES:,} files, or folders nested more "
                        f"than {MAX_DEPTH} deep; move what does not belong to the run elsewhere"
                    )
                if stat.S_ISDIR(mode):
                    waiting.append((folder.inner(name), depth + 1))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Open the folder and yield its descriptor; None where names need the complete path."""
        below = self.path.relative_to(self._base).parts
        if not _RELATIVE:
            for end in range(len(below)):
                _check_folder(self._base.joinpath(*below[: end + 1]))
            if not self.path.is_dir():
                raise FileNotFoundError(errno.ENOENT, "no such folder", str(self.path))
            yield None
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        descriptor = os.open(self._base, flags)
        try:
            for number, name in enumerate(below):
                try:
                    inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
                except OSError as error:
                    if error.errno in (errno.ELOOP, errno.ENOTDIR):
                        _check_folder(self._base.joinpath(*below[: number + 1]))
                    raise
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def _descriptor(self, name: str, mode: str, at: int | None) -> int:
        # Looked at first: opening a device can have effects of its own.
        before = self._mode(name, at)
        if before is not None and not stat.S_ISREG(before):
            raise CheckpointError(_refusal(self.path / name, before))
        flags = _MODES[mode] | _SAFE | _BINARY
        descriptor = os.open(self._name(name, at), flags, 0o644, dir_fd=at)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise CheckpointError(_refusal(self.path / name, found.st_mode))
        if mode in ("r+b", "ab", "w+b") and found.st_nlink > 1:
            os.close(descriptor)
            raise CheckpointError(
                f"{self.path / name}: is a hard link, so that writing to it would change another "
                "file too; replace it by a copy"
            )
        return descriptor

    def _name(self, name: str, at: int | None) -> str:
        if name in ("", ".", "..") or "/" in name or os.sep in name or "\0" in name:
            raise CheckpointError(f"{self.path}: {name!r} is not a file name")
        return name if at is not None else str(self.path / name)

    def _mode(self, name: str, at: int | None) -> int | None:
        try:
            return os.stat(self._name(name, at), dir_fd=at, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return None


def temporary_name() -> str:
    return f"{TEMPORARY}{uuid.uuid4().hex}"


def is_temporary(name: str) -> bool:
    """Return whether `temporary_name` made a name."""
    return re.fullmatch(rf"{re.escape(TEMPORARY)}[0-9a-f]{{32}}", name) is not None


def _kind(entry: os.DirEntry[str]) -> int:
    """Return the kind of an entry without a system call; 0 if it is neither of the usual ones."""
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFREG if entry.is_file(follow_symlinks=False) else 0


def _check_folder(path: Path) -> None:
    """Raise `CheckpointError` if this is a link, or anything else that is not a folder."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        raise CheckpointError(_refusal(path, mode))


def _refusal(path: Path, mode: int) -> str:
    if stat.S_ISLNK(mode):
        return (
            f"{path}: is a link; a run folder or checkpoint must not contain links; "
            "replace it by what it points to, or remove it"
        )
    kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
    if stat.S_ISREG(mode):
        kind = "a file, not a folder"
    return f"{path}: is {kind}; move it out of the folder or remove it"
