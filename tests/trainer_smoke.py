"""Shared smoke test of trainers: from config to result, with gradient updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_of, trainer_of
from safetensors.torch import load_file

from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.callbacks import Callback, TrainingContext
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.training.engine import planned_updates


class KeepFirst(Callback):
    """Requests a checkpoint right before the first update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_collect_end(self, context: TrainingContext) -> None:
        if context.global_step == self.step:
            context.request_checkpoint()


def check_training(
    name: str, tmp_path: Path, *, networks: set[str], **algo_kwargs: Any
) -> dict[str, Any]:
    """Check that a run changes every parameter tensor, and check its result."""
    spec = get_algorithm_spec(name)
    config = tiny_of(spec, tmp_path, algo_kwargs=algo_kwargs)
    # An offline run starts with an update, so its initial checkpoint is the one before it.
    start = 0 if spec.regimes[0] == "offline" else config["algo_kwargs"].get("learning_starts", 0)
    result = trainer_of(spec)(config, callbacks=[KeepFirst(start)])
    assert result.metrics["gradient_steps"] == planned_updates(TrainConfig(**config)) > 0
    assert result.metrics["global_step"] == config["total_timesteps"]
    assert {"eval_return_mean", "eval_return_std"} <= result.metrics.keys()
    assert result.stop_reason == "total_timesteps"
    assert result.best_checkpoint_path is not None
    first = result.run_dir / "checkpoints" / f"step_{start:09}"
    before, after = (
        {k: v for k, v in load_file(f / "model.safetensors").items() if "normalizer" not in k}
        for f in (first, result.checkpoint_path)
    )
    assert {part.partition(".")[0] for part in after} == networks
    assert [part for part in after if torch.equal(before[part], after[part])] == []
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    return dict(result.metrics)


def check_refusal(name: str, tmp_path: Path) -> None:
    """Check that another algorithm's config and several seeds are refused and create no files."""
    spec = get_algorithm_spec(name)
    other = "dqn" if name == "sac" else "sac"
    with pytest.raises(ConfigError, match=f"this trainer is for '{name}'"):
        trainer_of(spec)(tiny_of(get_algorithm_spec(other), tmp_path))
    with pytest.raises(ConfigError, match="seeds"):
        trainer_of(spec)(tiny_of(spec, tmp_path, seeds=[1, 2]))
    assert list(tmp_path.iterdir()) == []
