"""Rewards that are divided by the size of returns so far, and noise that exploration remembers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conformance import assert_same
from helpers import StopAt, tiny

import rl_training
from rl_training.algorithms import FlashSACAlgorithm, SACAlgorithm
from rl_training.callbacks import Callback, TrainingContext
from rl_training.data.transforms import ReturnScaler
from rl_training.errors import ConfigError
from rl_training.execution.execution import Execution
from rl_training.execution.learner import Explorer, Learner
from rl_training.execution.programs import Population
from rl_training.types import Batch, ReturnScaling, SpaceInfo

NO_END = np.array([False, False])


def returns_by_hand(rewards: list[float], ends: list[bool], gamma: float) -> list[float]:
    """Return what the authors' code computes: an episode's last step starts again."""
    found, current = [], 0.0
    for reward, end in zip(rewards, ends, strict=True):
        current = gamma * (0.0 if end else current) + reward
        found.append(current)
    return found


def test_one_environment_has_the_same_bits_as_one_of_several() -> None:
    """One environment is counted without arrays; one that is chosen of two, with them."""
    draw = np.random.default_rng(0)
    alone, chosen = (
        ReturnScaler(ReturnScaling(0.9, 5.0), 1),
        ReturnScaler(ReturnScaling(0.9, 5.0), 2),
    )
    for _ in range(200):
        reward = draw.normal(size=2).astype(np.float32)
        ended = draw.random(2) < 0.1
        alone.observe(reward[:1], ended[:1], None)
        chosen.observe(reward, ended, np.array([True, False]))
    assert alone.state["returns"][0] == chosen.state["returns"][0]
    for name in ("mean", "square_sum", "count", "largest"):
        assert alone.state[name] == chosen.state[name], name
    assert torch.equal(alone.scale, chosen.scale)


@pytest.mark.parametrize("largest", [None, 5.0, 0.5])
def test_the_scale_is_that_of_the_returns_so_far(largest: float | None) -> None:
    draw = np.random.default_rng(0)
    rewards = draw.normal(size=(40, 2)) * 3 + 1
    ends = draw.random((40, 2)) < 0.1
    scaler = ReturnScaler(ReturnScaling(0.9, largest), 2)
    assert scaler.scale.item() == 1.0
    for reward, ended in zip(rewards, ends, strict=True):
        scaler.observe(reward.astype(np.float32), ended, None)
    seen = [returns_by_hand([*rewards[:, e]], [*ends[:, e]], 0.9) for e in range(2)]
    size = np.std(np.concatenate(seen))
    if largest is not None:
        size = max(size, np.abs(seen).max() / largest)
    assert scaler.scale.item() == pytest.approx(1 / size, rel=1e-5)
    assert (largest == 0.5) == (size > np.std(np.concatenate(seen)))


def test_environments_that_were_not_stepped_keep_their_returns() -> None:
    scaler = ReturnScaler(ReturnScaling(0.5), 2)
    scaler.observe(np.array([2.0, 4.0]), NO_END, None)
    scaler.observe(np.array([1.0, 99.0]), NO_END, np.array([True, False]))
    assert scaler.state["returns"].tolist() == [2.0, 4.0]
    assert scaler.state["count"] == 3
    assert scaler.state["largest"] == 4.0
    scaler.observe(np.array([9.0, 9.0]), NO_END, np.array([False, False]))
    assert scaler.state["count"] == 3
    scaler.drop(np.array([False, True]))
    assert scaler.state["returns"].tolist() == [2.0, 0.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("returns", np.zeros(3)), ("mean", np.zeros(1)), ("count", np.array(np.nan))],
)
def test_damaged_statistics_are_refused(name: str, value: np.ndarray) -> None:
    scaler = ReturnScaler(ReturnScaling(0.5), 2)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        scaler.load_state({**scaler.state, name: value})


def test_equal_returns_have_a_finite_scale() -> None:
    scaler = ReturnScaler(ReturnScaling(0.0), 1)
    for _ in range(5):
        scaler.observe(np.zeros(1), np.array([False]), None)
    assert math.isfinite(scaler.scale.item())


class Rewards:
    """A source whose rewards are ones."""

    def __len__(self) -> int:
        return 4

    def flush(self) -> None:
        pass

    def draw(self, bits: torch.Tensor) -> Batch:
        lead = bits.shape
        rows = torch.zeros(*lead, 3)
        return Batch(rows, torch.zeros(*lead, 1), torch.ones(lead), torch.zeros(lead), rows)


def test_each_seed_of_a_population_has_its_own_scale() -> None:
    settings = {"hidden_sizes": [4], "batch_size": 4}
    algorithms = [SACAlgorithm(3, 1, settings, seed=seed) for seed in range(3)]
    scalers = [ReturnScaler(ReturnScaling(0.0), 1) for _ in algorithms]
    learner = Learner(
        algorithms,
        Rewards(),
        Execution("cpu", False, 1, "highest"),
        population=Population(3, (0, 1, 2)),
        generators=[torch.Generator().manual_seed(seed) for seed in range(3)],
        scalers=scalers,
    )
    for number, scaler in enumerate(scalers):
        for reward in (-1.0 - number, 1.0 + number):
            scaler.observe(np.array([reward]), np.array([False]), None)
    noise = learner.pool.take()
    rewards = learner._batch_of(learner.source, noise).reward
    expected = torch.tensor([[1.0] * 4, [0.5] * 4, [1 / 3] * 4])
    torch.testing.assert_close(rewards, expected, rtol=1e-5, atol=1e-6)


def test_exploration_of_each_seed_remembers_its_own_noise() -> None:
    """With repeated noise, a seed of a population acts as it would alone."""
    settings = {"hidden_sizes": [4], "batch_size": 4, "num_atoms": 3}
    low, high = -np.ones(2, np.float32), np.ones(2, np.float32)
    spaces = SpaceInfo(3, 2, action_low=low, action_high=high)
    obs = np.random.default_rng(0).normal(size=(2 * 3, 3)).astype(np.float32)

    def explorer(seeds: tuple[int, ...]) -> Explorer:
        learner = Learner(
            [FlashSACAlgorithm(3, 2, settings, seed=seed) for seed in seeds],
            Rewards(),
            Execution("cpu", False, 1, "highest"),
            population=Population(len(seeds), tuple(range(len(seeds)))),
            generators=[torch.Generator().manual_seed(seed) for seed in seeds],
        )
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return Explorer(learner, spaces, 3, generators)

    together, alone = explorer((4, 5)), [explorer((4,)), explorer((5,))]
    repeated = 0
    last = None
    for _ in range(100):
        together.begin(obs, 0.0, at_random=False)
        for number, each in enumerate(alone):
            each.begin(obs[3 * number : 3 * number + 3], 0.0, at_random=False)
        actions = together.finish()
        of_each = np.concatenate([each.finish() for each in alone])
        np.testing.assert_allclose(actions, of_each, rtol=1e-5, atol=1e-6)
        repeated += last is not None and np.array_equal(actions[:3], last)
        last = actions[:3].copy()
    # About 53 of 100 steps repeat the noise of the one before: 1 - sum(1/n^2) / sum(1/n).
    assert 30 <= repeated <= 75
    memory = together.memory(1)
    assert memory is not None
    assert memory["noise"].shape == (3, 2)


def test_random_actions_at_the_start_use_no_remembered_noise() -> None:
    settings = {"hidden_sizes": [4], "batch_size": 4, "num_atoms": 3}
    low, high = -np.ones(2, np.float32), np.ones(2, np.float32)
    algorithm = FlashSACAlgorithm(3, 2, settings)
    learner = Learner([algorithm], Rewards(), Execution("cpu", False, 1, "highest"))
    spaces = SpaceInfo(3, 2, action_low=low, action_high=high)
    explorer = Explorer(learner, spaces, 1, [torch.Generator().manual_seed(0)])
    first = [_random_action(explorer) for _ in range(20)]
    assert len({action.tobytes() for action in first}) == 20
    memory = explorer.memory()
    assert memory is not None
    assert memory["left"] == 0


def _random_action(explorer: Explorer) -> np.ndarray:
    explorer.begin(np.zeros((1, 3), np.float32), 0.0, at_random=True)
    return explorer.finish()


class Watch(Callback):
    """Records the scale of rewards, and the rewards of each step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.rewards: list[np.ndarray] = []

    def on_collect_end(self, context: TrainingContext) -> None:
        run = context._run
        self.scales.append(run.shared.scalers[0].scale.item())
        step = run.last_step()
        assert step is not None
        self.rewards.append(step.rewards)


