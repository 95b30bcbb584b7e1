"""benchmarks/world_training.py: its command line, and returns in the simulator."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_of

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import world_training

import rl_training
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.checkpoints.loading import find_checkpoint, load_policy
from rl_training.envs.tensors.classic_control import CartPole


def test_settings_add_up_as_on_the_command_line() -> None:
    given = world_training.parse_arguments(["--set", "a=1", "b=2", "--set", "c=3"])
    assert given.set == ["a=1", "b=2", "c=3"]
    assert world_training.parse_arguments([]).set == []


def test_returns_in_the_simulator_are_those_of_a_policy_that_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world_training, "WORLDS", 4)
    task = {"env_id": "tensors/CartPole-v1", "num_envs": 4, "total_timesteps": 64}
    settings = {"recurrent": "gru", "sequence_length": 4}
    config = tiny_of(get_algorithm_spec("ppo"), tmp_path, **task, algo_kwargs=settings)
    run = rl_training.train(config).run_dir
    returns = world_training.simulator_returns(run, "tensors/CartPole-v1", "cpu")

    policy, worlds = load_policy(find_checkpoint(run)), CartPole(4, "cpu")
    obs, state, starts = worlds.reset([10_000]), None, np.ones(4, dtype=bool)
    expected, playing = np.zeros(4), np.ones(4, dtype=bool)
    while playing.any():
        actions, state = policy.predict(obs.numpy(), state=state, episode_start=starts)
        step = worlds.step(torch.from_numpy(actions))
        expected += np.where(playing, step.reward.numpy(), 0.0)
        obs, starts = step.obs, (step.terminated | step.truncated).numpy()
        playing &= ~starts
    assert returns.tolist() == expected.tolist()
