"""Algorithms learn which choices are best from a little recorded data, within seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from action_spaces import Choices
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete

import rl_training

ROWS = 600
OBSERVATIONS = np.random.default_rng(0).uniform(-1, 1, (ROWS, 3)).astype(np.float32)
BEST = (OBSERVATIONS[:, 0] > 0).astype(np.int64)
"""The best of two choices in each state"""


def learned(algo: str, space: gym.Space[Any], data: dict[str, Any], tmp_path: Path) -> Any:
    """Return the trained policy's choices for the recorded observations."""
    config = {
        "algo": algo,
        "total_timesteps": 500,
        "eval_interval": 0,
        "eval_episodes": 1,
        "checkpoint_interval": 0,
        "compile": "off",
        "output_dir": str(tmp_path),
        "algo_kwargs": {"hidden_sizes": [32], "batch_size": 64, "learning_rate": 3e-3},
    }
    result = rl_training.train(config, env=lambda: Choices(space), dataset=data)
    return rl_training.predict_checkpoint(result.run_dir, OBSERVATIONS)


def recorded(actions: np.ndarray, rewards: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return episodes of one step."""
    return {
        "observations": OBSERVATIONS,
        "next_observations": OBSERVATIONS,
        "actions": actions,
        "rewards": np.zeros(ROWS) if rewards is None else rewards,
        "terminals": np.ones(ROWS, np.bool_),
    }


@pytest.mark.parametrize("algo", ["iql", "cql"])
def test_the_better_choice_is_learned_from_random_data(algo: str, tmp_path: Path) -> None:
    actions = np.random.default_rng(1).integers(0, 2, ROWS)
    data = recorded(actions, (actions == BEST).astype(np.float32))
    assert np.mean(learned(algo, Discrete(2), data, tmp_path) == BEST) > 0.9


def test_the_most_frequent_choice_is_cloned(tmp_path: Path) -> None:
    others = np.random.default_rng(1).random(ROWS) < 0.2
    data = recorded(np.where(others, 1 - BEST, BEST))
    assert np.mean(learned("bc", Discrete(2), data, tmp_path) == BEST) > 0.9


@pytest.mark.parametrize("space", [MultiDiscrete([2, 3]), MultiBinary(2)], ids=str)
def test_several_choices_are_cloned(space: gym.Space[Any], tmp_path: Path) -> None:
    actions = np.stack([BEST, (OBSERVATIONS[:, 1] > 0).astype(np.int64)], axis=1)
    found = learned("bc", space, recorded(actions), tmp_path)
    assert np.mean((found == actions).all(1)) > 0.85
