"""Pass the rows of `metrics.jsonl` to experiment trackers: W&B, MLflow, Trackio.

Each tracker has a process of its own (`tracker_process.py`), which all seeds of this process share.
Rows wait for it in a queue of limited length. Nothing here blocks training: if a tracker does not
answer, rows wait, are tried again, and the oldest are dropped in the end, with one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints.run_folder import TRACKERS, RunFolder
from rl_training.config import TrainConfig
from rl_training.errors import CheckpointError, UserError, warn_user
from rl_training.reporting.log_files import LoggedRow
from rl_training.reporting.tracker_queue import Mark, TrackerProcess
from rl_training.types import FINISHED, Json

DEFAULT_PROJECT = "rl_training"
EXTRAS = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""The extra of this package that installs each tracker"""
MAX_FILE_BYTES = 10_000
FINISH_SECONDS, INTERRUPTED_SECONDS = 30.0, 3.0
"""How long the end of a run waits for all trackers, and after a signal"""
_ID = re.compile(r"[0-9a-f]{12}")
_GROUP = re.compile(r"[\w.@+=-]{1,150}")
_PRIVATE = ("output_dir", "run_name", "init_from", "trackers", "tracker_project", "ray_address")
"""Settings that say where something is, and nothing about what is learned"""
_NOT_GROUPED = (
    *("seed", "seeds", "video_interval", "device", "num_threads"),
    *("vectorization", "env_workers", "env_worker_cpus"),
)
"""Settings in which runs of one group may differ"""


_PROCESSES: dict[str, TrackerProcess] = {}


