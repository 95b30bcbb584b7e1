"""Intercepts the file operations of a process: to count them, to fail one, or to die at one.

Works at the level of Python's own functions (`open`, `os.fsync`, ...), which is all the package
uses for files. Only operations below one folder are seen.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
BY_NAME = {"rename": "rename", "replace": "rename", "link": "link", "mkdir": "mkdir"}
BY_DESCRIPTOR = {
    "write": "write",
    "writev": "write",
    "pwrite": "write",
    "fsync": "fsync",
    "fdatasync": "fsync",
    "ftruncate": "truncate",
}


class Operation(NamedTuple):
    """One operation that is about to be made."""

    kind: str
    """open, open folder, write, truncate, fsync, rename, link, mkdir, or read if these are seen"""
    path: str
    in_main_thread: bool


Act = Callable[[Operation], None]
"""Called before each operation; what it raises, the operation raises"""


def watch(folder: Path, act: Act, *, reads: bool = False) -> None:
    """Call `act` before each operation below `folder`, from now on, in this process.

    Without `reads`, only operations that change the disk, or open folders to do so, are seen.
    """
    watcher = _Watcher(os.path.realpath(folder), act, reads=reads)
    io.open = builtins.open = functools.partial(_open, watcher)  # type: ignore[assignment]
    os.open = functools.partial(_os_open, watcher, os.open)  # type: ignore[assignment]
    for name, kind in BY_NAME.items():
        setattr(os, name, functools.partial(_by_name, watcher, kind, getattr(os, name)))
    for name, kind in BY_DESCRIPTOR.items():
        setattr(os, name, functools.partial(_by_descriptor, watcher, kind, getattr(os, name)))


class _Watcher:
    def __init__(self, folder: str, act: Act, *, reads: bool) -> None:
        self._folder, self._act, self.reads = folder, act, reads

    def see(self, kind: str, path: str) -> None:
        if path == self._folder or path.startswith(self._folder + "/"):
            main = threading.current_thread() is threading.main_thread()
            self._act(Operation(kind, path, main))


def _path(target: Any, folder: int | None = None) -> str:
    """Return the path of a file name or descriptor, relative to an opened folder or not."""
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")
    name = os.fsdecode(target)
    if folder is not None:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    parent, last = os.path.split(os.path.abspath(name))
    return os.path.join(os.path.realpath(parent), last)


_real_open = io.open


class _WatchedFile(io.FileIO):
    """An unbuffered file whose writes and reads are seen."""

    watcher: _Watcher

    def write(self, data: Any) -> int:
        self.watcher.see("write", _path(self.fileno()))
        return super().write(data)

    def readinto(self, buffer: Any) -> int:
        self._see_read()
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._see_read()
        return super().readall()

    def _see_read(self) -> None:
        if self.watcher.reads:
            self.watcher.see("read", _path(self.fileno()))


def _open(
    watcher: _Watcher, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any
) -> Any:
    writes = set(mode) & set("wax+")
    if not writes and not watcher.reads:
        return _real_open(file, mode, buffering, *rest, **more)
    if writes and not isinstance(file, int):
        watcher.see("open", _path(file))
    names = ("encoding", "errors", "newline", "closefd", "opener")
    options = {**dict(zip(names, rest, strict=False)), **more}
    raw = _WatchedFile(
        file,
        mode.replace("b", "").replace("t", ""),
        closefd=options.pop("closefd", True),
        opener=options.pop("opener", None),
    )
    raw.watcher = watcher
    if buffering == 0:
        return raw
    kind: Any = io.BufferedWriter if writes else io.BufferedReader
    buffered = (io.BufferedRandom if "+" in mode else kind)(raw)
    if "b" in mode:
        return buffered
    return io.TextIOWrapper(buffered, **options)


def _os_open(
    watcher: _Watcher,
    real: Any,
    path: Any,
    flags: int,
    mode: int = 0o777,
    *,
    dir_fd: int | None = None,
) -> int:
    if flags & WRITING:
        watcher.see("open", _path(path, dir_fd))
    elif not flags & os.O_PATH and os.path.isdir(_path(path, dir_fd)):
        watcher.see("open folder", _path(path, dir_fd))
    descriptor: int = real(path, flags, mode, dir_fd=dir_fd)
    return descriptor


def _by_name(watcher: _Watcher, kind: str, real: Any, path: Any, *rest: Any, **options: Any) -> Any:
    folder = options.get("dir_fd", options.get("src_dir_fd"))
    target = path if kind == "mkdir" else rest[0]
    if kind != "mkdir":
        folder = options.get("dst_dir_fd")
    watcher.see(kind, _path(target, folder))
    return real(path, *rest, **options)


def _by_descriptor(watcher: _Watcher, kind: str, real: Any, descriptor: int, *rest: Any) -> Any:
    watcher.see(kind, _path(descriptor))
    return real(descriptor, *rest)