FLASH: dict[str, Any] = {"algo": "flash_sac", "algo_kwargs": {"num_atoms": 11}, "num_envs": 3}


def test_a_run_updates_its_scale_at_every_step(tmp_path: Path) -> None:
    watch = Watch()
    rl_training.train(tiny(tmp_path, **FLASH), callbacks=[watch])
    seen = [returns_by_hand([*rewards], [False] * len(rewards), 0.99)
            for rewards in np.stack(watch.rewards).T]  # fmt: skip
    largest = np.abs(np.stack(seen)).max()
    size = max(np.std(np.stack(seen)), largest / 5)
    assert watch.scales[-1] == pytest.approx(1 / size, rel=1e-4)
    assert len(set(watch.scales)) > 30


def test_a_run_that_stops_in_an_episode_continues_with_its_returns_and_noise(
    tmp_path: Path,
) -> None:
    """Three environments, between two repetitions of noise, with scaled rewards."""
    config = tiny(tmp_path, **FLASH)
    uninterrupted = rl_training.train(config)
    for step in (60, 63, 66):
        stopped = rl_training.train(config, callbacks=[StopAt(step)])
        assert_same(uninterrupted, rl_training.resume_training(stopped.run_dir))


def test_other_runs_save_nothing_more(tmp_path: Path) -> None:
    result = rl_training.train(tiny(tmp_path, total_timesteps=50))
    state = json.loads((result.checkpoint_path / "state.json").read_text())
    assert "exploration" not in state
    assert "returns" not in state["collector"]


class OwnCritic:
    def critic(self, inputs: int, outputs: int) -> torch.nn.Module:
        return torch.nn.Linear(inputs, outputs)


@pytest.mark.parametrize("algo", ["crossq", "xqc", "flash_sac"])
def test_networks_that_are_part_of_the_method_cannot_be_replaced(algo: str) -> None:
    kind = rl_training.algorithms.get_algorithm_spec(algo).algorithm
    with pytest.raises(ConfigError, match=r"remove OwnCritic\.critic"):
        kind(3, 2, {"hidden_sizes": [8]}, custom_networks=OwnCritic)


def test_scaled_rewards_are_learned_at_any_scale(tmp_path: Path) -> None:
    """Runs with rewards of another size are the same but for rounding."""

    def make(scale: float) -> Any:
        def environment() -> gym.Env[Any, Any]:
            env = gym.make("Pendulum-v1")
            return gym.wrappers.TransformReward(env, lambda reward: scale * reward)

        return environment

    found = []
    for scale in (1.0, 1024.0):
        config = tiny(tmp_path / str(scale), **{**FLASH, "env_id": None})
        result = rl_training.train(config, env=make(scale))
        found.append(result.metrics)
    for name in ("train/critic_loss", "train/q_mean", "train/target_q_mean"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-3)
