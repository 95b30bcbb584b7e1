"""Draw learning curves: a picture for each task, by steps and by wall time, and one of all tasks.

A line is the mean over seeds, a band its 95 % bootstrap interval, and a thin line one seed. Gray
are published means, as lines in a band of one deviation, or as single marks.
`make results` draws the pictures again if what they show or this file has changed.
"""

from __future__ import annotations

import hashlib
import itertools
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
PANEL = (5.2, 4.6)
"""Inches"""
MARKERS, DASHES = "x+*^v", ("--", ":", "-.")
GRAY = "#666666"
PALETTE = (*COLORS[:6], "#332288", "#117733", "#882255", "#999933", "#661100", "#44aa99")
"""Colors of our curves: black and gray are left to published results"""


def colors_of(curves: Sequence[MeasuredCurve]) -> dict[str, str]:
    """A color for each label, the same in all pictures.

    Two labels of the same task differ, as long as there are colors left.
    """
    found: dict[str, str] = {}
    for _, label in sorted({(curve.config or "", curve.label) for curve in curves}):
        tasks = {curve.task for curve in curves if curve.label == label}
        others = {curve.label for curve in curves if curve.task in tasks}
        near = [found[other] for other in others if other in found]
        used = list(found.values())
        found[label] = min(PALETTE, key=lambda color: (near.count(color), used.count(color)))
    return found


def fingerprint(curves: Sequence[MeasuredCurve], colors: Mapping[str, str]) -> str:
    """A hash of everything that a picture of these curves depends on."""
    shown = [
        [curve.task, curve.label, colors[curve.label], *(each.tolist() for each in _arrays(curve))]
        for curve in curves
    ]
    published = [[repr(row) for row in _published(curve)] for curve in curves]
    text = json.dumps([shown, published]) + Path(__file__).read_text("utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def _arrays(curve: MeasuredCurve) -> tuple[np.ndarray, ...]:
    return curve.steps, curve.returns, curve.seconds


def is_current(path: Path, curves: Sequence[MeasuredCurve], colors: Mapping[str, str]) -> bool:
    """Whether the picture was drawn from these curves."""
    from PIL import Image  # matplotlib needs it too

    if not path.exists():
        return False
    with Image.open(path) as picture:
        return picture.info.get(FINGERPRINT) == fingerprint(curves, colors)


def draw(
    curves: Sequence[MeasuredCurve], path: Path, colors: Mapping[str, str], *, by_time: bool
) -> None:
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
    for axes, (task, axis) in zip(grid, panels, strict=False):
        _draw_panel(axes, [curve for curve in curves if curve.task == task], axis, colors)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(
        "Mean over seeds, 95 % bootstrap interval, and every seed. Gray: published means and "
        "deviations",
        fontsize=9,
        color="#555555",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {"Software": None, FINGERPRINT: fingerprint(curves, colors)}
    figure.savefig(path, dpi=120, metadata=described)


def _draw_panel(
    axes: Axes, curves: Sequence[MeasuredCurve], axis: str, colors: Mapping[str, str]
) -> None:
    from matplotlib.ticker import EngFormatter

    if axis == "steps":
        _draw_published(axes, curves)
    for curve in curves:
        _draw_curve(axes, curve, axis, colors[curve.label])
    axes.set_title(curves[0].task, fontsize=11)
    axes.set_xlabel("environment steps" if axis == "steps" else "seconds of all seeds together")
    axes.set_ylabel("return of evaluation episodes")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.19), ncols=2, frameon=False, fontsize=8)


def _draw_curve(axes: Axes, curve: MeasuredCurve, axis: str, color: str) -> None:
    at = curve.steps if axis == "steps" else curve.seconds.mean(axis=1)
    scores = curve.returns[:, :, None]
    low, high = statistics.interval(scores, statistics.mean)
    machine = curve.sources[0]["machine"]
    about = f"{len(curve.seeds)} seeds" if axis == "steps" else machine.get("gpu") or "CPU"
    name = f"{curve.label.replace('`', '')}, {about}"
    axes.plot(at, curve.returns, color=color, alpha=0.15, linewidth=0.6)
    axes.fill_between(at, low, high, color=color, alpha=0.25, linewidth=0)
    axes.plot(at, statistics.mean(scores), color=color, linewidth=2, label=name)


def _published(curve: MeasuredCurve) -> list[PublishedRow]:
    """The published returns of evaluations, as ours are."""
    rows = counterparts(curve.config or "", curve.task)
    return [row for row in rows if not row.of_training]


def _draw_published(axes: Axes, curves: Sequence[MeasuredCurve]) -> None:
    """Draw the published results of each method once."""
    rows: dict[str, list[PublishedRow]] = {}
    for row in dict.fromkeys(row for curve in curves for row in _published(curve)):
        rows.setdefault(row.title, []).append(row)
    dashes, markers = itertools.cycle(DASHES), itertools.cycle(MARKERS)
    for title, own in rows.items():
        steps, means = [row.step for row in own], np.array([row.mean for row in own])
        if own[0].is_curve:
            spread = np.array([row.deviation or 0.0 for row in own])
            axes.fill_between(steps, means - spread, means + spread, color=GRAY, alpha=0.1)
            axes.plot(steps, means, color=GRAY, linestyle=next(dashes), linewidth=1.2, label=title)
        else:
            axes.scatter(steps, means, color=GRAY, marker=next(markers), label=title, zorder=3)
