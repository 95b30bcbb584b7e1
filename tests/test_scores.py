"""Normalized scores: values, names of the scales, and datasets with different scales."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from rl_training import evaluate_checkpoint
from rl_training.data.scores import D4RL, MINARI, ReferenceScale, minari_ids, reference_scale
from rl_training.runtime import workflows


def test_a_score_is_0_at_one_end_of_its_scale_and_100_at_the_other() -> None:
    scale = ReferenceScale("D4RL", "halfcheetah", *D4RL["halfcheetah"])
    assert scale.score(-280.178953) == 0
    assert scale.score(12135.0) == 100
    # CORL's README: BC reaches 42.4 on halfcheetah-medium, a return of about 4984.
    assert scale.score(4984) == pytest.approx(42.4, abs=0.05)


@pytest.mark.parametrize(
    ("environment", "datasets", "expected"),
    [
        ("HalfCheetah-v5", [], ("D4RL", "halfcheetah")),
        ("Walker2d-v4", [], ("D4RL", "walker2d")),
        ("antmaze-umaze-diverse-v2", [], ("D4RL", "antmaze")),
        ("ant-medium-v2", [], ("D4RL", "ant")),
        ("maze2d-large-v1", [], ("D4RL", "maze2d-large")),
        ("maze2d-umaze-dense-v1", [], ("D4RL", "maze2d-umaze-dense")),
        ("maze2d-medium-dense-v1", [], ("D4RL", "maze2d-medium-dense")),
        ("maze2d-large-dense-v1", [], ("D4RL", "maze2d-large-dense")),
        ("maze2d-large-dense-v0", [], None),
        ("PointMaze_UMaze-v3", [], None),
        (None, ["door-human-v1"], None),  # an old Minari id, not D4RL's door
        ("Pendulum-v1", [], None),
        ("HalfCheetah-v9", [], None),
        (None, [], None),
        ("AdroitHandDoor-v1", [], ("Minari", "D4RL/door/human-v2")),
        ("AdroitHandDoor-v1", ["D4RL/door/human-v2"], ("Minari", "D4RL/door/human-v2")),
        ("HalfCheetah-v5", ["nobody/knows-v0"], ("D4RL", "halfcheetah")),
    ],
)
def test_the_scale_comes_from_the_data_or_else_from_the_environment(
    environment: str | None, datasets: list[str], expected: tuple[str, str] | None
) -> None:
    scale = reference_scale(environment, datasets)
    assert (scale and (scale.owner, scale.task)) == expected


@pytest.mark.parametrize(
    ("environment", "low", "high"),
    [
        ("maze2d-umaze-v1", 23.85, 161.86),
        ("maze2d-umaze-dense-v1", 68.537689, 193.662856),
        ("maze2d-medium-dense-v1", 44.264742, 297.455255),
        ("maze2d-large-dense-v1", 30.569041, 303.485738),
    ],
)
def test_dense_mazes_have_their_own_scale(environment: str, low: float, high: float) -> None:
    scale = reference_scale(environment)
    assert scale is not None
    assert (scale.low, scale.high) == (low, high)


def test_d4rl_and_minari_scales_differ_for_the_same_task() -> None:
    d4rl, minari = D4RL["door"], MINARI["D4RL/door/human-v2"]
    assert minari == pytest.approx((-45.807, 2940.578), abs=1e-3)
    assert d4rl != pytest.approx(minari, abs=1)


def test_local_metadata_give_the_scale_of_datasets_missing_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    for name, low in (("a/b-v0", 10.0), ("a/c-v0", 20.0)):
        (tmp_path / name / "data").mkdir(parents=True)
        about = {"ref_min_score": low, "ref_max_score": 110.0}
        (tmp_path / name / "data" / "metadata.json").write_text(json.dumps(about))
    scale = reference_scale("HalfCheetah-v5", ["a/b-v0"])
    assert scale == ReferenceScale("Minari", "a/b-v0", 10.0, 110.0)
    # Datasets with different scales have no common score.
    assert reference_scale("HalfCheetah-v5", ["a/b-v0", "a/c-v0"]) is None


def test_minari_ids_are_read_from_a_saved_config() -> None:
    assert minari_ids(None) == []
    assert minari_ids({"kind": "minari", "id": "a/b-v0"}) == ["a/b-v0"]
    assert minari_ids([{"kind": "npz", "path": "x"}, {"kind": "minari", "id": "a-v0"}]) == ["a-v0"]


def test_evaluation_names_the_score_by_its_source_and_prints_the_scale(
    rl: Command,
    finished_run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = evaluate_checkpoint(finished_run.run_dir, num_episodes=1)
    assert not any("score" in key for key in plain)
    assert "score" not in rl("evaluate", "--checkpoint", finished_run.run_dir).out

    calls = []

    def known(environment: str | None, datasets: list[str]) -> ReferenceScale:
        calls.append((environment, datasets))
        return ReferenceScale("D4RL", "pendulum", -2000.0, 0.0)

    monkeypatch.setattr(workflows, "reference_scale", known)
    scored = evaluate_checkpoint(finished_run.run_dir, num_episodes=1)
    expected = 100 * (plain["eval_return_mean"] + 2000) / 2000
    assert scored == {**plain, "eval_d4rl_score": pytest.approx(expected)}
    printed = rl("evaluate", "--checkpoint", finished_run.run_dir, "--episodes", "1").out
    assert f"score {expected:.1f} (D4RL's scale for pendulum, 0 at -2000 and 100 at 0)" in printed
    assert calls[0] == ("Pendulum-v1", [])
    result = workflows.evaluate_policy_at(finished_run.run_dir, num_episodes=1)
    assert dataclasses.replace(result, scale=None).score is None
