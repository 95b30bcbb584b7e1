"""Writes the metrics of a run to `metrics.jsonl` and TensorBoard, and draws its learning curve.

Tags are those of Stable-Baselines3, such as `rollout/ep_rew_mean`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rl_training.callbacks import PeriodicCallback, TrainingContext
from rl_training.checkpoints.run_folder import RunFolder, read_metrics
from rl_training.errors import warn_user
from rl_training.types import SUCCESS_RATE, Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch.utils.tensorboard import SummaryWriter

GREY, BLUE = "#9aa5b1", "#2563eb"


class MetricsLog(PeriodicCallback):
    """Writes rollout, training and speed metrics every `interval` steps, and each evaluation.

    The next row of either kind also has what callbacks logged since the last one. Checkpoints
    contain the length of the file and the values that wait for a row. A resumed run first removes
    the rows after that length, so that no row is written twice.
    """

    def __init__(self, folder: RunFolder, interval: int) -> None:
        super().__init__(interval)
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._offset = 0
        self._logged: dict[str, float] = {}
        """What callbacks logged since the last row"""
        self._tensorboard: SummaryWriter | None = None
        self._started_at, self._started_step = 0.0, 0

    def on_train_start(self, context: TrainingContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _truncate(self._folder.metrics, self._offset)
        self._file = self._folder.metrics.open("ab")
        resumed_from = context.position
        self._tensorboard = SummaryWriter(
            str(self._folder.tensorboard), purge_step=resumed_from + 1 if resumed_from else None
        )
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
        self._write(context, tags)

    def add(self, name: str, value: float) -> None:
        """Add a value to the next row; the last value of a name wins."""
        self._logged[name] = value

    def on_train_end(self, context: TrainingContext) -> None:
        if self._logged:
            self._write(context, {})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._file = self._tensorboard = None

    def state_dict(self) -> Json:
        if self._file is not None:
            self._file.flush()
            self._offset = self._file.tell()
        return {**super().state_dict(), "offset": self._offset, "logged": self._logged}

    def load_state_dict(self, state: Json) -> None:
        super().load_state_dict(state)
        self._offset = int(state["offset"])
        # Checkpoints of earlier versions have no logged values.
        self._logged = {name: float(value) for name, value in state.get("logged", {}).items()}

    def _write(self, context: TrainingContext, values: Mapping[str, float]) -> None:
        assert self._file is not None
        assert self._tensorboard is not None
        logged, self._logged = self._logged, {}
        for name in sorted(logged.keys() & values.keys()):
            warn_user(f"{name} is a metric of this package; context.log needs another name")
        values = {**logged, **values}
        finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        row = {"step": context.global_step, "gradient_steps": context.gradient_steps, **finite}
        self._file.write((json.dumps(row) + "\n").encode())
        self._file.flush()
        for tag, value in values.items():
            self._tensorboard.add_scalar(tag, value, context.position)


def _truncate(path: Path, offset: int) -> None:
    """Keep the complete rows of the first `offset` bytes; after a power cut there may be fewer."""
    if path.exists():
        kept = path.read_bytes()[:offset]
        with path.open("r+b") as file:
            file.truncate(kept.rfind(b"\n") + 1)


def draw_learning_curve(metrics: Path, picture: Path, title: str, *, pretraining: int = 0) -> None:
    """Draw evaluation and rollout returns over steps to a PNG file.

    If a run starts with `pretraining` updates, they are drawn at negative steps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    rows = read_metrics(metrics)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if pretraining:
        rows = [row | {"step": row["step"] or row["gradient_steps"] - pretraining} for row in rows]
        axes.axvline(0, color=GREY, linewidth=1, linestyle=":")
        axes.axvspan(-pretraining, 0, color=GREY, alpha=0.12, label="pretraining, in updates")
    steps, means = _series(rows, "rollout/ep_rew_mean")
    if steps:
        axes.plot(steps, means, color=GREY, linewidth=1.5, label="training, last 100 episodes")
    _draw_evaluations(axes, rows)
    axes.set(title=title, xlabel="steps", ylabel="return")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.has_data():
        axes.legend(frameon=False, loc="best")
    figure.savefig(picture, dpi=120)


def _draw_evaluations(axes: Axes, rows: list[Json]) -> None:
    """Draw the mean returns, with a band of one standard deviation, and label the last mean."""
    steps, means = _series(rows, "eval/mean_reward")
    if not steps:
        return
    deviations = _series(rows, "eval/std_reward")[1]
    low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
    high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(
        steps,
        means,
        color=BLUE,
        linewidth=2,
        marker="o",
        markersize=4,
        label="evaluation, mean ± standard deviation",
    )
    axes.annotate(
        f"{means[-1]:.1f}",
        (steps[-1], means[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=BLUE,
    )


def _series(rows: list[Json], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of the rows that have `key`."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]
