"""Published curves: those that ship equal the collected data, with source and version."""

from __future__ import annotations

import csv
from importlib import resources
from pathlib import Path

import pytest

from rl_training.experiment.published import published_curves

SHARED = Path(__file__).parents[2] / "shared" / "published" / "online.csv"
COLLECTED = {
    "SAC": "SAC",
    "REDQ": "REDQ20",
    "CrossQ": "CrossQ",
    "SimbaV2": "SimbaV2_2",
    "XQC": "XQCrepo",
    "FlashSAC": "FlashSAC",
}
GYM = ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5"]
CONTROL = ["dog-run", "dog-stand", "dog-trot", "dog-walk"]
CONTROL += ["humanoid-run", "humanoid-stand", "humanoid-walk"]


@pytest.mark.skipif(not SHARED.is_file(), reason="the collected data is not here")
def test_the_shipped_numbers_are_those_that_were_collected() -> None:
    with SHARED.open(newline="") as lines:
        collected = {
            (row["method"], row["task"], int(row["env_steps"])): (
                *(float(row["mean_return"]), float(row["std_over_seeds"]), int(row["seeds"])),
            )
            for row in csv.DictReader(lines)
        }
    shipped = {}
    for environment in [*GYM, *(f"dm_control/{task}-v0" for task in CONTROL)]:
        for curve in published_curves(environment):
            for step, mean, deviation in zip(curve.steps, curve.mean, curve.deviation, strict=True):
                key = (COLLECTED[curve.method], curve.task, int(step))
                shipped[key] = (mean, deviation, curve.seeds)
    assert shipped == {
        key: values for key, values in collected.items() if key[0] in COLLECTED.values()
    }


@pytest.mark.parametrize("environment", GYM)
def test_every_method_has_one_curve_with_its_source(environment: str) -> None:
    curves = published_curves(environment)
    assert [curve.method for curve in curves] == list(COLLECTED)
    for curve in curves:
        assert curve.steps.tolist() == sorted(set(curve.steps.tolist()))
        assert len(curve.steps) == len(curve.mean) == len(curve.deviation) == 7
        assert curve.steps[-1] == 1_000_000
        assert (curve.deviation > 0).all()
        assert curve.source.startswith("github.com/")


def test_the_version_of_the_task_is_stated() -> None:
    assert "same version" in published_curves("Hopper-v4")[0].version_note
    note = published_curves("Hopper-v5")[0].version_note
    assert note == "published for Hopper-v4, not v5: the healthy reward of the first steps differs"
    assert "observations differ" in published_curves("Ant-v5")[0].version_note
    assert published_curves("HalfCheetah-v3")[0].version_note.endswith("not v3")


def test_the_variant_of_a_method_is_stated() -> None:
    variants = {curve.method: curve.variant for curve in published_curves("Hopper-v5")}
    assert variants["REDQ"] == "20 updates per step"
    assert variants["SimbaV2"] == "2 updates per step"


@pytest.mark.parametrize("environment", ["Pendulum-v1", "Hopper-v5 (TimeLimit)", "(own)", ""])
def test_other_tasks_have_no_published_curves(environment: str) -> None:
    assert published_curves(environment) == []


def test_every_row_of_the_file_has_a_source() -> None:
    file = resources.files("rl_training") / "assets" / "published" / "online.csv"
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert {len(row) for row in rows} == {8}
    assert all(row["source"].startswith("github.com/") for row in rows)
