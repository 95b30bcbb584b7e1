"""Runs with recorded data and live steps: pretraining, mixed batches, offline to online."""

from __future__ import annotations

import multiprocessing
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance import assert_same
from helpers import (
    MIXED,
    Recorder,
    StopAt,
    StopAtPosition,
    hashes,
    metric_rows,
    model_bytes,
    tiny_of,
)
from safetensors.torch import load_file

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.config import TrainConfig
from rl_training.data import ReplayBuffer
from rl_training.datasets.opening import build_dataset
from rl_training.errors import ConfigError, DataError
from rl_training.execution import execution
from rl_training.execution.learner import Explorer
from rl_training.runtime.workflows import resume_together
from rl_training.training.engine import learning_starts, planned_updates
from rl_training.types import TrainResult

PRETRAINING = 30
each_mixed = pytest.mark.parametrize("spec", MIXED, ids=lambda spec: spec.name)
RLPD = get_algorithm_spec("rlpd")


def mixed(spec: AlgorithmSpec, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Return a config with pretraining, then steps with updates on mixed batches."""
    algo_kwargs = {"offline_pretrain_updates": PRETRAINING, **changes.pop("algo_kwargs", {})}
    given = {"regime": "mixed", "total_timesteps": 70, "log_interval": 10, **changes}
    return tiny_of(spec, tmp_path, algo_kwargs=algo_kwargs, **given)


# Pretraining


@each_mixed
@pytest.mark.fast_cases("rlpd", "iql")
def test_pretraining_comes_before_the_first_step(spec: AlgorithmSpec, tmp_path: Path) -> None:
    config, recorder = mixed(spec, tmp_path), Recorder()
    result = rl_training.train(config, callbacks=[recorder])
    events = [(name, step) for name, step, _ in recorder.events if name.endswith("_end")]
    first_step = events.index(("collect_end", 1))
    assert events[:first_step] == [("update_end", 0)] * PRETRAINING
    assert all(step > 0 for _, step in events[first_step:])
    assert result.metrics["global_step"] == 70
    per_step = config["algo_kwargs"].get("gradient_updates_per_step", 1)
    assert result.metrics["gradient_steps"] == PRETRAINING + 30 * per_step
    assert result.metrics["gradient_steps"] == planned_updates(TrainConfig(**config))


def test_pretraining_is_evaluated_logged_and_saved_like_the_rest(tmp_path: Path) -> None:
    config = mixed(RLPD, tmp_path, eval_interval=20, checkpoint_interval=20, log_interval=5)
    recorder = Recorder(only=["evaluation_end"])
    result = rl_training.train(config, callbacks=[recorder])
    # Periodic callbacks fire when pretraining ends. Steps are counted from there.
    expected = [(0, 20), (0, 30), (20, 30), (40, 30), (60, 70), (70, 90)]
    assert [event[1:] for event in recorder.events] == expected
    rows = metric_rows(result.run_dir)
    logged = [(row["step"], row["gradient_steps"]) for row in rows if "train/q_mean" in row]
    assert logged[:6] == [(0, 5), (0, 10), (0, 15), (0, 20), (0, 25), (0, 30)]
    assert [row["step"] for row in rows if "eval/mean_reward" in row] == [0, 0, 20, 40, 60, 70]
    assert result.checkpoint_path.name == "step_000000100"
    assert (result.run_dir / "learning_curve.png").stat().st_size > 10_000


def test_a_pretrained_policy_acts_from_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_random: list[bool] = []
    begin = Explorer.begin

    def watched(self: Explorer, *arguments: Any, **options: Any) -> None:
        at_random.append(options["at_random"])
        begin(self, *arguments, **options)

    monkeypatch.setattr(Explorer, "begin", watched)
    rl_training.train(mixed(RLPD, tmp_path))
    assert at_random == [False] * 70
    at_random.clear()
    rl_training.train(mixed(RLPD, tmp_path, algo_kwargs={"offline_pretrain_updates": 0}))
    assert at_random == [True] * 40 + [False] * 30


def test_pretraining_counts_towards_the_update_budget(tmp_path: Path) -> None:
    result = rl_training.train(mixed(RLPD, tmp_path, max_updates=20))
    assert (result.metrics["global_step"], result.metrics["gradient_steps"]) == (0, 20)
    assert result.stop_reason == "max_updates"
    with pytest.warns(UserWarning, match="all 20 max_updates are used"):
        rl_training.resume_training(result.run_dir)
    longer = rl_training.train(mixed(RLPD, tmp_path, max_updates=50))
    assert longer.metrics["gradient_steps"] == 50
    assert longer.metrics["global_step"] == 50  # ten blocks of two after the random ones


def test_early_stopping_can_end_a_run_during_pretraining(tmp_path: Path) -> None:
    stopping = {"target_value": -1e9, "min_steps": 0}
    result = rl_training.train(mixed(RLPD, tmp_path, eval_interval=10, early_stopping=stopping))
    assert (result.metrics["global_step"], result.metrics["gradient_steps"]) == (0, 10)
    assert result.stop_reason == "target_value"
    stopping = {"target_value": -1e9, "min_steps": 1}
    result = rl_training.train(mixed(RLPD, tmp_path, eval_interval=10, early_stopping=stopping))
    assert result.metrics["global_step"] == 10


def test_pretraining_does_not_count_towards_patience(tmp_path: Path) -> None:
    stopping = {"patience": 2, "min_delta": 1e6}
    result = rl_training.train(mixed(RLPD, tmp_path, eval_interval=5, early_stopping=stopping))
    assert (result.metrics["global_step"], result.stop_reason) == (10, "early_stopping")
    with pytest.warns(UserWarning, match="pass --total-timesteps 70"):
        rl_training.resume_training(result.run_dir)


def test_the_logged_speed_excludes_pretraining(tmp_path: Path) -> None:
    config = mixed(RLPD, tmp_path, algo_kwargs={"offline_pretrain_updates": 400})
    rows = metric_rows(rl_training.train(config).run_dir, timed=True)
    [last] = [row for row in rows if row["step"] == 70 and "time/fps" in row]
    assert last["time/fps"] == pytest.approx(70 / last["time/time_elapsed"], rel=1e-6)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_schedules_reach_zero_with_the_last_update_of_both_phases(
    tmp_path: Path, kind: str
) -> None:
    config = mixed(RLPD, tmp_path, algo_kwargs={"learning_rate_schedule": kind})
    result = rl_training.train(config)
    policy = rl_training.checkpoints.loading.cached_policy(result.run_dir)
    algorithm = policy.algorithm
    algorithm.planned_updates = planned_updates(TrainConfig(**config))
    updates = load_file(result.checkpoint_path / "learner.safetensors")["updates"]
    assert float(algorithm.learning_rate_factor({"updates": updates})) == pytest.approx(0, abs=1e-6)
    assert float(algorithm.learning_rate_factor({"updates": updates - 1})) > 0


# Mixing


@pytest.mark.parametrize("normalized", [False, True], ids=["plain", "normalized"])
def test_without_offline_rows_a_run_equals_the_online_run_bit_for_bit(
    normalized: bool, tmp_path: Path
) -> None:
    data = {"kind": "random", "size": 100, "reward_scale": 0.1}
    common = {"total_timesteps": 70, "normalize_observations": normalized}
    settings = {"offline_pretrain_updates": 0, "offline_batch_ratio": 0.0}
    with_data = mixed(RLPD, tmp_path, dataset=data, algo_kwargs=settings, **common)
    online = tiny_of(RLPD, tmp_path, regime="online", dataset=None, **common)
    results = [rl_training.train(config) for config in (with_data, online)]
    assert model_bytes(results[0]) == model_bytes(results[1])


def test_with_only_offline_rows_the_replay_buffer_is_not_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("the replay buffer was read")

    monkeypatch.setattr(ReplayBuffer, "draw", read)
    monkeypatch.setattr(ReplayBuffer, "rows", read)
    settings = {"offline_batch_ratio": 1.0, "learning_starts": 0}
    result = rl_training.train(mixed(RLPD, tmp_path, algo_kwargs=settings))
    assert result.metrics["gradient_steps"] == PRETRAINING + 140
    assert result.metrics["train/online_batch_size"] == 0
    assert "train/q_gap" not in result.metrics


@each_mixed
@pytest.mark.fast_cases("rlpd", "iql")
def test_the_composition_of_batches_is_logged(spec: AlgorithmSpec, tmp_path: Path) -> None:
    result = rl_training.train(
        mixed(spec, tmp_path, algo_kwargs={"offline_batch_ratio": 0.25, "buffer_capacity": 50})
    )
    rows = [row for row in metric_rows(result.run_dir) if "train/offline_batch_size" in row]
    names = (
        "offline_batch_size",
        "online_batch_size",
        "pretrain_updates_done",
        "offline_dataset_size",
        "online_buffer_size",
    )
    first, last = ([row[f"train/{name}"] for name in names] for row in (rows[0], rows[-1]))
    assert first == [16, 0, 10, 200, 0]
    assert last == [4, 12, 30, 200, 50]
    assert rows[0]["train/q_gap"] is None  # there are no live rows
    gap = rows[-1]["train/q_offline_mean"] - rows[-1]["train/q_online_mean"]
    assert rows[-1]["train/q_gap"] == pytest.approx(gap, rel=1e-4, abs=1e-5)
    assert result.metrics["train/pretrain_updates_done"] == PRETRAINING


def test_live_rewards_are_transformed_like_recorded_rewards(tmp_path: Path) -> None:
    data = {"kind": "random", "size": 200, "reward_scale": 0.01, "reward_shift": 5.0}
    result = rl_training.train(mixed(RLPD, tmp_path, dataset=data))
    rewards = replayed_rewards(result)
    assert len(rewards) == 70
    assert ((rewards > 5 - 0.17) & (rewards <= 5)).all()
    assert result.metrics["eval_return_mean"] < -100  # evaluations use the environment's rewards


def test_replay_data_of_a_run_have_untransformed_rewards(tmp_path: Path) -> None:
    data = {"kind": "random", "size": 200, "reward_scale": 0.01, "reward_shift": 5.0}
    result = rl_training.train(mixed(RLPD, tmp_path, dataset=data))
    replay = build_dataset({"kind": "run", "path": str(result.run_dir)})
    rewards = replay.rows(torch.arange(len(replay))).reward
    torch.testing.assert_close(rewards, (replayed_rewards(result) - 5) * 100, atol=1e-3, rtol=0)
    clipped = rl_training.train(mixed(RLPD, tmp_path, dataset={**data, "reward_clip": 1.0}))
    with pytest.raises(DataError, match="rewards clipped to ±1"):
        build_dataset({"kind": "run", "path": str(clipped.run_dir)})


def replayed_rewards(result: TrainResult) -> torch.Tensor:
    rows = load_file(result.checkpoint_path / "replay-00000.safetensors")["rows"]
    return rows[:, 4]  # after three observations and an action


def test_data_with_different_reward_transforms_is_refused(tmp_path: Path) -> None:
    parts = [{"kind": "random", "size": 50, "reward_scale": scale} for scale in (1.0, 0.1)]
    with pytest.raises(ConfigError, match="sections transform rewards differently"):
        rl_training.train(mixed(RLPD, tmp_path, dataset=parts))
    assert list(tmp_path.iterdir()) == []


def test_a_mixed_run_supports_several_datasets_arrays_and_normalization(tmp_path: Path) -> None:
    parts = [{"kind": "random", "size": 50, "weight": weight} for weight in (1.0, 3.0)]
    result = rl_training.train(mixed(RLPD, tmp_path, dataset=parts, normalize_observations=True))
    normalizer = load_file(result.checkpoint_path / "model.safetensors")
    assert normalizer["normalizer.count"] > 100  # recorded and live observations
    generator = np.random.default_rng(0)
    arrays = {
        "observations": generator.normal(size=(60, 3)).astype(np.float32),
        "actions": generator.uniform(-2, 2, size=(60, 1)).astype(np.float32),
        "rewards": generator.normal(size=60).astype(np.float32),
        "terminals": np.arange(60) % 20 == 19,
    }
    agent = rl_training.RLPD(
        "Pendulum-v1",
        dataset=arrays,
        **{
            k: v for k, v in mixed(RLPD, tmp_path).items() if k not in ("algo", "env_id", "dataset")
        },
    )
    assert agent.learn().metrics["train/offline_dataset_size"] == 60
    assert agent.learn(10).metrics["global_step"] == 80
    loaded = rl_training.RLPD.load(agent.result.run_dir, dataset=arrays)
    assert loaded.learn(10).metrics["global_step"] == 90
    with pytest.raises(ConfigError, match="needs a dataset"):
        rl_training.RLPD.load(agent.result.run_dir).learn(100)
    assert agent.predict(np.zeros(3)).shape == (1,)


# Resuming


@each_mixed
@pytest.mark.parametrize("position", [7, PRETRAINING, PRETRAINING + 55], ids=str)
@pytest.mark.thorough
def test_a_run_stopped_in_either_phase_resumes_bit_for_bit(
    spec: AlgorithmSpec, position: int, tmp_path: Path
) -> None:
    config = mixed(spec, tmp_path, normalize_observations=True, num_envs=2)
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAtPosition(position)])
    assert stopped.checkpoint_path.name < uninterrupted.checkpoint_path.name
    resumed = rl_training.resume_training(stopped.run_dir)
    assert resumed.metrics == uninterrupted.metrics
    assert_same(uninterrupted, resumed)


@pytest.mark.faults
@pytest.mark.parametrize("position", [17, PRETRAINING + 55], ids=["pretraining", "mixed"])
def test_a_run_killed_in_either_phase_resumes_bit_for_bit(position: int, tmp_path: Path) -> None:
    config = mixed(RLPD, tmp_path, checkpoint_interval=10, eval_interval=25)
    uninterrupted = rl_training.train(config)
    process = multiprocessing.get_context("spawn").Process(
        target=rl_training.train,
        args=({**config, "run_name": "killed"},),
        kwargs={"callbacks": [StopAtPosition(position, kill=True)]},
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    saved = {path.name for path in (tmp_path / "killed" / "checkpoints").glob("step_*")}
    assert f"step_{position // 10 * 10:09}" in saved
    assert_same(uninterrupted, rl_training.resume_training(tmp_path / "killed"))


@each_mixed
@pytest.mark.parametrize("batched", [False, True], ids=["in turn", "batched"])
@pytest.mark.parametrize("position", [7, PRETRAINING + 55], ids=["pretraining", "mixed"])
@pytest.mark.thorough
def test_seeds_trained_together_resume_bit_for_bit(
    spec: AlgorithmSpec,
    batched: bool,
    position: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if batched:
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    config = mixed(spec, tmp_path, seeds=[3, 1])
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAtPosition(position)])
    resumed = resume_together([result.run_dir for result in stopped])
    for one, other in zip(uninterrupted, resumed, strict=True):
        assert_same(one, other)
    if not batched:
        alone = rl_training.train({**config, "seeds": None, "seed": 1})
        assert model_bytes(alone) == model_bytes(uninterrupted[1])


def test_a_larger_total_continues_from_the_mixed_phase(tmp_path: Path) -> None:
    result = rl_training.train(mixed(RLPD, tmp_path))
    longer = rl_training.resume_training(result.run_dir, total_timesteps=90)
    assert longer.metrics["global_step"] == 90
    assert longer.metrics["gradient_steps"] == PRETRAINING + 100


# Online training of an offline policy


@pytest.fixture
def offline(tmp_path: Path) -> Any:
    def train(algo: str, **changes: Any) -> TrainResult:
        spec = get_algorithm_spec(algo)
        return rl_training.train(tiny_of(spec, tmp_path, total_timesteps=30, **changes))

    return train


@pytest.mark.parametrize("algo", ["awac", "iql", "cql", "td3_bc"])
@pytest.mark.parametrize("regime", ["online", "mixed"])
@pytest.mark.fast_cases("online-iql", "mixed-td3_bc")
def test_online_training_starts_with_the_critics_and_normalization_of_an_offline_policy(
    algo: str, regime: str, tmp_path: Path, offline: Any
) -> None:
    """Only `regime` and `init_from` differ from the offline config."""
    before = offline(algo, normalize_observations=True)
    config = tiny_of(get_algorithm_spec(algo), tmp_path, total_timesteps=60)
    config |= {"regime": regime, "init_from": str(before.run_dir)}
    result = rl_training.train(config)
    assert result.metrics["gradient_steps"] == 20
    start = result.run_dir / "checkpoints" / "step_000000000"
    for name in ("model", "learner"):
        was, first = (
            load_file(folder / f"{name}.safetensors") for folder in (before.checkpoint_path, start)
        )
        for key in was:
            if key != "updates":
                assert torch.equal(first[key], was[key]), key
    last = load_file(result.checkpoint_path / "model.safetensors")
    assert not torch.equal(last["actor.weight_0"], was_actor(before))
    assert last["normalizer.count"] > 200


def was_actor(result: TrainResult) -> torch.Tensor:
    return load_file(result.checkpoint_path / "model.safetensors")["actor.weight_0"]


def test_online_training_keeps_the_reward_scale_of_the_critics(
    tmp_path: Path, offline: Any
) -> None:
    data = {"kind": "random", "size": 200, "reward_scale": 0.01}
    before = offline("awac", dataset=data)
    config = tiny_of(get_algorithm_spec("awac"), tmp_path, total_timesteps=60)
    config |= {"regime": "online", "dataset": None, "init_from": str(before.run_dir)}
    uninterrupted = rl_training.train(config)
    assert (replayed_rewards(uninterrupted) > -0.17).all()
    stopped = rl_training.train(config, callbacks=[StopAtPosition(50)])
    assert_same(uninterrupted, rl_training.resume_training(stopped.run_dir))
    # The same holds for a further run.
    again = rl_training.train({**config, "init_from": str(uninterrupted.run_dir)})
    assert (replayed_rewards(again) > -0.17).all()
    with pytest.warns(
        UserWarning, match=re.escape("scaled by 0.01, those of this run are scaled by 1")
    ):
        rl_training.train({**config, "regime": "mixed", "dataset": {"kind": "random", "size": 50}})


@pytest.mark.parametrize(
    ("before", "after", "settings"),
    [
        ("bc", "td3", {}),
        ("bc", "awac", {}),
        ("bc", "awac", {"objective": "likelihood"}),
        ("bc", "iql", {"objective": "likelihood"}),
        ("awac", "iql", {}),
        ("awac", "sac", {"actor_head": "squashed_gaussian"}),
    ],
)
def test_a_policy_can_be_trained_further_by_another_algorithm(
    before: str, after: str, settings: dict[str, Any], tmp_path: Path, offline: Any
) -> None:
    cloned = offline(before, normalize_observations=True, algo_kwargs=settings)
    config = tiny_of(get_algorithm_spec(after), tmp_path, total_timesteps=60)
    config |= {"regime": "online", "dataset": None, "init_from": str(cloned.run_dir)}
    fresh = {"bc": "critic", "awac": "value"}[before]
    if after != "sac":
        with pytest.warns(UserWarning, match=f"starts with a new .*{fresh}"):
            result = rl_training.train(config)
    else:
        result = rl_training.train(config)
    first = load_file(result.run_dir / "checkpoints" / "step_000000000" / "model.safetensors")
    for name, tensor in load_file(cloned.checkpoint_path / "model.safetensors").items():
        assert torch.equal(first[name], tensor)
    observations = np.random.default_rng(0).normal(size=(5, 3))
    np.testing.assert_array_equal(
        rl_training.predict_checkpoint(cloned.run_dir, observations),
        rl_training.predict_checkpoint(
            result.run_dir / "checkpoints" / "step_000000000", observations
        ),
    )


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"num_critics": 4}, "does not fit this run's networks"),
        ({}, {"hidden_sizes": [8]}, "does not fit this run's networks"),
        ({}, {"critic_layer_norm": True}, "does not fit this run's networks"),
        ({}, {"activation": "tanh"}, "trained with activation = 'relu', but this run uses 'tanh'"),
        ({"algo": "sac"}, {"activation": "tanh"}, "activation = 'relu', but this run uses 'tanh'"),
        ({"normalize_observations": False}, {}, "was trained with normalize_observations"),
        ({"algo": "sac", "normalize_observations": False}, {}, "remove that key"),
    ],
)
def test_networks_of_another_shape_are_refused_by_name(
    changes: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path, offline: Any
) -> None:
    before = offline("awac", normalize_observations=True)
    config = tiny_of(get_algorithm_spec("awac"), tmp_path / "new", algo_kwargs=settings)
    config |= {"regime": "online", "dataset": None, "init_from": str(before.run_dir), **changes}
    with pytest.raises(ConfigError, match=f"init_from = .*{message}"):
        rl_training.train(config)
    assert not (tmp_path / "new").exists()


def test_a_fixed_or_zero_temperature_is_not_loaded_from_the_policy(
    tmp_path: Path, offline: Any
) -> None:
    learned = offline("rlpd", regime="offline", dataset={"kind": "random", "size": 50})
    config = tiny_of(RLPD, tmp_path, regime="online", dataset=None, total_timesteps=60)
    config["init_from"] = str(learned.run_dir)
    config["algo_kwargs"] |= {"alpha": 0.05, "policy_delay": 1}
    fixed = rl_training.train(config)
    assert fixed.metrics["train/alpha"] == pytest.approx(0.05)
    config["algo_kwargs"]["alpha"] = 0.0
    without = rl_training.train(config)
    config |= {"init_from": str(without.run_dir)}
    config["algo_kwargs"]["alpha"] = "auto"
    tuned = rl_training.train(config)
    assert 0.9 < tuned.metrics["train/alpha"] < 1.1


def test_a_policy_trained_with_different_reward_transforms_warns(
    tmp_path: Path, offline: Any
) -> None:
    parts = [{"kind": "random", "size": 50, "reward_scale": scale} for scale in (0.1, 0.01)]
    before = offline("awac", dataset=parts)
    config = tiny_of(get_algorithm_spec("awac"), tmp_path, total_timesteps=60)
    config |= {"regime": "online", "dataset": None, "init_from": str(before.run_dir)}
    with pytest.warns(UserWarning, match="different reward transforms"):
        result = rl_training.train(config)
    assert replayed_rewards(result).min() < -0.17
    again = build_dataset({"kind": "run", "path": str(result.run_dir)})
    assert len(again) == 60


def arrays_with_actions(components: int, bound: float) -> dict[str, np.ndarray]:
    """Return two episodes of ten random steps with 3 observation components."""
    random = np.random.default_rng(0)
    return {
        "observations": random.normal(size=(20, 3)).astype(np.float32),
        "next_observations": random.normal(size=(20, 3)).astype(np.float32),
        "actions": random.uniform(-bound, bound, (20, components)).astype(np.float32),
        "rewards": np.ones(20, np.float32),
        "terminals": np.arange(20) % 10 == 9,
        "timeouts": np.zeros(20, np.bool_),
        "action_low": np.full(components, -bound, np.float32),
        "action_high": np.full(components, bound, np.float32),
    }


def test_two_actions_are_not_confused_with_one_action_and_its_standard_deviation(
    tmp_path: Path,
) -> None:
    bare = {"env_id": None, "dataset": None, "eval_interval": 0, "total_timesteps": 5}
    td3_bc = tiny_of(get_algorithm_spec("td3_bc"), tmp_path, **bare)
    before = rl_training.train(td3_bc, dataset=arrays_with_actions(2, 1.0))
    config = tiny_of(get_algorithm_spec("sac"), tmp_path / "new", init_from=str(before.run_dir))
    with pytest.raises(ConfigError, match="3 observations and 2 actions, but this run has 3 and 1"):
        rl_training.train(config)


def test_a_policy_trained_with_other_action_bounds_warns(tmp_path: Path) -> None:
    bare = {"env_id": None, "dataset": None, "eval_interval": 0, "total_timesteps": 5}
    spec = get_algorithm_spec("td3_bc")
    before = rl_training.train(tiny_of(spec, tmp_path, **bare), dataset=arrays_with_actions(1, 1.0))
    config = tiny_of(spec, tmp_path, total_timesteps=5, init_from=str(before.run_dir))
    config |= {"regime": "online", "dataset": None}
    with pytest.warns(
        UserWarning, match="init_from.*actions range from -1 to 1, the env.* from -2"
    ):
        rl_training.train(config)


def test_an_actor_that_does_not_fit_is_refused(tmp_path: Path, offline: Any) -> None:
    cloned = offline("bc")
    spec, sizes = get_algorithm_spec("sac"), {"actor_hidden_sizes": [8]}
    config = tiny_of(spec, tmp_path / "new", init_from=str(cloned.run_dir), algo_kwargs=sizes)
    with pytest.raises(ConfigError, match="actor of 'bc' does not fit 'sac'"):
        rl_training.train(config)
    assert not (tmp_path / "new").exists()


# Settings that cannot be combined


def test_an_unused_dataset_warns(tmp_path: Path) -> None:
    config = tiny_of(get_algorithm_spec("awac"), tmp_path, regime="online")
    with pytest.warns(UserWarning, match="dataset: not used, because the regime is 'online'"):
        rl_training.train(config)
    with pytest.raises(ConfigError, match="sac learns online and uses no dataset"):
        TrainConfig(algo="sac", dataset={"kind": "random", "size": 10})


@pytest.mark.parametrize("regime", ["online", "offline"])
def test_pretraining_without_a_mixed_run_is_refused(regime: str) -> None:
    kwargs = {"offline_pretrain_updates": 5}
    message = "algo_kwargs.offline_pretrain_updates = 5: needs regime 'mixed'"
    with pytest.raises(ConfigError, match=message):
        TrainConfig(algo="awac", regime=regime, algo_kwargs=kwargs)


def test_a_dataset_section_passed_in_python_is_saved_with_the_run(tmp_path: Path) -> None:
    section = {"kind": "random", "size": 100}
    config = {**mixed(RLPD, tmp_path), "dataset": None}
    result = rl_training.train(config, dataset=section)
    assert rl_training.resume_training(result.run_dir, total_timesteps=80)
    saved = rl_training.RLPD.load(result.run_dir).save(tmp_path / "policy")
    agent = rl_training.RLPD.load(saved, dataset=section)
    agent.config = agent.config.with_changes(output_dir=str(tmp_path))
    fresh = agent.learn(10)
    assert rl_training.resume_training(fresh.run_dir, total_timesteps=20)


def test_a_mixed_run_without_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("(regime mixed) and needs a dataset")):
        rl_training.train({**mixed(RLPD, tmp_path), "dataset": None})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spec", MIXED, ids=lambda spec: spec.name)
@pytest.mark.fast_cases("rlpd", "iql")
def test_data_and_live_steps_can_share_one_buffer(spec: AlgorithmSpec, tmp_path: Path) -> None:
    settings = {"offline_batch_ratio": "uniform", "batch_size": 64, "learning_starts": 40}
    config = tiny_of(spec, tmp_path, regime="mixed", total_timesteps=100, algo_kwargs=settings)
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(70)])
    resumed = rl_training.resume_training(stopped.run_dir)
    assert hashes(uninterrupted.checkpoint_path) == hashes(resumed.checkpoint_path)
    # 200 recorded rows and 100 live rows.
    assert uninterrupted.metrics["train/offline_batch_size"] == round(64 * 200 / 300)


@pytest.mark.parametrize(
    ("changes", "settings", "starts"),
    [
        ({}, {}, 25_000),
        ({}, {"learning_starts": 7}, 7),
        ({"init_from": "policy"}, {}, 1_000),
        ({"init_from": "policy"}, {"learning_starts": 5_000}, 5_000),
        ({"regime": "mixed", "dataset": {"kind": "random", "size": 100}}, {}, 256),
        ({"regime": "mixed", "dataset": {"kind": "random", "size": 100}}, {"batch_size": 64}, 64),
        (
            {"regime": "mixed", "dataset": {"kind": "random", "size": 100}},
            {"offline_batch_ratio": 0.0},
            25_000,
        ),
    ],
)
def test_learning_starts_earlier_with_a_trained_policy_or_data(
    changes: dict[str, Any], settings: dict[str, Any], starts: int
) -> None:
    values = {"algo": "td3_bc", "regime": "online", "algo_kwargs": settings, **changes}
    assert learning_starts(TrainConfig(**values)) == starts


def test_fine_tuning_on_data_changes_the_policy_within_a_few_steps(
    tmp_path: Path, offline: Any
) -> None:
    before = offline("awac")
    config = tiny_of(get_algorithm_spec("awac"), tmp_path / "new", total_timesteps=60)
    del config["algo_kwargs"]["learning_starts"]
    config |= {"regime": "mixed", "init_from": str(before.run_dir)}
    result = rl_training.train(config)
    assert result.metrics["gradient_steps"] == 60 - 16


def test_different_weights_are_refused_with_a_uniform_ratio() -> None:
    sections = [{"kind": "random", "size": 10, "weight": weight} for weight in (1.0, 9.0)]
    values = {"algo": "rlpd", "dataset": sections}
    assert TrainConfig(**values).dataset_sections[1].weight == 9.0
    with pytest.raises(ConfigError, match=r"'uniform': .*cannot have different weights"):
        TrainConfig(**values, algo_kwargs={"offline_batch_ratio": "uniform"})


@pytest.mark.parametrize(("given", "kept"), [({"learning_starts": 7}, 7), ({}, "auto")])
def test_a_saved_policy_keeps_its_settings_as_they_were_given(
    given: dict[str, Any], kept: int | str, tmp_path: Path
) -> None:
    config = tiny_of(get_algorithm_spec("iql"), tmp_path)
    del config["algo_kwargs"]["learning_starts"]
    agent = rl_training.IQL(TrainConfig(**config), **given)
    agent.learn()
    agent.save(tmp_path / "policy")
    loaded = rl_training.IQL.load(tmp_path / "policy").config.algo_kwargs
    assert loaded.learning_starts == kept
    assert loaded.learning_rate_schedule == "auto"


def test_a_policy_with_another_actor_head_is_refused_by_name(tmp_path: Path, offline: Any) -> None:
    before = offline("awac", algo_kwargs={"actor_head": "squashed_gaussian"})
    config = tiny_of(get_algorithm_spec("awac"), tmp_path / "new")
    config |= {"regime": "mixed", "init_from": str(before.run_dir)}
    with pytest.raises(ConfigError, match=r"set algo_kwargs.actor_head: squashed_gaussian"):
        rl_training.train(config)
