"""Runs with rewards by PyTorch: rows are stored once, and get other goals in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from goal_environments import PointGoal, TorchPointGoal
from gymnasium import spaces
from helpers import StopAt, each_replayed, tiny, tiny_of
from safetensors.torch import load_file
from test_hindsight_runs import HINDSIGHT, ROW, assert_same, die_once, split, stored
from torch import Tensor

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.checkpoints.format import STATE, CheckpointReader
from rl_training.checkpoints.replay import load_replay
from rl_training.data.hindsight.sampled import SampledHindsight
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.storage.stacks import FrameLayout
from rl_training.envs import EnvironmentFactory, describe_spaces
from rl_training.envs.goals import GoalEnvironment
from rl_training.errors import CheckpointError, ConfigError, DataError, EnvironmentSetupError
from rl_training.execution import execution
from rl_training.runtime.workflows import resume_together


class Short(TorchPointGoal):
    """Episodes of seven steps, which end near the goal."""

    def __init__(self) -> None:
        super().__init__(length=7, near=0.5, episodic=True)


class ShortDiscrete(TorchPointGoal):
    def __init__(self) -> None:
        super().__init__(length=7, near=0.5, discrete=True)


def goal_run(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {**tiny(tmp_path, replay=HINDSIGHT, **changes), "env_id": None}


LEAVES = [0, 1, 110, 111, 112, 113]
"""The words of an observation of `HasImage` that `PointGoal` also has"""


def sampled(result: Any, environment: Any = Short, size: int = 400) -> Any:
    """A batch of the replay buffer of a run's last checkpoint."""
    goals = GoalEnvironment(EnvironmentFactory(environment))
    reader = CheckpointReader(result.checkpoint_path)
    state, observation = reader.json(STATE), describe_spaces(environment()).observation
    num_envs = state["config"]["num_envs"]
    replay = ReplayBuffer(
        state["config"]["algo_kwargs"]["buffer_capacity"],
        observation,
        2,
        frames=FrameLayout.of(observation, "auto", num_envs, 1),
        hindsight=SampledHindsight(goals, "future", 2, 0.99),
        num_envs=num_envs,
        generator=torch.Generator().manual_seed(0),
    )
    load_replay(replay, reader, state["replay"], 0)
    goals.close()
    return replay.sample(size)


def assert_exact(batch: Any) -> None:
    """Every transition has the reward and the end of its goal, and stays in its episode."""
    desired = batch.next_obs[:, ROW["desired"]]
    assert torch.equal(batch.obs[:, ROW["desired"]], desired)
    distance = torch.linalg.vector_norm(batch.next_obs[:, ROW["achieved"]] - desired, dim=-1)
    near = distance <= 0.5
    assert torch.equal(batch.reward, -(~near).float())
    torch.testing.assert_close(batch.discount, 0.99 * (~near).float())
    assert 0.3 < near.float().mean() < 0.95


def test_rows_are_stored_once_and_sampled_with_the_rewards_of_their_goals(tmp_path: Path) -> None:
    result = rl_training.train(goal_run(tmp_path, num_envs=2), env=Short)
    assert len(stored(result)) == 120
    batch = sampled(result)
    assert_exact(batch)
    # A goal that no row was stored with is one that was reached.
    obs, *_, next_obs = split(stored(result))
    own = {tuple(row) for row in obs[:, ROW["desired"]].tolist()}
    reached = {tuple(row) for row in next_obs[:, ROW["achieved"]].tolist()}
    goals = {tuple(row) for row in batch.obs[:, ROW["desired"]].tolist()}
    assert goals - own
    assert goals - own <= reached


def test_the_first_rows_are_those_of_a_run_without_hindsight(tmp_path: Path) -> None:
    runs = [
        rl_training.train({**goal_run(tmp_path), "replay": replay}, env=Short)
        for replay in (HINDSIGHT, None)
    ]
    np.testing.assert_array_equal(stored(runs[0])[:40], stored(runs[1])[:40])


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


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.fast_cases("future")
def test_stopping_twice_with_a_full_ring_changes_nothing(tmp_path: Path, strategy: str) -> None:
    config = goal_run(
        tmp_path,
        num_envs=3,
        algo_kwargs={"buffer_capacity": 50},
        normalize_observations=True,
        total_timesteps=180,
    )
    config["replay"] = {"hindsight": {"strategy": strategy}}
    uninterrupted = rl_training.train(config, env=Short)
    result = rl_training.train(config, env=Short, callbacks=[StopAt(31)])
    result = rl_training.resume_training(result.run_dir, env=Short, callbacks=[StopAt(100)])
    assert_same(uninterrupted, rl_training.resume_training(result.run_dir, env=Short))


