"""Rollouts of tensor environments: the rows that PPO learns from, and exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import StopAt, hashes, metric_rows, tiny_of

import rl_training
from rl_training.algorithms import get_algorithm_spec
from rl_training.data.rollouts.steps import ENDED, LOST, with_ends
from rl_training.runtime.workflows import resume_together
from rl_training.types import Batch


def rollouts(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    task = {"env_id": "tensors/CartPole-v1", "num_envs": 4, "total_timesteps": 256}
    own = {"rollout_steps": 16, "batch_size": 32, "num_epochs": 2, **changes.pop("algo_kwargs", {})}
    spec = get_algorithm_spec("ppo")
    return tiny_of(spec, tmp_path, **{**task, **changes}, algo_kwargs=own)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="discrete"),
        pytest.param({"env_id": "tensors/Pendulum-v1"}, id="continuous"),
        pytest.param(
            {
                "env_id": "tensors/Pendulum-v1",
                "normalize_observations": True,
                "algo_kwargs": {"normalize_rewards": True},
            },
            id="normalized",
        ),
    ],
)
@pytest.mark.fast_cases("discrete")
def test_two_seeds_resume_bit_for_bit_in_the_middle_of_a_rollout(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = {**rollouts(tmp_path, **changes), "seeds": [3, 4]}
    complete = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(100)])
    assert isinstance(complete, list)
    assert isinstance(stopped, list)
    resumed = resume_together([each.run_dir for each in stopped])
    for mine, other in zip(resumed, complete, strict=True):
        assert hashes(mine.checkpoint_path) == hashes(other.checkpoint_path)
        assert metric_rows(mine.run_dir) == metric_rows(other.run_dir)


def test_lost_transitions_keep_their_place_and_teach_nothing() -> None:
    step = Batch(
        obs=torch.tensor([[1.0], [2.0], [3.0]]),
        action=torch.zeros(3, 1),
        reward=torch.tensor([4.0, 5.0, torch.nan]),
        discount=torch.full((3,), 0.9),
        next_obs=torch.tensor([[6.0], [7.0], [torch.nan]]),
    )
    ended, lost = torch.tensor([False, True, True]), torch.tensor([False, False, True])
    rows = with_ends(step, ended, lost)
    assert rows.ended is not None
    assert rows.ended.tolist() == [0.0, ENDED, LOST]
    assert rows.reward.tolist() == [4.0, 5.0, 0.0]
    assert rows.next_obs.flatten().tolist() == [6.0, 7.0, 3.0]


@pytest.mark.learning
def test_ppo_balances_the_pole_of_tensor_worlds(tmp_path: Path) -> None:
    result = rl_training.train(
        {
            **rollouts(tmp_path, num_envs=32, total_timesteps=150_000, eval_interval=0),
            "algo_kwargs": {
                "rollout_steps": 64,
                "batch_size": 256,
                "num_epochs": 4,
                "learning_rate": 1e-3,
                "hidden_sizes": [64, 64],
            },
        }
    )
    assert not isinstance(result, list)
    found = rl_training.evaluate_checkpoint(result.run_dir, num_episodes=20)
    assert found["eval_return_mean"] >= 475
