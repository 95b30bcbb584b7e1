"""Signatures, `help` and type stubs of the managed classes."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import generate_api
import pytest
from helpers import BUILT_IN, each_algorithm
from pydantic import Field

import rl_training
from rl_training.algorithms.sac import SAC as SACLearner
from rl_training.algorithms.sac import SACHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.api import Agent, parameters
from rl_training.config import TrainConfig
from rl_training.config_descriptions import description_of

ROOT = Path(__file__).parent.parent
SET_BY_THE_CLASS = {"algo", "seeds"}


def managed_class(spec: AlgorithmSpec) -> type[Agent]:
    found: type[Agent] = getattr(rl_training, spec.algorithm.__name__)
    return found


def expected_defaults(spec: AlgorithmSpec) -> dict[str, Any]:
    """Return the defaults of all config keys and hyper-parameters."""
    fields = {**TrainConfig.model_fields, **spec.hyperparameters_type.model_fields}
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in fields.items()
        if name not in SET_BY_THE_CLASS
    }
    return {**defaults, "algo_kwargs": None}


# Signatures and help


@each_algorithm
def test_the_signature_has_every_setting_with_its_default(spec: AlgorithmSpec) -> None:
    environment, *settings = inspect.signature(managed_class(spec)).parameters.values()
    assert (environment.name, environment.default) == ("env", None)
    assert {each.name: each.default for each in settings} == expected_defaults(spec)
    assert {each.kind for each in settings} == {inspect.Parameter.KEYWORD_ONLY}


def test_annotations_are_the_accepted_types() -> None:
    _, *settings = inspect.signature(rl_training.IQL).parameters.values()
    shown = {each.name: parameters.type_name(each.annotation) for each in settings}
    assert shown["learning_rate"] == "float"
    assert shown["max_grad_norm"] == "float | None"
    assert shown["hidden_sizes"] == "Sequence[int]"
    assert shown["learning_starts"] == "int | Literal['auto']"
    assert shown["learning_rate_schedule"] == "Literal['constant', 'linear', 'cosine', 'auto']"
    assert shown["output_dir"] == "str | Path"
    assert shown["compile"] == "bool | Literal['auto', 'on', 'off']"
    assert shown["early_stopping"] == "EarlyStopping | Mapping[str, Any] | None"
    assert shown["algo_kwargs"] == "IQLHyperparameters | Mapping[str, Any] | None"


@each_algorithm
def test_help_explains_every_setting(spec: AlgorithmSpec) -> None:
    text = inspect.getdoc(managed_class(spec))
    assert text is not None
    assert text.startswith(spec.title)
    shown = re.findall(r"^    (\w+) \(.*?:", text.replace("\n        ", " "), re.MULTILINE)
    assert set(shown) == set(expected_defaults(spec))
    without = [each.name for each in parameters.parameters_of(spec) if not each.description]
    assert without == []


def test_a_subclass_that_changes_a_default_keeps_the_description() -> None:
    class Faster(SACHyperparameters):
        tau: float = 0.01

    own = description_of(Faster, "tau")
    assert own == "Polyak coefficient: fraction by which target networks move toward their networks"


def test_a_user_defined_constructor_keeps_its_signature() -> None:
    class Mine(rl_training.SAC):
        """Mine."""

        def __init__(self, width: int) -> None:
            super().__init__(hidden_sizes=[width])

    class Child(Mine):
        """Child."""

    for own in (Mine, Child):
        assert list(inspect.signature(own).parameters) == ["width"]
        assert own.__doc__ == f"{own.__name__}."


def test_a_class_of_an_unregistered_algorithm_has_a_signature_and_help() -> None:
    class Later(Agent):
        """Later."""

        algo = "not_registered_yet"

    own = ["env", "others", "verbose", "settings"]
    assert list(inspect.signature(Later).parameters) == own
    assert list(inspect.signature(Agent).parameters) == own
    assert Later.__doc__ == "Later."


# Generated files


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    status = generate_api.main(["--check"])
    assert (status, capsys.readouterr().err) == (0, "")


def test_outdated_files_and_trainers_without_algorithm_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = generate_api.generate(BUILT_IN)
    monkeypatch.setattr(generate_api, "ROOT", tmp_path)
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    gone = Path("src/rl_training/runtime/gone_trainer.py")
    (tmp_path / gone).write_text(generate_api.NOTICE)
    by_hand = Path("src/rl_training/runtime/curriculum_trainer.py")
    (tmp_path / by_hand).write_text("# Not generated.")
    edited = Path("src/rl_training/api/algorithms.py")
    (tmp_path / edited).write_text(texts[edited].replace("class SAC(", "class Sac("))
    monkeypatch.setattr(generate_api, "generate", lambda specs: texts)

    assert generate_api.main(["--check"]) == 1
    named = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert named == [str(edited), str(gone)]
    assert generate_api.main([]) == 0
    assert generate_api.main(["--check"]) == 0
    assert not (tmp_path / gone).exists()
    assert (tmp_path / by_hand).exists()


class ToyHyperparameters(SACHyperparameters):
    wobble: float | Literal["auto"] = Field(0.25, ge=0)
    """How much it wobbles"""


class Toy(SACLearner):
    hyperparameters_type = ToyHyperparameters


def test_a_new_algorithm_is_in_all_generated_files() -> None:
    spec = AlgorithmSpec(
        name="toy",
        title="Toy",
        reference="a test",
        algorithm=Toy,
        regimes=("offline", "online"),
        actions=("discrete",),
    )
    files = generate_api.generate([*BUILT_IN, spec])
    texts = {path.relative_to("src/rl_training").as_posix(): text for path, text in files.items()}
    assert listed_in(texts["__init__.py"]) - listed_in(read("__init__.py")) == {"Toy"}
    assert listed_in(texts["api/__init__.py"]) - listed_in(read("api/__init__.py")) == {"Toy"}
    learners = listed_in(texts["algorithms/__init__.py"])
    assert learners - listed_in(read("algorithms/__init__.py")) == {"Toy", "ToyAlgorithm"}
    assert f"from {Toy.__module__} import Toy\n" in texts["algorithms/__init__.py"]
    assert 'class Toy(Agent):\n    """Toy for discrete actions.\n' in texts["api/algorithms.py"]
    assert "offline from recorded data and can continue online.\n" in texts["api/algorithms.py"]
    assert '    algo = "toy"\n' in texts["api/algorithms.py"]
    stub = texts["api/algorithms.pyi"]
    assert '        wobble: float | Literal["auto"] = 0.25,\n' in stub
    assert "            wobble: How much it wobbles.\n" in stub
    assert "def train_toy(" in texts["runtime/toy_trainer.py"]
    assert 'train_algorithm("toy", config, callbacks, progress)' in texts["runtime/toy_trainer.py"]


