"""Every registered algorithm has all of its parts and is mentioned in the README."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import BUILT_IN, each_algorithm, first_task

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.config_files import load_config, packaged_configs

ROOT = Path(__file__).parent.parent
PACKAGE = Path(rl_training.__file__).parent
NOTES = "docs/plans/2026-03-12-"
ROADMAP, SOURCEBOOK = (
    f"{NOTES}rl-expansion-roadmap-design.md",
    f"{NOTES}rl-yearly-sourcebook-design.md",
)


def task_name(spec: AlgorithmSpec) -> str:
    """Return the task's name as used in file names."""
    return first_task(spec).partition("-")[0].lower()


def test_there_are_algorithms() -> None:
    assert "sac" in [spec.name for spec in BUILT_IN]


@each_algorithm
def test_an_algorithm_has_all_of_its_files(spec: AlgorithmSpec) -> None:
    name, task = spec.name, task_name(spec)
    expected = [
        f"src/rl_training/algorithms/{name}.py",
        f"src/rl_training/runtime/{name}_trainer.py",
        f"src/rl_training/assets/configs/{name}/{task}.yaml",
        f"examples/{name}_{task}_reference.py",
        f"tests/test_{name}_update.py",
        f"tests/test_{name}_trainer_smoke.py",
        f"tests/test_{name}_reference_script.py",
    ]
    assert [path for path in expected if not (ROOT / path).is_file()] == []


@each_algorithm
def test_the_readme_table_lists_every_algorithm_with_its_configs(spec: AlgorithmSpec) -> None:
    [row] = [
        line for line in read("README.md").splitlines() if line.startswith(f"| `{spec.name}` |")
    ]
    own = [name for name in packaged_configs() if name.startswith(f"{spec.name}/")]
    assert [name for name in own if f"`{name}`" not in row] == []


@each_algorithm
def test_the_roadmap_lists_every_algorithm(spec: AlgorithmSpec) -> None:
    done = [row for row in read(ROADMAP).splitlines() if row.endswith("| in |")]
    assert [row for row in done if f"`{spec.name}`" in row]


def test_the_roadmap_lists_the_next_algorithms() -> None:
    assert [row for row in read(ROADMAP).splitlines() if row.endswith("| next |")]


@each_algorithm
def test_the_list_of_methods_by_year_contains_every_algorithm(spec: AlgorithmSpec) -> None:
    assert [row for row in read(SOURCEBOOK).splitlines() if row.endswith(f"| `{spec.name}` |")]


@pytest.mark.parametrize(
    ("note", "subjects"),
    [
        ("mainstream-rl-package-design.md", ["config", "API", "offline to online (RLPD)"]),
        (
            "rlpd-phase13.md",
            [
                *("Box actions", "flat vector observations", "single process", "offline path"),
                *("No recurrence, no images, no distributed runtime", "SAC", "replay"),
                *("offline-to-online baseline", "automatic temperature", "LayerNorm", "ensemble"),
            ],
        ),
    ],
)
def test_a_design_note_covers_its_subjects(note: str, subjects: list[str]) -> None:
    text = " ".join(read(NOTES + note).split())
    assert [subject for subject in subjects if subject not in text] == []


@pytest.mark.parametrize("name", ["eval_interval", "early_stopping", "make demo", "make test"])
def test_the_readme_mentions(name: str) -> None:
    assert name in read("README.md")


@each_algorithm
def test_the_first_config_of_an_algorithm_is_packaged_and_uses_its_first_task(
    spec: AlgorithmSpec,
) -> None:
    name = f"{spec.name}/{task_name(spec)}"
    assert name in packaged_configs()
    assert load_config(name).env_id == first_task(spec)


@pytest.mark.parametrize("name", sorted(packaged_configs()))
def test_packaged_configs_load_and_belong_to_their_algorithm(name: str) -> None:
    config = load_config(name)
    assert config.algo == name.split("/")[0]
    assert config.env_id is not None
    assert config.run_name is None


def test_configs_at_the_root_are_the_packaged_files() -> None:
    seen = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    packaged = PACKAGE / "assets/configs"
    assert seen == {path.relative_to(packaged) for path in packaged.rglob("*.yaml")}
    assert [path for path in seen if not (ROOT / "configs" / path).samefile(packaged / path)] == []


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
