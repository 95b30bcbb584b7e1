"""ReBRAC's trainer from config to result, with gradient updates."""

from __future__ import annotations

import math
from pathlib import Path

from helpers import tiny_of
from trainer_smoke import check_refusal, check_training

import rl_training
from rl_training.algorithms.spec import get_algorithm_spec


def test_training_updates_every_network_and_reports_its_result(tmp_path: Path) -> None:
    metrics = check_training("rebrac", tmp_path, networks={"actor", "critic"})
    assert {"train/critic_loss", "train/actor_loss", "train/target_q_mean"} <= metrics.keys()


def test_another_algorithms_config_is_refused(tmp_path: Path) -> None:
    check_refusal("rebrac", tmp_path)


def test_offline_evaluation_has_the_validation_losses(tmp_path: Path) -> None:
    """The losses need the next actions of the data, in held-out episodes, too."""
    settings = tiny_of(get_algorithm_spec("rebrac"), tmp_path, total_timesteps=10)
    settings["dataset"] = {"kind": "random", "size": 700, "seed": 0}  # three episodes and a half
    run = rl_training.train(settings)
    metrics = rl_training.evaluate_offline(run.run_dir, fqe_updates=0, held_out=0.5)
    losses = [metrics[f"ope_validation_{name}"] for name in ("critic_loss", "actor_loss")]
    assert all(math.isfinite(loss) for loss in losses)


def test_a_policy_continues_online_with_td3(tmp_path: Path) -> None:
    before = rl_training.train(
        tiny_of(get_algorithm_spec("rebrac"), tmp_path, total_timesteps=10, eval_interval=0)
    )
    settings = {"critic_layer_norm": True}
    after = tiny_of(
        get_algorithm_spec("td3"), tmp_path, init_from=str(before.run_dir), algo_kwargs=settings
    )
    assert rl_training.train(after).metrics["gradient_steps"] > 0
