"""Draw learning curves from the JSON files of benchmarks/learning.py: one panel per environment.

    python benchmarks/learning_picture.py docs/images/learning_curves.png
        --curve "sac-1M=sac/mujoco" --curve "rate1e-3=sac/mujoco_fast"

A line is the mean over seeds, a band its 95 % bootstrap interval, and a thin line one seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from learning_summary import Run, bootstrap_interval, read_runs
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter
from reporting import RESULTS

from rl_training.errors import UserError

COLORS = ("#2563eb", "#d97706", "#059669", "#7c3aed")


def draw(folder: Path, labels: dict[str, str], path: Path) -> None:
    """Draw every environment that has one of the curves, which `labels` gives names for readers."""
    runs = [run for run in read_runs(folder) if run.name in labels]
    if missing := sorted(set(labels) - {run.name for run in runs}):
        raise UserError(f"{folder}: contains no curve named {', '.join(missing)}")
    envs = sorted({run.env for run in runs})
    figure, panels = plt.subplots(
        1, len(envs), figsize=(4.6 * len(envs), 3.6), squeeze=False, layout="constrained"
    )
    for env, axes in zip(envs, panels[0], strict=True):
        for color, (name, label) in zip(COLORS, labels.items(), strict=False):
            own = [run for run in runs if (run.env, run.name) == (env, name)]
            if own:
                draw_curve(axes, own, label, color, folder)
        axes.set_title(env)
        axes.set_xlabel("environment steps")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", frameon=False, fontsize=9)
    panels[0][0].set_ylabel("return of evaluation episodes")
    figure.suptitle(
        "Mean over seeds, 95 % bootstrap interval, and every seed", fontsize=10, color="#555555"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    plt.close(figure)


def draw_curve(axes: Axes, runs: Sequence[Run], label: str, color: str, folder: Path) -> None:
    """Draw a curve over the steps at which every seed was evaluated."""
    seeds = sum(len(run.seeds) for run in runs)
    returns = np.concatenate([returns_by_seed(folder / run.file) for run in runs], axis=1)
    steps = np.array(sorted(runs[0].returns))[: len(returns)]
    low, high = np.transpose([bootstrap_interval(row) for row in returns])
    axes.plot(steps, returns, color=color, alpha=0.18, linewidth=0.7)
    axes.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
    mean = returns.mean(axis=1)
    axes.plot(steps, mean, color=color, linewidth=2, label=f"{label}, {seeds} seeds")


def returns_by_seed(file: Path) -> np.ndarray:
    """The returns as `(evaluations, seeds)`, up to the last evaluation that all seeds reached."""
    rounds = [each["returns"] for each in json.loads(file.read_text())["evaluations"]]
    return np.array([row for row in rounds if None not in row], dtype=np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, help="image file to write")
    parser.add_argument("--curve", action="append", required=True, metavar="NAME=LABEL")
    parser.add_argument("--folder", type=Path, default=RESULTS / "learning")
    arguments = parser.parse_args()
    labels = dict(text.partition("=")[::2] for text in arguments.curve)
    try:
        draw(arguments.folder, labels, arguments.picture)
    except UserError as error:
        sys.exit(str(error))
    print(f"written to {arguments.picture}")


if __name__ == "__main__":
    main()
