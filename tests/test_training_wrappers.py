"""Wrappers that are for training only, those that anyone may name, and packages known by ids."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.spaces import Box, Discrete
from helpers import assert_resumes_bit_for_bit, metric_rows

from rl_training import TrainConfig, evaluate_checkpoint, train
from rl_training.envs import EnvironmentFactory, EvaluationFactory, environment_factory
from rl_training.envs.atari import EpisodicLife
from rl_training.envs.packages import KNOWN_PACKAGES
from rl_training.envs.snapshots.layers import learning_wrappers
from rl_training.envs.wrapping import PLAIN_WRAPPERS, load_wrappers
from rl_training.errors import ConfigError, EnvironmentSetupError
from rl_training.types import TrainResult

CLIPPED = {
    "wrapper": "gymnasium.wrappers:ClipReward",
    "kwargs": {"min_reward": -1, "max_reward": 1},
}


def clipped_pendulum() -> EnvironmentFactory:
    return environment_factory("Pendulum-v1", {}, None, training_wrappers=[CLIPPED])


def test_training_wrappers_are_left_out_of_evaluations() -> None:
    factory = clipped_pendulum()
    rewards = []
    for each in (factory, EvaluationFactory.like(factory, None)):
        env = each()
        env.reset(seed=0)
        rewards.append(min(float(env.step(np.zeros(1, np.float32))[1]) for _ in range(60)))
    assert rewards[0] == -1
    assert rewards[1] < -5


def test_evaluations_of_a_run_report_the_true_return(tiny_config: dict[str, Any]) -> None:
    result = train({**tiny_config, "training_wrappers": [CLIPPED], "total_timesteps": 450})
    assert isinstance(result, TrainResult)
    rows = metric_rows(result.run_dir)
    assert min(row.get("rollout/ep_rew_mean", 0.0) for row in rows) >= -200
    assert max(row.get("eval/mean_reward", -1e9) for row in rows) < -400
    assert evaluate_checkpoint(result.run_dir, num_episodes=2)["eval_return_mean"] < -400


def test_a_run_with_training_wrappers_resumes_bit_for_bit(tiny_config: dict[str, Any]) -> None:
    normalized = "gymnasium.wrappers:NormalizeReward"
    config = {**tiny_config, "training_wrappers": [normalized, CLIPPED], "num_envs": 2}
    assert_resumes_bit_for_bit(config)


def test_what_training_wrappers_learn_is_not_for_evaluations() -> None:
    normalized = {"wrapper": "gymnasium.wrappers:NormalizeReward", "kwargs": {}}
    inside = environment_factory("Pendulum-v1", {}, None, wrappers=[normalized])
    outside = environment_factory("Pendulum-v1", {}, None, training_wrappers=[normalized])
    assert [kind for _, kind in learning_wrappers(inside())] == ["reward"]
    assert learning_wrappers(outside()) == []


def test_a_training_wrapper_that_changes_a_space_is_refused() -> None:
    stack = {"wrapper": "gymnasium.wrappers:FrameStackObservation", "kwargs": {"stack_size": 2}}
    factory = environment_factory("Pendulum-v1", {}, None, training_wrappers=[stack])
    with pytest.raises(EnvironmentSetupError, match=r"changes the observation space.*move it to"):
        factory()


class Unbounded(gym.Env[np.ndarray, np.ndarray]):
    """Normalization does not change its space."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)


def test_observations_are_not_normalized_for_training_only() -> None:
    normalized = {"wrapper": "gymnasium.wrappers:NormalizeObservation", "kwargs": {}}
    for wrappers_of_training in ([normalized], [CLIPPED, normalized], [normalized, CLIPPED]):
        outside = load_wrappers(wrappers_of_training)
        factory = EnvironmentFactory(Unbounded, training_wrappers=outside)
        with pytest.raises(EnvironmentSetupError, match=r"NormalizeObservation.*move it to"):
            factory()
    EnvironmentFactory(Unbounded, wrappers=load_wrappers([normalized]))()


def test_wrong_settings_name_their_key() -> None:
    with pytest.raises(ConfigError, match=r"training_wrappers\[0\] = 3: must be module:Class"):
        TrainConfig(algo="sac", env_id="Pendulum-v1", training_wrappers=[3])


