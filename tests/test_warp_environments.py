"""Worlds of MuJoCo Warp: its dynamics against MuJoCo's, snapshots, randomization and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import StopAt, tiny
from typer.testing import CliRunner

import rl_training
from rl_training.cli import app
from rl_training.envs import environment_factory
from rl_training.errors import EnvironmentSetupError
from rl_training.types import ResumeLevel, TrainResult

mujoco = pytest.importorskip("mujoco")

TOLERANCES = {
    "HalfCheetah": (1e-3, 1e-4),
    "Hopper": (1e-4, 1e-4),
    "Walker2d": (1e-3, 1e-4),
    "Ant": (1e-4, 1e-3),
    "Swimmer": (1e-4, 1e-5),
    "Reacher": (1e-5, 1e-5),
    "Pusher": (1e-4, 1e-5),
    "InvertedPendulum": (1e-5, 0.0),
    "HumanoidNewton": (1e-2, 1e-3),
}
"""How far observations and rewards may be from MuJoCo's after one step, in 90 of 100 worlds. In
contact, Ant differs by more: half of its worlds must be within the limits"""


def worlds_of(name: str, number: int, **kwargs: Any) -> Any:
    pytest.importorskip("mujoco_warp")
    factory = environment_factory(f"warp/{name}-v5", kwargs, None)
    source = factory.tensor_source
    assert source is not None
    return source.make(number, "cpu", **kwargs)


def actions_of(worlds: Any, generator: np.random.Generator) -> torch.Tensor:
    low, high = worlds.action_space.low, worlds.action_space.high
    numbers = generator.uniform(low, high, (worlds.num_envs, *low.shape))
    return torch.tensor(numbers.astype(np.float32))


def twin_step(twin: Any, before: dict[str, np.ndarray], world: int, action: np.ndarray) -> Any:
    """Step the twin from the state of a world."""
    inner = twin.unwrapped
    mujoco.mj_resetData(inner.model, inner.data)
    inner.set_state(before["qpos"][world], before["qvel"][world])
    inner.data.qacc_warmstart[:] = before["qacc_warmstart"][world]
    for name in ("xpos", "xipos"):  # one substep behind, as after a step of MuJoCo
        if f"field.{name}" in before:
            getattr(inner.data, name)[:] = before[f"field.{name}"][world]
    return inner.step(action)


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(TOLERANCES))
def test_one_step_is_close_to_mujocos(name: str) -> None:
    worlds = worlds_of(name, 4)
    worlds.reset([0])
    twin, generator = environment_factory(f"warp/{name}-v5", {}, None)(), np.random.default_rng(0)
    twin.reset(seed=0)
    differences = []
    for _ in range(40):
        before = {k: v.numpy().astype(np.float64) for k, v in worlds.snapshot().items()}
        actions = actions_of(worlds, generator)
        step = worlds.step(actions)
        for world in range(worlds.num_envs):
            obs, reward, *_ = twin_step(twin, before, world, actions[world].numpy())
            apart = np.abs(step.final_obs[world].numpy() - obs).max()
            differences.append((apart, abs(float(step.reward[world]) - reward)))
    of_obs, of_reward = np.quantile(differences, 0.5 if name == "Ant" else 0.9, axis=0)
    assert of_obs <= TOLERANCES[name][0]
    assert of_reward <= TOLERANCES[name][1]


def test_worlds_end_start_again_and_continue_from_a_snapshot() -> None:
    worlds, other = worlds_of("InvertedPendulum", 8), worlds_of("InvertedPendulum", 8)
    obs = worlds.reset([1])
    assert obs.abs().max() <= 0.01
    generator = np.random.default_rng(0)
    for _ in range(30):
        step = worlds.step(actions_of(worlds, generator))
        assert (step.obs[step.terminated].abs() <= 0.01).all()
        assert (step.final_obs[step.terminated][:, 1].abs() > 0.2).all()
    assert int(worlds.episodes.sum()) > 8
    other.reset([0])
    other.restore(worlds.snapshot())
    for _ in range(20):
        actions = actions_of(worlds, generator)
        torch.testing.assert_close(worlds.step(actions).obs, other.step(actions).obs)


def test_a_world_whose_state_is_not_finite_is_reset() -> None:
    worlds = worlds_of("InvertedPendulum", 3)
    worlds.reset([0])
    worlds.state()["qvel"][1] = torch.nan
    step = worlds.step(torch.zeros(3, 1))
    assert step.broken.tolist() == [False, True, False]
    assert torch.isfinite(step.obs).all()
    assert not worlds.step(torch.zeros(3, 1)).broken.any()


def test_randomized_worlds_differ_by_their_keys_alone() -> None:
    ranges = {"mass": [0.5, 2.0], "gain": [0.5, 1.5]}
    first, second = (worlds_of("InvertedPendulum", 4, randomize=ranges) for _ in range(2))
    plain = worlds_of("InvertedPendulum", 4)
    for worlds in (first, second, plain):
        worlds.reset([5])
    push = torch.full((4, 1), 3.0)
    moved, again, nominal = (worlds.step(push).final_obs for worlds in (first, second, plain))
    torch.testing.assert_close(moved, again)
    assert ((moved - nominal).abs().amax(1) > 1e-3).all()
    assert (moved[:, 2].std() / moved[:, 2].mean()).abs() > 0.05


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"randomize": {"color": [1, 2]}},
            "'color' cannot be randomized; mass, friction, gain can",
        ),
        ({"randomize": {"mass": [2.0, 1.0]}}, "range of positive factors"),
        ({"gravity": 3}, "unexpected keyword argument 'gravity'"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    pytest.importorskip("mujoco_warp")
    config = tiny(tmp_path, env_id="warp/InvertedPendulum-v5", env_kwargs=kwargs, num_envs=2)
    with pytest.raises(EnvironmentSetupError, match=message):
        rl_training.train(config)


def test_a_run_trains_stops_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("mujoco_warp")
    config = tiny(
        tmp_path,
        env_id="warp/InvertedPendulum-v5",
        env_kwargs={"randomize": {"mass": [0.9, 1.1]}},
        num_envs=4,
        total_timesteps=160,
    )
    stopped = rl_training.train(config, callbacks=[StopAt(80)])
    assert isinstance(stopped, TrainResult)
    resumed = rl_training.resume_training(stopped.run_dir)
    assert resumed.metrics["global_step"] == 160
    assert ResumeLevel.STATISTICAL.value in (resumed.run_dir / "metadata.json").read_text()


def test_a_policy_is_evaluated_without_warp(tmp_path: Path) -> None:
    config = tiny(tmp_path, env_id="warp/InvertedPendulum-v5", vectorization="sync")
    result = rl_training.train({**config, "env_kwargs": {"randomize": {"mass": [0.9, 1.1]}}})
    assert isinstance(result, TrainResult)
    shown = CliRunner().invoke(app, ["evaluate", str(result.run_dir), "--episodes", "2"])
    assert "in Gymnasium's InvertedPendulum-v5" in shown.stdout


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    config = tiny(tmp_path, env_id="warp/InvertedPendulum-v5", num_envs=2)
    with pytest.raises(EnvironmentSetupError, match=r"pip install \"rl-training\[warp\]\""):
        rl_training.train(config)
