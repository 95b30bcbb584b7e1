"""Plot the returns, lengths, observations and actions of recorded data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_training.data.summary import LeafSummary, Summary
from rl_training.errors import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, GREY = "#2563eb", "#6b7280"
BINS = 40
MAX_COMPONENTS = 60
MAX_LEAVES = 10
MANY_CHOICES = 20
"""Number of discrete actions from which a histogram replaces one bar for each"""


def draw_summary(summary: Summary, picture: Path) -> None:
    """Write a PNG file, or another format by the extension of the file name."""
    summary_figure(summary).savefig(picture, dpi=110)


def summary_figure(summary: Summary) -> Figure:
    """Plot a summary into a new figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Room around and between the panels.
    spacing = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.05, hspace=0.06)
    figure = Figure(figsize=(13, 7.5), layout=spacing)
    FigureCanvasAgg(figure)
    episodes = "1 episode" if len(summary.returns) == 1 else f"{len(summary.returns):,} episodes"
    is_id = summary.info.kind == "minari"
    name = summary.info.name if is_id else Path(summary.info.name).name
    figure.suptitle(f"{name}: {summary.steps:,} steps, {episodes}")
    axes = figure.subplots(2, 3)
    observations, actions, rewards = summary.sample
    _histogram(axes[0, 0], summary.returns, "return of an episode", "episodes")
    _histogram(axes[0, 1], summary.lengths, "length of an episode (steps)", "episodes")
    _histogram(axes[0, 2], rewards, "reward of a step", _steps(summary))
    if observations.shape[1]:
        _densities(axes[1, 0], observations, "observation", standardized=True)
    else:
        _values(axes[1, 0], summary.observations)
    if summary.info.action_kind == "discrete":
        _choices(axes[1, 1], actions[:, 0], _steps(summary))
    else:
        _densities(axes[1, 1], actions, "action")
    _scatter(axes[1, 2], summary)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    return figure


def _steps(summary: Summary) -> str:
    """Name the counted steps: all of them, or a sample."""
    sampled = len(summary.sample[2])
    return "steps" if sampled == summary.steps else f"steps (of {sampled:,} sampled)"


def _histogram(axes: Axes, values: np.ndarray, label: str, unit: str) -> None:
    low, high = float(values.min()), float(values.max())
    bins = min(BINS, max(5, len(values)))
    if low == high:  # one bar in the middle
        low, high, bins = low - 1.5, high + 1.5, 3
    axes.hist(values, bins=bins, range=(low, high), color=BLUE)
    mean = float(values.mean())
    axes.axvline(mean, color=GREY, linewidth=1.5, linestyle="--")
    axes.set(xlabel=label, ylabel=unit)
    # A title instead of a legend, which would cover bars.
    axes.set_title(f"mean {mean:,.4g} (dashed)", fontsize=9, color=GREY)
    _integer_ticks(axes.yaxis)
    if np.issubdtype(values.dtype, np.integer):
        _integer_ticks(axes.xaxis)


def _integer_ticks(axis: Axis) -> None:
    """Put ticks at integers, and separate thousands."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _densities(axes: Axes, values: np.ndarray, label: str, *, standardized: bool = False) -> None:
    """Draw a histogram of each component as a shaded column."""
    shown = values[:, :MAX_COMPONENTS].astype(np.float64)
    if standardized:  # observation components have different units
        spread = shown.std(0)
        shown = (shown - shown.mean(0)) / np.where(spread > 0, spread, 1.0)
        low, high, unit = -4.0, 4.0, "standard deviations from the mean"
    else:
        low, high, unit = float(shown.min()), float(shown.max()), "value"
        low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    counts = np.stack(
        [np.histogram(column, bins=BINS, range=(low, high))[0] for column in shown.T], axis=1
    )
    image = axes.imshow(
        counts / np.maximum(counts.max(0), 1),
        origin="lower",
        aspect="auto",
        extent=(-0.5, shown.shape[1] - 0.5, low, high),
        cmap="Blues",
        vmin=0,
        vmax=1,
    )
    axes.figure.colorbar(image, ax=axes, label="frequency (1: most frequent)", shrink=0.9, pad=0.04)
    components = values.shape[1]
    cut = f" (first {MAX_COMPONENTS} of {components})" if components > MAX_COMPONENTS else ""
    axes.set(xlabel=f"component of the {label}{cut}", ylabel=unit)
    _integer_ticks(axes.xaxis)


def _values(axes: Axes, leaves: Sequence[LeafSummary]) -> None:
    """Draw the range, mean and deviation of leaves that are not made of numbers."""
    shown = leaves[:MAX_LEAVES]
    for place, each in enumerate(shown):
        ranges = each.ranges
        axes.vlines(place, ranges.low.min(), ranges.high.max(), color=GREY, linewidth=1.5)
        axes.errorbar(
            place, ranges.mean.mean(), ranges.std.mean(), color=BLUE, marker="o", capsize=4
        )
    labels = [one_line(each.leaf.name, 20) or each.leaf.kind for each in shown]
    axes.set_xticks(range(len(shown)), labels, rotation=45 if max(map(len, labels)) > 6 else 0)
    axes.set(xlabel="observation", ylabel="range, mean and deviation of its values")
    axes.margins(x=0.2)


def _choices(axes: Axes, values: np.ndarray, unit: str) -> None:
    choices, counts = np.unique(values.astype(np.int64), return_counts=True)
    axes.bar(choices, counts, color=BLUE)
    axes.set(xlabel="action", ylabel=unit)
    if len(choices) <= MANY_CHOICES:
        axes.set_xticks(choices)
    _integer_ticks(axes.yaxis)


def _scatter(axes: Axes, summary: Summary) -> None:
    axes.scatter(summary.lengths, summary.returns, s=12, color=BLUE, alpha=0.5, linewidths=0)
    axes.set(xlabel="length of an episode (steps)", ylabel="return of an episode")
    _integer_ticks(axes.xaxis)
