"""Plot the returns, lengths, observations and actions of recorded data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rl_training.data.summary import Summary

BLUE, GREY = "#2563eb", "#9aa5b1"
BINS = 40
MAX_COMPONENTS = 60


def draw_summary(summary: Summary, picture: Path) -> None:
    """Write a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{summary.info.name}: {summary.steps:,} steps, {len(summary.returns):,} episodes"
    )
    axes = figure.subplots(2, 3)
    observations, actions, rewards = summary.sample
    _histogram(axes[0, 0], summary.returns, "episode return", "episodes")
    _histogram(axes[0, 1], summary.lengths, "episode length", "episodes")
    _histogram(axes[0, 2], rewards, "reward", "sampled steps")
    _densities(axes[1, 0], observations, "observation", symmetric=True)
    if summary.info.discrete:
        _choices(axes[1, 1], actions[:, 0])
    else:
        _densities(axes[1, 1], actions, "action")
    _scatter(axes[1, 2], summary)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)


def _histogram(axes: Any, values: np.ndarray, label: str, unit: str) -> None:
    low, high = float(values.min()), float(values.max())
    if low == high:  # one visible bar
        low, high = low - 0.5, high + 0.5
    axes.hist(values, bins=min(BINS, max(5, len(values))), range=(low, high), color=BLUE)
    axes.axvline(float(values.mean()), color=GREY, linewidth=1.5, label=f"mean {values.mean():.4g}")
    axes.set(xlabel=label, ylabel=unit)
    axes.legend(frameon=False, fontsize=8)


def _densities(axes: Any, values: np.ndarray, label: str, symmetric: bool = False) -> None:
    """Draw a histogram of each component as a shaded column."""
    shown = values[:, :MAX_COMPONENTS].astype(np.float64)
    if symmetric:  # observation components have different units
        spread = shown.std(0)
        shown = (shown - shown.mean(0)) / np.where(spread > 0, spread, 1.0)
        low, high, unit = -4.0, 4.0, "standard deviations from the mean"
    else:
        low, high, unit = float(shown.min()), float(shown.max()), "value"
        low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    counts = np.stack(
        [np.histogram(column, bins=BINS, range=(low, high))[0] for column in shown.T], axis=1
    )
    extent = (-0.5, shown.shape[1] - 0.5, low, high)
    shades = counts / np.maximum(counts.max(0), 1)
    axes.imshow(shades, origin="lower", aspect="auto", extent=extent, cmap="Blues")
    cut = (
        f" (first {MAX_COMPONENTS} of {values.shape[1]})"
        if values.shape[1] > MAX_COMPONENTS
        else ""
    )
    axes.set(xlabel=f"{label} component{cut}", ylabel=unit)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _choices(axes: Any, values: np.ndarray) -> None:
    choices, counts = np.unique(values, return_counts=True)
    axes.bar([str(int(choice)) for choice in choices], counts, color=BLUE)
    axes.set(xlabel="action", ylabel="sampled steps")


def _scatter(axes: Any, summary: Summary) -> None:
    axes.scatter(summary.lengths, summary.returns, s=9, color=BLUE, alpha=0.5, linewidths=0)
    axes.set(xlabel="episode length", ylabel="episode return")
