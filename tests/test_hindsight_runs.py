"""Runs with hindsight: what they store, and that they can be stopped, resumed and batched."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from goal_environments import PointGoal
from helpers import StopAt, each_replayed, hashes, metric_rows, tiny, tiny_of
from safetensors.torch import load_file

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.envs import EnvironmentFactory
from rl_training.envs.goals import GoalEnvironment
from rl_training.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EnvironmentRuntimeError,
    EnvironmentSetupError,
)
from rl_training.execution import execution
from rl_training.runtime.workflows import resume_together
from rl_training.types import TrainResult

HINDSIGHT = {"hindsight": {"per_transition": 2}}
ROW = {"achieved": slice(0, 2), "desired": slice(2, 4), "observation": slice(4, 6)}
"""The words of an observation of `PointGoal`, whose keys Gymnasium sorts"""


class Short(PointGoal):
    """Episodes of seven steps, which end near the goal."""

    def __init__(self) -> None:
        super().__init__(length=7, near=0.5, episodic=True)


class ShortDiscrete(PointGoal):
    def __init__(self) -> None:
        super().__init__(length=7, near=0.5, discrete=True)


def goal_run(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {**tiny(tmp_path, replay=HINDSIGHT, **changes), "env_id": None}


def assert_same(first: TrainResult, second: TrainResult) -> None:
    assert hashes(first.checkpoint_path) == hashes(second.checkpoint_path)
    assert metric_rows(first.run_dir) == metric_rows(second.run_dir)


def stored(result: TrainResult) -> np.ndarray:
    files = sorted(result.checkpoint_path.glob("replay-*.safetensors"))
    return np.concatenate([load_file(file)["rows"].numpy() for file in files])


def split(rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Observations, rewards, discounts and next observations of rows with two actions."""
    return rows[:, :6], rows[:, 8], rows[:, 9], rows[:, 10:]


def test_every_stored_transition_has_the_reward_and_the_end_of_its_goal(tmp_path: Path) -> None:
    result = rl_training.train(goal_run(tmp_path, num_envs=2), env=Short)
    obs, reward, discount, next_obs = split(stored(result))
    environment = Short()
    assert len(reward) > 2 * 120  # repeated twice, but for the unfinished episodes
    np.testing.assert_array_equal(obs[:, ROW["desired"]], next_obs[:, ROW["desired"]])
    distance = np.linalg.norm(next_obs[:, ROW["achieved"]] - next_obs[:, ROW["desired"]], axis=-1)
    near = distance <= environment.near
    np.testing.assert_array_equal(reward, np.where(near, 0, -1))
    np.testing.assert_allclose(discount, np.where(near, 0, 0.99), rtol=1e-6)
    assert 0.2 < near.mean() < 0.9


def test_without_compute_terminated_the_recorded_end_stays(tmp_path: Path) -> None:
    class Plain(Short):
        def __getattribute__(self, name: str) -> Any:
            if name == "compute_terminated":
                raise AttributeError(name)
            return super().__getattribute__(name)

        def step(self, action: Any) -> Any:
            self.time += 1
            self.position = np.clip(self.position + self.stride * np.asarray(action), -1, 1)
            reward = float(self.compute_reward(self.position, self.goal, {}))
            return self._observe(), reward, reward == 0, self.time >= self.length, {}

    result = rl_training.train(goal_run(tmp_path), env=Plain)
    _, reward, discount, next_obs = split(stored(result))
    ends = {tuple(row[ROW["observation"]]) for row in next_obs[discount == 0]}
    for row, left in zip(next_obs, discount, strict=True):
        assert (tuple(row[ROW["observation"]]) in ends) == (left == 0)
    assert 0 < (discount == 0).sum() < (reward == 0).sum()


@pytest.mark.thorough
@each_replayed
def test_stopping_within_an_episode_changes_nothing(spec: AlgorithmSpec, tmp_path: Path) -> None:
    environment = ShortDiscrete if spec.action_kind == "discrete" else Short
    config = {**tiny_of(spec, tmp_path, replay=HINDSIGHT, num_envs=2), "env_id": None}
    if "mixed" in spec.regimes:
        config |= {"regime": "online"} if "online" in spec.regimes else {}
    if config.get("dataset") is not None:
        config["dataset"] = {"kind": "random", "size": 60}
    uninterrupted = rl_training.train(config, env=environment)
    stopped = rl_training.train(config, env=environment, callbacks=[StopAt(53)])
    assert_same(uninterrupted, rl_training.resume_training(stopped.run_dir, env=environment))


