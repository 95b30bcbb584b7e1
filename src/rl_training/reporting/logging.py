"""Writes the metrics of a run to `metrics.jsonl` and TensorBoard, and draws its learning curve.

Tags are those of Stable-Baselines3, such as `rollout/ep_rew_mean`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import reprlib
import socket
import stat
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from rl_training.callbacks import (
    MAX_NAME_LENGTH,
    ROW_KEYS,
    PeriodicCallback,
    Stopwatch,
    TimeShare,
    TrainingContext,
)
from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.format import finite_or_none, plain_folder
from rl_training.checkpoints.run_folder import MAX_ROW_BYTES, RunFolder, read_metrics
from rl_training.errors import CheckpointError, warn_user
from rl_training.types import SUCCESS_RATE, Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from tensorboard.compat.proto.event_pb2 import Event

MAX_WAITING_BYTES = 4 * 2**20
"""Size of the rows that wait for a disk; the oldest ones are dropped beyond it"""
ROWS_AT_ONCE = 256
"""Rows that are written together after the disk has recovered"""
GREY, BLUE = "#9aa5b1", "#2563eb"
LEAST_TO_SMOOTH = 10
"""Number of training episodes from which their mean is drawn"""
WINDOWS = 10
"""Number of windows of the mean that fit into the run"""
FEW_EVALUATIONS = 10
"""Up to this number, evaluations are drawn one by one instead of as a band"""
MAX_COUNT = 10**15
"""Largest step or length in a checkpoint"""
LARGEST = sys.float_info.max
WALL = "wall"
"""Name of the seconds of training in a checkpoint, beside the names of `TimeShare`"""
_OWN_EVENTS = re.compile(r"events\.out\.tfevents\.[\w.-]{1,150}\.rl_training", re.ASCII)
"""Names of the event files that a resumed run may cut or remove; no other program ends them so"""


class LoggedRow(NamedTuple):
    """A row of metrics, with what TensorBoard needs in addition."""

    position: int
    wall_time: float
    values: dict[str, float | None]

    @classmethod
    def from_json(cls, saved: Sequence[Any]) -> LoggedRow:
        """Return a row from a checkpoint; raise if it is not one that `MetricsLog` could make."""
        position, wall_time, values = saved
        numbers = {
            _tag(tag): None if value is None else _number(value) for tag, value in values.items()
        }
        return cls(_count(position), _number(wall_time), numbers)


class LogFile:
    """A file that rows are appended to. A row that cannot be written waits for the next one.

    Nothing is raised: training does not depend on its logs. The file always ends with a complete
    row, except just after a failed write; what such a write left is overwritten or cut.
    """

    def __init__(
        self, run: Path, folder: PlainFolder, name: str, encode: Callable[[LoggedRow], bytes]
    ) -> None:
        self._run, self._folder, self._name, self._encode = run, folder, name, encode
        self.path = folder.path / name
        self.length = 0
        """Bytes of the rows that were written"""
        self.waiting: deque[LoggedRow] = deque()
        self.dropped = 0
        """Number of rows that no longer fit into the waiting ones"""
        self._waiting_bytes = 0
        self._descriptor: int | None = None
        self._has_failed = False
        self._warned_of: set[str] = set()

    def append(self, row: LoggedRow) -> None:
        self.enqueue(row)
        self.write_waiting()

    def enqueue(self, row: LoggedRow) -> None:
        """Add a row that is written later."""
        self.waiting.append(row)
        self._waiting_bytes += _size(row)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._waiting_bytes -= _size(self.waiting.popleft())
            self.dropped += 1

    def write_waiting(self) -> None:
        """Write the rows that wait, unless the disk fails again."""
        failed_before, number = self._has_failed, 1
        try:
            self.open()
            while self.waiting:
                # A single row at first: after a failure, the next attempt may fail as well.
                rows = list(itertools.islice(self.waiting, number))
                self._write(b"".join(map(self._encode, rows)))
                for row in rows:
                    self._waiting_bytes -= _size(row)
                    self.waiting.popleft()
                number = ROWS_AT_ONCE
        except (OSError, CheckpointError) as error:  # the latter if a link took its place
            self._fail(error)
            return
        self._has_failed = False
        if failed_before:
            self._warn_once("recovered", f"{self.path}: can be written again{self._lost()}")

    def open(self) -> None:
        """Open the file, unless it is open, and remove everything after its last known row."""
        if self._descriptor is not None:
            return
        with self._folder.open(self._name, "w+b") as file:
            descriptor = os.dup(file.fileno())
        try:
            self._cut(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _cut(self, descriptor: int) -> None:
        self.length = min(self.length, os.fstat(descriptor).st_size)
        os.ftruncate(descriptor, self.length)

    def close(self) -> None:
        """Write the rows that still wait, warn if that fails, and close the file."""
        self.write_waiting()
        self._close()
        if self.waiting:
            self._warn_once(
                "end",
                f"{self.path}: {len(self.waiting):,} rows could not be written; `rl-training "
                f"resume {self._run}` writes them: they are in the last checkpoint or are computed "
                f"again{self._lost()}",
            )

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        os.lseek(self._descriptor, self.length, os.SEEK_SET)
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(self._descriptor, remaining) :]
        self.length += len(data)

    def _fail(self, error: OSError | CheckpointError) -> None:
        self._has_failed = True
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.length)
        self._close()
        self._warn_once(
            "failed",
            f"{self.path}: cannot be written ({getattr(error, 'strerror', None) or error}); "
            "training continues, and the rows wait until it can",
        )

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _warn_once(self, event: str, message: str) -> None:
        """Warn of an event the first time; a disk may fail and recover many times."""
        if event not in self._warned_of:
            self._warned_of.add(event)
            warn_user(message)

    def _lost(self) -> str:
        if not self.dropped:
            return ""
        return f"; {self.dropped:,} older rows did not fit into the buffer and are lost"

    def state_dict(self) -> Json:
        return {"waiting": [list(row) for row in self.waiting], "dropped": self.dropped}

    def load_state_dict(self, state: Json) -> None:
        self.dropped = _count(state["dropped"])
        for saved in state["waiting"]:
            self.enqueue(LoggedRow.from_json(saved))


class MetricsFile(LogFile):
    """`metrics.jsonl`: a JSON object per line."""

    def __init__(self, folder: RunFolder) -> None:
        name = folder.metrics.name
        super().__init__(folder.path, folder.plain, name, lambda row: _line(row.values))

    def _cut(self, descriptor: int) -> None:
        super()._cut(descriptor)
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(max(0, self.length - 1))
            if file.read(1) in (b"", b"\n"):
                return
            # After a power cut, the last row may be incomplete.
            start = max(0, self.length - MAX_ROW_BYTES)
            file.seek(start)
            newline = file.read(self.length - start).rfind(b"\n")
        if newline < 0 < start:
            raise CheckpointError(f"it is damaged at byte {self.length:,}; remove the file")
        self.length = start + newline + 1
        super()._cut(descriptor)


class TensorBoardFile(LogFile):
    """An event file of TensorBoard with an event per row.

    It is written here and not by PyTorch's `SummaryWriter`, which writes in a thread and loses what
    it accepted before an error.

    Each process writes a file of its own, because a TensorBoard that is running cannot read on in a
    file that becomes shorter. A checkpoint contains the names and lengths of these files. A resumed
    run first cuts them to these lengths and removes the ones that are newer, as it cuts
    `metrics.jsonl`.
    """

    def __init__(self, folder: RunFolder) -> None:
        host = re.sub(r"[^\w.-]", "-", socket.gethostname(), flags=re.ASCII)[:64]
        name = f"events.out.tfevents.{time.time():.6f}.{host}.{os.getpid()}.rl_training"
        inner = folder.plain.inner(folder.tensorboard.name)
        super().__init__(folder.path, inner, name, _encode_event)
        self.first_step: int | None = None
        """From this step on, a TensorBoard that is running drops what it read from earlier files"""
        self._earlier: dict[str, int] | None = {}
        """Length of the file of each earlier process; None for a checkpoint of an older version"""
        self._earlier_are_cut = False

    def open(self) -> None:
        if self._descriptor is not None:
            return
        self._folder.make()
        if not self._earlier_are_cut:
            self._earlier = self._cut_earlier()
            self._earlier_are_cut = True
        super().open()
        if self.length == 0:
            self._write(_event_file_header(self.first_step))

    def _cut_earlier(self) -> dict[str, int]:
        """Cut or remove the files of earlier processes; return the lengths of those that remain."""
        remaining = {}
        for name, mode in self._folder.entries().items():
            if not stat.S_ISREG(mode) or not _OWN_EVENTS.fullmatch(name):
                continue
            size = self._folder.size(name)
            length = size if self._earlier is None else self._earlier.get(name, 0)
            if length == 0:
                self._folder.remove(name)
                continue
            if length < size:
                with self._folder.open(name, "r+b") as file:
                    os.ftruncate(file.fileno(), length)
            remaining[name] = min(length, size)
        return remaining

    def state_dict(self) -> Json:
        state = super().state_dict()
        if self._earlier is None:
            return state
        own = {self._name: self.length} if self.length else {}
        return {**state, "files": {**self._earlier, **own}}

    def load_state_dict(self, state: Json) -> None:
        super().load_state_dict(state)
        files = state.get("files")
        if files is not None:
            files = {_event_file_name(name): _count(length) for name, length in files.items()}
        self._earlier = files


def _encode_event(row: LoggedRow) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=tag, simple_value=math.nan if value is None else value)
        for tag, value in row.values.items()
        if tag not in ROW_KEYS
    ]
    summary = Summary(value=values)
    return _record(Event(wall_time=row.wall_time, step=row.position, summary=summary))


def _event_file_header(first_step: int | None) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    now, version = time.time(), "brain.Event:2"
    header = _record(Event(wall_time=now, file_version=version))
    if first_step is None:
        return header
    restart = SessionLog(status=SessionLog.START)
    return header + _record(Event(wall_time=now, step=first_step, session_log=restart))


def _record(event: Event) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    return record.getvalue()


def _event_file_name(name: str) -> str:
    """Return a name from a checkpoint; raise `ValueError` if this package does not use such."""
    if not _OWN_EVENTS.fullmatch(name):
        raise ValueError(f"{reprlib.repr(name)} is not the name of an event file")
    return name


def _tag(name: str) -> str:
    """Return the name of a value from a checkpoint; raise `ValueError` if no row can have it."""
    if not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise ValueError(f"{reprlib.repr(name)} is not the name of a metric")
    return name


def _number(value: Any) -> float:
    """Return a number from a checkpoint; raise `ValueError` if it is not one, or not finite."""
    if type(value) not in (int, float) or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{reprlib.repr(value)} is not a finite number")
    number: float = value
    return number


def _count(value: Any) -> int:
    """Return a number from a checkpoint; raise `ValueError` unless it can be a count."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{reprlib.repr(value)} is not a count")
    return value


