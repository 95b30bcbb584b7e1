"""The pages of results: rows, intervals, verdicts and marks from made-up JSON files."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import learning_picture
import published_rows
import results_pages
import results_report
import results_studies
import results_tables
from curves import stored
from learning_rows import MeasuredCurve, main_curves, normalized_scores, read_curves, result_rows
from results_markdown import NO_BREAK

from rl_training.data.scores import TD3
from rl_training.errors import UserError
from rl_training.experiment import statistics

ROOT = Path(__file__).parents[1]
LOW = [5000.0, 5400.0, 5100.0, 5900.0]
AROUND = [7000.0, 8000.0, 7600.0, 8300.0]
HIGH = [9000.0, 9400.0, 9100.0, 9900.0]
"""Returns below, around and above the published 6,156, 7,680 and 8,593 of SAC on HalfCheetah"""


def write_curve(
    folder: Path,
    rounds: dict[int, list[float | None]],
    *,
    env: str = "HalfCheetah-v5",
    name: str = "main",
    config: str = "sac/mujoco",
    planned: int = 300_000,
    first_seed: int = 0,
    known: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write a file of results; `known` are further keys, such as `peer` and `data`."""
    seeds = len(next(iter(rounds.values())))
    path = folder / f"{env}__{name}__from{first_seed}.json"
    values = {
        "machine": {"processor": "made up", "gpu": "made up", "torch": "2.13.0"},
        "command": f"python benchmarks/learning.py --name {name}",
        "config": config,
        "env": env,
        "name": name,
        "settings": {"device": "cuda", "eval_episodes": 5, **settings},
        "seeds": list(range(first_seed, first_seed + seeds)),
        "planned_steps": planned,
        "evaluations": [
            {"step": step, "returns": returns, "wall_seconds": step / 1e3, "steps_per_second": 1.0}
            for step, returns in rounds.items()
        ],
        **(known or {}),
    }
    path.write_text(json.dumps(values))
    return path


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of every row of the tables in a text, without headers."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    plain = [line.replace(NO_BREAK, " ").strip("| ") for line in lines[1:]]
    return [[cell.strip() for cell in line.split(" | ")] for line in plain]


def three_rounds(folder: Path) -> Path:
    return write_curve(folder, {100_000: LOW, 200_000: AROUND, 300_000: HIGH})


def test_a_row_has_means_intervals_and_published_rows_with_verdicts(tmp_path: Path) -> None:
    three_rounds(tmp_path)
    [curve] = read_curves(tmp_path, {})
    first, second, third = rows_of(results_tables.task_table([curve]))
    low, high = statistics.interval(np.array(AROUND), statistics.mean)
    middle = statistics.interval(np.array(AROUND), statistics.interquartile_mean)
    assert second == [
        "`sac/mujoco`",
        "200,000",
        f"7,725 [{low:,.0f}, {high:,.0f}]",
        f"7,800 [{middle[0]:,.0f}, {middle[1]:,.0f}]",
        "4",
        "200",
        "SAC (SimbaV2), v4: 7,680 ± 898, inside",
    ]
    assert first[-1] == "SAC (SimbaV2), v4: 6,156 ± 738, above"
    assert third[-1] == "SAC (SimbaV2), v4: 8,593 ± 1,016, below"
    assert results_tables.summary_text([curve]).startswith(
        "In 2 of 3 comparisons, the published mean is inside or below our interval "
        "(1 inside, 1 below, 1 above).\n1 curves: 0 not finished, 0 stale, 1 with fewer than 8"
    )


def test_published_returns_of_training_are_compared_with_those_of_training(
    tmp_path: Path,
) -> None:
    path = write_curve(tmp_path, {10**6: HIGH}, config="ppo/mujoco", planned=10**6)
    [row] = result_rows(read_curves(tmp_path, {})[0])
    [published] = [each for each in row.published if each.of_training]
    assert row.verdict(published) is None  # ours are not known
    values = json.loads(path.read_text())
    values["evaluations"][0]["training_returns"] = [900.0, 1000.0, 1100.0, 1200.0]
    path.write_text(json.dumps(values))
    [row] = result_rows(read_curves(tmp_path, {})[0])
    assert row.training is not None
    assert row.training.value == 1050.0
    assert row.verdict(published) == "above"
    assert "(ours 1,050 [" in results_tables.published_cell(row, published).replace(NO_BREAK, " ")


