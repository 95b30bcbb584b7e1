"""The runs below a folder as they train: what the dashboard shows, read again when it changed.

Nothing is written, and no run waits: the lock of a run is only tried in shared mode, for a moment.
Of each run, only files that changed are read, and of its metrics only new rows.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

import numpy as np

from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.format import read_json
from rl_training.checkpoints.run_folder import BEST, RUN, RunFolder
from rl_training.errors import UserError
from rl_training.experiment.curves import RunCurve, description_of, make_curve
from rl_training.experiment.overview import (
    RUNNING,
    UNREADABLE,
    newest_state,
    run_folders,
    run_state,
    saved_settings,
    shown_text,
)
from rl_training.report.data import assemble
from rl_training.report.health import HEALTH, MOST_METRICS, Health, group_phases, phase_seconds
from rl_training.report.numbers import text
from rl_training.report.runs import VIDEOS, RunDetails, count, readable, videos_of
from rl_training.report.tail import MetricsTail, Series
from rl_training.report.versions import Changes, VersionedData
from rl_training.types import Json

TITLE = "Training runs"
MOST_RUNS = 1_000
"""Most runs that are shown"""
READING_SECONDS = 2.0
"""Time for reading rows at each refresh; what is left is read at the next ones"""
LEAST_SECONDS, MOST_SECONDS = 1.0, 10.0
"""Time between two refreshes, however many pages are open"""
SEARCHING_SHARE, REFRESHING_SHARE = 0.05, 0.5
"""Largest shares of the time in which run folders are searched for, and in which runs are read"""
RESAMPLES = 1_000
"""Resamples of intervals, which are computed again with every evaluation"""
_FILES = ("config.yaml", "metadata.json", RUN, "checkpoints", f"checkpoints/{BEST}", VIDEOS)
"""What changes when anything but the metrics of a run changes"""
_PROGRESS = ("state", "problem", "step", "total", "speed")
"""Values of a run that can change with every row. They are sent apart from its curve."""

Stamp = tuple[int, int, int]
RunKey = tuple[Path, int, int, Stamp | None]


class LiveRun:
    """One run, read again where its files changed."""

    def __init__(self, folder: PlainFolder, identifier: str) -> None:
        self.folder, self.identifier = folder, identifier
        self.tail = MetricsTail(folder, lambda tag: tag.startswith(HEALTH))
        self.version = 0
        """Increases whenever anything but progress changed: evaluations, settings, the state"""
        self.state, self.detail = UNREADABLE, ""
        self._run = RunFolder(folder.path)
        self._run.plain = folder
        self._stamps: list[Stamp | None] | None = None
        self._progress: Json | None = None
        self._settings: Json | None = None
        self._described: Json = {}
        self._metadata: Json = {}
        self._videos: tuple[tuple[int, str, Path], ...] = ()
        self._problem: str | None = None
        self._details: RunDetails | None = None
        """None after a change, until it is needed"""

    def refresh(self, *, reads_rows: bool = True) -> None:
        """Read what changed; of the metrics, a limited number of rows or none."""
        tail_before = self.tail.version
        if reads_rows:
            self.tail.read()
        changed = self.tail.version != tail_before
        stamps = [stamp_of(self.folder.path / name) for name in _FILES]
        if stamps != self._stamps:
            self._stamps, changed = stamps, True
            self._read_details()
        state = self._read_state()
        if changed or state != (self.state, self.detail):
            self.state, self.detail = state
            self._details = None
            self.version += 1

    def _read_details(self) -> None:
        self._problem, self._settings, self._described = None, None, {}
        try:
            saved = newest_state(self._run)
            # The rest is not kept: it can have snapshots of thousands of environments.
            self._progress = None if saved is None else saved["progress"]
            self._settings = saved_settings(self._run) if saved is None else saved["config"]
            self._described = description_of(self._run)
            self._make_curve(UNREADABLE)
        except Exception as error:  # whatever one folder contains, the others are shown
            self._problem, self._settings = _reason(error), None
        self._metadata = readable(lambda: read_json(self.folder.path / "metadata.json"), {})
        self._videos = readable(lambda: videos_of(self._run), ())

    def _read_state(self) -> tuple[str, str]:
        if self._problem is not None:
            return UNREADABLE, self._problem
        try:
            saved = None if self._progress is None else {"progress": self._progress}
            state, detail = run_state(self._run, saved)
        except Exception as error:
            return UNREADABLE, _reason(error)
        return state, shown_text(detail)

    def _make_curve(self, state: str) -> RunCurve:
        problem = self._problem or self.tail.problem
        points = dict(sorted(self.tail.evaluations.items()))
        return make_curve(self.folder.path, state, self._settings, points, self._described, problem)

    def details(self) -> RunDetails:
        """Return what `report.runs.read_run` would read; progress may be older."""
        if self._details is None:
            self._details = RunDetails(
                curve=self._make_curve(self.state),
                step=self._step(),
                total=self._total(),
                speed=self._speed(),
                health=_health(self.tail.series),
                seconds=self.phases()[0],
                metadata=self._metadata,
                videos=self._videos,
            )
        return self._details

    def phases(self) -> tuple[dict[str, float], int]:
        """Return the seconds of each phase until now, and the step."""
        return phase_seconds(self.tail.last, None), self._step()

    def status(self, problem: str | None) -> Json:
        """Return what can change with every row, and `problem` in place of the run's own one."""
        total, speed, step = self._total(), self._speed(), self._step()
        left = None if total is None or not speed else max(0, total - step) / speed
        return {
            "key": self.identifier,
            "state": self.state,
            "detail": self.detail,
            "problem": problem or self._problem or self.tail.problem,
            "step": step,
            "total": total,
            "speed": speed,
            "seconds_left": left if self.state == RUNNING else None,
            "updated": self.tail.changed_at,
            "is_reading": not self.tail.is_complete,
        }

    def _step(self) -> int:
        progress = self._progress if isinstance(self._progress, dict) else {}
        return max(self.tail.step, count(progress.get("global_step")) or 0)

    def _total(self) -> int | None:
        return None if self._settings is None else count(self._settings.get("total_timesteps"))

    def _speed(self) -> float | None:
        speed = self.tail.speed()
        return None if speed is None or speed > 1e12 else float(f"{speed:.3g}")


