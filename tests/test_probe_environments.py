"""SAC learns the values of environments in which they are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import probes
import pytest
import torch

import rl_training
from rl_training.runtime.locating import cached_policy
from rl_training.runtime.policy import Policy

GAMMA = 0.5


def learn(environment: type[probes.Probe], tmp_path: Path, **algo_kwargs: object) -> Policy:
    settings = {
        "hidden_sizes": [32, 32],
        "learning_rate": 3e-3,
        "tau": 0.05,
        "gamma": GAMMA,
        "batch_size": 64,
        "learning_starts": 200,
        "alpha": 0.0,
        **algo_kwargs,
    }
    config = {
        "algo": "sac",
        "total_timesteps": 1200,
        "eval_interval": 0,
        "checkpoint_interval": 0,
        "eval_episodes": 1,
        "output_dir": str(tmp_path),
        "algo_kwargs": settings,
    }
    return cached_policy(rl_training.train(config, env=environment).run_dir)


def q_value(policy: Policy, obs: float, action: float) -> float:
    inputs = torch.tensor([[obs]]), torch.tensor([[action]])
    with torch.no_grad():
        values = policy.algorithm.model.q_values(*inputs)
    return float(values.mean())


@pytest.mark.parametrize("alpha", [0.0, "auto"])
def test_a_constant_reward(tmp_path: Path, alpha: object) -> None:
    policy = learn(probes.ConstantReward, tmp_path, alpha=alpha)
    assert q_value(policy, 0.0, 0.0) == pytest.approx(1.0, abs=0.1)


def test_a_reward_that_the_observation_tells(tmp_path: Path) -> None:
    policy = learn(probes.ObservationReward, tmp_path)
    for obs in (-1.0, 1.0):
        assert q_value(policy, obs, 0.0) == pytest.approx(obs, abs=0.1)


@pytest.mark.parametrize("n_step", [1, 2])
def test_a_reward_one_step_later(tmp_path: Path, n_step: int) -> None:
    policy = learn(probes.DelayedReward, tmp_path, n_step=n_step)
    assert q_value(policy, 0.0, 0.0) == pytest.approx(GAMMA, abs=0.1)
    assert q_value(policy, 1.0, 0.0) == pytest.approx(1.0, abs=0.1)


def test_a_reward_that_depends_on_the_action(tmp_path: Path) -> None:
    policy = learn(probes.ActionReward, tmp_path, alpha=0.01)
    action = policy.predict(np.array([0.0]))
    assert action[0] == pytest.approx(0.5, abs=0.1)
    assert q_value(policy, 0.0, float(action[0])) == pytest.approx(0.0, abs=0.1)
    assert q_value(policy, 0.0, -0.5) == pytest.approx(-1.0, abs=0.1)


def test_a_truncated_episode_is_worth_what_would_have_followed(tmp_path: Path) -> None:
    policy = learn(probes.TruncatedReward, tmp_path)
    assert q_value(policy, 0.0, 0.0) == pytest.approx(1 / (1 - GAMMA), abs=0.1)