def test_an_unfinished_curve_ends_where_all_seeds_were_evaluated(tmp_path: Path) -> None:
    write_curve(tmp_path, {100_000: LOW, 150_000: AROUND, 200_000: [9e9, None, None, None]})
    [curve] = read_curves(tmp_path, {})
    assert [row.step for row in result_rows(curve)] == [100_000, 150_000]
    rows = rows_of(results_tables.task_table([curve]))
    assert [row[0] for row in rows] == ["`sac/mujoco`, **not finished**"] * 2
    assert "stopped after 150,000 of 300,000 steps" in results_tables.about(curve)


def test_evaluations_near_the_standard_steps_are_shown_with_their_own_step(tmp_path: Path) -> None:
    write_curve(tmp_path, {102_400: LOW, 150_000: LOW, 204_800: AROUND, 320_000: HIGH})
    [curve] = read_curves(tmp_path, {})
    rows = result_rows(curve)
    assert [row.step for row in rows] == [102_400, 204_800, 320_000]
    assert [[each.step for each in row.published] for row in rows] == [[100_000], [200_000], []]


def test_stale_results_are_marked_and_neither_mixed_nor_compared(tmp_path: Path) -> None:
    old = three_rounds(tmp_path)
    new = write_curve(tmp_path, {300_000: AROUND}, first_seed=4)
    pooled = read_curves(tmp_path, {})
    assert [(len(curve.seeds), curve.reached) for curve in pooled] == [(8, 300_000)]
    curves = read_curves(tmp_path, {old.name: "critic_loss differs", new.name: None})
    assert [(curve.files, curve.stale) for curve in main_curves(curves)] == [
        ((old.name,), "critic_loss differs"),
        ((new.name,), None),
    ]
    text = results_tables.tasks_text(curves)
    cells = rows_of(text)
    assert [row[0] for row in cells] == ["`sac/mujoco`, **stale**"] * 3 + ["`sac/mujoco`"]
    assert cells[0][-1] == "SAC (SimbaV2), v4: 6,156 ± 738"  # without a verdict
    assert "stale: critic_loss differs" in text
    assert "In 0 of 1 comparisons" in results_tables.summary_text(curves)
    assert rows_of(results_tables.guide_text(curves, {"sac": "SAC"}))[0][4].startswith("7,725 [")
    data = results_report.report_data(main_curves(curves))
    assert {run["name"] for run in data["runs"]} == {f"seed {seed}" for seed in range(4, 8)}
    assert data["notes"] == ["HalfCheetah-v5, sac/mujoco is left out as stale: critic_loss differs"]


def test_curves_that_must_not_be_pooled_are_an_error(tmp_path: Path) -> None:
    three_rounds(tmp_path)
    write_curve(tmp_path, {300_000: HIGH}, first_seed=2)
    with pytest.raises(UserError, match=r"cannot be pooled: its seeds overlap .* \(2 to 3\)"):
        read_curves(tmp_path, {})
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UserError, match=r"is not a learning curve .* remove it|cannot be pooled"):
        read_curves(tmp_path, {})


@pytest.mark.parametrize(
    ("settings", "label", "config"),
    [
        ({"compile": "off", "early_stopping.patience": 3}, "`sac/mujoco`", "sac/mujoco"),
        ({"float32_precision": "high"}, "`sac/mujoco`, TF32", "sac/mujoco"),
        ({"algo_kwargs.learning_rate": 1e-3}, "`sac/mujoco_fast`", "sac/mujoco_fast"),
        ({"algo_kwargs.tau": 0.1}, "`sac/mujoco`, `tau: 0.1`", None),
    ],
)
def test_settings_are_named_after_the_config_that_has_them(
    tmp_path: Path, settings: dict[str, Any], label: str, config: str | None
) -> None:
    write_curve(tmp_path, {300_000: HIGH}, **settings)
    [curve] = read_curves(tmp_path, {})
    assert (curve.label, curve.config) == (label, config)
    assert len(main_curves([curve])) == (config is not None)


