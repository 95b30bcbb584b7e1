"""Runs and policies saved by earlier versions can predict, evaluate and resume.

`make_compatibility_fixtures.py` made the files. `RL_TRAINING_EXACT=1` compares bit for bit, which
holds on the kind of machine, and with the versions of PyTorch and NumPy, that made them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_compatibility_fixtures import FIXTURES, agent_class, learned_tensors
from safetensors.torch import load_file
from torch import Tensor

import rl_training
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.checkpoints.format import CheckpointReader, write_checkpoint
from rl_training.checkpoints.loading import find_checkpoint
from rl_training.config import TrainConfig
from rl_training.config_files import load_config
from rl_training.errors import CheckpointError
from rl_training.types import TrainResult
from rl_training.validation import validate

EXACT = os.environ.get("RL_TRAINING_EXACT") == "1"

CHANGED = {
    "v0.1.0/cql": "cql has changed since this run: the Bellman loss is now the mean square",
    "v0.1.0/cql_target_gap": "cql has changed since this run: the Bellman loss is now the mean",
    "v0.1.0/dqn_dueling": "dqn has changed since this run: dueling: the gradients of all streams",
    "v0.1.0/sac_n_step": r"sac has changed since this run: n_step = 3.*entropy_in_target: false",
}
"""Cases, such as `v0.1.0/cql`, whose mathematics has changed on purpose since: they resume, and
one line that matches this regular expression says what is different"""

OTHER_VERSIONS = "library versions have changed"
RELATIVE, ABSOLUTE = 1e-4, 1e-5

CASES = sorted(path.parent for path in FIXTURES.glob("*/*/expected.json"))
IDS = [path.relative_to(FIXTURES).as_posix() for path in CASES]

every_case = pytest.mark.parametrize("case", CASES, ids=IDS)


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def checkpoint_of(case: Path) -> Path:
    return max((case / "run" / "checkpoints").glob("step_*"))


def agents_of(case: Path) -> list[Any]:
    """Load the agents of a case from the run, its checkpoint and the saved policy."""
    agent_type = agent_class(read(case / "policy" / "policy.json")["algo"])
    return [agent_type.load(path) for path in saved_forms(case)]


def saved_forms(case: Path) -> list[Path]:
    return [case / "run", checkpoint_of(case), case / "policy"]


def assert_same_actions(actual: np.ndarray, expected: list[Any]) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if EXACT else {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(actual, expected, **tolerance)


def resume(case: Path, folder: Path) -> tuple[TrainResult, list[str]]:
    """Resume a copy of the run to its end. Return the result and the warnings."""
    copy = shutil.copytree(case / "run", folder / "run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = rl_training.resume_training(copy)
    # Ignore deprecation warnings of libraries.
    messages = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    return result, [text for text in messages if OTHER_VERSIONS not in text]


def largest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference in units of the tolerance, and the name of its tensor."""
    return max(
        (((actual[name] - tensor).abs() / (ABSOLUTE + RELATIVE * tensor.abs())).max().item(), name)
        for name, tensor in expected.items()
    )


def test_every_algorithm_of_the_first_version_has_a_case() -> None:
    first = [case for case in CASES if case.parent.name == "v0.1.0"]
    algorithms = {read(case / "policy" / "policy.json")["algo"] for case in first}
    names = "awac bc cql ddpg dqn iql redq rlpd sac td3 td3_bc tqc"
    assert algorithms == set(names.split())
    assert set(CHANGED) <= set(IDS)


@every_case
def test_a_saved_policy_gives_the_same_actions(case: Path) -> None:
    expected = read(case / "expected.json")
    for path in saved_forms(case):
        actions = rl_training.predict_checkpoint(path, expected["observations"])
        assert_same_actions(actions, expected["actions"])
    for agent in agents_of(case):
        assert_same_actions(agent.predict(expected["observations"]), expected["actions"])
        sampled = agent.predict(expected["observations"], deterministic=False)
        assert_same_actions(sampled, expected["sampled_actions"])


@every_case
def test_a_saved_policy_can_be_evaluated(case: Path) -> None:
    for path in (case / "run", case / "policy"):
        metrics = rl_training.evaluate_checkpoint(path, num_episodes=1)
        assert "eval_return_mean" in metrics
        assert np.isfinite(list(metrics.values())).all()


def test_the_best_checkpoint_of_a_run_is_still_found() -> None:
    run = FIXTURES / "v0.1.0" / "rlpd_pretrained" / "run"
    best = find_checkpoint(run, best=True).folder
    assert best == run / "checkpoints" / read(run / "checkpoints" / "best.json")["checkpoint"]
    assert best != find_checkpoint(run).folder