def _share(name: str) -> str:
    """Return a name of `MetricsLog`'s seconds from a checkpoint; raise `ValueError` for others."""
    if name != WALL and name not in get_args(TimeShare):
        raise ValueError(f"{reprlib.repr(name)} is not a share of a run's time")
    return name


def _duration(value: Any) -> float:
    """Return seconds from a checkpoint; raise `ValueError` if a run cannot have taken so long."""
    if not 0 <= (seconds := float(_number(value))) <= MAX_COUNT:
        raise ValueError(f"{reprlib.repr(value)} is not a duration")
    return seconds


def _seconds_in(metrics: Path) -> float:
    """Return the seconds of a run according to the rows of an older version.

    They have only the time since their process began, which becomes smaller at each resume.
    """
    try:
        rows = read_metrics(metrics)
    except (OSError, CheckpointError):
        return 0.0
    total = last = 0.0
    for row in rows:
        elapsed = row.get("time/time_elapsed")
        if elapsed is not None and 0 <= elapsed <= MAX_COUNT:
            total, last = total + (last if elapsed < last else 0.0), float(elapsed)
    return total + last


def _line(values: Mapping[str, float | None]) -> bytes:
    return (json.dumps(values) + "\n").encode()


def _size(row: LoggedRow) -> int:
    """Bytes of a row in a checkpoint, roughly."""
    return sum(len(tag) + 32 for tag in row.values)


