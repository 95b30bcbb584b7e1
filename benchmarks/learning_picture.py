"""Draw learning curves: a picture for each task, by steps and by wall time, and one of all tasks.

A line is the mean over seeds, a band its 95 % bootstrap interval, and a thin line one seed. Dashed
lines in a lighter band are published means with one deviation; a cross is a printed one.
`make results` draws the pictures again if what they show or this file has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from learning_rows import MeasuredCurve
from published_rows import PublishedRow, counterparts

from rl_training.experiment import statistics
from rl_training.experiment.comparison_picture import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FINGERPRINT = "Comment"
"""Key of the text in a picture that says what was drawn"""
COLUMNS = 2
PANEL = (5.2, 3.7)
"""Inches"""
MARKERS = "x+*^v"


def fingerprint(curves: Sequence[MeasuredCurve]) -> str:
    """A hash of everything that a picture of these curves depends on."""
    shown = [
        [curve.task, curve.label, *(each.tolist() for each in _arrays(curve))] for curve in curves
    ]
    published = [[repr(row) for row in _published(curve)] for curve in curves]
    text = json.dumps([shown, published]) + Path(__file__).read_text("utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def _arrays(curve: MeasuredCurve) -> tuple[np.ndarray, ...]:
    return curve.steps, curve.returns, curve.seconds


def is_current(path: Path, curves: Sequence[MeasuredCurve]) -> bool:
    """Whether the picture was drawn from these curves."""
    from PIL import Image  # matplotlib needs it too

    if not path.exists():
        return False
    with Image.open(path) as picture:
        return picture.info.get(FINGERPRINT) == fingerprint(curves)


def draw(curves: Sequence[MeasuredCurve], path: Path, *, by_time: bool) -> None:
    """Draw a panel for each task by steps, and with `by_time` one by wall time beside each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(curve.task for curve in curves))
    panels = [(task, axis) for task in tasks for axis in ("steps", "seconds")[: 1 + by_time]]
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * lines), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    labels = dict.fromkeys(curve.label for curve in curves)
    colors = dict(zip(labels, COLORS, strict=False))
    for axes, (task, axis) in zip(grid, panels, strict=False):
        _draw_panel(axes, [curve for curve in curves if curve.task == task], axis, colors)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(
        "Mean over seeds, 95 % bootstrap interval, and every seed. Dashed: published means and "
        "deviations",
        fontsize=9,
        color="#555555",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None, FINGERPRINT: fingerprint(curves)})


def _draw_panel(
    axes: Axes, curves: Sequence[MeasuredCurve], axis: str, colors: Mapping[str, str]
) -> None:
    from matplotlib.ticker import EngFormatter

    if axis == "steps":
        _draw_published(axes, curves, colors)
    for curve in curves:
        _draw_curve(axes, curve, axis, colors[curve.label])
    axes.set_title(curves[0].task, fontsize=11)
    axes.set_xlabel("environment steps" if axis == "steps" else "seconds of all seeds together")
    axes.set_ylabel("return of evaluation episodes")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False, fontsize=8)


def _draw_curve(axes: Axes, curve: MeasuredCurve, axis: str, color: str) -> None:
    at = curve.steps if axis == "steps" else curve.seconds.mean(axis=1)
    scores = curve.returns[:, :, None]
    low, high = statistics.interval(scores, statistics.mean)
    name = f"{curve.label.replace('`', '')}, {len(curve.seeds)} seeds"
    axes.plot(at, curve.returns, color=color, alpha=0.15, linewidth=0.6)
    axes.fill_between(at, low, high, color=color, alpha=0.25, linewidth=0)
    axes.plot(at, statistics.mean(scores), color=color, linewidth=2, label=name)


def _published(curve: MeasuredCurve) -> list[PublishedRow]:
    return counterparts(curve.config or "", curve.task)


def _draw_published(
    axes: Axes, curves: Sequence[MeasuredCurve], colors: Mapping[str, str]
) -> None:
    """Draw each published curve once, in the color of the first of our curves of its method."""
    rows: dict[str, tuple[str, list[PublishedRow]]] = {}
    for curve in curves:
        for title in dict.fromkeys(row.title for row in _published(curve)):
            own = [row for row in _published(curve) if row.title == title]
            rows.setdefault(title, (colors[curve.label], own))
    printed = 0
    for title, (color, own) in rows.items():
        steps, means = [row.step for row in own], np.array([row.mean for row in own])
        spread = np.array([row.deviation or 0.0 for row in own])
        if own[0].is_curve:
            axes.fill_between(steps, means - spread, means + spread, color=color, alpha=0.08)
            axes.plot(steps, means, color=color, linestyle="--", linewidth=1.2, label=title)
        else:
            marker = MARKERS[printed % len(MARKERS)]
            axes.scatter(steps, means, color=color, marker=marker, s=36, label=title, zorder=3)
            printed += 1
