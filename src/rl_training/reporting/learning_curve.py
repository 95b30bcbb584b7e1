"""Draws the learning curve of a run from its metrics."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_training.checkpoints.format import plain_folder
from rl_training.checkpoints.run_folder import read_metrics
from rl_training.types import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, BLUE = "#9aa5b1", "#2563eb"
LEAST_TO_SMOOTH = 10
"""Number of training episodes from which their mean is drawn"""
WINDOWS = 10
"""Number of windows of the mean that fit into the run"""
FEW_EVALUATIONS = 10
"""Up to this number, evaluations are drawn one by one instead of as a band"""


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