class MetricsLog(PeriodicCallback):
    """Writes rollout, training and speed metrics every `interval` steps, and each evaluation.

    The next row of either kind also has what callbacks logged since the last one. Checkpoints
    contain the lengths of the files and the values that wait for a row. A resumed run first removes
    the rows after these lengths, so that no row is written twice. Rows that could not be written
    are part of the checkpoint too.

    `time/wall_seconds`, in every row, is the time that was spent on the run so far, also by earlier
    processes. The time while no process ran does not count.
    """

    def __init__(
        self,
        folder: RunFolder,
        interval: int,
        stopwatch: Stopwatch | None = None,
        listeners: Sequence[Callable[[LoggedRow], None]] = (),
    ) -> None:
        """Each row is also passed to the `listeners`."""
        super().__init__(interval)
        self._stopwatch = stopwatch or Stopwatch()
        self._earlier: dict[str, float] | None = {}
        """Seconds of earlier processes; None for a checkpoint of an older version"""
        self._listeners = listeners
        self._metrics = MetricsFile(folder)
        self._tensorboard = TensorBoardFile(folder)
        self._logged: dict[str, float] = {}
        """What callbacks logged since the last row"""
        self._started_at, self._started_step = 0.0, 0

    def on_train_start(self, context: TrainingContext) -> None:
        if context.position or os.path.exists(self._tensorboard.path.parent):
            self._tensorboard.first_step = context.position + 1
        for file in (self._metrics, self._tensorboard):
            file.write_waiting()
        if self._earlier is None:
            self._earlier = {WALL: _seconds_in(self._metrics.path)}
        self._started_at, self._started_step = time.perf_counter(), context.steps_of_phase

    def due(self, context: TrainingContext) -> None:
        elapsed = time.perf_counter() - self._started_at
        steps = context.steps_of_phase - self._started_step
        row = {f"rollout/{key}": value for key, value in context.rollout_metrics().items()}
        row |= {f"train/{key}": value for key, value in context.train_metrics().items()}
        row |= {
            "train/n_updates": context.gradient_steps,
            "time/fps": steps / elapsed,
            "time/time_elapsed": elapsed,
            "time/total_timesteps": context.global_step,
        }
        row |= {
            f"time/{share}_seconds": value
            for share, value in self._seconds().items()
            if share != WALL
        }
        self._write(context, row)
        if context.ends_pretraining:  # from here on, speed is measured in steps
            self._started_at, self._started_step = time.perf_counter(), 0

    def on_evaluation_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        metrics = context.evaluation.metrics
        tags = {
            "eval/mean_reward": metrics["eval_return_mean"],
            "eval/std_reward": metrics["eval_return_std"],
            "eval/mean_ep_length": metrics["eval_length_mean"],
        }
        if SUCCESS_RATE in metrics:
            tags["eval/success_rate"] = metrics[SUCCESS_RATE]
        tags |= {f"health/{name}": value for name, value in context.evaluation.health.items()}
        self._write(context, tags)

    def add(self, name: str, value: float) -> None:
        """Add a value to the next row; the last value of a name wins."""
        self._logged[name] = value

    def on_train_end(self, context: TrainingContext) -> None:
        if self._logged:
            self._write(context, {})

    def close(self) -> None:
        for file in (self._metrics, self._tensorboard):
            file.close()

    def state_dict(self) -> Json:
        return {
            **super().state_dict(),
            "offset": self._metrics.length,
            "logged": self._logged,
            "metrics": self._metrics.state_dict(),
            "tensorboard": self._tensorboard.state_dict(),
            "seconds": self._seconds(),
        }

    def load_state_dict(self, state: Json) -> None:
        super().load_state_dict(state)
        self._metrics.length = _count(state["offset"])
        # Checkpoints of earlier versions have no logged values and no waiting rows.
        logged = state.get("logged", {})
        self._logged = {_tag(name): float(_number(value)) for name, value in logged.items()}
        nothing: Json = {"waiting": [], "dropped": 0}
        self._metrics.load_state_dict(state.get("metrics", nothing))
        self._tensorboard.load_state_dict(state.get("tensorboard", nothing))
        earlier = state.get("seconds")
        if earlier is not None:
            earlier = {_share(name): _duration(value) for name, value in earlier.items()}
        self._earlier = earlier

    def _seconds(self) -> dict[str, float]:
        """Seconds that were spent on the run so far, in total and on what."""
        here: dict[str, float] = {WALL: self._stopwatch.seconds, **self._stopwatch.shares}
        earlier = self._earlier or {}
        return {name: earlier.get(name, 0.0) + here.get(name, 0.0) for name in here | earlier}

    def _write(self, context: TrainingContext, values: Mapping[str, float]) -> None:
        logged, self._logged = self._logged, {}
        values = {**logged, **values}
        finite = {tag: finite_or_none(value) for tag, value in values.items()}
        counters = {"step": context.global_step, "gradient_steps": context.gradient_steps}
        elapsed = {"time/wall_seconds": self._seconds()[WALL]}
        row = LoggedRow(context.position, time.time(), {**counters, **finite, **elapsed})
        self._metrics.append(row)
        self._tensorboard.append(row)
        for listener in self._listeners:
            listener(row)