class Trackers(Callback):
    """Passes the rows of one run to its trackers.

    A row is identified by its position and its number among the rows of that position. The run
    folder keeps the last row that each tracker has. A resumed run, which computes the rows after
    its checkpoint again, sends only those that come after it.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, environment: str) -> None:
        self._names = tuple(config.trackers)
        self._folder, self._config = folder, config
        self._environment = environment
        self._key = str(folder.path)
        self._last: Mark = (-1, 0)
        """The last row of this run"""
        self._sent: dict[str, Mark] = {}
        """The last row that each tracker has"""
        self._id = self._group = ""
        self._lock = threading.Lock()
        self._open: list[TrackerProcess] = []
        self._has_warned: set[str] = set()
        self._context: TrainingContext | None = None
        self._status = "failed"
        self._summary: dict[str, float] = {}

    def on_train_start(self, context: TrainingContext) -> None:
        self._context = context
        if context.position == 0:
            self._last = (-1, 0)
        self._identify()
        for name in self._names:
            process = _PROCESSES.get(name)
            if process is None or process.users == 0:
                process = _PROCESSES[name] = TrackerProcess(name)
            process.users += 1
            self._open.append(process)
            process.open(self._key, self._description(), self._keep_receipt)

    def add(self, row: LoggedRow) -> None:
        """Send a row, unless it was sent before this run was resumed."""
        position, number = self._last
        self._last = (row.position, number + 1 if row.position == position else 1)
        values = {
            name: value
            for name, value in row.values.items()
            if value is not None and name != "step"  # the position takes its place
        }
        for process in self._open:
            if self._last > self._sent.get(process.tracker, (-1, 0)):
                process.log(self._key, self._last, [row.position, row.wall_time, values])
        self._warn()

    def on_train_end(self, context: TrainingContext) -> None:
        self._status = context.stop_reason or "finished"
        if context.stop_reason in FINISHED and not context.is_interrupted:
            found = context.evaluation.metrics if context.evaluation else {}
            self._summary = {f"final/{name}": value for name, value in found.items()}
            self._summary["final/global_step"] = float(context.global_step)
            if context.best_return is not None:
                self._summary["final/best_return"] = context.best_return

    def close(self) -> None:
        """Finish the remote runs; the last run of this process waits for the trackers."""
        interrupted = self._context is not None and self._context.is_interrupted
        deadline = time.monotonic() + (INTERRUPTED_SECONDS if interrupted else FINISH_SECONDS)
        for process in self._open:
            process.finish(self._key, self._summary, self._status)
            process.users -= 1
        unused = [process for process in self._open if process.users == 0]
        for process in unused:  # all of them end at the same time
            process.start_closing()
        for process in unused:
            process.close(deadline)
        self._warn()
        for process in unused:
            if number := process.unsent():
                warn_user(
                    f"{process.tracker}: {number:,} rows were not sent; metrics.jsonl has all rows"
                )
        self._open = []

    def state_dict(self) -> Json:
        return {"last": list(self._last)}

    def load_state_dict(self, state: Json) -> None:
        position, number = state["last"]
        self._last = (int(position), int(number))

    def _identify(self) -> None:
        """Read the identity of the remote runs, or choose one."""
        saved = self._read()
        if saved is not None:
            self._id, self._group, self._sent = saved["id"], saved["group"], saved["sent"]
            return
        self._id, self._group, self._sent = secrets.token_hex(6), self._group_name(), {}
        self._write()

    def _read(self) -> Json | None:
        if self._folder.plain.mode(TRACKERS) is None:
            return None
        try:
            saved = json.loads(self._folder.plain.read(TRACKERS, MAX_FILE_BYTES))
            sent = {name: _mark(*saved["sent"][name]) for name in saved["sent"] if name in EXTRAS}
            valid = _ID.fullmatch(saved["id"]) and _GROUP.fullmatch(saved["group"])
        except (AttributeError, KeyError, OSError, TypeError, ValueError, CheckpointError):
            valid = None
        if not valid:
            warn_user(f"{self._folder.path / TRACKERS}: is damaged; the trackers get a new run")
            return None
        return {**saved, "sent": sent}

    def _write(self) -> None:
        values = {"id": self._id, "group": self._group, "sent": self._sent}
        data = (json.dumps(values, indent=1) + "\n").encode()
        # If it fails, a resumed run may send some rows again.
        with contextlib.suppress(OSError, CheckpointError):
            self._folder.plain.replace(TRACKERS, data)

    def _keep_receipt(self, tracker: str, mark: Mark) -> None:
        """Called in a thread of a tracker, after the rows up to this one were sent."""
        with self._lock:
            self._sent[tracker] = mark
            self._write()

    def _description(self) -> Json:
        return {
            "project": self._config.tracker_project,
            "default_project": DEFAULT_PROJECT,
            "id": self._id,
            "group": self._group,
            "name": self._folder.path.name,
            "config": {**public_settings(self._config), "environment": self._environment},
        }

    def _group_name(self) -> str:
        """Return a name that runs have in common if they differ only in their seed."""
        settings = public_settings(self._config)
        for name in _NOT_GROUPED:
            settings.pop(name, None)
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        environment = re.sub(r"[^\w.-]", "-", self._environment)[:60]
        return f"{self._config.algo}__{environment}__{digest}"

    def _warn(self) -> None:
        """Show the first problem of each tracker."""
        for process in self._open:
            while process.problems:
                message = process.problems.popleft()
                if process.tracker not in self._has_warned:
                    self._has_warned.add(process.tracker)
                    warn_user(message)


def _mark(position: Any, number: Any) -> Mark:
    if type(position) is not int or type(number) is not int:
        raise ValueError("not the mark of a row")
    return position, number


def check_trackers(config: TrainConfig) -> None:
    """Raise `UserError` if the package of a tracker is not installed; imports none of them."""
    for name in config.trackers:
        found = importlib.util.find_spec(name)
        # Without an origin it is only a folder of that name, such as W&B's own `wandb`.
        if found is None or found.origin is None:
            raise UserError(
                f"trackers: {name} needs the package {name}; install it with "
                f"`pip install 'rl-training[{EXTRAS[name]}]'`"
            )


def public_settings(config: TrainConfig) -> Json:
    """Return the settings of a run without paths."""
    settings = {key: value for key, value in config.to_mapping().items() if key not in _PRIVATE}
    return dict(_without_paths(settings))


def _without_paths(value: Any, key: str = "") -> Any:
    """Replace paths by the names of their files."""
    if isinstance(value, Mapping):
        return {name: _without_paths(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_paths(part, key) for part in value]
    if isinstance(value, str) and (key == "path" or value.startswith(("/", "~", "./", "../"))):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value
