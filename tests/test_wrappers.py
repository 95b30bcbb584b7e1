"""Wrappers of configs: where they apply, which modules they may come from, and resuming with them.

A config or a run folder may come from a stranger, so it must never import a module by itself.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import Command, Outcome, tree
from helpers import StopAt, hashes, metric_rows
from test_checkpoint_workflows import rewrite

from rl_training import SAC, TrainConfig, evaluate_checkpoint, resume_training, train
from rl_training.algorithms.spec import _registered
from rl_training.config_files import dump_yaml, load_config
from rl_training.datasets.workflows import record_dataset
from rl_training.envs import (
    TRUSTED_MODULES,
    EnvironmentFactory,
    EvaluationFactory,
    VectorEnvironment,
    environment_factory,
    probe_resume_level,
    trust_modules,
)
from rl_training.envs.wrapping import load_wrappers
from rl_training.errors import CheckpointError, ConfigError, EnvironmentSetupError
from rl_training.types import Json, ResumeLevel, TrainResult

MODULE = """
    import pathlib

    import gymnasium as gym
    import numpy as np
    from gymnasium.wrappers import RecordVideo  # a wrapper of a module that nobody trusted

    pathlib.Path(__file__).with_suffix(".imported").touch()

    class Double(gym.ObservationWrapper):
        '''Has no state.'''

        def observation(self, observation):
            return observation * 2

    class Add(gym.ObservationWrapper):
        def __init__(self, env, number=1.0):
            super().__init__(env)
            self.number = np.float32(number)

        def observation(self, observation):
            return observation + self.number

    class Drift(gym.ObservationWrapper):
        '''Has state that outlives an episode.'''

        def __init__(self, env):
            super().__init__(env)
            self.steps = 0

        def observation(self, observation):
            self.steps += 1
            return observation + np.float32(np.sin(self.steps))

    class Slope(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.full(2, 0.25, np.float32), {}

        def step(self, action):
            return np.full(2, 0.5, np.float32), 0.0, False, True, {}

    def function(env):
        return env

    instance = Double(gym.make("Pendulum-v1"))

    gym.register("%s-v0", entry_point=Slope)
"""


@pytest.fixture
def module(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A module that is on the path but not imported; importing it makes a file `.imported`."""
    name = f"wraps_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE) % name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    TRUSTED_MODULES.clear()
    sys.modules.pop(name, None)
    gym.registry.pop(f"{name}-v0", None)


@pytest.fixture
def trusted(module: str) -> str:
    trust_modules(module)
    return module


def forget(module: str) -> None:
    """Make this process like a new one, which has not imported the module."""
    TRUSTED_MODULES.clear()
    sys.modules.pop(module, None)
    gym.registry.pop(f"{module}-v0", None)


def was_imported(tmp_path: Path, module: str) -> bool:
    return (tmp_path / f"{module}.imported").exists()


def settings(*wrappers: str, **kwargs: Any) -> list[Json]:
    return [{"wrapper": name, "kwargs": kwargs} for name in wrappers]


def wrapped_pendulum(*wrappers: str, **kwargs: Any) -> EnvironmentFactory:
    return environment_factory("Pendulum-v1", {}, None, wrappers=settings(*wrappers, **kwargs))


# Where wrappers apply


def test_wrappers_apply_in_order_and_take_keyword_arguments(trusted: str) -> None:
    plain, _ = gym.make("Pendulum-v1").reset(seed=3)
    factory = wrapped_pendulum(f"{trusted}:Double", f"{trusted}:Add")
    np.testing.assert_array_equal(factory().reset(seed=3)[0], plain * 2 + 1)
    other_order = wrapped_pendulum(f"{trusted}:Add", f"{trusted}:Double")
    np.testing.assert_array_equal(other_order().reset(seed=3)[0], (plain + 1) * 2)
    five = wrapped_pendulum(f"{trusted}:Add", number=5)
    np.testing.assert_array_equal(five().reset(seed=3)[0], plain + 5)
    evaluation = EvaluationFactory.like(factory, None)
    np.testing.assert_array_equal(evaluation().reset(seed=3)[0], plain * 2 + 1)


def test_wrappers_apply_around_your_own_environment(trusted: str) -> None:
    factory = environment_factory(
        None, {}, lambda: gym.make("Pendulum-v1"), wrappers=settings(f"{trusted}:Double")
    )
    plain, _ = gym.make("Pendulum-v1").reset(seed=3)
    np.testing.assert_array_equal(factory().reset(seed=3)[0], plain * 2)


@pytest.mark.usefixtures("no_pictures")
def test_a_run_trains_evaluates_and_records_in_its_wrappers(
    trusted: str, make_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Observations of Pendulum are at most 8; with the wrapper they are at least 90."""
    far = [{"wrapper": f"{trusted}:Add", "kwargs": {"number": 100.0}}]
    result = train(make_config(wrappers=far))
    assert isinstance(result, TrainResult)
    replay = next(result.checkpoint_path.glob("replay-*"))
    from safetensors.numpy import load_file

    assert load_file(replay)["rows"][:, :3].min() >= 90
    assert evaluate_checkpoint(result.run_dir, num_episodes=1)["eval_return_mean"] < 0
    recorded = record_dataset(tmp_path / "data.npz", 20, checkpoint=result.run_dir)
    assert np.load(recorded)["observations"].min() >= 90
    recorded = record_dataset(tmp_path / "r.npz", 20, env_id="Pendulum-v1", wrappers=far)
    assert np.load(recorded)["observations"].min() >= 90
    with pytest.raises(Exception, match="in the wrappers that it was trained with"):
        record_dataset(tmp_path / "w.npz", 20, checkpoint=result.run_dir, wrappers=far)


def test_managed_classes_take_wrappers_and_saved_policies_keep_them(
    trusted: str, tmp_path: Path, make_config: Callable[..., dict[str, Any]]
) -> None:
    config = make_config(wrappers=[f"{trusted}:Double"], total_timesteps=60)
    agent = SAC(TrainConfig(**config))
    agent.learn()
    policy = agent.save(tmp_path / "policy")
    description = json.loads((policy / "policy.json").read_text())["environment"]
    assert description["wrappers"] == settings(f"{trusted}:Double")
    assert description["modules"] == [trusted]
    again = SAC.load(policy)
    assert [section.wrapper for section in again.config.wrappers] == [f"{trusted}:Double"]
    assert again.evaluate(1, seed=1) == agent.evaluate(1, seed=1)
    forget(trusted)
    with pytest.raises(EnvironmentSetupError, match=rf"--import {trusted} .*trust_modules"):
        SAC.load(policy).evaluate(1)


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.faults)])
def test_worker_processes_know_the_module_and_its_wrappers(
    trusted: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process has imported neither the wrapper's module nor the environment's."""
    other = f"{trusted}_other"
    (tmp_path / f"{other}.py").write_text(
        "import gymnasium as gym\n"
        "class Double(gym.ObservationWrapper):\n"
        "    def observation(self, observation):\n"
        "        return observation * 2\n"
    )
    trust_modules(other)
    context = multiprocessing.get_context(method)
    monkeypatch.setattr(multiprocessing, "get_context", lambda: context)
    factory = environment_factory(f"{trusted}-v0", {}, None, wrappers=settings(f"{other}:Double"))
    with VectorEnvironment(factory, 2, 0, backend="async") as vector:
        np.testing.assert_array_equal(vector.reset(), np.full((2, 2), 0.5, np.float32))


# Resuming


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("wrapper", ["Double", "Drift"])
def test_a_run_with_wrappers_resumes_bit_for_bit(
    trusted: str, wrapper: str, make_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    name = f"{trusted}:{wrapper}"
    assert probe_resume_level(wrapped_pendulum(name)) is ResumeLevel.BIT_EXACT
    config = make_config(wrappers=[name], num_envs=2)
    complete = train({**config, "run_name": "complete"})
    stopped = train({**config, "run_name": "stopped"}, callbacks=[StopAt(70)])
    assert isinstance(complete, TrainResult)
    assert isinstance(stopped, TrainResult)
    resumed = resume_training(stopped.run_dir)
    assert resumed.stop_reason == "total_timesteps"
    assert hashes(resumed.checkpoint_path) == hashes(complete.checkpoint_path)
    assert metric_rows(resumed.run_dir)[-1] == metric_rows(complete.run_dir)[-1]


# Which modules are trusted


def test_a_name_imports_nothing_and_an_imported_module_is_not_trusted(
    module: str, tmp_path: Path
) -> None:
    for name in (f"{module}:Double", "gymnasium.wrappers:ClipAction", "os:system"):
        with pytest.raises(EnvironmentSetupError, match=f"--import {name.partition(':')[0]}"):
            wrapped_pendulum(name)
    assert not was_imported(tmp_path, module)
    trust_modules("gymnasium")  # says nothing about gymnasium.wrappers
    with pytest.raises(EnvironmentSetupError, match=r"--import gymnasium\.wrappers"):
        wrapped_pendulum("gymnasium.wrappers:ClipAction")
    trust_modules("gymnasium.wrappers")
    assert isinstance(wrapped_pendulum("gymnasium.wrappers:ClipAction")(), gym.Wrapper)


@pytest.mark.parametrize("name", ["function", "instance", "Slope", "np", "missing"])
def test_only_classes_that_derive_from_wrapper_are_used(trusted: str, name: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=f"{trusted}:{name}: "):
        wrapped_pendulum(f"{trusted}:{name}")


def test_functions_of_trusted_modules_are_never_called(tmp_path: Path) -> None:
    trust_modules("os", "subprocess", "builtins")
    try:
        for name in ("os:system", "subprocess:Popen", "builtins:eval", "builtins:type"):
            with pytest.raises(EnvironmentSetupError, match=r"derives from gymnasium\.Wrapper"):
                load_wrappers(settings(name))
    finally:
        TRUSTED_MODULES.clear()


def test_a_wrapper_that_a_trusted_module_imports_is_refused(trusted: str) -> None:
    """The module's own wrappers are trusted; `RecordVideo` writes files wherever it is told to."""
    with pytest.raises(EnvironmentSetupError, match=r"RecordVideo belongs to gymnasium\.wrappers"):
        wrapped_pendulum(f"{trusted}:RecordVideo")


@pytest.mark.parametrize(
    "name",
    [
        "os",
        "os:path.join",
        "os.path:join.__call__",
        "__main__:Wrapper",
        "gymnasium:__dict__",
        "gymnasium:Wrapper.__init__",
        "a:b:c",
        ":Wrapper",
        "gymnasium:",
        "../evil:Wrapper",
        "evil; rm -rf ~:Wrapper",
        "evil\x1b[2J:Wrapper",
        "evil:Wrapper\n",
        "évil:Wrapper",
        f"{'a' * 300}:Wrapper",
    ],
)
def test_names_that_are_not_module_and_class_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"wrappers\[0\]"):
        TrainConfig(algo="sac", env_id="Pendulum-v1", wrappers=[name])


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [
        ("a:B", "must be a list"),
        ({"wrapper": "a:B"}, "must be a list"),
        ([3], r"wrappers\[0\] = 3: must be module:Class"),
        ([{"kwargs": {}}], r"wrappers\[0\]\.wrapper: required"),
        (["a:B", {"wrapper": "a:B", "kwarg": {}}], r"wrappers\[1\]\.kwarg .*did you mean 'kwargs'"),
        ([{"wrapper": "a:B", "kwargs": [1]}], "must be a mapping"),
        ([{"wrapper": "a:B", "kwargs": {"x": float("inf")}}], "wrappers: .*JSON"),
    ],
)
def test_wrong_settings_are_explained(wrappers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(algo="sac", env_id="Pendulum-v1", wrappers=wrappers)


def test_settings_survive_a_config_file(tmp_path: Path) -> None:
    wrappers = ["a.b:C", {"wrapper": "d:E", "kwargs": {"x": [1, 2]}}]
    config = TrainConfig(algo="sac", wrappers=wrappers)
    (tmp_path / "config.yaml").write_text(dump_yaml(config.to_mapping()))
    assert load_config(tmp_path / "config.yaml") == config
    assert config.to_mapping()["wrappers"] == [{"wrapper": "a.b:C", "kwargs": {}}, wrappers[1]]


def test_a_refused_argument_is_explained(trusted: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=r":Add .*nmber=3: .*unexpected keyword"):
        wrapped_pendulum(f"{trusted}:Add", nmber=3)()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here", "No module named"),
        (".relative", "not the name of a module"),
        ("folder/file.py", r"leave out \.py: folder\.file"),
        ("./file.py", r"leave out \.py: file\."),
        ("./file", r"such as my_package.my_module; use file\."),
        ("../file.py", r"such as my_package.my_module\.$"),
        ("/folder/file.py", r"such as my_package.my_module\.$"),
        ("", "not the name of a module"),
        ("__main__", "not the name of a module"),
    ],
)
def test_a_module_that_cannot_be_imported_is_explained(name: str, message: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        trust_modules(name)
    assert not TRUSTED_MODULES


def test_an_error_inside_a_module_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks_at_import.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EnvironmentSetupError, match="'breaks_at_import': ZeroDivisionError"):
        trust_modules("breaks_at_import")