def draw_learning_curve(
    metrics: Path, picture: Path, title: str, *, pretraining: int = 0, offline: bool = False
) -> None:
    """Draw evaluation and training returns over steps to a PNG file.

    Without any returns, the losses are drawn. If a run starts with `pretraining` updates, they are
    drawn at negative steps. The steps of an `offline` run are updates.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    plot_learning_curve(figure, read_metrics(metrics), title, pretraining, offline=offline)
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    plain_folder(picture.parent).replace(picture.name, image.getvalue())


def plot_learning_curve(
    figure: Figure, rows: list[Json], title: str, pretraining: int = 0, *, offline: bool = False
) -> None:
    """Plot the rows of a run's metrics into an empty figure; see `draw_learning_curve`."""
    from matplotlib.ticker import EngFormatter, StrMethodFormatter

    axes = figure.add_subplot()
    rows = [row for row in rows if isinstance(row.get("step"), int)]
    steps = "updates" if offline else "environment steps"
    if pretraining:
        rows = [row | {"step": row["step"] or row["gradient_steps"] - pretraining} for row in rows]
        axes.axvline(0, color=GREY, linewidth=1, linestyle=":")
        axes.axvspan(-pretraining, 0, color=GREY, alpha=0.12, label="pretraining on recorded data")
        steps += " (before 0: updates of the pretraining)"
    axes.set(title=title, xlabel=steps, ylabel="return of an episode")
    _draw_training(axes, rows)
    _draw_evaluations(axes, rows)
    if not _series(rows, "eval/mean_reward") and not _series(rows, "rollout/ep_rew_mean"):
        _draw_losses(axes, rows)
    if rows:
        last = max(1, rows[-1]["step"])
        axes.set_xlim(-1.02 * pretraining, last + 0.02 * (last + pretraining))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, _ = axes.get_legend_handles_labels()
    if handles:  # below the axes, where it covers nothing
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)