def _health(series: Mapping[str, Series]) -> Health:
    """Return the values at evaluations; NaN where one lacks a value."""
    by_name = {
        text(tag.removeprefix(HEALTH), 60): dict(zip(each.steps, each.values, strict=True))
        for tag, each in list(series.items())[:MOST_METRICS]
    }
    steps = sorted({step for values in by_name.values() for step in values})
    metrics = {
        name: np.array([values.get(step, math.nan) for step in steps])
        for name, values in by_name.items()
    }
    return Health(np.array(steps, dtype=np.int64), metrics)


def _reason(error: Exception) -> str:
    known = isinstance(error, UserError | OSError)
    return shown_text(f"cannot be read: {error if known else repr(error)}")


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
        self._runs: dict[RunKey, LiveRun] = {}
        self._found: list[Path] = []
        self._videos: dict[Path, str] = {}
        """Names under which videos are served"""
        self._members: list[list[int]] = []
        """The places of the runs of each group"""
        self._page_made_of: object = None
        """The runs in the page, each with its version"""
        self._data = VersionedData()
        self._lock = threading.Lock()
        self._refresh_at = self._search_at = 0.0

    def changes(self, version: str) -> Changes:
        """Return what changed after a version of the data, or everything."""
        with self._lock:
            began = time.monotonic()
            if began >= self._refresh_at:
                self._refresh()
                spent = time.monotonic() - began
                wait = min(MOST_SECONDS, max(LEAST_SECONDS, spent / REFRESHING_SHARE))
                self._refresh_at = began + max(spent, wait)
            return self._data.since(version)

    def folder(self, identifier: str) -> PlainFolder:
        """Return the folder of a run; raise `UserError` if it does not exist anymore."""
        with self._lock:
            for key, run in self._runs.items():
                if run.identifier == identifier and _folder_key(run.folder.path) == key:
                    return run.folder
        raise UserError("this run does not exist anymore")

    def video(self, name: str) -> tuple[PlainFolder, str]:
        """Return the folder and the file of a video; raise `UserError` if there is none."""
        with self._lock:
            for path, known in self._videos.items():
                if known == name:
                    return PlainFolder(path.parent, self._root), path.name
        raise UserError("this video does not exist anymore")

    def _refresh(self) -> None:
        self._search()
        runs = list(self._runs.values())
        end = time.monotonic() + READING_SECONDS
        for run in runs:
            run.refresh(reads_rows=time.monotonic() < end)
        while unread := [run for run in runs if not run.tail.is_complete]:
            for run in unread:
                if time.monotonic() >= end:
                    break
                run.refresh()
            else:
                continue
            break
        made_of = [(run.identifier, run.version) for run in runs]
        if made_of == self._page_made_of:
            self._data.update(self._progress(runs), keep_others=True)
            return
        page = self._make_page(runs)
        self._members = [group["runs"] for group in page["groups"]]
        self._data.update({**page, **self._progress(runs)})
        self._page_made_of = made_of

    def _search(self) -> None:
        """Find new run folders, and forget those that are gone."""
        began = time.monotonic()
        if began >= self._search_at:
            self._found = sorted(islice(run_folders(self._root), MOST_RUNS + 1))
            self._search_at = began + (time.monotonic() - began) / SEARCHING_SHARE
        keys = {path: _folder_key(path) for path in self._found[:MOST_RUNS]}
        self._runs = {
            key: self._runs.get(key) or LiveRun(PlainFolder(path, self._root), secrets.token_hex(8))
            for path, key in keys.items()
            if key is not None
        }

    def _make_page(self, runs: list[LiveRun]) -> Json:
        """Return everything but the progress of runs."""
        self._videos, known = {}, self._videos

        def link(path: Path) -> str:
            self._videos[path] = known.get(path) or secrets.token_hex(8)
            return f"videos/{self._videos[path]}.mp4"

        details = [run.details() for run in runs]
        data = assemble(details, title=TITLE, link=link, resamples=RESAMPLES)
        if len(self._found) > MOST_RUNS:
            data["notes"].append(f"only {MOST_RUNS:,} runs are shown; name a smaller folder")
        for run in data["runs"]:
            for key in _PROGRESS:
                del run[key]
        for group in data["groups"]:
            del group["phases"]
        return {**data, "control": self._control}

    def _progress(self, runs: list[LiveRun]) -> Json:
        """Return what can change with every row, apart from the curves."""
        problems = self._problems()
        groups = [[runs[place] for place in places] for places in self._members]
        return {
            "status": [run.status(problems.get(run.identifier)) for run in runs],
            "phases": [group_phases([run.phases() for run in group]) for group in groups],
        }


def _folder_key(path: Path) -> RunKey | None:
    """Return what tells whether another run took the place of one; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    # The number of a removed folder is soon used again; its config is written only once.
    return path, found.st_dev, found.st_ino, stamp_of(path / "config.yaml")
