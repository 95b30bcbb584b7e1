"""Tensor environments on a GPU: captured, without waiting for the device. Skipped without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import StopAt, hashes, tiny
from test_rollouts import FirstRatios
from test_tensor_rollouts import rollouts

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.envs import environment_factory
from rl_training.envs.tensors.classic_control import CartPole, Pendulum
from rl_training.envs.tensors.simulated import SimulatedWorlds
from rl_training.types import TrainResult

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

modes = pytest.mark.parametrize("compile", ["off", "on"])


def on_cuda(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    settings = {"train_frequency": 16, "learning_starts": 64, **changes.pop("algo_kwargs", {})}
    task = {"env_id": "tensors/Pendulum-v1", "num_envs": 16, "total_timesteps": 1_600}
    return tiny(tmp_path, **{**task, "device": "cuda", **changes}, algo_kwargs=settings)


def trained(config: dict[str, Any], **options: Any) -> TrainResult:
    result = rl_training.train(config, **options)
    assert isinstance(result, TrainResult)
    return result


@pytest.mark.parametrize("kind", [Pendulum, CartPole])
def test_captured_steps_are_those_of_the_cpu(kind: type[SimulatedWorlds]) -> None:
    here, there = kind(64, "cpu"), kind(64, "cuda")
    torch.testing.assert_close(there.reset([3]).cpu(), here.reset([3]))
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        shape = (64, *(here.action_space.shape or ()))
        actions = torch.rand(shape, generator=generator) * 2 - 1
        if kind is CartPole:
            actions = (actions > 0).long()
        there.restore(here.snapshot())  # so that rounding does not add up
        mine, other = here.step(actions), there.step(actions.cuda())
        torch.testing.assert_close(other.final_obs.cpu(), mine.final_obs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(other.reward.cpu(), mine.reward, atol=1e-4, rtol=1e-4)
        assert (other.terminated.cpu() == mine.terminated).float().mean() > 0.95


@modes
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="sac"),
        pytest.param({"normalize_observations": True}, id="normalized"),
        pytest.param({"algo": "flash_sac", "algo_kwargs": {"num_atoms": 11}}, id="flash_sac"),
        pytest.param({"algo": "dqn", "env_id": "tensors/CartPole-v1"}, id="dqn"),
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(
    tmp_path: Path, compile: str, changes: dict[str, Any]
) -> None:
    config = on_cuda(tmp_path, compile=compile, **changes)
    whole = trained(config)
    stopped = trained(config, callbacks=[StopAt(800)])
    resumed = rl_training.resume_training(stopped.run_dir)
    assert hashes(resumed.checkpoint_path) == hashes(whole.checkpoint_path)


@modes
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_recurrent_policy_remembers_on_the_device(
    tmp_path: Path, compile: str, kind: str
) -> None:
    """The first update of a rollout has the policy that acted, and a resumed run has its states."""
    own = {"rollout_steps": 16, "batch_size": 256, "num_epochs": 1, "recurrent": kind}
    changes = {"device": "cuda", "compile": compile, "num_envs": 16, "total_timesteps": 2_560}
    config, ratios = rollouts(tmp_path, **changes, algo_kwargs=own), FirstRatios()
    whole = trained(config, callbacks=[ratios])
    assert len(ratios.seen) == 10
    assert max(ratios.seen) < 1e-5
    stopped = trained(config, callbacks=[StopAt(1_000)])
    resumed = rl_training.resume_training(stopped.run_dir)
    assert hashes(resumed.checkpoint_path) == hashes(whole.checkpoint_path)


@modes
def test_two_seeds_run_in_one_program(tmp_path: Path, compile: str) -> None:
    results = rl_training.train({**on_cuda(tmp_path, compile=compile), "seeds": [0, 1]})
    assert isinstance(results, list)
    assert results[0].metrics != results[1].metrics
    for result in results:
        assert np.isfinite(result.metrics["train/critic_loss"])


class NoWaiting(Callback):
    """Makes it an error to wait for the device, after the first rounds."""

    def __init__(self) -> None:
        self.rounds = 0

    def on_update_end(self, context: TrainingContext) -> None:
        self.rounds += 1
        torch.cuda.set_sync_debug_mode("error" if 20 < self.rounds < 70 else "default")


@pytest.mark.parametrize(
    "changes",
    [
        {"normalize_observations": True},
        {"algo": "flash_sac", "algo_kwargs": {"num_atoms": 11}},
    ],
)
def test_rounds_do_not_wait_for_the_device(tmp_path: Path, changes: dict[str, Any]) -> None:
    watch = NoWaiting()
    try:
        trained(
            on_cuda(tmp_path, compile="on", log_interval=10**6, health=False, **changes),
            callbacks=[watch],
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.rounds > 70


class Launches(Callback):
    """Counts the graphs that are launched while worlds are stepped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs, self.rounds = 0, 0
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: torch.cuda.CUDAGraph) -> None:
            self.graphs += 1
            replay(graph)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)

    def on_collect_end(self, context: TrainingContext) -> None:
        self.rounds += 1
        if self.rounds > 50:
            assert self.graphs == 1
        self.graphs = 0

    def on_update_end(self, context: TrainingContext) -> None:
        self.graphs = 0


@pytest.mark.parametrize("env_id", ["tensors/Pendulum-v1", "warp/InvertedPendulum-v5"])
def test_acting_simulating_and_storing_are_one_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env_id: str
) -> None:
    if env_id.startswith("warp"):
        pytest.importorskip("mujoco_warp")
    launches = Launches(monkeypatch)
    trained(on_cuda(tmp_path, compile="on", env_id=env_id), callbacks=[launches])
    assert launches.rounds == 100


def test_worlds_that_cannot_be_captured_are_trained_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(on_cuda(tmp_path, compile="on"))
    monkeypatch.setattr(Pendulum, "is_capturable", False)
    parts = trained(on_cuda(tmp_path, compile="on"))
    assert hashes(parts.checkpoint_path) == hashes(whole.checkpoint_path)


@pytest.mark.parametrize("name", ["InvertedPendulum", "HalfCheetah", "Ant"])
def test_warp_on_the_gpu_is_close_to_the_cpu(name: str) -> None:
    pytest.importorskip("mujoco_warp")
    source = environment_factory(f"warp/{name}-v5", {}, None).tensor_source
    assert source is not None
    here, there = source.make(16, "cpu"), source.make(16, "cuda")
    torch.testing.assert_close(there.reset([3]).cpu(), here.reset([3]), atol=1e-4, rtol=1e-4)
    generator, close = torch.Generator().manual_seed(0), []
    for _ in range(12):
        actions = torch.rand((16, *here.action_space.shape), generator=generator) * 2 - 1
        there.restore(here.snapshot())
        mine, other = here.step(actions), there.step(actions.cuda())
        apart = (other.final_obs.cpu() - mine.final_obs).abs().amax(1)
        close.append((apart < 1e-2).float().mean())
    assert torch.stack(close).mean() > (0.4 if name == "Ant" else 0.9)


def test_a_run_in_warp_trains_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("mujoco_warp")
    config = on_cuda(tmp_path, env_id="warp/InvertedPendulum-v5", compile="on")
    stopped = trained(config, callbacks=[StopAt(800)])
    resumed = rl_training.resume_training(stopped.run_dir)
    assert resumed.metrics["global_step"] == 1_600
    assert np.isfinite(resumed.metrics["train/critic_loss"])