def test_stopping_twice_with_several_steps_per_transition_changes_nothing(tmp_path: Path) -> None:
    settings = {"n_step": 3, "entropy_in_target": False, "buffer_capacity": 90}
    config = goal_run(
        tmp_path, num_envs=3, algo_kwargs=settings, normalize_observations=True, total_timesteps=180
    )
    uninterrupted = rl_training.train(config, env=Short)
    result = rl_training.train(config, env=Short, callbacks=[StopAt(31)])
    result = rl_training.resume_training(result.run_dir, env=Short, callbacks=[StopAt(100)])
    assert_same(uninterrupted, rl_training.resume_training(result.run_dir, env=Short))


def test_a_checkpoint_without_its_unfinished_episodes_is_refused(tmp_path: Path) -> None:
    stopped = rl_training.train(goal_run(tmp_path), env=Short, callbacks=[StopAt(53)])
    (stopped.checkpoint_path / "episodes.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"episodes\.safetensors"):
        rl_training.resume_training(stopped.checkpoint_path, env=Short)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.fast_cases("True")
def test_each_seed_of_a_population_equals_a_single_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    if batched:
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    config = goal_run(tmp_path, num_envs=2)
    together = rl_training.train({**config, "seeds": [3, 1]}, env=Short)
    for seed, result in zip((3, 1), together, strict=True):
        alone = rl_training.train({**config, "seed": seed}, env=Short)
        if batched:  # updates round differently, and the policies act differently from then on
            first = stored(alone)[:40]
            np.testing.assert_array_equal(stored(result)[:40], first)
        else:
            np.testing.assert_array_equal(stored(result), stored(alone))


def test_a_resumed_population_equals_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    config = goal_run(tmp_path, num_envs=2, seeds=[3, 1])
    uninterrupted = rl_training.train(config, env=Short)
    stopped = rl_training.train(config, env=Short, callbacks=[StopAt(53)])
    resumed = resume_together([each.run_dir for each in stopped], env=Short)
    for first, second in zip(uninterrupted, resumed, strict=True):
        assert_same(first, second)


class Lost(Short):
    """Cannot be captured, and its worker process dies once, in the middle of an episode."""

    def __init__(self, marker: str = "") -> None:
        super().__init__()
        self.marker, self.stream = Path(marker), iter(())

    def step(self, action: Any) -> Any:
        if self.time == 3 and self.marker.name:
            die_once(self.marker)
        return super().step(action)


def die_once(marker: Path) -> None:
    """End this worker process, unless the file shows that one has ended."""
    if multiprocessing.parent_process() is not None:
        with contextlib.suppress(FileExistsError):
            marker.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_lost_episode_is_not_repeated_with_other_goals(tmp_path: Path) -> None:
    marker = tmp_path / "died"
    config = goal_run(tmp_path / "runs", num_envs=2, vectorization="async", env_restarts=1)
    config["env_kwargs"] = {"marker": str(marker)}
    with pytest.warns(UserWarning, match="new episodes"):
        result = rl_training.train(config, env=Lost)
    assert marker.exists()
    assert result.metrics["rollout/lost_episodes"] >= 1
    obs, reward, discount, next_obs = split(stored(result))
    moved = np.abs(next_obs[:, ROW["observation"]] - obs[:, ROW["observation"]])
    assert moved.max() <= 0.15 + 1e-6  # no transition joins two episodes
    distance = np.linalg.norm(next_obs[:, ROW["achieved"]] - next_obs[:, ROW["desired"]], axis=-1)
    np.testing.assert_array_equal(reward, np.where(distance <= 0.5, 0, -1))
    reached = distance[reward == 0]
    assert len(reached)
    np.testing.assert_allclose(discount[reward == 0], 0)


def test_environments_in_processes_give_the_same_run(tmp_path: Path) -> None:
    runs = [
        rl_training.train(goal_run(tmp_path, num_envs=2, vectorization=backend), env=Short)
        for backend in ("sync", "async")
    ]
    np.testing.assert_array_equal(stored(runs[0]), stored(runs[1]))


def test_prioritized_replay_works_with_repeated_transitions(tmp_path: Path) -> None:
    config = goal_run(tmp_path, algo="dqn", algo_kwargs={"prioritized": True})
    uninterrupted = rl_training.train(config, env=ShortDiscrete)
    stopped = rl_training.train(config, env=ShortDiscrete, callbacks=[StopAt(66)])
    assert_same(uninterrupted, rl_training.resume_training(stopped.run_dir, env=ShortDiscrete))


@pytest.mark.thorough
def test_rewards_are_scaled_as_those_of_the_data(tmp_path: Path) -> None:
    data = {"kind": "random", "size": 80, "reward_scale": 2.0, "reward_shift": 1.0}
    config = goal_run(tmp_path, algo="rlpd", dataset=data, algo_kwargs={"num_critics": 2})
    _, reward, *_ = split(stored(rl_training.train(config, env=Short)))
    assert set(np.unique(reward)) == {-1.0, 1.0}


@pytest.mark.parametrize("n_step", [1, 3])
def test_recorded_transitions_are_repeated_with_the_same_rules(tmp_path: Path, n_step: int) -> None:
    from rl_training.data.hindsight.relabelling import Hindsight
    from rl_training.datasets.opening import build_dataset

    factory = EnvironmentFactory(Short)
    goals = GoalEnvironment(factory)
    hindsight = Hindsight(goals, "future", 3, 0.9, n_step)
    section = {"kind": "random", "size": 100}
    plain = build_dataset(section, factory=factory, gamma=0.9, n_step=n_step)
    both = build_dataset(section, factory=factory, gamma=0.9, n_step=n_step, hindsight=hindsight)
    goals.close()
    assert len(both) == 4 * len(plain)
    own, new = both.packed[: len(plain)], both.packed[len(plain) :].numpy()
    np.testing.assert_array_equal(own.numpy(), plain.packed.numpy())
    obs, reward, discount, next_obs = split(new)
    recorded = split(plain.packed.numpy())
    for index, (row, last) in enumerate(zip(obs, next_obs, strict=True)):
        start = index // 3
        np.testing.assert_array_equal(
            row[ROW["observation"]], recorded[0][start, ROW["observation"]]
        )
        np.testing.assert_array_equal(row[ROW["desired"]], last[ROW["desired"]])
    if n_step == 1:
        distance = np.linalg.norm(
            next_obs[:, ROW["achieved"]] - next_obs[:, ROW["desired"]], axis=-1
        )
        np.testing.assert_array_equal(reward, np.where(distance <= 0.5, 0, -1))
        np.testing.assert_allclose(discount, np.where(distance <= 0.5, 0, 0.9), rtol=1e-6)
    assert both.fingerprint != plain.fingerprint
    shares = [part.weight for part in both.parts]
    assert shares == [0.25, 0.75]


@pytest.mark.parametrize("algo", ["bc", "iql", "td3_bc", "rebrac"])
def test_offline_algorithms_learn_from_repeated_transitions(tmp_path: Path, algo: str) -> None:
    config = {
        **tiny(tmp_path, algo=algo, replay=HINDSIGHT, total_timesteps=12, log_interval=4),
        "env_id": None,
        "dataset": {"kind": "random", "size": 60},
        "algo_kwargs": {"hidden_sizes": [16, 16], "batch_size": 16},
    }
    uninterrupted = rl_training.train(config, env=Short)
    stopped = rl_training.train(config, env=Short, callbacks=[StopAt(5)])
    assert_same(uninterrupted, rl_training.resume_training(stopped.run_dir, env=Short))


def test_a_replay_buffer_with_repeated_transitions_is_not_taken_for_recorded_data(
    tmp_path: Path,
) -> None:
    result = rl_training.train(goal_run(tmp_path), env=Short)
    config = tiny(tmp_path, algo="bc", dataset={"kind": "run", "path": str(result.run_dir)})
    config |= {"env_id": None, "algo_kwargs": {"hidden_sizes": [16], "batch_size": 16}}
    with pytest.raises(DataError, match="other goals"):
        rl_training.train(config, env=Short)


class Shaped(gym.RewardWrapper):
    def reward(self, reward: Any) -> float:
        return float(reward) + 0.5


class NeedsInfo(Short):
    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
        return super().compute_reward(achieved, desired, info) if info["grip"] else 0.0

    def step(self, action: Any) -> Any:
        return self._observe(), 0.0, False, False, {}


class NoFunction(Short):
    def __getattribute__(self, name: str) -> Any:
        if name == "compute_reward":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def step(self, action: Any) -> Any:
        return self._observe(), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("Pendulum-v1", r"replay\.hindsight: needs an environment with goals.*Pendulum-v1 has"),
        (NoFunction, "and no compute_reward"),
        (lambda: Shaped(Short()), r"cannot be used: it returns -1 for a step.*no wrapper"),
        (NeedsInfo, r"compute_reward of .* cannot be used: KeyError: 'grip'"),
    ],
)
def test_environments_that_cannot_be_relabelled_are_refused(
    tmp_path: Path, environment: Any, message: str
) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        rl_training.train(goal_run(tmp_path), env=environment)
    assert not list(tmp_path.iterdir())