# The command line


def assert_refused(done: Outcome, *words: str) -> None:
    assert done.code == 2
    assert [word for word in words if word not in done.err] == []
    assert "Traceback" not in done.err
    assert len(re.findall(r"^error: ", done.err, re.MULTILINE)) == 1


@pytest.fixture
def config_file(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_yaml({**tiny_config, "output_dir": "runs", "total_timesteps": 60}))
    return path


@pytest.mark.usefixtures("no_pictures")
def test_commands_ask_for_the_modules_of_a_run(
    rl: Command, work: Path, config_file: Path, module: str, tmp_path: Path
) -> None:
    """`--wrapper` adds to the wrappers of the config and trusts the module of both."""
    config_file.write_text(config_file.read_text() + f"\nwrappers: ['{module}:Double']\n")
    assert_refused(rl("train", "-c", config_file), f"add --import {module}")
    assert not was_imported(tmp_path, module)
    trained = rl("train", "-c", config_file, "--wrapper", f"{module}:Add")
    (run,) = (work / "runs").iterdir()
    assert (trained.code, trained.err) == (0, "")
    assert f"rl-training evaluate runs/{run.name} --import {module}\n" in trained.out
    config = load_config(run / "config.yaml")
    assert [each.wrapper for each in config.wrappers] == [f"{module}:Double", f"{module}:Add"]
    metadata = json.loads((run / "metadata.json").read_text())
    assert metadata["environment"]["modules"] == [module]

    (tmp_path / f"{module}.imported").unlink()
    for command in (
        ["evaluate", str(run)],
        ["resume", str(run), "--total-timesteps", "70"],
        ["dataset", "record", "--checkpoint", str(run), "--steps", "20", "--out", "data.npz"],
    ):
        forget(module)
        before = tree(work)
        refused = rl(*command)
        assert_refused(refused, f"if you trust this code, add --import {module}")
        assert f"run: rl-training {' '.join(command)} --import {module}\n" in refused.err
        assert not was_imported(tmp_path, module)
        assert tree(work) == before
    for command in (["evaluate", str(run)], ["resume", str(run), "--total-timesteps", "70"]):
        assert rl(*command, "--import", module).code == 0
    forget(module)
    assert rl("predict", run, "--obs", "[1, 0, 0]").code == 0  # needs no environment
    assert module not in sys.modules