def read(name: str) -> str:
    return (ROOT / "src/rl_training" / name).read_text(encoding="utf-8")


def listed_in(text: str) -> set[str]:
    """Return the names in a module's `__all__`."""
    lists = [
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign | ast.AugAssign)
        if "__all__" in ast.unparse(node).split(" ")
        if isinstance(node.value, ast.List)
    ]
    return {name for each in lists for name in ast.literal_eval(each)}


# Type checkers


def test_the_package_is_marked_as_typed() -> None:
    assert resources.files("rl_training").joinpath("py.typed").is_file()


@each_algorithm
def test_the_stub_has_the_parameters_of_the_models(spec: AlgorithmSpec) -> None:
    [constructor] = [
        method
        for node in ast.parse(read("api/algorithms.pyi")).body
        if isinstance(node, ast.ClassDef) and node.name == spec.algorithm.__name__
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    ]
    arguments = constructor.args
    defaults = {
        argument.arg: ast.literal_eval(default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    }
    assert defaults == expected_defaults(spec)
    assert [argument.arg for argument in arguments.args] == ["self", "env"]
    assert (arguments.vararg, arguments.kwarg) == (None, None)


PROGRAM = """
from pathlib import Path
from typing import assert_type

import gymnasium as gym
import numpy as np
import torch

import rl_training
from rl_training import BC, DQN, SAC, TD3BC, Callback, TrainConfig, TrainResult
from rl_training.algorithms import SACAlgorithm
from rl_training.api import Agent

agent = SAC("Pendulum-v1", learning_rate=1e-3, seed=0, hidden_sizes=[64, 64], alpha="auto")
result = agent.learn(1_000, callbacks=[Callback()])
agent.learn(1e5, Callback(), progress=False)
module: torch.nn.Module = agent.policy.module
assert_type(result, TrainResult)
assert_type(result.metrics["eval_return_mean"], float)
assert_type(result.run_dir, Path)
assert_type(agent.evaluate(num_episodes=2), dict[str, float])
assert_type(agent.predict(np.zeros(3)), np.ndarray)
assert_type(agent.save("policy"), Path)
assert_type(SAC.load("policy"), SAC)
assert_type(SAC.from_config("sac/pendulum", total_timesteps=5), SAC)
assert_type(agent.config, TrainConfig)
assert_type(agent.result, TrainResult | None)
assert_type(rl_training.evaluate_checkpoint(result.run_dir)["eval_return_mean"], float)

SAC(TrainConfig(algo="sac"), compile=True, output_dir=Path("runs"))
SAC(lambda: gym.make("Pendulum-v1"), early_stopping={"patience": 3}, env_kwargs={"g": 9.8})
SAC(gym.make("Pendulum-v1"), alpha=0.2, learning_starts=0, target_entropy=-1)
TD3BC(dataset={"observations": np.zeros((2, 3))})
TD3BC("Pendulum-v1", dataset=[{"kind": "random", "size": 10}], regime="mixed")

SAC("Pendulum-v1", learning_rate="x")  # refused: arg-type
SAC("Pendulum-v1", learning_rte=1e-3)  # refused: call-arg
SAC("Pendulum-v1", activation="rleu")  # refused: arg-type
SAC("Pendulum-v1", seeds=[0, 1])  # refused: call-arg
SAC("Pendulum-v1", total_timesteps=1e5)  # refused: arg-type
SAC("Pendulum-v1", hidden_sizes=["a"])  # refused: list-item
SAC("Pendulum-v1", epsilon_start=1.0)  # refused: call-arg
SAC(7)  # refused: arg-type
DQN("CartPole-v1", tau=None)  # refused: arg-type
BC(num_critics=2)  # refused: call-arg
agent.learn("long")  # refused: arg-type
result.metrics["eval_return_mean"].upper()  # refused: attr-defined
rl_training.SCA  # refused: attr-defined


class Mine(Agent):
    algo = "mine"


Mine("Pendulum-v1", anything=1).learn()
"""


def test_mypy_accepts_correct_and_rejects_incorrect_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mypy import api

    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    monkeypatch.chdir(ROOT)  # uses the cache of `make lint`
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    output, problems, _ = api.run(["--no-error-summary", str(program)])
    assert problems == ""
    found = re.findall(r"program\.py:(\d+): error: .*\[([\w-]+)\]$", output, re.MULTILINE)
    lines = enumerate(PROGRAM.splitlines(), start=1)
    marked = ((str(number), line.partition("# refused: ")[2]) for number, line in lines)
    assert found == [(number, code) for number, code in marked if code], output
