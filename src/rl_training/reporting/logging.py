"""Writes the metrics of a run to `metrics.jsonl` and TensorBoard, and draws its learning curve.

Tags are those of Stable-Baselines3, such as `rollout/ep_rew_mean`.
"""

from __future__ import annotations

import io
import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rl_training.callbacks import PeriodicCallback, TrainingContext
from rl_training.checkpoints.format import plain_folder
from rl_training.checkpoints.run_folder import RunFolder, read_metrics
from rl_training.errors import CheckpointError
from rl_training.types import SUCCESS_RATE, Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter

GREY, BLUE = "#9aa5b1", "#2563eb"
LONGEST_ROW = 2**20
"""Bytes of the metrics that are searched for the end of the last complete row"""
LEAST_TO_SMOOTH = 10
"""Number of training episodes from which their mean is drawn"""
WINDOWS = 10
"""Number of windows of the mean that fit into the run"""
FEW_EVALUATIONS = 10
"""Up to this number, evaluations are drawn one by one instead of as a band"""


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

        _truncate(self._folder, self._offset)
        self._file = self._folder.plain.open(self._folder.metrics.name, "ab")
        resumed_from = context.position
        # TensorBoard writes by path, so nothing there may be a link.
        self._folder.plain.inner(self._folder.tensorboard.name).check_plain()
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
        values = {**logged, **values}
        finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        row = {"step": context.global_step, "gradient_steps": context.gradient_steps, **finite}
        self._file.write((json.dumps(row) + "\n").encode())
        self._file.flush()
        for tag, value in values.items():
            self._tensorboard.add_scalar(tag, value, context.position)


def _truncate(folder: RunFolder, offset: int) -> None:
    """Keep the complete rows of the first `offset` bytes; after a power cut there may be fewer."""
    if folder.plain.mode(folder.metrics.name) is None:
        return
    with folder.plain.open(folder.metrics.name, "r+b") as file:
        end = max(0, min(offset, os.fstat(file.fileno()).st_size))
        start = max(0, end - LONGEST_ROW)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline < 0 < start:
            raise CheckpointError(f"{folder.metrics}: is damaged at byte {end:,}; remove the file")
        file.truncate(start + newline + 1)


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