@every_case
def test_a_stopped_run_resumes_to_the_same_result(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drawing the learning curve would take most of the time.
    monkeypatch.setattr("rl_training.training.run.draw_learning_curve", lambda *_, **__: None)
    result, messages = resume(case, tmp_path)
    expected = read(case / "expected.json")["metrics"]
    reached = {name: result.metrics[name] for name in expected}
    assert reached["global_step"] == expected["global_step"]
    assert reached["gradient_steps"] == expected["gradient_steps"]
    if (pattern := CHANGED.get(case.relative_to(FIXTURES).as_posix())) is not None:
        assert len(messages) == 1
        assert re.search(pattern, messages[0])
        return
    assert messages == []
    tensors = load_file(case / "expected.safetensors")
    learned = learned_tensors(result.checkpoint_path)
    assert tensors.keys() <= learned.keys()
    if EXACT:
        assert [name for name in tensors if not learned[name].equal(tensors[name])] == []
        assert reached == expected
    else:
        difference, name = largest_difference(learned, tensors)
        assert difference <= 1, name
        assert reached == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("algo", "saved", "expected"),
    [
        ("sac", {"n_step": 3}, ["entropy_in_target: false"]),
        ("sac", {"n_step": 3, "alpha": 0.0}, []),
        ("sac", {"n_step": 1}, []),
        ("rlpd", {"n_step": 3, "entropy_in_target": False}, []),
        ("cql", {"n_step": 3, "entropy_in_target": True}, ["Bellman", "entropy_in_target: false"]),
        ("cql", {}, ["Bellman"]),
        ("dqn", {"dueling": True}, ["clipped together"]),
        ("dqn", {"dueling": False}, []),
    ],
)
def test_changes_since_0_1_are_listed_for_saved_settings(
    algo: str, saved: dict[str, Any], expected: list[str]
) -> None:
    kind = get_algorithm_spec(algo).hyperparameters_type
    change = kind.changes_since(saved) or ""
    assert all(part in change for part in expected)
    assert bool(change) == bool(expected)
    validate(kind, kind.upgrade(saved))  # upgraded settings can be loaded
    assert kind.changes_since({**saved, "initialization": "default"}) is None


def test_the_error_for_changed_data_mentions_files_that_0_1_read_differently(
    tmp_path: Path,
) -> None:
    """Version 0.1.0 ignored `masks` in a file."""
    run = shutil.copytree(FIXTURES / "v0.1.0" / "bc" / "run", tmp_path / "run")
    arrays = {
        "observations": np.zeros((4, 3), np.float32),
        "actions": np.zeros((4, 1), np.float32),
        "rewards": np.zeros(4, np.float32),
        "terminals": np.array([0, 1, 0, 1]),
        "masks": np.ones(4),
        "next_observations": np.zeros((4, 3), np.float32),
    }
    np.savez(tmp_path / "data.npz", **arrays)
    checkpoint = next((run / "checkpoints").glob("step_*"))
    reader = CheckpointReader(checkpoint)
    state = reader.json("state.json")
    state["config"]["dataset"] = {"kind": "npz", "path": str(tmp_path / "data.npz")}
    contents = {name: reader.tensors(name) for name in reader.files if name.endswith("tensors")}
    other = {"state.json": state, "policy.json": reader.json("policy.json")}
    write_checkpoint(tmp_path / "other", {**contents, **other})
    with pytest.raises(CheckpointError, match=r"the data has changed.*version 0\.1.*init_from"):
        rl_training.resume_training(tmp_path / "other")


@every_case
def test_the_config_file_of_an_old_run_describes_what_its_version_did(case: Path) -> None:
    saved = CheckpointReader(checkpoint_of(case)).json("state.json")["config"]
    change = CHANGED.get(case.relative_to(FIXTURES).as_posix())
    with warnings.catch_warnings() if change is None else pytest.warns(UserWarning, match=change):
        loaded = load_config(case / "run" / "config.yaml")
    expected = TrainConfig.from_saved(saved)
    assert loaded == expected.with_changes(run_name=None)


def test_a_config_file_that_no_run_wrote_gets_the_defaults_of_today(tmp_path: Path) -> None:
    old = FIXTURES / "v0.1.0" / "awac" / "run"
    shutil.copy(old / "config.yaml", tmp_path)
    today = load_config(tmp_path / "config.yaml")
    assert today.algo_kwargs != load_config(old / "config.yaml").algo_kwargs
