"""Whole learning runs; long, so behind a marker."""

from __future__ import annotations

from pathlib import Path

import pytest

import rl_training

pytestmark = pytest.mark.learning


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_packaged_pendulum_config_swings_up(tmp_path: Path, seed: int) -> None:
    agent = rl_training.SAC.from_config("sac/pendulum", seed=seed, output_dir=str(tmp_path))
    agent.learn()
    assert agent.evaluate(num_episodes=20, seed=seed + 1000)["eval_return_mean"] >= -200


def test_pendulum_with_several_environments_and_normalised_observations(tmp_path: Path) -> None:
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
