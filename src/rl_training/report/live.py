"""The runs below a folder as they train: what the dashboard shows, read again when it changed.

Nothing is written, and no run waits: the lock of a run is only tried in shared mode, for a moment.
Of each run, only files that changed are read, and of its metrics only new rows.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.format import read_json
from rl_training.checkpoints.run_folder import BEST, RUN, RunFolder
from rl_training.errors import UserError
from rl_training.experiment.overview import (
    RUNNING,
    UNREADABLE,
    newest_state,
    run_folders,
    run_state,
    saved_settings,
    shown_text,
)
from rl_training.report.tail import MetricsTail
from rl_training.report.versions import Changes, VersionedData
from rl_training.types import Json

_FILES = ("config.yaml", "metadata.json", RUN, "checkpoints", f"checkpoints/{BEST}")
"""What changes when anything but the metrics of a run changes"""
MOST_RUNS = 1_000
"""Most runs that are shown"""
READING_SECONDS = 1.0
"""Time for reading rows at each refresh; what is left is read at the next ones"""
LEAST_SECONDS = 1.0
"""Least time between two refreshes, however many pages are open"""
SEARCHING_SHARE = 0.05
"""Share of the time in which run folders are searched for; in a very large tree, this is rarely"""

Stamp = tuple[int, int, int]


class LiveRun:
    """One run, read again where its files changed."""

    def __init__(self, folder: PlainFolder, identifier: str) -> None:
        self.folder, self.identifier = folder, identifier
        self.tail = MetricsTail(folder, lambda tag: tag.startswith(HEALTH))
        self.version = 0
        """Increases whenever anything about the run changed"""
        self.state, self.detail = UNREADABLE, ""
        self._run = RunFolder(folder.path)
        self._run.plain = folder
        self._stamps: list[Stamp | None] | None = None
        self._saved: Json | None = None
        self._settings: Json | None = None
        self._described: Json = {}
        self._metadata: Json = {}
        self._videos: Videos = ()
        self._problem: str | None = None
        self._curve: tuple[object, RunCurve] | None = None

    def refresh(self, *, reads_rows: bool = True) -> None:
        """Read what changed; of the metrics, a limited number of rows or none."""
        changed = reads_rows and self.tail.read()
        stamps = [stamp_of(self.folder.path / name) for name in _FILES]
        if stamps != self._stamps:
            self._stamps, self._curve, changed = stamps, None, True
            self._read_details()
        state = self._read_state()
        changed |= state != (self.state, self.detail)
        self.state, self.detail = state
        self.version += changed

    def _read_details(self) -> None:
        self._problem = None
        try:
            saved = newest_state(self._run)
            settings = saved_settings(self._run) if saved is None else saved["config"]
            # A state can have snapshots of thousands of environments; they are not kept.
            kept = {} if saved is None else {"progress": saved["progress"]}
            self._saved = None if saved is None else kept
            self._settings, self._described = settings, described(self._run)
        except Exception as error:  # whatever one folder contains, the others are shown
            self._problem = _reason(error)
        self._metadata = readable(lambda: read_json(self.folder.path / "metadata.json"), {})
        self._videos = readable(lambda: videos_of(self._run), ())

    def _read_state(self) -> tuple[str, str]:
        if self._problem is not None:
            return UNREADABLE, self._problem
        try:
            state, detail = run_state(self._run, self._saved)
            self._read_curve(state)
        except Exception as error:
            return UNREADABLE, _reason(error)
        return state, shown_text(detail)

    def details(self) -> RunDetails:
        """Return what `report.runs.read_run` would read now."""
        curve = self._read_curve(self.state)
        ...

    def step(self) -> int:
        """The last known step."""
        progress = {} if self._saved is None else self._saved["progress"]
        saved = progress.get("global_step", 0) if isinstance(progress, dict) else 0
        return max(self.tail.step, saved if type(saved) is int else 0)

    def status(self) -> Json:
        """Return what changes with every row: state, progress and speed."""
        ...


def stamp_of(path: Path) -> Stamp | None:
    """Return what tells whether a file or folder changed; None if there is none."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class LiveRuns:
    """All runs below a folder, and the data of their page in its newest version."""

    def __init__(
        self,
        root: Path,
        *,
        problems: Callable[[], Mapping[str, str]] = dict,
        control: bool = False,
    ) -> None:
        """`problems` returns what to say about runs, by their identifiers."""
        self._root, self._problems, self._control = root, problems, control
        self._runs: dict[tuple[Path, int, int], LiveRun] = {}
        """Runs by their path and what tells whether another folder took its place"""
        self._shown: list[tuple[str, int]] | None = None
        """The identifiers and versions of the runs in the data"""
        self._data = VersionedData()
        self._lock = threading.Lock()
        self._refresh_at = self._search_at = 0.0
        self._found: list[Path] = []

    def changes(self, version: str) -> Changes:
        """Return what changed after a version of the data, or everything."""
        with self._lock:
            if time.monotonic() >= self._refresh_at:
                self._refresh()
                self._refresh_at = time.monotonic() + LEAST_SECONDS
            return self._data.since(version)

    def folder(self, identifier: str) -> PlainFolder:
        """Return the folder of a run; raise `UserError` if it does not exist anymore."""
        with self._lock:
            for key, run in self._runs.items():
                if run.identifier == identifier and _folder_key(run.folder.path) == key:
                    return run.folder
        raise UserError("this run does not exist anymore")

    def _refresh(self) -> None:
        self._search()
        end = time.monotonic() + READING_SECONDS
        for run in self._runs.values():
            run.refresh(reads_rows=time.monotonic() < end)
        unread = list(self._runs.values())
        while time.monotonic() < end:
            unread = [run for run in unread if not run.tail.is_complete]
            if not unread:
                break
            for run in unread:
                run.refresh()
        ...

    def _search(self) -> None:
        """Find new run folders, and forget those that are gone."""
        began = time.monotonic()
        if began >= self._search_at:
            self._found = sorted(islice(run_folders(self._root), MOST_RUNS + 1))
            spent = time.monotonic() - began
            self._search_at = began + spent / SEARCHING_SHARE
        keys = {path: _folder_key(path) for path in self._found[:MOST_RUNS]}
        self._runs = {
            key: self._runs.get(key) or self._new_run(path)
            for path, key in keys.items()
            if key is not None
        }

    def _new_run(self, path: Path) -> LiveRun:
        return LiveRun(PlainFolder(path, self._root), secrets.token_hex(8), is_shown)


def _folder_key(path: Path) -> tuple[Path, int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return path, found.st_dev, found.st_ino
