"""Public names can be imported, and `import rl_training` is fast."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import BUILT_IN, each_algorithm, trainer_of

import rl_training
from rl_training import api
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.api import Agent

SOURCE = Path(rl_training.__file__).parent.parent


@pytest.mark.parametrize(
    "name",
    [
        "rl_training",
        "rl_training.algorithms",
        "rl_training.api",
        "rl_training.data",
        "rl_training.envs",
        "rl_training.experiment",
        "rl_training.models",
    ],
)
def test_all_names_in_dunder_all_exist(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    assert len(set(module.__all__)) == len(module.__all__)
    assert [listed for listed in module.__all__ if not hasattr(module, listed)] == []


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "rl_training",
            "Callback TrainConfig TrainResult TrainingInterrupted train resume_training "
            "evaluate_checkpoint evaluate_offline predict_checkpoint progress_callback",
        ),
        ("rl_training.algorithms.spec", "AlgorithmSpec get_algorithm_spec list_algorithm_specs"),
        ("rl_training.models", "MLPSACModel MLPTD3Model MLPREDQModel"),
        ("rl_training.models.mlp_sac", "MLPSACModel"),
        (
            "rl_training.runtime.workflows",
            "train evaluate_checkpoint predict_checkpoint resume_training",
        ),
        ("rl_training.training.controls", "build_control_callbacks"),
        ("rl_training.experiment.manager", "ExperimentManager"),
        (
            "rl_training.experiment.registry",
            "AlgorithmSpec get_algorithm_spec list_algorithm_specs register_algorithm",
        ),
        ("rl_training.types", "TrainResult UpdateResult"),
    ],
)
def test_documented_names_can_be_imported(module: str, names: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names.split() if not callable(getattr(found, name, None))] == []


@each_algorithm
@pytest.mark.parametrize(
    "home", ["rl_training", "rl_training.api", "rl_training.api.algorithms"], ids=str
)
def test_every_algorithm_has_a_managed_class(home: str, spec: AlgorithmSpec) -> None:
    name = spec.algorithm.__name__
    module = importlib.import_module(home)
    managed = getattr(module, name)
    assert managed is getattr(api, name)
    assert issubclass(managed, Agent)
    assert managed.algo == spec.name
    assert name in getattr(module, "__all__", [name])


@each_algorithm
def test_every_learner_is_exported_under_its_own_name_and_as_an_algorithm(
    spec: AlgorithmSpec,
) -> None:
    name = spec.algorithm.__name__
    algorithms = importlib.import_module("rl_training.algorithms")
    own_module = importlib.import_module(f"rl_training.algorithms.{spec.name}")
    assert getattr(own_module, name) is spec.algorithm
    for exported in (name, f"{name}Algorithm"):
        assert getattr(algorithms, exported) is spec.algorithm
        assert exported in algorithms.__all__


@each_algorithm
def test_every_algorithm_has_a_loss_function(spec: AlgorithmSpec) -> None:
    module = importlib.import_module(f"rl_training.algorithms.{spec.name}")
    assert callable(getattr(module, f"{spec.name}_loss"))


@each_algorithm
def test_every_algorithm_has_a_train_function(spec: AlgorithmSpec) -> None:
    parameters = inspect.signature(trainer_of(spec)).parameters
    assert list(parameters) == ["config", "callbacks", "progress"]
    for name in ("callbacks", "progress"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None


def test_the_package_exports_the_same_objects_as_its_modules() -> None:
    from rl_training import config
    from rl_training.runtime import workflows

    assert rl_training.TrainConfig is config.TrainConfig
    assert rl_training.train is workflows.train
    assert set(rl_training.__all__) <= set(dir(rl_training))


def test_an_unknown_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'SCA'"):
        _ = rl_training.SCA  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        exec("from rl_training import SCA")


def in_a_process(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = (
        "import sys, rl_training; dir(rl_training); "
        "print(*{'torch', 'gymnasium', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    assert in_a_process(script) == ""


def test_the_package_works_from_a_source_tree_that_is_not_installed() -> None:
    """The version and the algorithms are available without package metadata."""
    script = (
        "import importlib.metadata as metadata\n"
        "def missing(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version, metadata.entry_points = missing, lambda **_: ()\n"
        "import rl_training\n"
        "from rl_training.experiment import list_algorithm_specs\n"
        "assert isinstance(rl_training.__version__, str) and rl_training.__version__\n"
        "print(rl_training.__file__, *(spec.name for spec in list_algorithm_specs()))"
    )
    file, *names = in_a_process(script, PYTHONPATH=str(SOURCE)).split()
    assert Path(file).is_relative_to(SOURCE)
    assert {spec.name for spec in BUILT_IN} <= set(names)