def test_leaves_that_are_not_observed_cannot_be_relabelled(tmp_path: Path) -> None:
    config = goal_run(tmp_path, observation_keys=["observation"])
    with pytest.raises(EnvironmentSetupError, match="needs an environment with goals"):
        rl_training.train(config, env=Short)


def test_recorded_data_without_an_environment_is_refused(tmp_path: Path) -> None:
    arrays = {
        "observations": np.zeros((5, 6)),
        "actions": np.zeros((5, 2)),
        "rewards": np.zeros(5),
        "terminals": np.ones(5, bool),
    }
    config = goal_run(tmp_path, algo="bc")
    config["algo_kwargs"] = {"hidden_sizes": [16], "batch_size": 4}
    with pytest.raises(ConfigError, match=r"replay\.hindsight: needs an environment \(env_id\)"):
        rl_training.train(config, dataset=arrays)


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        ({"hindsight": {"strategy": "random"}}, "replay.hindsight.strategy"),
        ({"hindsight": {"per_transition": 0}}, "replay.hindsight.per_transition"),
        ({"hindsite": {}}, "hindsite"),
        ({"hindsight": "future"}, "replay.hindsight"),
    ],
)
def test_wrong_settings_are_refused_by_name(replay: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl_training.TrainConfig(algo="sac", env_id="Pendulum-v1", replay=replay)


def test_a_reward_function_that_fails_ends_its_seed_with_its_name(tmp_path: Path) -> None:
    class Fails(Short):
        calls = itertools.count()

        def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
            if achieved.ndim == 2 and next(self.calls) > 3:
                raise OverflowError("too far")
            return super().compute_reward(achieved, desired, info)

    with pytest.raises(EnvironmentRuntimeError, match=r"compute_reward failed.*too far"):
        rl_training.train(goal_run(tmp_path), env=Fails)


@pytest.mark.parametrize("name", ["is_success", "success"])
def test_success_rates_are_reported(tmp_path: Path, name: str) -> None:
    class Named(Short):
        def step(self, action: Any) -> Any:
            *result, info = super().step(action)
            return (*result, {name: info["is_success"]})

    result = rl_training.train(goal_run(tmp_path, eval_episodes=5), env=Named)
    assert 0 <= result.metrics["eval_success_rate"] <= 1
    assert 0 <= result.metrics["rollout/success_rate"] <= 1


def test_goal_functions_for_single_goals_are_called_one_by_one() -> None:
    class Single(Short):
        def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
            return -float(np.linalg.norm(achieved - desired) > self.near)

    generator = np.random.default_rng(0)
    achieved, desired = generator.uniform(-1, 1, (2, 50, 2)).astype(np.float32)
    one, many = (GoalEnvironment(EnvironmentFactory(kind)) for kind in (Single, Short))
    np.testing.assert_array_equal(one.rewards(achieved, desired), many.rewards(achieved, desired))
    for goals in (one, many):
        ends = goals.terminations(achieved, desired)
        np.testing.assert_array_equal(ends, goals.rewards(achieved, desired) == 0)
        goals.close()
