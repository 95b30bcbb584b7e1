"""Draws a comparison: learning curves of every task, and over all tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_training.errors import UserError
from rl_training.experiment.curves import Group, aligned
from rl_training.experiment.efficiency import (
    Axis,
    LearningCurve,
    efficiency_curve,
    learning_curve,
)
from rl_training.validation import user_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Colors that color-blind people can tell apart (Okabe and Ito)"""
STYLES = ("-", "--", "-.", ":")
"""Styles of lines, for more curves than colors"""
COLUMNS = 3
MAX_LABEL = 48


@dataclass(frozen=True)
class Line:
    """One curve, and the group whose seeds are drawn behind it."""

    label: str
    curve: LearningCurve
    group: Group | None = None


@dataclass(frozen=True)
class Panel:
    title: str
    lines: list[Line]

    def drawn(self) -> Panel:
        """Return the panel without lines that have no points."""
        return Panel(self.title, [line for line in self.lines if len(line.curve.at)])


def draw_comparison(
    groups: Sequence[Group],
    overall: Sequence[str],
    scaled_tasks: Sequence[str],
    path: Path | str | None,
    bootstrap: Mapping[str, Any],
) -> Figure:
    """Draw one panel per task over steps, one over all tasks, and the same over wall time.

    `overall` are the labels with runs in all of `scaled_tasks`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_task: dict[str, list[Group]] = {}
    for group in groups:
        if group.evaluated:
            by_task.setdefault(group.environment, []).append(group)
    complete = {
        label: [each for task in scaled_tasks for each in by_task[task] if each.label == label]
        for label in overall
    }
    panels, styles = _panels(by_task, complete, bootstrap), _styles(groups)
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.8 * columns, 3.6 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, styles)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(
        "Interquartile mean over seeds, 95 % bootstrap interval, and every seed", fontsize=10
    )
    if path is not None:
        _write(figure, user_path(path))
    return figure


def _panels(
    by_task: Mapping[str, Sequence[Group]],
    complete: Mapping[str, Sequence[Group]],
    bootstrap: Mapping[str, Any],
) -> list[Panel]:
    """Return the panels with at least one curve."""
    panels = []
    axes: tuple[Axis, ...] = ("steps", "seconds")
    for by in axes:
        for task, groups in by_task.items():
            curves = [(each, learning_curve(each, by=by, **bootstrap)) for each in groups]
            panels.append(Panel(task, [Line(each.label, curve, each) for each, curve in curves]))
        lines = [
            Line(label, efficiency_curve(groups, by=by, **bootstrap))
            for label, groups in complete.items()
        ]
        panels.append(Panel("all tasks, normalized", lines))
    return [known for panel in panels if (known := panel.drawn()).lines]


def _styles(groups: Sequence[Group]) -> dict[str, tuple[str, str]]:
    """Return a color and a style of line for each label, equal in all panels."""
    labels = dict.fromkeys(group.label for group in groups)
    return {
        label: (COLORS[index % len(COLORS)], STYLES[index // len(COLORS) % len(STYLES)])
        for index, label in enumerate(labels)
    }


def _draw_panel(axes: Axes, panel: Panel, styles: dict[str, tuple[str, str]]) -> None:
    from matplotlib.ticker import EngFormatter

    for line in panel.lines:
        _draw_line(axes, line, *styles[line.label])
    axes.set_title(_plain(panel.title))
    axes.set_xlabel("steps" if panel.lines[0].curve.by == "steps" else "seconds of training")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _draw_line(axes: Axes, line: Line, color: str, style: str) -> None:
    curve = line.curve
    if line.group is not None and curve.by == "steps":
        steps, scores = aligned(line.group)
        axes.plot(steps, scores.T, color=color, alpha=0.2, linewidth=0.7)
    name = _plain(f"{line.label}, {curve.seeds} seed{'s' if curve.seeds > 1 else ''}")
    look: dict[str, Any] = {"color": color, "linestyle": style, "label": name}
    if len(curve.at) == 1:  # a band would be invisible
        ends = np.nan_to_num([curve.value - curve.low, curve.high - curve.value]).clip(min=0)
        axes.errorbar(curve.at, curve.value, yerr=ends, marker="o", capsize=3, **look)
        return
    axes.plot(curve.at, curve.value, linewidth=2, **look)
    axes.fill_between(curve.at, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)


def _plain(text: str) -> str:
    """Shorten text, and keep matplotlib from reading formulas in it."""
    short = text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"
    return short.replace("$", r"\$")


def _write(figure: Figure, path: Path) -> None:
    known = figure.canvas.get_supported_filetypes()
    kind = path.suffix.removeprefix(".").lower()
    if kind not in known:
        raise UserError(f"{path}: the name must end with one of .{', .'.join(sorted(known))}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140, format=kind)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