@pytest.mark.parametrize("name", sorted(PLAIN_WRAPPERS))
def test_plain_wrappers_need_no_trust(name: str) -> None:
    (factory,) = load_wrappers([{"wrapper": name, "kwargs": {}}])
    assert issubclass(factory.kind, gym.Wrapper)


def test_lists_are_the_tuples_that_plain_wrappers_take() -> None:
    resized = {"wrapper": "gymnasium.wrappers:ResizeObservation", "kwargs": {"shape": [8, 9]}}
    assert load_wrappers([resized])[0].kwargs == {"shape": (8, 9)}


@pytest.mark.parametrize("name", ["RecordVideo", "HumanRendering", "TransformObservation"])
def test_wrappers_that_do_more_than_compute_are_not_plain(name: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=r"--import gymnasium\.wrappers"):
        load_wrappers([{"wrapper": f"gymnasium.wrappers:{name}", "kwargs": {}}])


class ThreeLives(gym.Env[np.ndarray, int]):
    """Loses a life every two steps."""

    def __init__(self) -> None:
        self.observation_space = Box(0, 100, (1,), np.float32)
        self.action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observation(), {"lives": 3}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        lives = 3 - self.steps // 2
        return self.observation(), 1.0, lives == 0, False, {"lives": lives}

    def observation(self) -> np.ndarray:
        return np.array([self.steps], np.float32)


def ends(env: gym.Env[Any, Any], steps: int) -> list[int]:
    """Return the steps at which episodes end, playing on after each."""
    found = []
    env.reset(seed=0)
    for step in range(1, steps + 1):
        *_, terminated, truncated, _ = env.step(1)
        if terminated or truncated:
            found.append(step)
            env.reset()
    return found


def test_a_life_is_an_episode_and_the_game_goes_on() -> None:
    env = EpisodicLife(ThreeLives())
    env.reset(seed=0)
    assert [env.step(1)[2] for _ in range(2)] == [False, True]
    observation, info = env.reset()
    assert (observation[0], info["lives"]) == (3, 2)  # continued by a step that does nothing
    assert env.step(1)[2]
    env.reset()
    assert env.step(1)[2]
    observation, info = env.reset()
    assert (observation[0], info["lives"]) == (0, 3)
    assert ends(EpisodicLife(ThreeLives()), 8) == [2, 3, 4, 6, 7, 8]
    assert ends(ThreeLives(), 8) == [6]


def test_a_seed_starts_a_new_game() -> None:
    env = EpisodicLife(ThreeLives())
    env.reset(seed=0)
    env.step(1)
    env.step(1)
    assert env.reset(seed=1)[0][0] == 0


def test_a_game_that_ends_while_it_continues_starts_again() -> None:
    env = EpisodicLife(wrappers.TimeLimit(ThreeLives(), 3))
    env.reset(seed=0)
    env.step(1)
    env.step(1)
    observation, _ = env.reset()
    assert observation[0] == 0


@pytest.mark.parametrize(
    ("identity", "module", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid"),
        ("BabyAI-GoToRedBall-v0", "minigrid", "minigrid"),
    ],
)
def test_the_extra_of_a_known_package_is_named(
    identity: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.delitem(gym.registry, identity, raising=False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == module else find(name)
    )
    with pytest.raises(EnvironmentSetupError, match=rf'rl-training\[{extra}\]"'):
        environment_factory(identity, {}, None)


def test_known_packages_are_imported_by_their_ids() -> None:
    examples = ("ALE/Pong-v5", "MiniGrid-Empty-5x5-v0", "PandaReach-v3", "PointMaze_UMaze-v3")
    found = [
        identity
        for identity in examples
        for package in KNOWN_PACKAGES
        if identity.startswith(package.prefix) and importlib.util.find_spec(package.module)
    ]
    if "ALE/Pong-v5" not in found:
        pytest.skip("needs ale-py")
    for identity in found:
        EnvironmentFactory(identity)().close()
    with pytest.raises(EnvironmentSetupError, match=r"not registered\. Did you mean ALE/Pong-v5"):
        environment_factory("ALE/Pongg-v5", {}, None)


def test_an_id_imports_nothing_else() -> None:
    before = set(sys.modules)
    with pytest.raises(EnvironmentSetupError, match="not registered"):
        environment_factory("antigravity/Pong-v5", {}, None)
    assert "antigravity" not in set(sys.modules) - before
