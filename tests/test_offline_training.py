"""Offline runs: sources of data, saved files, resuming and errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Recorder, StopAt, hashes, metric_rows, tiny_of
from safetensors.torch import load_file

import rl_training
from rl_training import BC, IQL, SAC, TD3BC
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.checkpoints.loading import cached_policy
from rl_training.datasets.opening import build_dataset
from rl_training.errors import CheckpointError, ConfigError, UserError

QUICK = {"hidden_sizes": [16, 16], "batch_size": 16, "compile": "off"}


def arrays(rows: int = 300, seed: int = 0, shift: float = 5.0) -> dict[str, np.ndarray]:
    """Return episodes of fifty steps. Half of them terminate and half are truncated."""
    stream = np.random.default_rng(seed)
    ends = np.zeros((2, rows), dtype=bool)
    ends[0, 49::100], ends[1, 99::100] = True, True
    observations = stream.normal(shift, 3.0, (rows + 1, 3)).astype(np.float32)
    return {
        "observations": observations[:-1],
        "next_observations": observations[1:],
        "actions": stream.uniform(-2, 2, (rows, 1)).astype(np.float32),
        "rewards": stream.normal(size=rows).astype(np.float32),
        "terminals": ends[0],
        "timeouts": ends[1],
        "action_low": np.array([-2.0]),
        "action_high": np.array([2.0]),
    }


def config(algo: str, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return tiny_of(get_algorithm_spec(algo), tmp_path, **changes)


def test_no_environment_is_needed(tmp_path: Path) -> None:
    agent = TD3BC(dataset=arrays(), total_timesteps=40, output_dir=str(tmp_path), **QUICK)
    result = agent.learn()
    assert result.metrics["gradient_steps"] == result.metrics["global_step"] == 40
    assert np.isnan(result.metrics["eval_return_mean"])
    assert "recorded-data" in result.run_dir.name
    action = agent.predict([5.0, 5.0, 5.0])
    assert action.shape == (1,)
    assert abs(action.item()) <= 2.0
    with pytest.raises(UserError, match="env_id"):
        agent.evaluate()


def test_a_policy_that_was_trained_without_an_environment_can_be_saved_and_exported(
    tmp_path: Path,
) -> None:
    agent = TD3BC(dataset=arrays(), total_timesteps=5, output_dir=str(tmp_path / "runs"), **QUICK)
    agent.learn()
    obs = arrays()["observations"][:5]
    loaded = TD3BC.load(agent.save(tmp_path / "policy"))
    np.testing.assert_array_equal(loaded.predict(obs), agent.predict(obs))
    exported = torch.export.load(agent.export(tmp_path / "policy.pt2", format="torch")).module()
    actions = exported(torch.as_tensor(obs, dtype=torch.float32))
    torch.testing.assert_close(actions, torch.as_tensor(agent.predict(obs)))


def test_steps_and_intervals_count_gradient_steps(tmp_path: Path) -> None:
    recorder = Recorder()
    given = config("iql", tmp_path, total_timesteps=90, eval_interval=40, num_envs=4)
    result = rl_training.train(given, callbacks=[recorder])
    assert recorder.steps("evaluation_end") == [40, 80, 90]
    assert recorder.steps("update_end") == list(range(1, 91))
    assert recorder.steps("collect_end") == []
    assert result.metrics["gradient_steps"] == 90


def test_the_policy_is_saved_with_the_normalization_of_the_data(tmp_path: Path) -> None:
    """Without it, a TD3+BC policy would be evaluated on observations of another scale."""
    data = arrays()
    result = rl_training.train(
        {k: v for k, v in config("td3_bc", tmp_path).items() if k not in ("dataset", "env_id")},
        dataset=data,
    )
    saved = load_file(result.checkpoint_path / "model.safetensors")
    mean = data["observations"].astype(np.float64).mean(0)
    np.testing.assert_allclose(saved["normalizer.mean"].numpy(), mean, rtol=1e-3)
    policy = cached_policy(result.run_dir)
    obs = data["observations"][:5]
    standard = (obs - mean) / data["observations"].astype(np.float64).std(0)
    inputs = torch.tensor(standard, dtype=torch.float32)
    with torch.no_grad():
        by_hand = 2.0 * policy.algorithm.model.actions(inputs).numpy()
    np.testing.assert_allclose(policy.predict(obs), by_hand, rtol=1e-3, atol=1e-4)


def test_observations_are_normalized_only_if_enabled(tmp_path: Path) -> None:
    cases = (("iql", None, False), ("iql", True, True), ("td3_bc", False, False))
    for algo, wanted, expected in cases:
        given = config(algo, tmp_path, total_timesteps=2, normalize_observations=wanted)
        found = load_file(rl_training.train(given).checkpoint_path / "model.safetensors")
        assert ("normalizer.mean" in found) == expected


def test_seeds_share_the_data_and_have_different_parameters(tmp_path: Path) -> None:
    first, second = rl_training.train(config("iql", tmp_path, seeds=[0, 1]))
    assert hashes(first.checkpoint_path) != hashes(second.checkpoint_path)
    alone = rl_training.train(config("iql", tmp_path, seed=1))
    assert hashes(alone.checkpoint_path) == hashes(second.checkpoint_path)


def test_a_run_on_arrays_resumes_with_the_same_arrays(tmp_path: Path) -> None:
    given = {"total_timesteps": 60, "output_dir": str(tmp_path), **QUICK}
    uninterrupted = IQL(dataset=arrays(), **given).learn()
    agent = IQL(dataset=arrays(), **given)
    agent.learn(callbacks=[StopAt(33)])
    resumed = agent.learn()
    assert hashes(resumed.checkpoint_path) == hashes(uninterrupted.checkpoint_path)
    assert metric_rows(resumed.run_dir) == metric_rows(uninterrupted.run_dir)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            lambda data: {k: v[:200] if len(v) > 1 else v for k, v in data.items()},
            "rows 300, now 200",
        ),
        (lambda data: {**data, "rewards": data["rewards"] + 1}, "sum of rewards"),
    ],
    ids=["fewer", "other rewards"],
)
def test_the_error_for_other_data_names_the_differences(
    tmp_path: Path, change: Any, difference: str
) -> None:
    agent = IQL(dataset=arrays(), total_timesteps=60, output_dir=str(tmp_path), **QUICK)
    result = agent.learn(callbacks=[StopAt(33)])
    before = hashes(result.checkpoint_path)
    with pytest.raises(CheckpointError, match=difference):
        rl_training.resume_training(result.run_dir, dataset=change(arrays()))
    assert hashes(result.checkpoint_path) == before
    with pytest.raises(ConfigError, match="dataset"):
        rl_training.resume_training(result.run_dir)
    resumed = rl_training.resume_training(result.run_dir, dataset=arrays())
    assert resumed.metrics["global_step"] == 60


def test_a_recipe_is_recorded_again_on_resume(tmp_path: Path) -> None:
    stopped = rl_training.train(config("bc", tmp_path), callbacks=[StopAt(50)])
    state = json.loads((stopped.checkpoint_path / "state.json").read_text())
    assert state["data"]["parts"][0]["rows"] == 200
    assert rl_training.resume_training(stopped.run_dir).metrics["global_step"] == 120


def test_the_replay_of_an_earlier_run_can_be_used_as_data(tmp_path: Path) -> None:
    spec = get_algorithm_spec("sac")
    earlier = rl_training.train(tiny_of(spec, tmp_path))
    given = config("awac", tmp_path, dataset={"kind": "run", "path": str(earlier.run_dir)})
    result = rl_training.train(given)
    state = json.loads((result.checkpoint_path / "state.json").read_text())
    assert state["data"]["parts"][0]["rows"] == 120


@pytest.mark.parametrize("algo", ["bc", "td3_bc", "iql", "awac", "cql"])
def test_data_is_required(tmp_path: Path, algo: str) -> None:
    given = config(algo, tmp_path)
    del given["dataset"]
    with pytest.raises(ConfigError, match=rf"dataset: {algo} learns from recorded data"):
        rl_training.train(given)
    assert list(tmp_path.iterdir()) == []


def test_an_online_algorithm_refuses_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learns online"):
        SAC("Pendulum-v1", dataset=arrays(), output_dir=str(tmp_path)).learn()
    with pytest.raises(ConfigError, match="learns online"):
        rl_training.train(config("sac", tmp_path, dataset={"kind": "random", "size": 100}))
    assert list(tmp_path.iterdir()) == []


def test_data_of_other_sizes_than_the_environments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="observation"):
        BC("MountainCarContinuous-v0", dataset=arrays(), output_dir=str(tmp_path), **QUICK).learn()
    assert list(tmp_path.iterdir()) == []


def test_truncated_rows_bootstrap_and_terminated_rows_do_not(tmp_path: Path) -> None:
    """With a constant reward of 1, the value is 1 for terminated and 2 for truncated steps."""
    rows = 400
    data = {
        "observations": np.zeros((rows, 1), np.float32),
        "actions": np.zeros((rows, 1), np.float32),
        "rewards": np.ones(rows, np.float32),
        "next_observations": np.zeros((rows, 1), np.float32),
        "action_low": np.array([-1.0]),
        "action_high": np.array([1.0]),
    }
    settings = {"gamma": 0.5, "tau": 0.05, "learning_rate": 3e-3, "total_timesteps": 600, **QUICK}
    for ended, value in ((True, 1.0), (False, 2.0)):
        flags = {"terminals": np.full(rows, ended), "timeouts": np.full(rows, not ended)}
        agent = IQL(dataset={**data, **flags}, output_dir=str(tmp_path), **settings)
        agent.learn()
        with torch.no_grad():
            zero = torch.zeros(1, 1)
            found = agent.policy.algorithm.model.q_values(zero, zero).mean().item()
        assert found == pytest.approx(value, abs=0.1)


@pytest.mark.skipif(
    "MINARI_DATASETS_PATH" not in os.environ
    or not Path(os.environ["MINARI_DATASETS_PATH"], "D4RL/door/human-v2").is_dir(),
    reason="no genuine dataset here",
)
@pytest.mark.parametrize("algo", ["bc", "iql"])
def test_a_published_minari_dataset_can_be_used_for_training(tmp_path: Path, algo: str) -> None:
    given = config(algo, tmp_path, dataset={"kind": "minari", "id": "D4RL/door/human-v2"})
    result = rl_training.train({**given, "env_id": None, "total_timesteps": 300})
    batch = build_dataset(given["dataset"]).rows(torch.arange(1_000))
    first = result.run_dir / "checkpoints" / "step_000000000"
    distances = [
        np.square(rl_training.predict_checkpoint(path, batch.obs) - batch.action.numpy()).mean()
        for path in (first, result.checkpoint_path)
    ]
    assert distances[1] < 0.8 * distances[0]


@pytest.mark.parametrize("algo", ["awac", "iql", "cql", "td3_bc"])
def test_an_offline_policy_can_be_trained_further_online(tmp_path: Path, algo: str) -> None:
    """Networks, targets and normalization are loaded, and no random actions are played."""
    offline = rl_training.train(config(algo, tmp_path, normalize_observations=True))
    given = config(algo, tmp_path, normalize_observations=True, total_timesteps=80)
    given |= {"regime": "online", "dataset": None, "init_from": str(offline.run_dir)}
    online = rl_training.train(given)
    assert online.metrics["gradient_steps"] == 40  # after `learning_starts`
    before, first, last = (
        load_file(path / "model.safetensors")
        for path in (
            offline.checkpoint_path,
            online.run_dir / "checkpoints" / "step_000000000",
            online.checkpoint_path,
        )
    )
    assert all(torch.equal(first[name], before[name]) for name in before)
    assert not torch.equal(last["actor.weight_0"], before["actor.weight_0"])
