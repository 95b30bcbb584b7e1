"""Complete learning runs. They are slow and need a marker."""

from __future__ import annotations

from pathlib import Path

import pytest
from goal_environments import PointGoal, TorchPointGoal

import rl_training
from rl_training.config_files import load_config

pytestmark = pytest.mark.learning


FIGURES = {
    "sac/pendulum": -200,
    "td3/pendulum": -250,
    "ddpg/pendulum": -250,
    "tqc/pendulum": -250,
    "redq/pendulum": -250,
    "redq/droq_pendulum": -250,
    "crossq/pendulum": -250,
    "xqc/pendulum": -250,
    "flash_sac/pendulum": -250,
    "dqn/cartpole": 475,
    "dqn/rainbow": 475,
    "dqn/frozenlake": 1,
    "dqn/taxi": 7,
    "dqn/minigrid": 0.9,
    "qr_dqn/cartpole": 475,
    "sac/cartpole": 475,
    "ppo/cartpole": 475,
    "ppo/pendulum": -250,
    "ppo/recurrent_cartpole": 475,
    "a2c/cartpole": 475,
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("config", FIGURES)
def test_a_packaged_config_reaches_its_documented_return(
    tmp_path: Path, config: str, seed: int
) -> None:
    if config == "dqn/minigrid":
        pytest.importorskip("minigrid")
    result = rl_training.train(load_config(config, seed=seed, output_dir=str(tmp_path)))
    found = rl_training.evaluate_checkpoint(result.run_dir, num_episodes=20, seed=seed + 1000)
    assert found["eval_return_mean"] >= FIGURES[config]


def test_a_pole_without_velocities_is_not_balanced_without_a_memory(tmp_path: Path) -> None:
    """The other half of what `ppo/recurrent_cartpole` shows."""
    config = load_config("ppo/recurrent_cartpole", seed=0, output_dir=str(tmp_path))
    settings = {**config.algo_kwargs.given(), "recurrent": "none"}
    result = rl_training.train(config.with_changes(algo_kwargs=settings))
    found = rl_training.evaluate_checkpoint(result.run_dir, num_episodes=20, seed=1000)
    assert found["eval_return_mean"] < 100


@pytest.mark.parametrize("environment", [PointGoal, TorchPointGoal])
@pytest.mark.parametrize("algo", ["sac", "td3", "ddpg"])
def test_goals_are_reached_with_hindsight_and_not_without(
    tmp_path: Path, algo: str, environment: type[PointGoal]
) -> None:
    config = {
        "algo": algo,
        "total_timesteps": 4_000,
        "eval_interval": 0,
        "eval_episodes": 100,
        "output_dir": str(tmp_path),
        "compile": "off",
        "algo_kwargs": {
            "learning_starts": 500,
            "learning_rate": 1e-3,
            "hidden_sizes": [64, 64],
            "batch_size": 128,
            "gamma": 0.95,
            "buffer_capacity": 100_000,
        },
    }
    with_hindsight, without = (
        rl_training.train({**config, "replay": replay}, env=environment).metrics[
            "eval_success_rate"
        ]
        for replay in ({"hindsight": {}}, None)
    )
    assert with_hindsight >= 0.95
    assert without <= 0.3


def test_pendulum_with_several_environments_and_normalized_observations(tmp_path: Path) -> None:
    agent = rl_training.SAC.from_config(
        "sac/pendulum",
        output_dir=str(tmp_path),
        num_envs=4,
        normalize_observations=True,
    )
    agent.learn()
    assert agent.evaluate(num_episodes=20, seed=1000)["eval_return_mean"] >= -250


def test_the_mujoco_preset_balances(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    agent = rl_training.SAC.from_config(
        "sac/mujoco",
        env_id="InvertedPendulum-v5",
        output_dir=str(tmp_path),
        total_timesteps=25_000,
        eval_interval=1_000,
        early_stopping={"target_value": 999.0, "patience": 100},
        compile="off",
        learning_starts=1_000,
    )
    agent.learn()
    assert agent.evaluate(num_episodes=20, seed=1000)["eval_return_mean"] >= 900