def test_the_longest_curve_of_a_config_represents_it(tmp_path: Path) -> None:
    write_curve(tmp_path, {200_000: LOW + HIGH}, name="short", planned=200_000)
    three_rounds(tmp_path)
    [curve] = main_curves(read_curves(tmp_path, {}))
    assert (curve.name, curve.reached) == ("main", 300_000)


def test_a_result_that_was_not_checked_for_staleness_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve, checked = three_rounds(tmp_path), tmp_path / "checked" / "mathematics.json"
    checked.parent.mkdir()
    monkeypatch.setattr(stored, "why_stale", lambda: lambda values: f"{values['name']} differs")
    checked.write_text(json.dumps(results_pages.checked_mathematics(tmp_path)))
    assert results_pages.known_stale(tmp_path, checked) == {curve.name: "main differs"}
    curve.write_text(curve.read_text().replace("5000.0", "5001.0"))
    with pytest.raises(UserError, match=r"from0\.json: not checked yet; run `make results`"):
        results_pages.known_stale(tmp_path, checked)


def five_tasks(folder: Path) -> list[MeasuredCurve]:
    for task, (low, high) in TD3.items():
        scores = [0.2, 0.4, 0.6, 0.8]
        returns: list[float | None] = [low + score * (high - low) for score in scores]
        write_curve(folder, {200_000: returns}, env=f"{task}-v5", planned=200_000)
    return read_curves(folder, {})


def test_the_normalized_score_needs_all_five_tasks(tmp_path: Path) -> None:
    curves = five_tasks(tmp_path)
    found = normalized_scores(curves, list(TD3), 200_000)["sac/mujoco"]
    assert found.value == pytest.approx(0.5)
    assert 0.2 < found.low < 0.5 < found.high < 0.8
    # The authors' data give 0.54 for SAC, as they published it.
    [text] = results_tables.normalized_text(curves)
    assert rows_of(text)[0][-1] == "SAC (SimbaV2), v4: 0.54"
    assert results_tables.normalized_text(curves[1:]) == []


def test_pictures_and_the_page_are_reproducible_and_know_their_data(tmp_path: Path) -> None:
    three_rounds(tmp_path)
    curves = read_curves(tmp_path, {})
    colors, pictures = learning_picture.colors_of(curves), [tmp_path / "1.png", tmp_path / "2.png"]
    for picture in pictures:
        learning_picture.draw(curves, picture, colors, by_time=False)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert learning_picture.is_current(pictures[0], curves, colors)
    data = results_report.report_data(curves)
    page = tmp_path / "page.html"
    page.write_text(results_pages.render({**data, "version": "0.0.1"}))
    assert results_report.is_current(page, data)
    earlier = tmp_path / "earlier.html"
    earlier.write_text(page.read_text().replace("</style>", "p { margin: 0 }</style>", 1))
    assert not results_report.is_current(earlier, data)
    assert [each["value"] for each in data["groups"][0]["score"]["values"]] == HIGH
    assert {run["repeat"] for run in data["runs"]} == {"python benchmarks/learning.py --name main"}
    assert results_report.report_data(read_curves(tmp_path, {})) == data

    write_curve(tmp_path, {100_000: LOW, 200_000: LOW, 300_000: HIGH})
    changed = read_curves(tmp_path, {})
    assert not learning_picture.is_current(pictures[0], changed, colors)
    assert not results_report.is_current(page, results_report.report_data(changed))


def test_the_pages_of_the_repository_show_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (results_pages.main(["--check"]), capsys.readouterr().err) == (0, "")
    three_rounds(tmp_path)
    old = {path.name for path in results_pages.outdated(read_curves(tmp_path, {}))}
    assert old >= {"results.md", "README.md", "results_HalfCheetah-v5.png", "learning.html"}


def test_the_package_has_the_published_numbers_of_the_benchmarks() -> None:
    curves = [row for row in published_rows.published_rows() if row.is_curve]
    known = {(row.method, row.task, row.step): row for row in curves}
    asset = ROOT / "src/rl_training/assets/published/online.csv"
    with asset.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) > 400
    for row in rows:
        own = known[row["name_in_source"], row["task"], int(row["env_steps"])]
        assert (own.mean, own.seeds) == (float(row["mean_return"]), int(row["seeds"]))
        assert own.deviation == float(row["std_over_seeds"])


