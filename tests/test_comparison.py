"""Comparing runs: how they are found, grouped, aligned, scored and shown."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Command
from written_runs import write_run

import rl_training
from rl_training.errors import UserError
from rl_training.experiment import statistics
from rl_training.experiment.comparison import Comparison, compare
from rl_training.experiment.curves import (
    Group,
    aligned,
    aligned_by_time,
    find_runs,
    group_runs,
    read_curve,
)
from rl_training.experiment.efficiency import efficiency_curve, learning_curve

FIXTURES = Path(__file__).parent / "fixtures"


def write_seeds(folder: Path, finals: list[float], **settings: Any) -> None:
    name = f"{settings.get('algo', 'sac')}-{settings.get('env', 'Hopper-v5')}"
    for seed, final in enumerate(finals):
        run = folder / f"{name}-{settings.get('total_timesteps', 300)}-{seed}"
        write_run(run, seed=seed, returns=[0.0, 1.0, final], **settings)


def only_group(folder: Path) -> Group:
    (group,) = group_runs([read_curve(run) for run in find_runs([folder])])
    return group


def test_a_curve_has_the_evaluations_of_a_run_and_its_settings(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", seed=4, returns=[5, 6, 7.5], seconds=[1.0, 2.0, 3.5])
    curve = read_curve(run)
    assert (curve.algorithm, curve.environment, curve.seed) == ("sac", "Hopper-v5", 4)
    assert (curve.state, curve.problem, curve.name) == ("stopped", None, "run")
    assert curve.steps.tolist() == [100, 200, 300]
    assert curve.returns.tolist() == [5, 6, 7.5]
    assert curve.wall_seconds.tolist() == [1.0, 2.0, 3.5]
    assert "seed" not in curve.config
    assert curve.config["algo_kwargs"] == {"tau": 0.005}


def test_a_trained_run_is_read_as_its_result_says(finished_run: Any) -> None:
    curve = read_curve(finished_run.run_dir)
    assert curve.steps.tolist() == [40, 80, 120]
    assert curve.returns[-1] == pytest.approx(finished_run.metrics["eval_return_mean"])
    assert curve.state == "finished"


@pytest.mark.skipif(not FIXTURES.exists(), reason="only in the repository")
def test_runs_of_earlier_versions_are_grouped_with_their_equals() -> None:
    curves = [read_curve(run) for run in find_runs([FIXTURES])]
    assert {curve.problem for curve in curves} == {None}
    groups = group_runs(curves)
    population = [group for group in groups if any("population" in str(r.path) for r in group.runs)]
    assert len(population) == 1  # of several versions, whose configs have different keys
    versions = len(list(FIXTURES.glob("v*/sac_population")))
    assert f"seed 1 has {versions} runs" in population[0].notes[0]


def test_the_last_of_several_evaluations_at_one_step_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=[0, 0, 200, 100], returns=[1.0, 2.0, 3.0, None])
    curve = read_curve(run)
    assert curve.steps.tolist() == [0, 200]
    assert curve.returns.tolist() == [2.0, 3.0]


def test_runs_that_differ_in_seed_and_execution_alone_form_a_group(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=1, device="cpu", compile="on", eval_interval=100)
    write_run(tmp_path / "b", seed=0, device="cuda", compile="off", log_interval=7)
    group = only_group(tmp_path)
    assert [run.seed for run in group.runs] == [0, 1]
    assert (group.label, group.notes) == ("sac", ())


def test_other_settings_make_another_group_and_name_it(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", algo_kwargs={"tau": 0.01})
    write_run(tmp_path / "c", env="Walker2d-v5")
    groups = group_runs([read_curve(run) for run in find_runs([tmp_path])])
    assert [(group.environment, group.label) for group in groups] == [
        ("Hopper-v5", "sac (tau=0.005)"),
        ("Hopper-v5", "sac (tau=0.01)"),
        ("Walker2d-v5", "sac"),
    ]


def test_arguments_and_wrappers_make_another_task(tmp_path: Path) -> None:
    write_run(tmp_path / "a", env_kwargs={"ctrl_cost_weight": 0})
    write_run(tmp_path / "b", wrappers=[{"wrapper": "my.module:Scaled", "kwargs": {}}])
    write_run(tmp_path / "c", env=None, label="my.module.Swing")
    curves = [read_curve(run) for run in find_runs([tmp_path])]
    tasks = ["Hopper-v5 (ctrl_cost_weight=0)", "Hopper-v5 (Scaled)", "Swing"]
    assert [curve.environment for curve in curves] == tasks


def test_seeds_are_cut_at_the_shortest_run_and_a_note_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, steps=[100, 200, 300], returns=[1.0, 2.0, 30.0])
    write_run(tmp_path / "b", seed=1, steps=[100, 200], returns=[3.0, 4.0])
    group = only_group(tmp_path)
    steps, scores = aligned(group)
    assert steps.tolist() == [100, 200]
    assert scores.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert "up to step 200" in group.notes[0]
    assert "seed 1 (stopped)" in group.notes[0]
    (row,) = compare(tmp_path).rows
    assert (row.mean, row.steps, row.seeds) == (3.0, 200, 2)


def test_evaluations_at_different_steps_are_interpolated_and_a_note_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, steps=[100, 300], returns=[0.0, 10.0])
    write_run(tmp_path / "b", seed=1, steps=[150, 300], returns=[1.0, 4.0])
    group = only_group(tmp_path)
    steps, scores = aligned(group)
    assert steps.tolist() == [150, 300]
    assert scores.tolist() == [[2.5, 10.0], [1.0, 4.0]]
    assert any("interpolated" in note for note in group.notes)
    _, chosen = aligned(group, [100, 200, 400])
    np.testing.assert_allclose(chosen, [[0.0, 5.0, np.nan], [np.nan, 2.0, np.nan]])


@pytest.mark.parametrize("late", [0, 2])
def test_a_seed_without_a_step_in_common_is_left_out_and_a_note_says_so(
    tmp_path: Path, late: int
) -> None:
    write_run(tmp_path / "late", seed=late, steps=[500, 600], returns=[5.0, 6.0])
    for seed in {0, 1, 2} - {late}:
        write_run(tmp_path / str(seed), seed=seed, steps=[100, 300], returns=[1.0, 2.0 + seed])
    comparison = compare(tmp_path)
    (row,) = comparison.rows
    assert [each.seed for each in row.scores] == sorted({0, 1, 2} - {late})
    assert (row.seeds, row.steps) == (2, 300)
    assert f"seed {late} is left out: its evaluations, at steps 500 to 600" in row.notes[0]
    json.dumps(comparison.to_json(), allow_nan=False)


def test_of_two_seeds_without_a_step_in_common_the_later_one_is_used(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, steps=[500, 600], returns=[5.0, 6.0])
    write_run(tmp_path / "b", seed=1, steps=[100, 300], returns=[1.0, 2.0])
    (row,) = compare(tmp_path).rows
    assert ([each.seed for each in row.scores], row.iqm) == ([0], 6.0)


def test_runs_without_a_time_in_common_have_no_curve_over_time(tmp_path: Path) -> None:
    write_run(tmp_path / "slow", seed=0, seconds=[100.0, 200.0, 300.0])
    write_run(tmp_path / "fast", seed=1, seconds=[1.0, 2.0, 3.0])
    curve = learning_curve(only_group(tmp_path), by="seconds")
    assert (len(curve.at), curve.notes) == (0, ("the runs have no seconds in common",))
    assert len(compare(tmp_path).plot().axes) == 1


@pytest.mark.parametrize("by", ["steps", "seconds"])
def test_tasks_without_a_step_or_time_in_common_have_no_joint_curve(
    tmp_path: Path, by: Any
) -> None:
    for seed in range(2):
        write_run(tmp_path / f"short{seed}", seed=seed, seconds=[1.0, 2.0, 3.0])
        long: dict[str, Any] = {"steps": [5_000, 10_000], "seconds": [60.0, 90.0]}
        write_run(tmp_path / f"long{seed}", seed=seed, env="Ant-v5", returns=[1.0, 2.0], **long)
    comparison = compare(tmp_path)
    assert len(efficiency_curve(comparison.groups, by=by).at) == 0
    assert len(comparison.aggregates) == 1
    titles = [title for axes in comparison.plot().axes if (title := axes.get_title())]
    assert titles == 2 * ["Ant-v5", "Hopper-v5"]


def test_the_longest_of_two_runs_with_one_seed_is_used(tmp_path: Path) -> None:
    write_run(tmp_path / "long", seed=0, returns=[1.0, 2.0, 3.0])
    write_run(tmp_path / "short", seed=0, steps=[100], returns=[9.0])
    group = only_group(tmp_path)
    assert [run.name for run in group.runs] == ["long"]
    assert "seed 0 has 2 runs" in group.notes[0]


def test_a_run_without_evaluations_is_left_out_and_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, steps=[])
    group = only_group(tmp_path)
    assert [run.seed for run in group.evaluated] == [0]
    assert group.notes == ("without evaluations, left out: seed 1 (stopped)",)
    assert any("seed 1" in note for note in compare(tmp_path).notes)


def test_equal_wall_time_compares_seeds_of_different_speed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, returns=[0.0, 10.0, 20.0], seconds=[10.0, 20.0, 30.0])
    write_run(tmp_path / "b", seed=1, returns=[0.0, 10.0, 20.0], seconds=[5.0, 10.0, 15.0])
    seconds, scores = aligned_by_time(only_group(tmp_path))
    assert (seconds[0], seconds[-1]) == (10.0, 15.0)
    np.testing.assert_allclose(scores[:, -1], [5.0, 20.0])
    curve = learning_curve(only_group(tmp_path), by="seconds", statistic=statistics.mean)
    assert curve.value[-1] == pytest.approx(12.5)
    assert curve.low[-1] == 5.0


def test_runs_without_wall_time_are_left_out_of_curves_over_time(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, seconds=[1.0, 2.0, 3.0])
    write_run(tmp_path / "b", seed=1)
    curve = learning_curve(only_group(tmp_path), by="seconds")
    assert curve.seeds == 1
    assert "1 of the runs did not save" in curve.notes[0]
    write_run(tmp_path / "old" / "c")
    assert len(learning_curve(only_group(tmp_path / "old"), by="seconds").at) == 0


def test_a_row_has_the_statistics_of_the_last_evaluations(tmp_path: Path) -> None:
    finals = [100.0, 300.0, 200.0, 900.0]
    write_seeds(tmp_path, finals)
    (row,) = compare(tmp_path, resamples=500, seed=3).rows
    assert (row.task, row.label, row.seeds, row.steps) == ("Hopper-v5", "sac", 4, 300)
    assert (row.iqm, row.mean, row.median) == (250.0, 375.0, 250.0)
    assert (row.low, row.high) == statistics.interval(finals, resamples=500, seed=3)
    assert [(each.seed, each.score) for each in row.scores] == list(enumerate(finals))
    assert row.scores[1].run == tmp_path / "sac-Hopper-v5-300-1"
    scaled = statistics.normalized("Hopper-v5", finals)
    assert row.estimates["optimality_gap"].value == statistics.optimality_gap(scaled)


def two_tasks(folder: Path) -> Comparison:
    write_seeds(folder, [1000.0, 1200.0, 1100.0])
    write_seeds(folder, [5000.0, 5200.0, 4100.0], env="HalfCheetah-v5")
    write_seeds(folder, [900.0, 1150.0, 1000.0], algo="td3")
    write_seeds(folder, [4000.0, 5100.0], algo="td3", env="HalfCheetah-v5")
    return compare([folder])


def test_over_tasks_scores_are_normalized(tmp_path: Path) -> None:
    comparison = two_tasks(tmp_path)
    assert comparison.scaled_tasks == ("HalfCheetah-v5", "Hopper-v5")
    sac, td3 = comparison.aggregates
    hopper = (np.array([1000.0, 1200.0, 1100.0]) - 18.791) / (3226 - 18.791)
    cheetah = (np.array([5000.0, 5200.0, 4100.0]) + 289.415) / (10574 + 289.415)
    assert sac.mean == pytest.approx((hopper.mean() + cheetah.mean()) / 2)
    assert sac.low < sac.iqm < sac.high
    assert (sac.seeds, td3.seeds, len(td3.scores)) == (3, 2, 5)
    assert any("td3 has 2 to 3 seeds per task" in note for note in comparison.notes)
    assert any("no score for seed 2 of td3" in note for note in comparison.notes)


def test_other_settings_in_other_tasks_are_said(tmp_path: Path) -> None:
    write_seeds(tmp_path, [1.0, 2.0])
    write_seeds(tmp_path, [3.0, 4.0], env="Ant-v5", algo_kwargs={"tau": 0.5}, total_timesteps=500)
    assert compare(tmp_path).notes == ("sac has other settings in other tasks: tau",)


def test_pairs_are_compared_per_task_and_over_tasks(tmp_path: Path) -> None:
    found = {each.task: each for each in two_tasks(tmp_path).improvements}
    assert list(found) == ["HalfCheetah-v5", "Hopper-v5", "all tasks"]
    assert all((each.first, each.second) == ("sac", "td3") for each in found.values())
    assert found["HalfCheetah-v5"].probability.value == pytest.approx(4 / 6)
    assert found["Hopper-v5"].probability.value == pytest.approx(6.5 / 9)  # with a tie
    assert found["all tasks"].probability.value == pytest.approx((4 / 6 + 6.5 / 9) / 2)


def test_profiles_and_curves_over_tasks(tmp_path: Path) -> None:
    comparison = two_tasks(tmp_path)
    profile = comparison.profiles([0.0, 0.31, 5.0])[0]
    assert profile.share.tolist() == pytest.approx([1.0, 5 / 6, 0.0])
    assert (profile.low <= profile.share).all()
    assert (profile.share <= profile.high).all()
    groups = [group for group in comparison.groups if group.label == "sac"]
    curve = efficiency_curve(groups)
    assert curve.at.tolist() == [100, 200, 300]
    assert curve.value[-1] == pytest.approx(comparison.aggregates[0].iqm)


def test_a_task_without_constants_is_left_out_of_scores_over_tasks(tmp_path: Path) -> None:
    for env in ("Hopper-v5", "Ant-v5", "Mine-v0"):
        write_seeds(tmp_path, [1.0, 2.0], env=env)
    comparison = compare(tmp_path)
    assert {each.task for each in comparison.aggregates[0].scores} == {"Ant-v5", "Hopper-v5"}
    assert any("no constants to normalize Mine-v0" in note for note in comparison.notes)


def test_different_lengths_of_algorithms_are_said(tmp_path: Path) -> None:
    write_seeds(tmp_path, [1.0, 2.0])
    write_seeds(tmp_path, [3.0, 4.0], algo="td3", steps=[100, 200, 250])
    (note,) = compare(tmp_path).notes
    assert note == "Hopper-v5: final scores are at different steps (sac at 300, td3 at 250)"


def test_paths_without_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    write_run(tmp_path / "runs" / "a", steps=[])
    for path, words in [
        ("missing", "no such folder"),
        ("file", "is not a folder"),
        ("empty", "contains no runs"),
        ("runs", "no evaluation"),
    ]:
        with pytest.raises(UserError, match=words):
            compare(tmp_path / path)
    with pytest.raises(UserError, match="nothing to compare"):
        compare([])


def test_a_run_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert len(find_runs([tmp_path, run, tmp_path / "run/../run"])) == 1


@pytest.mark.parametrize("damage", ["text", "seed", "kwargs", "link", "missing"])
def test_a_damaged_run_is_named_and_the_others_are_compared(tmp_path: Path, damage: str) -> None:
    write_seeds(tmp_path, [1.0, 2.0])
    bad = write_run(tmp_path / "bad\x1b[31m", seed=7)
    match damage:
        case "text":
            (bad / "config.yaml").write_bytes(b"\xff\x00{")
        case "seed":
            (bad / "config.yaml").write_text("algo: sac\nenv_id: Hopper-v5\nseed: [1]\n")
        case "kwargs":
            text = "algo: sac\nenv_id: Hopper-v5\nseed: 1\nenv_kwargs: [1]\n"
            (bad / "config.yaml").write_text(text)
        case "link":
            (bad / "metrics.jsonl").unlink()
            os.symlink("/etc/passwd", bad / "metrics.jsonl")
        case "missing":
            (bad / "metrics.jsonl").unlink()
    comparison = compare(tmp_path)
    assert comparison.rows[0].seeds == 2
    assert "left out" in " ".join(comparison.notes)
    assert "\x1b" not in comparison.table()


def test_huge_and_strange_numbers_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 400, "eval/mean_reward": 1e308}\n')
        file.write('{"step": 401, "eval/mean_reward": NaN}\n')
        file.write('{"step": -1, "eval/mean_reward": 1}\n')
        file.write('{"step": 1e3, "eval/mean_reward": 1}\n')
        file.write('{"step": ' + "9" * 30 + ', "eval/mean_reward": 1}\n')
        file.write('{"eval/mean_reward": 1}\n{"step": 500, "eval/mean_rew')
    assert read_curve(run).steps.tolist() == [100, 200, 300]


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_metrics_that_are_no_file_are_the_reason_why_a_run_is_left_out(
    tmp_path: Path, kind: str
) -> None:
    write_run(tmp_path / "a", seed=0)
    metrics = write_run(tmp_path / "b", seed=1) / "metrics.jsonl"
    metrics.rename(tmp_path / "elsewhere")
    metrics.symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(metrics)
    comparison = compare(tmp_path)
    assert comparison.rows[0].seeds == 1
    (note,) = [note for note in comparison.notes if "seed 1" in note]
    assert ("is a link" if kind == "link" else "is not a regular file") in note


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_evaluations_without_a_finite_return_are_left_out_and_a_note_says_so(
    tmp_path: Path, value: float | None
) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, returns=(1, value, 3))
    write_run(tmp_path / "c", seed=2, returns=(None, value, value))
    (group,) = group_runs(map(read_curve, find_runs([tmp_path])))
    assert [len(run.steps) for run in group.runs] == [3, 2, 0]
    (note,) = [note for note in group.notes if "finite" in note]
    assert "seed 1" in note
    assert "seed 0" not in note
    assert any("without evaluations" in note and "seed 2" in note for note in group.notes)


def test_the_table_fits_eighty_columns_whatever_the_names(tmp_path: Path) -> None:
    for tau in (0.001, 0.01):
        write_seeds(
            tmp_path,
            [-123456.7, -3.2],
            env="AVeryLongEnvironmentName-v5",
            algo_kwargs={"tau": tau, "a_setting_with_a_long_name": "value" * 9},
            total_timesteps=int(1000 * tau),
        )
    table = compare(tmp_path).table()
    assert max(map(len, table.splitlines())) <= 80
    assert "tau=0.001" in table
    assert re.search(r"IQM +95 % interval +mean +seeds +steps", table)
    assert "last evaluation" in table


def test_the_result_can_be_written_as_json_and_drawn(tmp_path: Path) -> None:
    comparison = two_tasks(tmp_path / "runs")
    text = json.dumps(comparison.to_json(), allow_nan=False)
    assert json.loads(text)["rows"][0]["iqm"]["value"] == comparison.rows[0].iqm
    figure = comparison.plot(tmp_path / "deep" / "curves.png")
    assert (tmp_path / "deep" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title() for axes in figure.axes] == [
        "HalfCheetah-v5",
        "Hopper-v5",
        "all tasks, normalized",
    ]
    with pytest.raises(UserError, match=r"\.png"):
        comparison.plot(tmp_path / "curves.docx")


def test_the_package_exports_compare(tmp_path: Path) -> None:
    write_seeds(tmp_path, [1.0])
    row = rl_training.compare([tmp_path]).rows[0]
    assert math.isnan(row.low)


def test_the_command_prints_tables_json_and_a_picture(rl: Command, tmp_path: Path) -> None:
    two_tasks(tmp_path / "runs")
    done = rl("compare", tmp_path / "runs", "--plot", tmp_path / "a.svg")
    assert done.code == 0
    assert re.search(
        r"^Hopper-v5 +sac +1100 +\[1000, 1200\] +1100 +3 +300$", done.out, re.MULTILINE
    )
    assert re.search(r"^0\.69 +\[0\.\d\d, 1\.00\] +sac over td3$", done.out, re.MULTILINE)
    assert (tmp_path / "a.svg").exists()
    done = rl("compare", tmp_path / "runs", "--json", "--resamples", "100", "--seed", "1")
    assert json.loads(done.out)["resamples"] == 100


def test_the_command_explains_what_is_missing(rl: Command, tmp_path: Path) -> None:
    done = rl("compare", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "contains no runs" in done.err
