"""Complete learning runs. They are slow and need a marker."""

from __future__ import annotations

from pathlib import Path

import pytest

import rl_training
from rl_training.config_files import load_config

pytestmark = pytest.mark.learning


FIGURES = {
    "sac/pendulum": -200,
    "td3/pendulum": -250,
    "ddpg/pendulum": -250,
    "tqc/pendulum": -250,
    "redq/pendulum": -250,
    "dqn/cartpole": 475,
    "dqn/rainbow": 475,
    "dqn/frozenlake": 1,
    "dqn/taxi": 7,
    "dqn/minigrid": 0.9,
    "qr_dqn/cartpole": 475,
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