def test_a_checkpoint_without_its_episodes_is_refused(tmp_path: Path) -> None:
    stopped = rl_training.train(goal_run(tmp_path), env=Short, callbacks=[StopAt(53)])
    (stopped.checkpoint_path / "episodes.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"episodes\.safetensors"):
        rl_training.resume_training(stopped.checkpoint_path, env=Short)


def test_a_run_without_its_replay_buffer_is_resumed(tmp_path: Path) -> None:
    config = goal_run(tmp_path, checkpoint_replay="none", num_envs=2)
    stopped = rl_training.train(config, env=Short, callbacks=[StopAt(53)])
    with pytest.warns(UserWarning, match="no replay buffer"):
        result = rl_training.resume_training(stopped.run_dir, env=Short)
    assert result.metrics["global_step"] == 120


@pytest.mark.thorough
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


def test_each_seed_equals_a_single_run(tmp_path: Path) -> None:
    config = goal_run(tmp_path, num_envs=2)
    together = rl_training.train({**config, "seeds": [3, 1]}, env=Short)
    for seed, result in zip((3, 1), together, strict=True):
        alone = rl_training.train({**config, "seed": seed}, env=Short)
        np.testing.assert_array_equal(stored(result), stored(alone))


class Lost(Short):
    """Cannot be captured, and its worker process dies once, in the middle of an episode."""

    def __init__(self, marker: str = "") -> None:
        super().__init__()
        self.marker, self.stream = Path(marker), iter(())

    def step(self, action: Any) -> Any:
        if self.time == 3 and self.marker.name:
            die_once(self.marker)
        return super().step(action)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_rows_of_a_lost_episode_get_no_goals_of_the_next_one(tmp_path: Path, num_envs: int) -> None:
    config = goal_run(tmp_path / "runs", num_envs=num_envs, vectorization="async", env_restarts=1)
    config["env_kwargs"] = {"marker": str(tmp_path / "died")}
    with pytest.warns(UserWarning, match="new episode"):
        result = rl_training.train(config, env=Lost)
    assert result.metrics["rollout/lost_episodes"] >= 1
    batch = sampled(result, size=3000)
    # Within an episode, a goal is at most seven steps away.
    obs, *_ = split(stored(result))
    own = {tuple(row) for row in obs[:, ROW["desired"]].tolist()}
    new = torch.tensor([tuple(row) not in own for row in batch.obs[:, ROW["desired"]].tolist()])
    far = (batch.obs[:, ROW["achieved"]] - batch.obs[:, ROW["desired"]])[new].abs()
    assert new.any()
    assert far.max() <= 7 * 0.15 + 1e-6


@pytest.mark.thorough
def test_rewards_are_scaled_as_those_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relabel, rewards, sizes = SampledHindsight.relabel, set(), set()

    def watched(*arguments: Any) -> Any:
        batch = relabel(*arguments)
        rewards.update(batch.reward.tolist())
        sizes.add(tuple(batch.reward.shape))
        return batch

    monkeypatch.setattr(SampledHindsight, "relabel", watched)
    data = {"kind": "random", "size": 80, "reward_scale": 2.0, "reward_shift": 1.0}
    config = goal_run(tmp_path, algo="rlpd", dataset=data, algo_kwargs={"num_critics": 2})
    rl_training.train(config, env=Short)
    assert rewards == {-1.0, 1.0}
    assert sizes == {(8,)}  # half of a batch of 16 is recorded, half collected


def test_a_dataset_relabels_rewards_as_it_transforms_them() -> None:
    from rl_training.datasets.opening import build_dataset

    factory = EnvironmentFactory(Short)
    goals = GoalEnvironment(factory)
    section = {"kind": "random", "size": 100, "reward_scale": 2.0, "reward_shift": 1.0}
    dataset = build_dataset(
        section, factory=factory, gamma=0.99, hindsight=SampledHindsight(goals, "future", 2, 0.99)
    )
    dataset.generator = torch.Generator().manual_seed(0)
    assert len(dataset) == 100
    batch = dataset.sample(500)
    assert set(batch.reward.unique().tolist()) == {-1.0, 1.0}
    assert_exact(batch._replace(reward=(batch.reward - 1) / 2))
    for part in dataset.split(0.5):
        part.generator = dataset.generator
        batch = part.sample(500)
        assert_exact(batch._replace(reward=(batch.reward - 1) / 2))
    goals.close()
    other = {**section, "reward_scale": 3.0}
    with pytest.raises(DataError, match="transform rewards differently"):
        build_dataset(
            [section, other],
            factory=factory,
            hindsight=SampledHindsight(goals, "future", 2, 0.99),
        )


@pytest.mark.parametrize("algo", ["bc", "iql", "td3_bc", "rebrac"])
def test_offline_algorithms_learn_from_relabelled_batches(tmp_path: Path, algo: str) -> None:
    config = {
        **tiny(tmp_path, algo=algo, replay=HINDSIGHT, total_timesteps=12, log_interval=4),
        "env_id": None,
        "dataset": {"kind": "random", "size": 60},
        "algo_kwargs": {"hidden_sizes": [16, 16], "batch_size": 16},
    }
    uninterrupted = rl_training.train(config, env=Short)
    stopped = rl_training.train(config, env=Short, callbacks=[StopAt(5)])
    assert_same(uninterrupted, rl_training.resume_training(stopped.run_dir, env=Short))


def test_the_replay_buffer_of_such_a_run_is_recorded_data(tmp_path: Path) -> None:
    result = rl_training.train(goal_run(tmp_path, num_envs=2), env=Short)
    config = tiny(tmp_path, algo="bc", dataset={"kind": "run", "path": str(result.run_dir)})
    config |= {"env_id": None, "algo_kwargs": {"hidden_sizes": [16], "batch_size": 16}}
    trained = rl_training.train({**config, "total_timesteps": 5}, env=Short)
    assert trained.metrics["gradient_steps"] == 5


class Camera(PointGoal):
    """A goal environment with an image in its observations."""

    def __init__(self) -> None:
        super().__init__(length=7, near=0.5, episodic=True)
        image = spaces.Box(0, 255, (12, 12, 3), np.uint8)
        self.observation_space = spaces.Dict({**self.observation_space.spaces, "camera": image})

    def _observe(self) -> dict[str, np.ndarray]:
        return {**super()._observe(), "camera": np.full((12, 12, 3), self.time, np.uint8)}


class HasImage(Camera, TorchPointGoal):
    """The same with rewards by PyTorch."""


def test_images_are_stored_once_and_goals_are_found_beside_them(tmp_path: Path) -> None:
    networks = {"encoders": {"camera": {"encoder": "impala", "feature_size": 8}}}
    config = goal_run(tmp_path, num_envs=2, algo_kwargs={"networks": networks}, total_timesteps=60)
    result = rl_training.train(config, env=HasImage)
    frames = load_file(result.checkpoint_path / "frames-00-00000.safetensors")["frames"]
    assert len(frames) < 2 * 60
    batch = sampled(result, HasImage)
    assert_exact(batch._replace(obs=batch.obs[:, LEAVES], next_obs=batch.next_obs[:, LEAVES]))
    cameras = batch.next_obs[:, 2 : 2 + 108].contiguous().view(torch.uint8)
    assert (cameras == cameras[:, :1]).all()
    assert set(cameras[:, 0].tolist()) <= set(range(1, 8))


@pytest.mark.parametrize("environment", [Camera, HasImage])
@pytest.mark.fast_cases("HasImage")
def test_environments_with_images_are_resumed(tmp_path: Path, environment: Any) -> None:
    networks = {"encoders": {"camera": {"encoder": "impala", "feature_size": 8}}}
    config = goal_run(tmp_path, algo_kwargs={"networks": networks}, total_timesteps=60)
    uninterrupted = rl_training.train(config, env=environment)
    stopped = rl_training.train(config, env=environment, callbacks=[StopAt(53)])
    assert_same(uninterrupted, rl_training.resume_training(stopped.run_dir, env=environment))


class NumpyEnds(Short):
    def __getattribute__(self, name: str) -> Any:
        if name == "compute_terminated_torch":
            raise AttributeError(name)
        if name == "compute_terminated":
            return lambda achieved, desired, info: False
        return super().__getattribute__(name)

    def step(self, action: Any) -> Any:
        return self._observe(), -1.0, False, False, {}


class WrongAxes(Short):
    def compute_reward_torch(self, achieved: Tensor, desired: Tensor) -> Tensor:
        return super().compute_reward_torch(achieved, desired).reshape(-1).mean()


class OtherRewards(Short):
    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, reward + 0.5, *rest


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            NumpyEnds,
            r"compute_reward_torch and compute_terminated, but no compute_terminated_torch",
        ),
        (
            WrongAxes,
            r"compute_reward_torch of .* cannot be used: .*the shape \(\) for goals of the",
        ),
        (OtherRewards, r"compute_reward_torch of .* cannot be used: it returns -1 for a step that"),
    ],
)
def test_functions_that_cannot_be_used_are_refused(
    tmp_path: Path, environment: Any, message: str
) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        rl_training.train(goal_run(tmp_path), env=environment)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environment", "changes", "message"),
    [
        (
            Short,
            {"algo_kwargs": {"n_step": 3, "entropy_in_target": False}},
            "n_step = 3: .*n_step: 1",
        ),
        (
            ShortDiscrete,
            {"algo": "dqn", "algo_kwargs": {"prioritized": True}},
            "prioritized = True: .*prioritized: false",
        ),
    ],
)
def test_settings_that_do_not_work_when_sampling_are_refused(
    tmp_path: Path, environment: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rl_training.train(goal_run(tmp_path, **changes), env=environment)


def test_without_a_function_for_ends_the_recorded_end_stays(tmp_path: Path) -> None:
    class Plain(Short):
        def __getattribute__(self, name: str) -> Any:
            if name == "compute_terminated_torch":
                raise AttributeError(name)
            return super().__getattribute__(name)

        def step(self, action: Any) -> Any:
            self.time += 1
            self.position = np.clip(self.position + self.stride * np.asarray(action), -1, 1)
            near = bool(np.linalg.norm(self.position - self.goal) <= self.near)
            return self._observe(), float(near) - 1, near, self.time >= self.length, {}

    result = rl_training.train(goal_run(tmp_path), env=Plain)
    _, _, discount, next_obs = split(stored(result))
    ends = {tuple(row[ROW["observation"]]) for row in next_obs[discount == 0]}
    batch = sampled(result, Plain)
    for row, left in zip(batch.next_obs.tolist(), batch.discount.tolist(), strict=True):
        assert (tuple(row[ROW["observation"]]) in ends) == (left == 0)
    assert 0 < (batch.discount == 0).sum() < (batch.reward == 0).sum()


def test_numpy_and_torch_rewards_say_the_same() -> None:
    generator = np.random.default_rng(0)
    achieved, desired = generator.uniform(-1, 1, (2, 50, 2)).astype(np.float32)

    class Numpy(PointGoal):
        def __init__(self) -> None:
            super().__init__(length=7, near=0.5, episodic=True)

    numpy, tensors = (GoalEnvironment(EnvironmentFactory(kind)) for kind in (Numpy, Short))
    assert (numpy.has_tensor_functions, tensors.has_tensor_functions) == (False, True)
    goals = [torch.from_numpy(each).reshape(5, 10, 2) for each in (achieved, desired)]
    rewards, ends = tensors.tensor_rewards(*goals), tensors.tensor_terminations(*goals)
    assert ends is not None
    np.testing.assert_array_equal(rewards.reshape(-1), numpy.rewards(achieved, desired))
    np.testing.assert_array_equal(ends.reshape(-1), numpy.terminations(achieved, desired))
    for environment in (numpy, tensors):
        environment.close()


@pytest.mark.compiled
def test_compiled_updates_of_relabelled_batches_equal_eager_ones(tmp_path: Path) -> None:
    config = goal_run(tmp_path, total_timesteps=60)
    eager, compiled = (
        rl_training.train({**config, "compile": mode}, env=Short) for mode in ("off", "on")
    )
    np.testing.assert_array_equal(stored(eager)[:40], stored(compiled)[:40])
    assert compiled.metrics["train/critic_loss"] == pytest.approx(
        eager.metrics["train/critic_loss"], rel=1e-2
    )
