"""Every family of algorithms learns known values of simple environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import probes
import pytest
import torch

import rl_training
from rl_training.checkpoints.loading import cached_policy
from rl_training.evaluation.evaluator import critics_of
from rl_training.execution.policy import Policy

pytestmark = pytest.mark.thorough
GAMMA = 0.5
SETTINGS: dict[str, dict[str, Any]] = {
    "sac": {"alpha": 0.0, "tau": 0.05},
    "td3": {"tau": 0.05},
    "ddpg": {"tau": 0.05},
    "tqc": {"alpha": 0.0, "tau": 0.05, "num_critics": 2, "top_quantiles_to_drop_per_critic": 0},
    "redq": {"alpha": 0.0, "tau": 0.05, "num_critics": 4, "gradient_updates_per_step": 2},
    "crossq": {"alpha": 0.0},
    "xqc": {"alpha": 0.0, "tau": 0.05, "normalize_rewards": False, "value_max": 3.0},
    "flash_sac": {"alpha": 0.0, "tau": 0.05, "normalize_rewards": False, "value_max": 3.0},
    "dqn": {"target_update_interval": 20},
    "dqn rainbow": {
        "target_update_interval": 20,
        "dueling": True,
        "prioritized": True,
        "noisy": True,
        "num_atoms": 41,
        "value_min": -3.0,
        "value_max": 3.0,
    },
    "qr_dqn": {"target_update_interval": 20, "num_quantiles": 16},
    "sac discrete": {"alpha": 0.0, "tau": 0.05},
}
"""By algorithm, and what is special about it"""
DISCRETE = ("dqn", "dqn rainbow", "qr_dqn", "sac discrete")
EXPLORING = {
    "sac discrete": {"alpha": 0.05},
    "sac": {"alpha": 0.01},
    "tqc": {"alpha": 0.01},
    "redq": {"alpha": 0.01},
    "crossq": {"alpha": 0.01, "policy_delay": 1, "renormalization_starts": 100},
    "xqc": {"alpha": 0.01},
    "flash_sac": {"alpha": 0.01},
}
"""Where the best action is to be found, a little entropy helps."""

each_algorithm = pytest.mark.parametrize("algo", list(SETTINGS))


def learn(
    algo: str, environment: type[probes.Probe], tmp_path: Path, **algo_kwargs: object
) -> Policy:
    settings = {
        "hidden_sizes": [32, 32],
        "learning_rate": 3e-3,
        "gamma": GAMMA,
        "batch_size": 64,
        "learning_starts": 200,
        **SETTINGS[algo],
        **algo_kwargs,
    }
    config = {
        "algo": algo.partition(" ")[0],
        "total_timesteps": 1200,
        "eval_interval": 0,
        "checkpoint_interval": 0,
        "eval_episodes": 1,
        "compile": "off",
        "output_dir": str(tmp_path),
        "algo_kwargs": settings,
    }
    make = probes.Discrete.of(environment) if algo in DISCRETE else environment
    return cached_policy(rl_training.train(config, env=make).run_dir)


def q_value(policy: Policy, obs: float, action: float) -> float:
    """Return the mean over all critics."""
    critics, actions = critics_of(policy), torch.tensor([[action]])
    assert critics is not None
    if policy.spaces.action_kind == "discrete":
        actions = torch.tensor([probes.Discrete.choice(action)])
    with torch.no_grad():
        return float(critics(torch.tensor([[obs]]), actions))


@each_algorithm
def test_a_constant_reward(tmp_path: Path, algo: str) -> None:
    policy = learn(algo, probes.ConstantReward, tmp_path)
    assert q_value(policy, 0.0, 0.0) == pytest.approx(1.0, abs=0.1)


def test_a_constant_reward_is_learned_with_automatic_temperature(tmp_path: Path) -> None:
    policy = learn("sac", probes.ConstantReward, tmp_path, alpha="auto")
    assert q_value(policy, 0.0, 0.0) == pytest.approx(1.0, abs=0.1)


@each_algorithm
def test_a_reward_that_depends_on_the_observation(tmp_path: Path, algo: str) -> None:
    policy = learn(algo, probes.ObservationReward, tmp_path)
    for obs in (-1.0, 1.0):
        assert q_value(policy, obs, 0.0) == pytest.approx(obs, abs=0.1)


@each_algorithm
def test_a_reward_one_step_later(tmp_path: Path, algo: str) -> None:
    policy = learn(algo, probes.DelayedReward, tmp_path)
    assert q_value(policy, 0.0, 0.0) == pytest.approx(GAMMA, abs=0.1)
    assert q_value(policy, 1.0, 0.0) == pytest.approx(1.0, abs=0.1)


@each_algorithm
def test_a_reward_that_depends_on_the_action(tmp_path: Path, algo: str) -> None:
    policy = learn(algo, probes.ActionReward, tmp_path, **EXPLORING.get(algo, {}))
    action = policy.predict(np.array([0.0]))
    best = (
        probes.Discrete.value(int(action))
        if policy.spaces.action_kind == "discrete"
        else float(action[0])
    )
    assert best == pytest.approx(0.5, abs=0.1)
    assert q_value(policy, 0.0, best) == pytest.approx(0.0, abs=0.1)
    # With batch normalization, few minibatches resemble actions far from the policy's.
    inexact = "batch_norm_momentum" in type(policy.algorithm.hyperparameters).model_fields
    assert q_value(policy, 0.0, -0.5) == pytest.approx(-1.0, abs=0.6 if inexact else 0.1)


@each_algorithm
def test_a_truncated_episode_bootstraps_the_future_value(tmp_path: Path, algo: str) -> None:
    policy = learn(algo, probes.TruncatedReward, tmp_path)
    assert q_value(policy, 0.0, 0.0) == pytest.approx(1 / (1 - GAMMA), abs=0.1)


@pytest.mark.parametrize(
    "settings",
    [{"dueling": True}, {"double": False}, {"prioritized": True}, {"n_step": 2}],
    ids=lambda settings: next(iter(settings)),
)
def test_dqns_options_learn_the_same_values(tmp_path: Path, settings: dict) -> None:
    policy = learn("dqn", probes.DelayedReward, tmp_path, **settings)
    assert q_value(policy, 0.0, 0.0) == pytest.approx(GAMMA, abs=0.1)
    assert q_value(policy, 1.0, 0.0) == pytest.approx(1.0, abs=0.1)
