"""`rl_training.export`: files that act as the policy does, without this package."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from code_blocks import ROOT, blocks_of
from conftest import Command, tree
from helpers import BUILT_IN, each_algorithm, keywords, tiny, tiny_of
from hostile import seal
from test_policy_module import Shifted

import rl_training
from rl_training import BC, DQN, SAC, TD3, predict_checkpoint
from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.api import Agent
from rl_training.deployment import export as export_module
from rl_training.errors import CheckpointError, UserError
from rl_training.runtime.policies import read_policy

STOCHASTIC = [
    *("awac", "bc", "cal_ql", "cql", "crossq", "edac", "flash_sac", "fql"),
    *("a2c", "iql", "ppo", "redq", "rlpd", "sac", "tqc", "xqc"),
]
DETERMINISTIC = ["ddpg", "dqn", "qr_dqn", "rebrac", "td3", "td3_bc"]
PAGE = ROOT / "docs/how-to/deploy.md"


def agent_of(spec: AlgorithmSpec, tmp_path: Path, **changes: Any) -> Agent:
    """Return an untrained agent with normalization, since that is harder to reproduce."""
    config = tiny_of(spec, tmp_path, normalize_observations=True, **changes)
    agent: Agent = getattr(rl_training, spec.algorithm.__name__)(
        config["env_id"], **keywords(config)
    )
    normalizer = agent.policy.normalizer
    assert normalizer is not None
    normalizer.observe(3 * torch.randn(100, agent.policy.spaces.obs_dim) + 1)
    return agent


def stochastic_agent_of(spec: AlgorithmSpec, tmp_path: Path) -> Agent:
    changes = {"objective": "likelihood"} if spec.name == "bc" else {}
    return agent_of(spec, tmp_path, algo_kwargs=changes, env_id="Pendulum-v1")


def observations(policy_folder: Path, rows: int) -> np.ndarray:
    size = json.loads((policy_folder / "policy.json").read_text())["obs_dim"]
    return (2 * np.random.default_rng(rows).standard_normal((rows, size)) + 1).astype(np.float32)


def run_onnx(path: Path, **inputs: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def run_torch(path: Path, **inputs: np.ndarray) -> list[np.ndarray]:
    found = torch.export.load(path).module()(*map(torch.from_numpy, inputs.values()))
    return [each.numpy() for each in (found if isinstance(found, tuple) else (found,))]


RUN = {"onnx": run_onnx, "torch": run_torch}
ENDING = {"onnx": "onnx", "torch": "pt2"}


def properties(path: Path) -> dict[str, str]:
    if path.suffix == ".onnx":
        return {each.key: each.value for each in onnx.load(path).metadata_props}
    extra_files = {"metadata.json": ""}
    torch.export.load(path, extra_files=extra_files)
    found: dict[str, str] = json.loads(extra_files["metadata.json"])
    return found


def assert_acts_as_the_policy(agent: Agent, format: Any, tmp_path: Path) -> None:
    saved = agent.save(tmp_path / "policy")
    file = rl_training.export(saved, tmp_path / f"policy.{ENDING[format]}", format=format)
    for rows in (1, 5, 32):
        obs = observations(saved, rows)
        expected = predict_checkpoint(saved, obs)
        action, *others = RUN[format](file, obs=obs)
        assert (action.shape, action.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(action, expected, rtol=0, atol=1e-5)
        has_values = type(agent.policy.algorithm).action_values is not Algorithm.action_values
        assert len(others) == has_values
        for values in others:
            start = agent.policy.spaces.action_start
            np.testing.assert_array_equal(values.argmax(-1) + start, expected)


def assert_samples_as_the_policy(agent: Agent, format: Any, tmp_path: Path) -> None:
    saved = agent.save(tmp_path / "policy")
    file = tmp_path / f"policy.{ENDING[format]}"
    rl_training.export(saved, file, format=format, stochastic=True)
    obs = observations(saved, 32)
    # The noise of the first call of `predict` after a policy was loaded.
    shape = (32, agent.policy.spaces.action_dim)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).numpy()
    expected = read_policy(saved).predict(obs, deterministic=False)
    (sampled,) = RUN[format](file, obs=obs, noise=noise)
    np.testing.assert_allclose(sampled, expected, rtol=0, atol=1e-5)
    (most_likely,) = RUN[format](file, obs=obs, noise=np.zeros_like(noise))
    np.testing.assert_allclose(most_likely, predict_checkpoint(saved, obs), rtol=0, atol=1e-5)
    assert not np.allclose(sampled, most_likely, atol=1e-2)


# Every algorithm


@each_algorithm
@pytest.mark.fast_cases
def test_a_torch_file_acts_as_the_policy(spec: AlgorithmSpec, tmp_path: Path) -> None:
    assert_acts_as_the_policy(agent_of(spec, tmp_path), "torch", tmp_path)


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.fast_cases
def test_a_torch_file_samples_as_the_policy(name: str, tmp_path: Path) -> None:
    agent = stochastic_agent_of(get_algorithm_spec(name), tmp_path)
    assert_samples_as_the_policy(agent, "torch", tmp_path)


@pytest.mark.docs
@each_algorithm
def test_an_onnx_file_acts_as_the_policy(spec: AlgorithmSpec, tmp_path: Path) -> None:
    assert_acts_as_the_policy(agent_of(spec, tmp_path), "onnx", tmp_path)


@pytest.mark.docs
@pytest.mark.parametrize("name", STOCHASTIC)
def test_an_onnx_file_samples_as_the_policy(name: str, tmp_path: Path) -> None:
    agent = stochastic_agent_of(get_algorithm_spec(name), tmp_path)
    assert_samples_as_the_policy(agent, "onnx", tmp_path)


def test_every_algorithm_is_stochastic_or_says_why_not(tmp_path: Path) -> None:
    assert sorted(STOCHASTIC + DETERMINISTIC) == sorted(spec.name for spec in BUILT_IN)
    for name in DETERMINISTIC:
        agent = agent_of(get_algorithm_spec(name), tmp_path)
        with pytest.raises(UserError, match=rf"^{name} cannot be exported with --stochastic .*: "):
            agent.export(tmp_path / "policy.pt2", format="torch", stochastic=True)
    with pytest.raises(UserError, match="squared_error it learns no standard deviation"):
        BC("Pendulum-v1").export(tmp_path / "policy.pt2", format="torch", stochastic=True)
    assert list(tmp_path.glob("*.pt2")) == []


# Spaces


def scaled_up(agent: Agent) -> Agent:
    """Make the actions of an untrained policy reach their bounds."""
    with torch.no_grad():
        for tensor in agent.policy.algorithm.state.values():
            tensor.mul_(5)
    return agent


class Far(Shifted):
    """An environment whose bounds are far from zero compared with their distance, or equal."""

    def __init__(self) -> None:
        low, high = np.array([1000.0, -0.125, 2.0]), np.array([1001.0, 500.0, 2.0])
        self.action_space = gym.spaces.Box(low, high, dtype=np.float64)


@pytest.mark.parametrize(
    ("make", "atol"),
    [
        (lambda: SAC(Shifted, hidden_sizes=[16], normalize_observations=True), 1e-5),
        (lambda: TD3(Far, hidden_sizes=[32, 32]), 2.5e-4),
        (lambda: DQN(lambda: Shifted(discrete=True), hidden_sizes=[16, 8], dueling=True), 0),
    ],
    ids=["asymmetric bounds", "bounds far from zero", "discrete from 7"],
)
def test_actions_are_in_environment_units(
    make: Callable[[], Agent], atol: float, tmp_path: Path
) -> None:
    agent = scaled_up(make())
    saved = agent.save(tmp_path / "policy")
    obs = observations(saved, 50)
    actions = run_onnx(agent.export(tmp_path / "policy.onnx"), obs=obs)[0]
    np.testing.assert_allclose(actions, predict_checkpoint(saved, obs), rtol=0, atol=atol)
    assert agent._env is not None
    space = agent._env().action_space  # type: ignore[operator]
    assert all(space.contains(action.astype(space.dtype)) for action in actions)


def test_onnx_files_name_their_inputs_and_outputs_and_take_any_batch(tmp_path: Path) -> None:
    sac = SAC("Pendulum-v1", hidden_sizes=[8])
    for stochastic, names in ((False, ["obs"]), (True, ["obs", "noise"])):
        file = sac.export(tmp_path / "sac.onnx", stochastic=stochastic)
        session = onnxruntime.InferenceSession(file)
        assert [each.name for each in session.get_inputs()] == names
        assert [each.shape[0] for each in session.get_inputs()] == ["batch"] * len(names)
        assert [(each.name, each.shape) for each in session.get_outputs()] == [
            ("action", ["batch", 1])
        ]
    for rows in (0, 1, 3):
        obs, noise = np.zeros((rows, 3), np.float32), np.zeros((rows, 1), np.float32)
        assert session.run(None, {"obs": obs, "noise": noise})[0].shape == (rows, 1)
    session = onnxruntime.InferenceSession(DQN("CartPole-v1").export(tmp_path / "dqn.onnx"))
    assert [(each.name, each.type) for each in session.get_outputs()] == [
        ("action", "tensor(int64)"),
        ("q_values", "tensor(float)"),
    ]
    assert {each.version for each in onnx.load(file).opset_import} == {18}


# Metadata


def test_metadata_describes_the_policy_and_nothing_of_the_machine(
    finished_run: Any, tmp_path: Path
) -> None:
    file = rl_training.export(finished_run.run_dir, tmp_path / "policy.onnx")
    found = properties(file)
    expected = {
        "format_version": "1",
        "algorithm": "sac",
        "environment": "Pendulum-v1",
        "run_id": finished_run.run_dir.name,
        "step": "120",
        "stochastic": "false",
        "rl_training_version": rl_training.__version__,
        "torch_version": torch.__version__,
    }
    assert expected.items() <= found.items()
    assert json.loads(found["observation_space"]) == {
        "type": "Box",
        "shape": [3],
        "dtype": "float32",
    }
    assert json.loads(found["action_space"]) == {
        "type": "Box",
        "shape": [1],
        "dtype": "float32",
        "low": [-2.0],
        "high": [2.0],
    }
    torch_file = rl_training.export(
        finished_run.run_dir, tmp_path / "policy.pt2", format="torch", best=True
    )
    best = json.loads((finished_run.run_dir / "checkpoints/best.json").read_text())["step"]
    assert properties(torch_file).items() >= {**expected, "step": str(best)}.items()
    with zipfile.ZipFile(torch_file) as archive:
        contents = [archive.read(name) for name in archive.namelist()]
    host = socket.gethostname()
    private = [str(tmp_path), str(ROOT), str(Path.home()), ".py"]
    private += [host] if len(host) > 5 else []  # a shorter one occurs by chance in the parameters
    for data in (file.read_bytes(), *contents):
        assert [text for text in private if text.encode() in data] == []


def test_a_saved_policy_and_a_changed_one_have_no_run(finished_run: Any, tmp_path: Path) -> None:
    agent = SAC.load(finished_run.run_dir)
    file = tmp_path / "policy.pt2"
    known = properties(agent.export(file, format="torch"))
    assert (known["run_id"], known["step"]) == (finished_run.run_dir.name, "120")
    with torch.no_grad():
        agent.policy.algorithm.state["actor"].mul_(2)
    changed = properties(agent.export(file, format="torch"))
    assert changed.keys() == known.keys() - {"run_id", "step", "model_sha256"}
    saved = agent.save(tmp_path / "policy")
    exported = properties(rl_training.export(saved, file, format="torch"))
    assert exported.keys() == known.keys() - {"run_id", "step"}


@pytest.mark.usefixtures("no_pictures")
def test_each_seed_of_a_population_can_be_exported(tmp_path: Path) -> None:
    results = rl_training.train(tiny(tmp_path, seeds=[0, 1], total_timesteps=60))
    assert isinstance(results, list)
    for result in results:
        file = rl_training.export(result.run_dir, tmp_path / "policy.pt2", format="torch")
        assert properties(file)["run_id"] == result.run_dir.name
        obs = np.ones((2, 3), np.float32)
        (action,) = run_torch(file, obs=obs)
        np.testing.assert_allclose(action, predict_checkpoint(result.run_dir, obs), atol=1e-5)


# Errors


def test_a_file_that_does_not_act_as_the_policy_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agent = SAC("Pendulum-v1", hidden_sizes=[8])
    earlier = agent.export(tmp_path / "policy.pt2", format="torch").read_bytes()
    write = export_module.write

    def write_another(format: str, module: torch.nn.Module, *others: Any) -> bytes:
        with torch.no_grad():
            dict(module.named_parameters())["actor.bias_1"].add_(2e-5)
        return write(format, module, *others)

    monkeypatch.setattr(export_module, "write", write_another)
    for format, ending in ENDING.items():
        with pytest.raises(UserError, match=r"does not act as the policy does: .* differ by"):
            agent.export(tmp_path / f"policy.{ending}", format=format)
    assert tree(tmp_path) == {"policy.pt2"}
    assert (tmp_path / "policy.pt2").read_bytes() == earlier


def test_damaged_policies_are_not_exported(run_copy: Path, tmp_path: Path) -> None:
    for checkpoint in (run_copy / "checkpoints").glob("step_*"):
        model = checkpoint / "model.safetensors"
        data = bytearray(model.read_bytes())
        data[-1] ^= 1
        model.write_bytes(data)
    with pytest.raises(CheckpointError):
        rl_training.export(run_copy, tmp_path / "policy.onnx")
    saved = SAC("Pendulum-v1", hidden_sizes=[8]).save(tmp_path / "policy")
    shutil.move(saved / "policy.json", tmp_path / "elsewhere.json")
    (saved / "policy.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError):
        rl_training.export(saved, tmp_path / "policy.onnx")
    assert not (tmp_path / "policy.onnx").exists()


def test_text_of_a_stranger_is_cleaned(tmp_path: Path) -> None:
    saved = SAC("Pendulum-v1", hidden_sizes=[8]).save(tmp_path / "policy")
    description = json.loads((saved / "policy.json").read_text())
    description["environment"] |= {"id": None, "label": "a\x1b[2J\nb" + 900 * "c"}
    (saved / "policy.json").write_text(json.dumps(description))
    seal(saved)
    file = rl_training.export(saved, tmp_path / "policy.pt2", format="torch")
    assert properties(file)["environment"] == "a [2J b" + 900 * "c"


def test_wrong_requests_are_explained(rl: Command, work: Path, finished_run: Any) -> None:
    run = finished_run.run_dir
    (work / "notes.txt").write_text("mine")
    for arguments, message in [
        ([run], "missing --out; name the file"),
        ([run, "--out", "x.pt2"], "x.pt2: a file that ends with .pt2 has the format torch"),
        ([run, "--out", "x.onnx", "--format", "tflite"], "choose from onnx, torch"),
        ([run, "--out", "."], ": is a folder"),
        ([run, "--out", "notes.txt"], "notes.txt: exists and is not an exported policy"),
        ([run, "--out", "notes.txt/x.onnx"], "notes.txt/x.onnx: cannot be written"),
        (["nothing", "--out", "x.onnx"], "nothing: no such run folder"),
        ([run / "checkpoints/step_000000080", "--best", "--out", "x.onnx"], "best checkpoint"),
    ]:
        outcome = rl("export", *arguments)
        assert (outcome.code, message in outcome.err) == (2, True), outcome
        assert "Traceback" not in outcome.err
    assert tree(work) == {"notes.txt"}
    assert (work / "notes.txt").read_text() == "mine"


def test_a_missing_package_is_named_before_anything_is_read(
    rl: Command, work: Path, finished_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    outcome = rl("export", finished_run.run_dir, "--out", "policy.onnx")
    assert outcome.code == 2
    expected = "needs the package onnxscript; install it with `pip install 'rl-training[export]'`"
    assert expected in outcome.err
    outcome = rl("export", finished_run.run_dir, "--out", "new/policy.pt2", "--format", "torch")
    assert (outcome.code, outcome.err) == (0, "")
    assert "exported the policy of sac at step 120 to new/policy.pt2" in outcome.out
    assert tree(work) == {"new", "new/policy.pt2"}


def test_a_policy_that_is_not_finite_is_not_exported(tmp_path: Path) -> None:
    agent = SAC("Pendulum-v1", hidden_sizes=[8])
    with torch.no_grad():
        agent.policy.algorithm.state["actor"][0] = torch.nan
    with pytest.raises(UserError, match=r"actor\.weight_0 is not finite"):
        agent.export(tmp_path / "policy.onnx")


# The page about deployment


def block_with(text: str) -> str:
    (block,) = [block for block in blocks_of(PAGE) if text in block.text]
    return block.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: SAC("Pendulum-v1", hidden_sizes=[16, 8], normalize_observations=True),
        lambda: scaled_up(TD3(Shifted, hidden_sizes=[16])),
        lambda: BC("Pendulum-v1", hidden_sizes=[16], objective="likelihood"),
    ],
    ids=["normalized", "asymmetric bounds", "gaussian"],
)
def test_the_numpy_code_of_the_page_acts_as_the_policy(
    make: Callable[[], Agent], work: Path
) -> None:
    agent = make()
    if agent.policy.normalizer is not None:
        agent.policy.normalizer.observe(3 * torch.randn(100, 3) + 1)
    saved = agent.save("policy")
    code = block_with("from safetensors.numpy import load_file")
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    variables: dict[str, Any] = {}
    exec(code, variables)
    obs = observations(saved, 20)
    np.testing.assert_allclose(variables["act"](obs), agent.predict(obs), rtol=0, atol=1e-5)


@pytest.mark.docs
@pytest.mark.skipif(
    "ONNXRUNTIME_HOME" not in os.environ,
    reason="needs ONNXRUNTIME_HOME, the folder of a release of ONNX Runtime",
)
def test_the_cpp_code_of_the_page_acts_as_the_policy(work: Path) -> None:
    agent = SAC("Pendulum-v1", hidden_sizes=[16, 8])
    agent.export("policy.onnx")
    (work / "act.cpp").write_text(block_with("onnxruntime_cxx_api.h"))
    command = re.sub(r"\\\n", " ", block_with("g++"))
    done = subprocess.run(["bash", "-ec", command], check=True, capture_output=True, text=True)
    assert float(done.stdout.split()[-1]) == pytest.approx(
        float(agent.predict([1.0, 0.0, 0.0])[0]), abs=1e-5
    )
