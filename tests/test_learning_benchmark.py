"""benchmarks/learning.py: statistics, tables and stored files."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import learning
import learning_summary as summary
from curves import processes, run
from curves.settings import Variant, command_line, curve_path, without_folders

import rl_training
from rl_training.config_files import load_config
from rl_training.errors import UserError

SMALL = shlex.split(
    "--config sac/pendulum --seeds 2 --steps 60 --eval-interval 30 --eval-episodes 1 --device cpu "
    "--set algo_kwargs.learning_starts=20 --set algo_kwargs.batch_size=8 --name small"
)


def arguments(folder: Path, *more: str) -> argparse.Namespace:
    return learning.parse_arguments([*SMALL, "--out", str(folder), *more])


def small_variant(given: argparse.Namespace) -> Variant:
    return Variant.parse(given.name, given.set)


def write_curve(
    folder: Path,
    name: str,
    returns: dict[int, list[float | None]],
    *,
    first_seed: int = 0,
    **settings: Any,
) -> None:
    seeds = max((len(values) for values in returns.values()), default=2)
    rounds = [
        {"step": step, "returns": values, "wall_seconds": 1.0, "steps_per_second": 50.0}
        for step, values in returns.items()
    ]
    values: dict[str, Any] = {
        "env": "HalfCheetah-v5",
        "name": name,
        "config": "sac/mujoco",
        "settings": settings,
        "seeds": list(range(first_seed, first_seed + seeds)),
        "planned_steps": 200,
        "evaluations": rounds,
    }
    path = curve_path(folder, "HalfCheetah-v5", name, first_seed)
    path.write_text(json.dumps(values))


def lines_of(text: str, start: str) -> list[str]:
    """Return the lines with this prefix, with repeated spaces collapsed."""
    return [" ".join(line.split()) for line in text.splitlines() if line.startswith(start)]


def test_the_bootstrap_interval_of_many_values_equals_the_normal_interval() -> None:
    values = np.random.default_rng(3).normal(10.0, 2.0, 400)
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    low, high = summary.bootstrap_interval(list(values))
    assert low == pytest.approx(values.mean() - half, abs=0.03)
    assert high == pytest.approx(values.mean() + half, abs=0.03)


def test_the_bootstrap_is_deterministic_and_has_no_interval_for_one_value() -> None:
    values = [1.0, 5.0, 2.0, 8.0]
    assert summary.bootstrap_interval(values) == summary.bootstrap_interval(values)
    assert summary.bootstrap_interval([4.0, 4.0]) == (4.0, 4.0)
    assert all(map(math.isnan, summary.bootstrap_interval([4.0])))


def test_a_difference_is_bootstrapped_unpaired() -> None:
    values = list(np.random.default_rng(5).normal(0.0, 1.0, 200))
    difference, low, high = summary.bootstrap_difference([v + 3.0 for v in values], values)
    assert difference == pytest.approx(3.0)
    # A paired interval would have width zero. The unpaired one includes both errors.
    half = 1.96 * math.sqrt(2 * np.var(values, ddof=1) / len(values))
    assert (low, high) == pytest.approx((3.0 - half, 3.0 + half), abs=0.02)


def test_the_probability_of_improvement_counts_pairs_and_halves_ties() -> None:
    assert summary.probability_of_improvement([3.0, 4.0], [1.0, 2.0, 2.5]) == 1.0
    assert summary.probability_of_improvement([1.0, 2.0, 3.0], [2.0]) == 0.5
    assert summary.probability_of_improvement([1.0, 2.0], [2.0, 2.0]) == 0.25


def test_the_table_has_steps_by_variants_and_the_published_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_curve(tmp_path, "base", {100: [10.0, 20.0], 200: [2000.0, 2000.0]})
    write_curve(tmp_path, "other", {100: [40.0, 50.0], 200: [2100.0, 2300.0]})
    published = tmp_path / "online.csv"
    published.write_text(
        "method,task,env_steps,mean_return,std_over_seeds,seeds\n"
        "SAC,halfcheetah-v4,200,1500.0,80.5,10\n"
        "PPO,halfcheetah-v4,200,1.0,1.0,5\n"
    )
    summary.print_summary(tmp_path, "base", published, "SAC")
    text = capsys.readouterr().out
    means, differences = lines_of(text, "200 ")
    assert means == "200 2000 (0.0) [2000, 2000] 2200 (141.4) [2100, 2300] 1500 (80.5)"
    assert differences == "200 200.0 [100.0, 300.0] P=1.00"
    assert lines_of(text, "100 ")[0].startswith("100 15.0 (7.1)")
    assert lines_of(text, "steps")[0] == "steps base other SAC, halfcheetah-v4"
    assert "SAC, halfcheetah-v4: published, 10 seeds, a different version of the task" in text
    assert "unpaired" in text
    assert max(map(len, text.splitlines())) <= 100


def test_many_variants_are_split_into_several_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abcde":
        write_curve(tmp_path, name, {100: [12345.0, 10345.0]})
    summary.print_summary(tmp_path, None, None, "SAC")
    text = capsys.readouterr().out
    assert lines_of(text, "steps") == ["steps a b c", "steps d e"]
    assert max(map(len, text.splitlines())) <= 100


def test_an_unfinished_run_is_shown_up_to_its_last_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_curve(tmp_path, "cut", {100: [10.0, 20.0, 30.0], 150: [40.0, 60.0, None]})
    write_curve(tmp_path, "full", {100: [1.0, 2.0, 3.0], 200: [3.0, 4.0, 5.0]})
    write_curve(tmp_path, "none", {})
    (tmp_path / "broken.json").write_text('{"env": "HalfChee')
    (tmp_path / "gpu.json").write_text('{"machine": {}, "updates": []}')
    summary.print_summary(tmp_path, "full", None, "SAC")
    text = capsys.readouterr().out
    assert lines_of(text, "150 ")[0] == "150 50.0 (14.1) [40.0, 60.0] n=2"
    assert "cut: 3 seeds, 150 steps of 200 (not finished)" in text
    assert "none: 2 seeds, 0 steps of 200 (not finished)" in text
    assert "full: 3 seeds, 200 steps, 50 steps/s" in text
    assert [line.split()[1] for line in lines_of(text, "note:")] == ["broken.json", "gpu.json"]
    # Compared only at steps with evaluations of both.
    compared = text[text.index("minus full") :]
    assert len(lines_of(compared, "100 ")) == 1
    assert not lines_of(compared, "150 ") + lines_of(compared, "200 ")


def test_runs_of_a_variant_with_other_seeds_are_one_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_curve(tmp_path, "base", {100: [1.0, 2.0], 200: [5.0, 5.0]})
    write_curve(tmp_path, "other", {100: [10.0, 20.0], 200: [30.0, 50.0]}, tau=0.1)
    more: dict[int, list[float | None]] = {100: [30.0, 40.0], 150: [1.0, None]}
    write_curve(tmp_path, "other", more, first_seed=2, tau=0.1)
    summary.print_summary(tmp_path, "base", None, "SAC")
    text = capsys.readouterr().out
    assert lines_of(text, "steps") == ["steps base other", "steps other"]
    means, differences = lines_of(text, "100 ")
    assert "25.0 (12.9)" in means
    assert "n=" not in means
    assert differences.startswith("100 23.5 ")
    # Each step counts its evaluated seeds.
    assert lines_of(text, "150 ")[0].endswith("1.0 (-) [-, -] n=1")
    assert lines_of(text, "200 ")[0].endswith("40.0 (14.1) [30.0, 50.0] n=2")
    assert "other: 2 seeds, 200 steps, 50 steps/s" in text
    assert "other: 2 seeds from 2, 150 steps of 200 (not finished)" in text
    assert "note:" not in text


@pytest.mark.parametrize(
    ("first_seed", "settings", "reason"),
    [
        (1, {"tau": 0.1}, "its seeds overlap with those of HalfCheetah-v5__base.json (1)"),
        (2, {"tau": 0.2}, "its settings differ from those of HalfCheetah-v5__base.json (tau)"),
        (
            2,
            {"tau": 0.1, "n": None},
            "its settings differ from those of HalfCheetah-v5__base.json (n)",
        ),
    ],
)
def test_runs_that_cannot_be_pooled_are_left_out_with_a_note(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    first_seed: int,
    settings: dict[str, Any],
    reason: str,
) -> None:
    write_curve(tmp_path, "base", {200: [10.0, 20.0]}, tau=0.1)
    write_curve(tmp_path, "base", {200: [70.0, 90.0]}, first_seed=first_seed, **settings)
    summary.print_summary(tmp_path, None, None, "SAC")
    text = capsys.readouterr().out
    file = f"HalfCheetah-v5__base__from{first_seed}.json"
    assert f"note: {file} is left out: {reason}" in text.splitlines()
    assert lines_of(text, "200 ") == ["200 15.0 (7.1) [10.0, 20.0]"]


def test_the_message_for_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run benchmarks/learning\.py first"):
        summary.print_summary(tmp_path, None, None, "SAC")


def test_a_variant_is_parsed_as_a_name_and_settings_that_may_contain_commas() -> None:
    text = "wide:algo_kwargs.hidden_sizes=[32,32],float32_precision=highest"
    found = Variant.parse(text, ["algo_kwargs.tau=0.01"])
    assert found.name == "wide"
    assert found.overrides == (
        "algo_kwargs.tau=0.01",
        "algo_kwargs.hidden_sizes=[32,32]",
        "float32_precision=highest",
    )
    assert Variant.parse("packaged").overrides == ()
    with pytest.raises(UserError, match="not usable as a file name"):
        Variant.parse("../up:a=1")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("init_from=/home/me/runs/best", "init_from=best"),
        ("dataset={kind: npz, path: ~/data/x.npz}", "dataset={kind: npz, path: x.npz}"),
        (["/a/b", "/c/d"], ["b", "d"]),
        ({"id": "D4RL/door/human-v2", "config": "sac/mujoco"}, None),
    ],
)
def test_local_paths_are_not_stored(given: Any, kept: Any) -> None:
    assert without_folders(given) == (given if kept is None else kept)


def test_the_stored_command_contains_no_local_path(tmp_path: Path) -> None:
    variant = Variant("tuned", ("init_from=/home/me/runs/best",))
    kept = command_line(variant, arguments(tmp_path))
    assert kept.endswith("--name tuned --set init_from=best")
    assert str(tmp_path) not in kept


def test_a_curve_contains_the_returns_and_settings_of_each_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(run.tempfile, "tempdir", str(scratch))
    versions: list[list[list[float | None]]] = []
    write = run.write_json

    def watched(path: Path, values: dict[str, Any]) -> None:
        write(path, values)
        if path.parent == tmp_path / "curves":
            kept = json.loads(path.read_text())
            versions.append([each["returns"] for each in kept["evaluations"]])

    monkeypatch.setattr(run, "write_json", watched)
    given = arguments(tmp_path / "curves")
    path = run.learn(small_variant(given), given)

    assert [(len(each), each[-1].count(None)) for each in versions] == [
        (1, 1),
        (1, 0),
        (2, 1),
        (2, 0),
    ]
    kept = json.loads(path.read_text())
    assert path.name == "Pendulum-v1__small.json"
    assert [each["step"] for each in kept["evaluations"]] == [30, 60]
    assert kept["seeds"] == [0, 1]
    assert kept["settings"] == {
        "total_timesteps": 60,
        "device": "cpu",
        "eval_interval": 30,
        "eval_episodes": 1,
        "checkpoint_interval": 0,
        "algo_kwargs.learning_starts": 20,
        "algo_kwargs.batch_size": 8,
    }
    assert kept["command"] == "python benchmarks/learning.py " + " ".join(
        [*SMALL[:12], "--name", "small", *SMALL[12:-2]]
    )
    assert {"processor", "torch", "cores"} <= kept["machine"].keys()
    assert str(tmp_path) not in path.read_text()
    assert not list(scratch.iterdir())


def test_other_seeds_of_a_variant_are_written_to_a_separate_file(tmp_path: Path) -> None:
    given = arguments(tmp_path, "--first-seed", "16")
    path = run.learn(small_variant(given), given)
    kept = json.loads(path.read_text())
    assert path.name == "Pendulum-v1__small__from16.json"
    assert kept["name"] == "small"
    assert kept["seeds"] == [16, 17]
    assert "--seeds 2 --first-seed 16 --steps 60" in kept["command"]


def test_a_curve_equals_that_of_training_the_seeds_directly(tmp_path: Path) -> None:
    given = arguments(tmp_path / "curves")
    kept = json.loads(run.learn(small_variant(given), given).read_text())
    alone = rl_training.train(
        load_config(
            "sac/pendulum",
            given.set,
            seeds=[0, 1],
            total_timesteps=60,
            eval_interval=30,
            eval_episodes=1,
            device="cpu",
            output_dir=str(tmp_path / "runs"),
        )
    )
    assert isinstance(alone, list)
    last = kept["evaluations"][-1]["returns"]
    assert last == [each.metrics["eval_return_mean"] for each in alone]


def test_cores_are_distributed_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 6}, raising=False)
    assert processes.core_shares(2) == [[0, 1], [2, 3]]
    assert processes.core_shares(1) == [[0, 1, 2, 3, 6]]
    assert processes.core_shares(8) == [[]] * 8