def test_other_packages_stand_beside_our_curve_of_the_same_plan_and_nowhere_else(
    tmp_path: Path,
) -> None:
    rounds: dict[int, list[float | None]] = {1000: [0.0, 0.0], 2000: [80.0, 90.0]}
    peer = {"peer": {"package": "sb3", "algo": "SAC"}}
    write_curve(tmp_path, {**rounds, 3000: [110.0, 130.0]}, name="fast", planned=3000)
    slower = {1000: [10.0, 10.0], 2000: [50.0, 60.0], 3000: [100.0, 100.0]}
    write_curve(tmp_path, slower, name="sb3-fast", planned=3000, known=peer)
    write_curve(tmp_path, rounds, name="sb3-alone", known=peer)
    curves = read_curves(tmp_path, {})
    assert [curve.name for curve in main_curves(curves)] == ["fast"]
    ours, theirs = rows_of(results_studies.peers_text(curves))
    # Nine tenths of the way from 0 to 100, which we reach after 3 s.
    assert ours[2:] == ["rl_training", "3,000", "120 [110, 130]", "2", "3", "3 (90)"]
    assert theirs[2:] == ["Stable-Baselines3", "3,000", "100 [100, 100]", "2", "3", "3 (90)"]


def test_curves_from_different_data_are_all_shown_and_named(tmp_path: Path) -> None:
    offline = {"config": "td3_bc/mujoco", "planned": 1000}
    for data in ("replay", "medium"):
        write_curve(tmp_path, {1000: LOW}, name=data, known={"data": {"name": data}}, **offline)
    write_curve(
        tmp_path, {1000: LOW}, name="on", known={"init_from": {"name": "replay"}}, **offline
    )
    changed = {**offline, "algo_kwargs.bc_alpha": 1.0}
    write_curve(tmp_path, {1000: LOW}, name="own", known={"data": {"name": "replay"}}, **changed)
    shown = main_curves(read_curves(tmp_path, {}))
    assert [curve.name for curve in shown if curve.is_drawn] == ["on"]
    labels = {curve.name: curve.label for curve in shown}
    assert labels == {
        "replay": "`td3_bc/mujoco`, replay data",
        "medium": "`td3_bc/mujoco`, medium data",
        "on": "`td3_bc/mujoco`, from `replay`",
        "own": "`td3_bc/mujoco`, `bc_alpha: 1.0`, replay data",
    }


def test_curves_have_different_colors_and_published_ones_alone_are_gray(tmp_path: Path) -> None:
    configs = ("ddpg", "dqn", "ppo", "qr_dqn", "redq", "sac", "td3", "tqc", "crossq", "xqc")
    for name in configs:
        own = {"env": "Pendulum-v1", "config": f"{name}/own", "planned": 1000}
        write_curve(tmp_path, {1000: LOW}, name=name, known={"data": {"name": name}}, **own)
    colors = learning_picture.colors_of(main_curves(read_curves(tmp_path, {})))
    assert len(set(colors.values())) == len(configs)
    shades = [color.lstrip("#") for color in colors.values()]
    assert not any(shade[:2] == shade[2:4] == shade[4:] for shade in shades)


def test_curves_of_a_task_differ_even_if_there_are_more_curves_than_colors(tmp_path: Path) -> None:
    most, tasks = len(learning_picture.PALETTE), ("CartPole-v1", "Pendulum-v1")
    for number in range(2 * most - 2):
        # Every third one is of the first task: in order, colors would come again within a task.
        own = {"env": tasks[number % 3 > 0], "config": f"sac/{number:02}", "planned": 1000}
        if number % 3 == 0 or number < 3 * most // 2:
            write_curve(tmp_path, {1000: LOW}, name=f"{number:02}", **own)
    curves = main_curves(read_curves(tmp_path, {}))
    colors = learning_picture.colors_of(curves)
    for task in tasks:
        labels = {curve.label for curve in curves if curve.task == task}
        assert most // 2 < len(labels) <= most
        assert len({colors[label] for label in labels}) == len(labels)