def _draw_evaluations(axes: Axes, rows: list[Json]) -> None:
    """Draw the mean returns with one standard deviation, and label the last mean."""
    points = _series(rows, "eval/mean_reward")
    if not points:
        return
    spreads = dict(_series(rows, "eval/std_reward"))
    steps, means = zip(*points, strict=True)
    deviations = [spreads.get(step, 0.0) for step in steps]
    low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
    high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
    name = "evaluation, mean ± standard deviation"
    if len(points) <= FEW_EVALUATIONS:  # a band between a few points would suggest more than known
        axes.errorbar(
            steps, means, deviations, color=BLUE, linewidth=2, marker="o", capsize=4, label=name
        )
    else:
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0)
        axes.plot(steps, means, color=BLUE, linewidth=2, marker="o", markersize=3, label=name)
    spread = f" ± {deviations[-1]:,.1f}\n(the only evaluation)" if len(points) == 1 else ""
    axes.annotate(
        f"{means[-1]:,.1f}{spread}",
        (steps[-1], means[-1]),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        color=BLUE,
    )


def _draw_training(axes: Axes, rows: list[Json]) -> None:
    """Draw the returns of training episodes, and a mean that does not lag behind them."""
    points = _series(rows, "rollout/ep_rew_last")
    if not points:  # metrics of earlier versions have only a mean of the latest episodes
        points = _series(rows, "rollout/ep_rew_mean")
    if not points:
        return
    steps, returns = zip(*points, strict=True)
    axes.plot(
        steps, returns, ".", color=GREY, alpha=0.6, markeredgewidth=0, label="training episodes"
    )
    if len(points) >= LEAST_TO_SMOOTH:
        smooth = _centered_means(returns, max(1, len(points) // WINDOWS // 2))
        axes.plot(steps, smooth, color=GREY, linewidth=1.5, label="training, centered mean")


def _centered_means(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and up to `reach` values on either side, as many on each."""
    means = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        means.append(statistics.fmean(values[index - near : index + near + 1]))
    return means


def _draw_losses(axes: Axes, rows: list[Json]) -> None:
    """Draw the losses of a run that has no returns."""
    names = sorted({key for row in rows for key in row if key[:6] == "train/" and "loss" in key})
    for name in names:
        if points := _series(rows, name):
            steps, losses = zip(*points, strict=True)
            label = name.removeprefix("train/").replace("_", " ")
            axes.plot(steps, losses, linewidth=1.5, marker=".", label=label)
    axes.set_ylabel("loss" if names else "")
    note = "not evaluated, and no episode has ended" if names else "no metrics recorded yet"
    axes.text(0.5, 0.97, note, transform=axes.transAxes, ha="center", va="top", color=GREY)
    if not names:
        axes.set(xticks=[], yticks=[])


def _series(rows: list[Json], key: str) -> list[tuple[int, float]]:
    """Return the step and the value of each row that has `key`."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]