@pytest.mark.usefixtures("no_pictures")
def test_the_module_of_an_environment_is_asked_for_even_if_its_id_is_registered(
    rl: Command, work: Path, config_file: Path, module: str, tmp_path: Path
) -> None:
    """It may register another environment with an id that is known without it."""
    identity = f"{module}-v0"
    assert rl("train", "-c", config_file, "--env", f"{module}:{identity}").code == 0
    (run,) = (work / "runs").iterdir()
    TRUSTED_MODULES.clear()
    assert rl("evaluate", run).code == 0  # imported, as by a Python program
    registered = gym.registry[identity]
    forget(module)
    (tmp_path / f"{module}.imported").unlink()
    for known in ({}, {identity: registered}):
        gym.registry.update(known)
        for command in (
            ["evaluate", str(run)],
            ["resume", str(run)],
            ["dataset", "record", "--checkpoint", str(run), "--steps", "20", "--out", "data.npz"],
        ):
            done = rl(*command)
            assert_refused(done, identity, f"trained with --import {module}")
            assert f"run: rl-training {' '.join(command)} --import {module}\n" in done.err
            assert not was_imported(tmp_path, module)
    forget(module)
    assert rl("evaluate", run, "--import", module).code == 0


ALGORITHM = """
    import dataclasses

    from rl_training.algorithms.sac import SPEC
    from rl_training.algorithms.spec import register_algorithm

    register_algorithm(dataclasses.replace(SPEC, name="%s"))
"""


