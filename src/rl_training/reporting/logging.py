"""Logs the metrics of a run: one row per interval, and one per evaluation.

Tags are those of Stable-Baselines3, such as `rollout/ep_rew_mean`.
"""

from __future__ import annotations

import os
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rl_training.callbacks import PeriodicCallback, Stopwatch, TimeShare, TrainingContext
from rl_training.checkpoints.format import finite_or_none
from rl_training.checkpoints.run_folder import RunFolder, read_metrics
from rl_training.errors import CheckpointError
from rl_training.reporting.log_files import (
    MAX_COUNT,
    LoggedRow,
    MetricsFile,
    TensorBoardFile,
    saved_count,
    saved_number,
    saved_tag,
)
from rl_training.types import SUCCESS_RATE, Json

WALL = "wall"
"""Name of the seconds of training in a checkpoint, beside the names of `TimeShare`"""


def _share(name: str) -> str:
    """Return a name of `MetricsLog`'s seconds from a checkpoint; raise `ValueError` for others."""
    if name != WALL and name not in get_args(TimeShare):
        raise ValueError(f"{reprlib.repr(name)} is not a share of a run's time")
    return name


def _duration(value: Any) -> float:
    """Return seconds from a checkpoint; raise `ValueError` if a run cannot have taken so long."""
    if not 0 <= (seconds := float(saved_number(value))) <= MAX_COUNT:
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
        self._metrics.length = saved_count(state["offset"])
        # Checkpoints of earlier versions have no logged values and no waiting rows.
        logged = state.get("logged", {})
        self._logged = {
            saved_tag(name): float(saved_number(value)) for name, value in logged.items()
        }
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
