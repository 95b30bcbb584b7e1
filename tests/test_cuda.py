"""The same promises on a GPU; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import StopAt, hashes, metric_rows, tiny

import rl_training
from rl_training.algorithms import SACAlgorithm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MODES = [pytest.param("off", id="eager"), pytest.param("on", id="compiled")]


@pytest.mark.parametrize("compile_mode", MODES)
def test_a_run_on_the_gpu_resumes_bit_for_bit(tmp_path: Path, compile_mode: str) -> None:
    config = tiny(tmp_path, device="cuda", compile=compile_mode, normalize_observations=True)
    whole = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(77)])
    resumed = rl_training.resume_training(stopped.run_dir)
    assert hashes(resumed.checkpoint_path) == hashes(whole.checkpoint_path)
    assert metric_rows(resumed.run_dir) == metric_rows(whole.run_dir)


def test_a_seed_starts_from_the_same_parameters_on_every_device() -> None:
    states = [
        SACAlgorithm(3, 1, seed=5, device=device).state["actor"] for device in ("cpu", "cuda")
    ]
    assert states[1].is_cuda
    assert torch.equal(states[0], states[1].cpu())


def test_a_policy_trained_on_the_gpu_predicts_on_the_cpu(tmp_path: Path) -> None:
    result = rl_training.train(tiny(tmp_path, device="cuda"))
    action = rl_training.predict_checkpoint(result.run_dir, [[0.1, 0.2, 0.3]] * 4)
    assert action.shape == (4, 1)
    assert np.abs(action).max() <= 2.0


def test_automatic_device_is_the_gpu(tmp_path: Path) -> None:
    result = rl_training.train(tiny(tmp_path, device="auto"))
    assert '"device": "cuda:0"' in (result.run_dir / "metadata.json").read_text()