@pytest.mark.usefixtures("no_pictures")
def test_the_module_of_an_algorithm_is_asked_for(
    rl: Command, work: Path, module: str, tmp_path: Path, config_file: Path
) -> None:
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(ALGORITHM) % module)
    config_file.write_text(config_file.read_text().replace("algo: sac", f"algo: {module}"))
    assert rl("train", "-c", config_file, "--import", module).code == 0
    (run,) = (work / "runs").iterdir()
    forget(module)
    del _registered[module]
    for command in ("evaluate", "resume"):
        assert_refused(rl(command, run), f"add --import {module}")
    refused = rl("predict", run, "--obs", "[1, 0, 0]")
    assert_refused(refused, "unknown algorithm", f"add --import {module}")
    assert rl("predict", run, "--obs", "[1, 0, 0]", "--import", module).code == 0
    del _registered[module]


EVIL = ["os:system", "subprocess:Popen", "builtins:eval", "gymnasium.wrappers:RecordVideo"]
MALFORMED = ["os:path.join", "os:__dict__"]


@pytest.mark.parametrize("name", [*EVIL, *MALFORMED, "{module}:Double"])
@pytest.mark.parametrize("command", ["train", "evaluate", "resume", "record"])
def test_a_file_from_a_stranger_imports_nothing(
    rl: Command, work: Path, config_file: Path, run_copy: Path, module: str, command: str, name: str
) -> None:
    name = name.format(module=module)
    wrappers = settings(name, command="touch owned", video_folder="owned")
    if command == "train":
        config_file.write_text(config_file.read_text() + dump_yaml({"wrappers": wrappers}))
        done = rl("train", "-c", config_file)
    else:
        infect(run_copy, wrappers=wrappers)
        record = ["dataset", "record", "--steps", "5", "--out", "d.npz", "--checkpoint"]
        done = rl(*(record if command == "record" else [command]), run_copy)
    is_well_formed = name not in MALFORMED
    assert_refused(done, f"add --import {name.partition(':')[0]}" if is_well_formed else name)
    assert module not in sys.modules
    assert not was_imported(config_file.parent, module)
    assert tree(work) == set()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"wrappers": "os:system"}, "must be a list"),
        ({"wrappers": [["os:system"]]}, "wrappers[0]"),
        ({"modules": ["evil; touch owned"], "id": "Missing-v0"}, "modules"),
        ({"modules": ["\x1b[2Jevil"], "id": "Missing-v0"}, "modules"),
        ({"modules": "evil", "id": "Missing-v0"}, "modules"),
        ({"modules": [["evil"]], "id": "Missing-v0"}, "modules"),
        ({"modules": ["evil"] * 100, "id": "Missing-v0"}, "modules"),
        ({"id": 5}, "damaged"),
        ({"id": "x\n\x1b[2J:A-v0"}, "--import MODULE"),
        ({"kwargs": [1]}, "damaged"),
    ],
)
def test_a_policy_file_that_was_edited_is_refused(
    rl: Command, work: Path, run_copy: Path, change: Json, word: str
) -> None:
    infect(run_copy, **change)
    done = rl("evaluate", run_copy)
    assert_refused(done, word)
    assert "\x1b" not in done.err
    assert done.err.count("\n") <= 3  # a line for each of the two checkpoints
    assert "touch owned" not in done.err
    assert tree(work) == set()


def test_a_run_copied_from_a_stranger_names_its_modules_but_imports_none(
    rl: Command, run_copy: Path, module: str, tmp_path: Path
) -> None:
    infect(run_copy, id="Missing-v0", modules=[module])
    for command in ("evaluate", "resume"):
        assert_refused(rl(command, run_copy), f"add --import {module}")
    assert not was_imported(tmp_path, module)


def infect(run: Path, **environment: Any) -> None:
    """Change the environment of a run in all its files, and seal them again."""

    in_config = {"id": "env_id", "wrappers": "wrappers"}
    config = {in_config[key]: value for key, value in environment.items() if key in in_config}
    for checkpoint in (run / "checkpoints").glob("step_*"):
        rewrite(checkpoint, "policy.json", lambda policy: policy["environment"].update(environment))
        rewrite(checkpoint, "state.json", lambda state: state["environment"].update(environment))
        rewrite(checkpoint, "state.json", lambda state: state["config"].update(config))


def test_a_damaged_list_of_modules_stops_a_resume(run_copy: Path) -> None:
    infect(run_copy, modules=["a b"])
    with pytest.raises(CheckpointError, match="modules"):
        resume_training(run_copy, total_timesteps=130)
