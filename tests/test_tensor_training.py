"""Training in tensor environments: resumed bit for bit, seeds side by side, clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import StopAt, hashes, metric_rows, tiny

import rl_training
from rl_training.data.n_step import NStepAccumulator
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.transforms import (
    DeviceReturnScaler,
    ObservationNormalizer,
    ReturnScaler,
)
from rl_training.envs.tensors.classic_control import Pendulum
from rl_training.envs.tensors.contract import TensorSource, TensorStep
from rl_training.errors import ConfigError, EnvironmentRuntimeError, EnvironmentSetupError
from rl_training.execution import execution
from rl_training.runtime.workflows import resume_together
from rl_training.training.tensors import collector as collecting
from rl_training.training.tensors.n_step import StepWindows
from rl_training.training.tensors.statistics import EpisodeStatistics
from rl_training.types import Batch, ReturnScaling, TrainResult


def tensors(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    settings = {"train_frequency": 8, **changes.pop("algo_kwargs", {})}
    task = {"env_id": "tensors/Pendulum-v1", "num_envs": 4, "total_timesteps": 480}
    return tiny(tmp_path, **{**task, **changes}, algo_kwargs=settings)


def trained(config: dict[str, Any], **options: Any) -> TrainResult:
    result = rl_training.train(config, **options)
    assert isinstance(result, TrainResult)
    return result


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="sac"),
        pytest.param(
            {"normalize_observations": True, "algo_kwargs": {"buffer_capacity": 70}},
            id="normalized-wrapping",
        ),
        pytest.param({"algo": "td3", "algo_kwargs": {"n_step": 3}}, id="td3-3-step"),
        pytest.param({"algo": "dqn", "env_id": "tensors/CartPole-v1"}, id="dqn"),
        pytest.param(
            {
                "algo": "flash_sac",
                "algo_kwargs": {"num_atoms": 11},
            },
            id="flash-sac-scaled-returns-repeated-noise",
        ),
    ],
)
@pytest.mark.fast_cases("sac", "normalized-wrapping")
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tensors(tmp_path, **changes)
    whole = trained(config)
    stopped = trained(config, callbacks=[StopAt(200)])
    assert stopped.metrics["global_step"] < whole.metrics["global_step"]
    resumed = rl_training.resume_training(stopped.run_dir)
    assert hashes(resumed.checkpoint_path) == hashes(whole.checkpoint_path)
    assert metric_rows(resumed.run_dir) == metric_rows(whole.run_dir)


def test_two_seeds_are_the_same_as_each_alone(tmp_path: Path) -> None:
    config = tensors(tmp_path, total_timesteps=240)
    both = rl_training.train({**config, "seeds": [3, 4]})
    assert isinstance(both, list)
    for seed, result in zip((3, 4), both, strict=True):
        alone = trained({**config, "seed": seed})
        assert hashes(result.checkpoint_path) == hashes(alone.checkpoint_path)


def test_two_seeds_resume_together(tmp_path: Path) -> None:
    config = {**tensors(tmp_path, total_timesteps=240), "seeds": [3, 4]}
    whole = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(100)])
    assert isinstance(whole, list)
    assert isinstance(stopped, list)
    resumed = resume_together([each.run_dir for each in stopped])
    for mine, other in zip(resumed, whole, strict=True):
        assert hashes(mine.checkpoint_path) == hashes(other.checkpoint_path)


def test_evaluation_uses_the_twin_and_needs_no_tensors(tmp_path: Path) -> None:
    result = trained(tensors(tmp_path, total_timesteps=80))
    found = rl_training.evaluate_checkpoint(result.run_dir, num_episodes=2)
    assert found["eval_length_mean"] == 200
    assert "Pendulum" in (result.run_dir / "metadata.json").read_text()


def test_episode_figures_are_read_from_the_device(tmp_path: Path) -> None:
    result = trained(tensors(tmp_path, total_timesteps=4 * 201, log_interval=400))
    assert result.metrics["rollout/ep_len_mean"] == 200
    assert -2_000 < result.metrics["rollout/ep_rew_mean"] < -100


def test_the_last_step_is_shown_to_callbacks(tmp_path: Path) -> None:
    seen = []

    class Watch(rl_training.Callback):
        def on_collect_end(self, context: Any) -> None:
            seen.append((context.rewards, context.actions))

    trained(tensors(tmp_path, total_timesteps=8), callbacks=[Watch()])
    rewards, actions = seen[-1]
    assert rewards.shape == (4,)
    assert 1 < np.abs(actions).max() < 2  # in the units of the environment


class Fragile(Pendulum):
    """Breaks every second world in every step."""

    def outcome(self) -> Any:
        outcome = super().outcome()
        outcome.obs[1::2, 0] = torch.nan
        return outcome


@pytest.mark.parametrize(
    ("num_envs", "rounds", "message"),
    [
        (4, 8, "16 worlds broke in 32 steps"),  # more than 10
        (64, 1, "32 worlds broke in 64 steps"),  # more than 1 of 1,000 in 100 rounds
        (64, 100, "32 worlds broke in 64 steps"),
    ],
)
def test_too_many_broken_worlds_stop_the_run(
    tmp_path: Path, num_envs: int, rounds: int, message: str
) -> None:
    config = tensors(tmp_path, env_id=None, num_envs=num_envs, total_timesteps=num_envs * rounds)
    with pytest.raises(EnvironmentRuntimeError, match=message):
        rl_training.train(config, env=TensorSource(Fragile))


class Rarely(Pendulum):
    """Breaks a world in some rounds."""

    breaks_in = range(0)

    def __init__(self, num_envs: int, device: torch.device) -> None:
        super().__init__(num_envs, device)
        self.rounds = 0

    def outcome(self) -> Any:
        outcome = super().outcome()
        self.rounds += 1
        if self.rounds in self.breaks_in:
            outcome.obs[0, 0] = torch.nan
        return outcome


@pytest.mark.parametrize(("often", "is_stopped"), [(10, False), (11, True)])
def test_worlds_may_break_ten_times_in_a_hundred_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: int, is_stopped: bool
) -> None:
    monkeypatch.setattr(Rarely, "breaks_in", range(40, 40 + often))
    config = tensors(tmp_path, env_id=None, num_envs=2, total_timesteps=2 * 150, eval_interval=0)
    if is_stopped:
        with pytest.raises(EnvironmentRuntimeError, match="11 worlds broke in 200 steps"):
            rl_training.train(config, env=TensorSource(Rarely))
    else:
        result = trained(config, env=TensorSource(Rarely))
        assert result.metrics["rollout/broken_worlds"] == often


@pytest.mark.parametrize("n_step", [1, 3])
def test_no_transition_is_invented_where_all_worlds_break_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_step: int
) -> None:
    monkeypatch.setattr(Rarely, "breaks_in", range(1, 2))
    task = {"num_envs": 1, "total_timesteps": 64, "eval_interval": 0}
    config = tensors(tmp_path, algo="td3", env_id=None, **task, algo_kwargs={"n_step": n_step})
    with pytest.raises(EnvironmentRuntimeError, match="before there was any transition to learn"):
        rl_training.train(config, env=TensorSource(Rarely))


def test_an_evaluation_goes_on_where_a_world_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rarely, "breaks_in", range(50_000, 50_001))
    config = tensors(tmp_path, env_id=None, total_timesteps=80, eval_interval=0)
    run = trained(config, env=TensorSource(Rarely)).run_dir
    monkeypatch.setattr(Rarely, "breaks_in", range(30, 31))
    with pytest.warns(UserWarning, match="a world broke"):
        found = rl_training.evaluate_checkpoint(run, num_episodes=1, env=TensorSource(Rarely))
    assert found["eval_length_mean"] == 30
    assert np.isfinite(found["eval_return_mean"])


def test_a_single_world_that_breaks_in_training_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rarely, "breaks_in", range(30, 31))
    config = tensors(tmp_path, env_id=None, vectorization="sync", eval_interval=0)
    with pytest.raises(EnvironmentRuntimeError, match="not finite"):
        rl_training.train(config, env=TensorSource(Rarely))


class Wrong(Pendulum):
    changes: ClassVar[dict[str, Any]] = {}

    def step(self, actions: torch.Tensor) -> TensorStep:
        step = super().step(actions)
        return step._replace(**{name: make(step) for name, make in self.changes.items()})


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("reward", lambda step: step.reward[:, None], r"reward .* of shape \(4,\), not .*\(4, 1\)"),
        ("terminated", lambda step: step.terminated.float(), "terminated .*bool .*not .*float32"),
        ("obs", lambda step: step.obs[:, :2], r"obs of a step .*\(4, 3\), not .*\(4, 2\)"),
        ("left_out", lambda step: step.broken[:2], r"left_out .*\(4,\), not .*\(2,\)"),
    ],
)
def test_steps_of_another_shape_or_type_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Any, message: str
) -> None:
    monkeypatch.setattr(Wrong, "changes", {name: make})
    config = tensors(tmp_path, env_id=None, total_timesteps=80)
    with pytest.raises(EnvironmentRuntimeError, match=message):
        rl_training.train(config, env=TensorSource(Wrong))


def test_actions_without_bounds_are_refused(tmp_path: Path) -> None:
    class Free(Pendulum):
        def __init__(self, num_envs: int, device: torch.device) -> None:
            super().__init__(num_envs, device)
            self.action_space = gym.spaces.Box(-np.inf, np.inf, (1,))

    config = tensors(tmp_path, env_id=None)
    with pytest.raises(EnvironmentSetupError, match=r"no finite bounds.*give it bounds") as error:
        rl_training.train(config, env=TensorSource(Free))
    assert "action_range" not in str(error.value)


def test_transitions_of_broken_worlds_are_not_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "FEW_BROKEN", 1_000)
    config = tensors(tmp_path, env_id=None, total_timesteps=200)
    result = trained(config, env=TensorSource(Fragile))
    assert result.metrics["rollout/broken_worlds"] == 100
    assert np.isfinite(result.metrics["train/critic_loss"])


def test_an_environment_of_the_user_is_trained_resumed_and_evaluated(tmp_path: Path) -> None:
    config = tensors(tmp_path, env_id=None)
    source = TensorSource(Pendulum)
    whole = trained(config, env=source)
    stopped = trained(config, env=source, callbacks=[StopAt(200)])
    resumed = rl_training.resume_training(stopped.run_dir, env=source)
    assert hashes(resumed.checkpoint_path) == hashes(whole.checkpoint_path)
    found = rl_training.evaluate_checkpoint(whole.run_dir, num_episodes=2, env=source)
    assert found["eval_length_mean"] == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wrappers": ["gymnasium.wrappers:TimeAwareObservation"]}, "wrappers: does not work"),
        ({"replay_device": "cpu"}, "replay_device: does not work"),
        ({"env_id": "Pendulum-v1", "vectorization": "tensors"}, "is no tensor environment"),
        ({"env_id": "Pendulum-v1", "num_envs": 5_000}, "at most 4,096"),
        ({"vectorization": "sync", "num_envs": 5_000}, "at most 4,096"),
        ({"vectorization": "tensors", "env_workers": 2}, "has none"),
    ],
)
def test_what_does_not_work_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rl_training.train(tensors(tmp_path, **changes))


def test_an_unknown_tensor_environment_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentSetupError, match="Did you mean tensors/Pendulum-v1"):
        rl_training.train(tensors(tmp_path, env_id="tensors/pendulum-v1"))


def test_a_run_cannot_move_from_tensors_to_the_host(tmp_path: Path) -> None:
    stopped = trained(tensors(tmp_path), callbacks=[StopAt(200)])
    with pytest.raises(ConfigError, match="start a new run"):
        rl_training.resume_training(stopped.run_dir, changes={"vectorization": "sync"})


def test_the_twin_can_be_trained_on_the_host(tmp_path: Path) -> None:
    result = trained(tensors(tmp_path, vectorization="sync", total_timesteps=80))
    assert result.metrics["global_step"] == 80


def test_thousands_of_worlds_fit(tmp_path: Path) -> None:
    settings = {"buffer_capacity": 20_000, "learning_starts": 8_192, "train_frequency": 8_192}
    config = tensors(tmp_path, num_envs=8_192, total_timesteps=3 * 8_192, algo_kwargs=settings)
    result = trained(config)
    assert result.metrics["gradient_steps"] == 2


def rows_of(values: torch.Tensor) -> Batch:
    column = values[:, None].float()
    return Batch(column, column, values.float(), values.float(), column)


def add_on_device(replay: ReplayBuffer, numbers: torch.Tensor) -> None:
    replay.add_on_device(replay.pack_on_device(rows_of(numbers)))
    replay.count_on_device(len(numbers))


def test_rows_are_added_on_the_device_as_from_the_host() -> None:
    replay = ReplayBuffer(10, 1, 1, slots=(0, 1), width=2)
    for first in range(0, 24, 4):  # both rings wrap around
        numbers = torch.arange(first, first + 4)
        add_on_device(replay, torch.cat([numbers, 100 + numbers]))
    assert len(replay) == 10
    for seed, start in ((0, 0), (1, 100)):
        [(_, rows, _)] = replay.segments(seed_index=seed)
        assert sorted(rows[:, 0].tolist()) == list(range(start + 14, start + 24))
        assert rows[4, 0] == start + 14  # the oldest row is overwritten next


def test_more_rows_than_fit_keep_the_newest() -> None:
    replay = ReplayBuffer(3, 1, 1)
    add_on_device(replay, torch.arange(8))
    [(_, rows, _)] = replay.segments()
    assert sorted(rows[:, 0].tolist()) == [5, 6, 7]
    assert replay.rows_added() == 8


def test_windows_give_the_transitions_of_the_accumulator() -> None:
    steps, worlds, gamma, n_step = 40, 3, 0.9, 4
    generator = np.random.default_rng(0)
    accumulator = NStepAccumulator(n_step, gamma, worlds)
    windows = StepWindows(n_step, gamma, worlds, [1, 1, 1, 1, 1], torch.device("cpu"))
    expected, found = [], []
    for number in range(steps):
        obs = np.stack([np.arange(worlds), np.full(worlds, number)], 1).astype(np.float32)
        place = (100 * obs[:, :1] + obs[:, 1:]).astype(np.float32)
        action, after = generator.normal(size=(2, worlds, 1)).astype(np.float32)
        reward = generator.normal(size=worlds).astype(np.float32)
        terminated, truncated = generator.random((2, worlds)) < 0.15
        rows, _ = accumulator.add(place, action, reward, terminated, truncated, after)
        columns = [np.ravel(part) for part in rows[:5]]
        expected += [tuple(float(x) for x in row) for row in zip(*columns, strict=True)]
        one = np.concatenate(
            [place, action, reward[:, None], gamma * (1 - terminated[:, None]), after], axis=1
        )
        ended = torch.from_numpy(terminated | truncated)
        combined, unknown = windows.add(torch.tensor(one).float(), ended, torch.zeros(worlds) > 0)
        if number >= n_step - 1:
            assert not unknown.any()
            found += [tuple(row) for row in combined.tolist()]
    # Windows complete a transition some steps later, so the last ones are still waiting.
    assert len(found) == (steps - n_step + 1) * worlds
    by_place = {row[0]: row for row in expected}
    for row in found:
        np.testing.assert_allclose(row, by_place[row[0]], rtol=1e-5, atol=1e-6)


def test_returns_are_scaled_on_the_device_as_on_the_host() -> None:
    scaling = ReturnScaling(0.9, 5.0)
    host, device = ReturnScaler(scaling, 3), DeviceReturnScaler(scaling, 3, "cpu")
    generator = np.random.default_rng(0)
    for _ in range(50):
        reward = generator.normal(size=3).astype(np.float32)
        ended = generator.random(3) < 0.2
        host.observe(reward, ended, None)
        device.observe_on_device(torch.from_numpy(reward), torch.from_numpy(ended))
        torch.testing.assert_close(device.scale, host.scale)
    for name, array in host.state.items():
        np.testing.assert_allclose(device.tensors[name], array)


def test_a_normalizer_that_was_moved_gives_the_same() -> None:
    plain, moved = ObservationNormalizer(2), ObservationNormalizer(2)
    moved.move(torch.device("cpu"))
    obs = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    for each in (plain, moved):
        each.observe(obs)
    torch.testing.assert_close(moved.normalize(obs), plain.normalize(obs), atol=0, rtol=0)


def test_statistics_hold_the_last_episode_of_each_world() -> None:
    statistics = EpisodeStatistics(2, torch.device("cpu"))
    no, yes = torch.tensor([False, False]), torch.tensor([True, False])
    obs = torch.zeros(2, 1)
    # Of a broken world nothing counts, not even that its episode was cut off.
    steps = ((1.0, no, no, no), (2.0, yes, no, no), (4.0, no, yes, yes))
    for reward, terminated, truncated, broken in steps:
        rewards = torch.full((2,), reward)
        statistics.add(TensorStep(obs, rewards, terminated, truncated, obs, broken))
    assert statistics.metrics(slice(0, 2)) == {
        "ep_rew_mean": 3.0,
        "ep_len_mean": 2.0,
        "broken_worlds": 1.0,
    }
    assert statistics.metrics(slice(1, 2)) == {}
    assert statistics.state["lengths"].tolist() == [0, 3]


@pytest.mark.learning
def test_sac_learns_in_worlds_that_are_tensors(tmp_path: Path) -> None:
    settings = {
        "train_frequency": 16,
        "gradient_updates_per_step": 4,
        "learning_starts": 1_000,
        "hidden_sizes": [64, 64],
        "batch_size": 128,
        "learning_rate": 1e-3,
    }
    config = tensors(tmp_path, num_envs=16, total_timesteps=20_000)
    result = trained({**config, "algo_kwargs": settings, "eval_episodes": 10})
    assert result.metrics["eval_return_mean"] > -250


@pytest.mark.thorough
def test_seeds_of_one_program_have_their_own_worlds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU all seeds share one program, with an axis of slots; here on a CPU."""
    monkeypatch.setattr(execution, "BATCHED_ON", ("cpu",))
    config = tensors(tmp_path, total_timesteps=160, algo_kwargs={"train_frequency": 40})
    config |= {"algo": "flash_sac", "normalize_observations": True}
    config["algo_kwargs"] = {**config["algo_kwargs"], "num_atoms": 11}
    both = rl_training.train({**config, "seeds": [3, 4]})
    stopped = rl_training.train({**config, "seeds": [3, 4]}, callbacks=[StopAt(80)])
    assert isinstance(both, list)
    assert isinstance(stopped, list)
    monkeypatch.setattr(execution, "BATCHED_ON", ("cuda",))
    resumed = resume_together([each.run_dir for each in stopped])
    for seed, result, again in zip((3, 4), both, resumed, strict=True):
        assert hashes(again.checkpoint_path) == hashes(result.checkpoint_path)
        alone = trained({**config, "seed": seed})
        for name in ("rollout/ep_rew_mean", "train/critic_loss"):
            if name in alone.metrics:
                assert result.metrics[name] == pytest.approx(alone.metrics[name], rel=0.01)
