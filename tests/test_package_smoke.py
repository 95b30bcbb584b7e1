"""Completeness: whatever is registered has all of its parts, and the README speaks of it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from helpers import BUILT_IN

import rl_training
from rl_training import api
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.config_files import load_config, packaged_configs

ROOT = Path(__file__).parent.parent
PACKAGE = Path(rl_training.__file__).parent
ROADMAP = ROOT / "docs/plans/2026-03-12-rl-expansion-roadmap-design.md"

each_algorithm = pytest.mark.parametrize("spec", BUILT_IN, ids=lambda spec: spec.name)


def first_task(spec: AlgorithmSpec) -> str:
    return "cartpole" if spec.discrete_actions else "pendulum"


def test_there_are_algorithms() -> None:
    assert "sac" in [spec.name for spec in BUILT_IN]


@each_algorithm
def test_an_algorithm_has_all_of_its_files(spec: AlgorithmSpec) -> None:
    name, task = spec.name, first_task(spec)
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
def test_an_algorithm_has_a_trainer_of_its_name(spec: AlgorithmSpec) -> None:
    module = importlib.import_module(f"rl_training.runtime.{spec.name}_trainer")
    assert callable(getattr(module, f"train_{spec.name}"))


@each_algorithm
def test_an_algorithm_has_its_loss_as_a_function(spec: AlgorithmSpec) -> None:
    module = importlib.import_module(f"rl_training.algorithms.{spec.name}")
    assert callable(getattr(module, f"{spec.name}_loss"))


@each_algorithm
def test_an_algorithm_has_a_managed_class_and_an_exported_learner(spec: AlgorithmSpec) -> None:
    name = spec.algorithm.__name__
    managed = getattr(api, name)
    assert managed.algo == spec.name
    assert getattr(rl_training, name) is managed
    assert name in api.__all__
    assert name in rl_training.__all__
    algorithms = importlib.import_module("rl_training.algorithms")
    assert getattr(algorithms, f"{name}Algorithm") is spec.algorithm
    assert f"{name}Algorithm" in algorithms.__all__


@each_algorithm
def test_an_algorithm_is_in_the_readmes_table(spec: AlgorithmSpec) -> None:
    rows = [line for line in read("README.md").splitlines() if line.startswith("|")]
    assert [row for row in rows if f"`{spec.name}`" in row]


@each_algorithm
def test_the_roadmap_names_what_is_in(spec: AlgorithmSpec) -> None:
    assert re.search(rf"\b{re.escape(spec.name)}\b", ROADMAP.read_text(), re.IGNORECASE)


@pytest.mark.parametrize("name", ["eval_interval", "early_stopping", "make demo", "make test"])
def test_the_readme_documents(name: str) -> None:
    assert name in read("README.md")


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


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", read(page))
    missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
    assert not missing
