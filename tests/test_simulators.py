"""The adapters in the real simulators of other packages (make test-simulators)."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from code_blocks import ROOT, blocks_of
from helpers import StopAt, tiny, tiny_of
from real_simulators import LIMIT, SIMULATORS, Simulator, gymnasium_worlds
from safetensors.torch import load_file

import rl_training
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.callbacks import Callback, TrainingContext
from rl_training.envs.tensors.contract import TensorEnvironment
from rl_training.errors import EnvironmentSetupError
from rl_training.runtime.workflows import resume_together
from rl_training.types import TrainResult

pytestmark = [
    pytest.mark.simulators,
    pytest.mark.usefixtures("no_pictures"),
    # Packages warn of many things, among them their own age.
    pytest.mark.filterwarnings("ignore"),
]
PAGE = ROOT / "docs" / "how-to" / "gpu-environments.md"
ROUNDS = 300


@pytest.fixture(params=SIMULATORS.values(), ids=SIMULATORS.keys())
def simulator(request: pytest.FixtureRequest) -> Simulator:
    found: Simulator = request.param
    if importlib.util.find_spec(found.package) is None:
        pytest.skip(f"{found.package} is not installed")
    return found


def worlds_of(simulator: Simulator) -> TensorEnvironment:
    source, worlds = simulator.make()
    return worlds or source.make(simulator.num_envs, "cpu")


def resting(worlds: TensorEnvironment) -> torch.Tensor:
    return torch.zeros(worlds.num_envs, *worlds.action_space.shape)


def test_time_limits_are_told_from_ends(simulator: Simulator) -> None:
    worlds = worlds_of(simulator)
    first = worlds.reset([0]).clone()
    for _ in range(LIMIT - 1):
        step = worlds.step(resting(worlds))
        assert not (step.terminated | step.truncated | step.broken).any()
        assert torch.equal(step.obs, step.final_obs)
    assert not torch.equal(step.obs, first)
    step = worlds.step(resting(worlds))
    assert step.truncated.all()
    assert not step.terminated.any()
    assert step.left_out is not None
    assert step.left_out.tolist() == [not simulator.tells_ends] * worlds.num_envs
    assert torch.equal(step.obs, step.final_obs) != simulator.tells_ends
    assert not torch.equal(step.obs, first)  # another first state


def test_the_same_seed_begins_the_same_episodes(simulator: Simulator) -> None:
    worlds = worlds_of(simulator)
    first, other, again = (worlds.reset([seed]).clone() for seed in (3, 4, 3))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_broken_world_is_reset_and_counted_once(simulator: Simulator) -> None:
    if simulator.break_world is None:
        pytest.skip("its state cannot be broken")
    worlds = worlds_of(simulator)
    worlds.reset([0])
    worlds.step(resting(worlds))
    simulator.break_world(worlds, 1)
    step = worlds.step(resting(worlds))
    assert step.broken.tolist() == [False, True, False, False]
    assert torch.isfinite(step.obs).all()
    for _ in range(LIMIT - 3):
        step = worlds.step(resting(worlds))
        assert not (step.broken | step.terminated | step.truncated).any()
        assert torch.isfinite(step.final_obs).all()
    assert step.obs[1].any()


def test_functions_of_jax_are_compiled_once(simulator: Simulator) -> None:
    worlds: Any = worlds_of(simulator)
    if not hasattr(worlds, "_state"):
        pytest.skip("it is not of JAX")
    worlds.reset([0])
    for _ in range(LIMIT + 2):
        worlds.step(resting(worlds))
    assert worlds._step._cache_size() == 1


@pytest.mark.parametrize("algo", ["sac", "td3", "ppo"])
def test_training_is_stopped_by_control_c_and_resumed(
    simulator: Simulator, algo: str, tmp_path: Path
) -> None:
    class ControlC(Callback):
        def on_collect_end(self, context: TrainingContext) -> None:
            if context.global_step == steps // 2 - 3 * simulator.num_envs:
                signal.raise_signal(signal.SIGINT)

    source, _ = simulator.make()
    steps = ROUNDS * simulator.num_envs
    task = {"env_id": None, "num_envs": simulator.num_envs, "total_timesteps": steps}
    settings: dict[str, Any] = {**simulator.settings}
    every = {"train_frequency": 2 * simulator.num_envs}
    settings |= {
        "ppo": {"rollout_steps": 16, "batch_size": 16},
        "sac": every,
        "td3": {**every, "n_step": 3},
    }[algo]
    config = tiny_of(get_algorithm_spec(algo), tmp_path, **task, algo_kwargs=settings)
    with pytest.raises(rl_training.TrainingInterrupted) as stopped:
        rl_training.train(config, env=source, callbacks=[ControlC()])
    resumed = rl_training.resume_training(stopped.value.result.run_dir, env=source)
    assert resumed.metrics["global_step"] == -(-steps // simulator.num_envs) * simulator.num_envs
    # Longer if an episode went on over the interruption.
    assert 0 < resumed.metrics["rollout/ep_len_mean"] <= LIMIT
    assert "rollout/broken_worlds" not in resumed.metrics
    assert np.isfinite(resumed.metrics["train/critic_loss"])
    rows = [load_file(path) for path in resumed.checkpoint_path.glob("replay-*.safetensors")]
    assert all(torch.isfinite(part).all() for row in rows for part in row.values())
    print(algo, {key: round(value, 3) for key, value in resumed.metrics.items()})


def test_broken_worlds_of_a_run_are_counted(simulator: Simulator, tmp_path: Path) -> None:
    if simulator.break_world is None:
        pytest.skip("its state cannot be broken")
    break_world = simulator.break_world

    class Break(Callback):
        def on_collect_end(self, context: TrainingContext) -> None:
            if context.global_step in (100, 200):
                break_world(context.env, 2)

    source, _ = simulator.make()
    settings = {"train_frequency": 8, **simulator.settings}
    config = tiny(tmp_path, env_id=None, num_envs=4, total_timesteps=400, algo_kwargs=settings)
    result = rl_training.train(config, env=source, callbacks=[Break()])
    assert isinstance(result, TrainResult)
    assert result.metrics["rollout/broken_worlds"] == 2
    assert np.isfinite(result.metrics["train/critic_loss"])


def test_two_seeds_share_the_worlds(simulator: Simulator, tmp_path: Path) -> None:
    if simulator.num_envs < 2:
        pytest.skip("it has one world")
    source, _ = simulator.make()
    settings = {"train_frequency": 8, **simulator.settings}
    config = tiny(tmp_path, env_id=None, num_envs=2, total_timesteps=200, algo_kwargs=settings)
    stopped = rl_training.train({**config, "seeds": [0, 1]}, env=source, callbacks=[StopAt(100)])
    assert isinstance(stopped, list)
    results = resume_together([each.run_dir for each in stopped], env=source)
    assert [each.metrics["global_step"] for each in results] == [200, 200]
    assert all(0 < each.metrics["rollout/ep_len_mean"] <= LIMIT for each in results)


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_modes_of_gymnasium_that_cannot_be_right_are_refused(mode: str) -> None:
    pytest.importorskip("array_api_compat")
    with pytest.raises(EnvironmentSetupError, match=f"AutoresetMode.{mode}: .*DISABLED"):
        gymnasium_worlds(gym.vector.AutoresetMode[mode])


@pytest.mark.parametrize(
    ("package", "line"),
    [
        pytest.param("mjlab", "import mjlab.tasks\n", id="mjlab"),
        pytest.param("brax", "from brax import envs\n", id="brax"),
        pytest.param(
            "mujoco_playground", "from mujoco_playground import registry\n", id="playground"
        ),
    ],
)
def test_the_example_of_the_documentation_runs(
    package: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    [block] = [block for block in blocks_of(PAGE) if block.text.startswith(line)]
    variables: dict[str, Any] = {}
    exec(compile(block.as_run(), block.place, "exec"), variables)
    result = variables["result"]
    assert isinstance(result, TrainResult)
    assert result.metrics["gradient_steps"] > 200
    assert np.isfinite(result.metrics["train/critic_loss"])
    print({key: round(value, 3) for key, value in result.metrics.items()})
