"""A picture of how a run went."""

from __future__ import annotations

import json
from pathlib import Path

from rl_training.types import Json


def read_metrics(path: Path) -> list[Json]:
    """The rows of a `metrics.jsonl`; a last line cut short by a kill is left out."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def draw_learning_curve(metrics: Path, picture: Path, title: str, *, pretraining: int = 0) -> None:
    """Evaluation and rollout returns over steps, as a PNG.

    Of a run with `pretraining` updates before its first step those count down to it.
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
        axes.axvline(0, color="#9aa5b1", linewidth=1, linestyle=":")
        axes.axvspan(-pretraining, 0, color="#9aa5b1", alpha=0.12, label="pretraining, in updates")
    steps, means = _series(rows, "rollout/ep_rew_mean")
    if steps:
        axes.plot(steps, means, color="#9aa5b1", linewidth=1.5, label="training, last 100 episodes")
    steps, means = _series(rows, "eval/mean_reward")
    if steps:
        spreads = _series(rows, "eval/std_reward")[1]
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        axes.fill_between(steps, low, high, color="#2563eb", alpha=0.15, linewidth=0)
        axes.plot(
            steps,
            means,
            color="#2563eb",
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
            color="#2563eb",
        )
    axes.set(title=title, xlabel="steps", ylabel="return")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.has_data():
        axes.legend(frameon=False, loc="best")
    figure.savefig(picture, dpi=120)


def _series(rows: list[Json], key: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]
