"""What learning curves and pictures of datasets show: artists, labels and ticks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from rl_training.data import array_recording
from rl_training.data.summary import Summary, summarize
from rl_training.datasets.picture import summary_figure
from rl_training.reporting.learning_curve import draw_learning_curve, plot_learning_curve

Row = dict[str, Any]


def online_rows(last: int = 20_000, evaluations: int = 4) -> list[Row]:
    """Returns rise at the middle of the run, and a mean of the latest episodes lags behind."""
    rows: list[Row] = []
    for step in range(1_000, last + 1, 1_000):
        achieved = -100.0 if step > last / 2 else -1_000.0
        lagging = -1_000 + 900 * max(0.0, step / last - 0.5)
        row: Row = {"step": step, "gradient_steps": step, "rollout/ep_len_mean": 200.0}
        rows.append(row | {"rollout/ep_rew_mean": lagging, "rollout/ep_rew_last": achieved})
        if step % (last // evaluations) == 0:
            row = {"step": step, "gradient_steps": step}
            rows.append(row | {"eval/mean_reward": achieved, "eval/std_reward": 50.0})
    return rows


def drawn(rows: list[Row], pretraining: int = 0, *, offline: bool = False) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    plot_learning_curve(figure, rows, "SAC on Pendulum-v1", pretraining, offline=offline)
    figure.draw_without_rendering()
    [axes] = figure.axes
    return figure, axes


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def line(axes: Axes, label: str) -> np.ndarray:
    [found] = [each for each in axes.lines if str(each.get_label()).startswith(label)]
    return np.asarray(found.get_xydata())


def test_a_learning_curve_names_its_axes_and_shortens_large_numbers() -> None:
    figure, axes = drawn(online_rows())
    assert axes.get_title() == "SAC on Pendulum-v1"
    assert axes.get_xlabel() == "environment steps"
    assert axes.get_ylabel() == "return of an episode"
    assert "10k" in [tick.get_text() for tick in axes.get_xticklabels()]
    assert labels(figure) == [
        "training episodes",
        "training, centered mean",
        "evaluation, mean ± standard deviation",
    ]
    legend, plot = figure.legends[0].get_window_extent(), axes.get_window_extent()
    assert not legend.overlaps(plot)


def test_the_mean_of_training_episodes_does_not_lag_behind_the_evaluations() -> None:
    _, axes = drawn(online_rows())
    steps, means = line(axes, "training, centered mean").T
    assert means[steps < 9_000] == pytest.approx(-1_000)
    assert means[steps > 12_000] == pytest.approx(-100)


def test_the_spread_of_evaluations_is_drawn_as_bars_or_as_a_band() -> None:
    _, few = drawn(online_rows(evaluations=4))
    [bars] = [each for each in few.containers if isinstance(each, ErrorbarContainer)]
    assert bars.has_yerr
    _, many = drawn(online_rows(evaluations=20))
    [band] = [each for each in many.collections if isinstance(each, PolyCollection)]
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (-1_050, -50)


def test_a_single_evaluation_is_explained_and_has_error_bars() -> None:
    rows: list[Row] = [
        {"step": 9_000, "gradient_steps": 1, "eval/mean_reward": -150.0, "eval/std_reward": 20.0}
    ]
    _, axes = drawn(rows)
    assert [text.get_text() for text in axes.texts] == ["-150.0 ± 20.0\n(the only evaluation)"]
    assert len(axes.containers) == 1
    assert axes.get_xlim()[0] == 0


def test_pretraining_is_marked_at_negative_steps() -> None:
    before: list[Row] = [
        {"step": 0, "gradient_steps": 2_000, "eval/mean_reward": -500.0, "eval/std_reward": 9.0}
    ]
    figure, axes = drawn(before + online_rows(), pretraining=5_000)
    assert "pretraining on recorded data" in labels(figure)
    assert "updates of the pretraining" in axes.get_xlabel()
    assert axes.get_xlim()[0] < -5_000
    [bars] = [each for each in axes.containers if isinstance(each, ErrorbarContainer)]
    assert bars.lines[0].get_xdata()[0] == -3_000  # type: ignore[index]


def test_an_offline_run_counts_updates_and_shows_losses_if_it_is_not_evaluated() -> None:
    rows: list[Row] = [
        {"step": step, "gradient_steps": step, "train/actor_loss": 1 / step}
        for step in range(1_000, 5_000, 1_000)
    ]
    figure, axes = drawn(rows, offline=True)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("updates", "loss")
    assert labels(figure) == ["actor loss"]
    assert "not evaluated" in axes.texts[0].get_text()


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 10, "gradient_steps": 0, "eval/mean_reward": None, "eval/std_reward": None}],
        [{"step": 10, "gradient_steps": 0, "eval/mean_reward": 1.0, "eval/std_reward": None}],
        [{"step": 10, "gradient_steps": 0, "rollout/ep_rew_mean": 3.0}],
    ],
    ids=["empty", "not finite", "no spread", "an earlier version"],
)
def test_incomplete_metrics_can_be_drawn(tmp_path: Path, rows: list[Row]) -> None:
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "curve.png"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_learning_curve(metrics, picture, "title")
    assert picture.read_bytes().startswith(b"\x89PNG")


def summary_of(lengths: list[int], obs_dim: int = 3, *, discrete: bool = False) -> Summary:
    rows, generator = sum(lengths), np.random.default_rng(0)
    actions = generator.integers(0, 3, rows) if discrete else generator.uniform(-1, 1, (rows, 2))
    timeouts = np.zeros(rows, np.bool_)
    timeouts[np.cumsum(lengths) - 1] = True
    observations = generator.normal(size=(rows, obs_dim)).astype(np.float32)
    arrays = {
        "observations": observations,
        "next_observations": observations,
        "actions": actions,
        "rewards": generator.normal(size=rows),
        "terminals": np.zeros(rows, np.bool_),
        "timeouts": timeouts,
    }
    return summarize(array_recording(arrays))


def plotted(summary: Summary) -> Figure:
    figure = summary_figure(summary)
    figure.draw_without_rendering()
    return figure


CASES = {
    "continuous": ([20, 30, 30], 3, False),
    "discrete": ([20, 30], 4, True),
    "one episode": ([25], 3, False),
    "many components": ([30] * 4, 80, False),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys(), scope="module")
def figure(request: pytest.FixtureRequest) -> Figure:
    lengths, obs_dim, discrete = request.param
    return plotted(summary_of(lengths, obs_dim, discrete=discrete))


def test_no_legend_covers_bars_and_means_are_written_above_them(figure: Figure) -> None:
    assert not figure.legends
    for axes in figure.axes[:3]:
        assert axes.get_legend() is None
        assert axes.get_title().startswith("mean ")
        bars = [patch.get_window_extent() for patch in axes.patches]
        assert bars
        assert not any(axes.title.get_window_extent().overlaps(bar) for bar in bars)


def test_counts_have_integer_ticks(figure: Figure) -> None:
    counts = [axes for axes in figure.axes if axes.get_ylabel() in ("episodes", "steps")]
    assert len(counts) >= 3
    for axes in counts:
        assert all(float(tick).is_integer() for tick in axes.get_yticks())
        written = [text.get_text().replace(",", "") for text in axes.get_yticklabels()]
        assert all(text.isdigit() for text in written)
        assert len(written) == len(set(written))
    lengths = next(axes for axes in figure.axes if axes.get_xlabel().startswith("length"))
    assert all(float(tick).is_integer() for tick in lengths.get_xticks())


def test_every_color_has_a_scale(figure: Figure) -> None:
    shaded = [axes for axes in figure.axes if axes.images]
    assert shaded
    for axes in shaded:
        scale = axes.images[0].colorbar
        assert scale is not None
        assert scale.ax.get_ylabel() == "frequency (1: most frequent)"
        assert (scale.vmin, scale.vmax) == (0, 1)


def test_panels_do_not_overlap(figure: Figure) -> None:
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    for index, first in enumerate(boxes):
        for second in boxes[index + 1 :]:
            assert first is not None
            assert second is not None
            assert not first.overlaps(second)


def test_discrete_actions_have_one_bar_each() -> None:
    axes = plotted(summary_of([20, 30], discrete=True)).axes
    [bars] = [each for each in axes if each.get_xlabel() == "action"]
    assert bars.get_xticks().tolist() == [0, 1, 2]
    assert sum(patch.get_height() for patch in bars.patches) == 50  # type: ignore[attr-defined]


def test_every_episode_is_a_point() -> None:
    axes = plotted(summary_of([20, 30, 30])).axes
    points = [each for panel in axes for each in panel.collections]
    [scatter] = [each for each in points if isinstance(each, PathCollection)]
    assert len(scatter.get_offsets()) == 3
