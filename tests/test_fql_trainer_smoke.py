"""FQL's trainer from config to result, with gradient updates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_of
from trainer_smoke import check_refusal, check_training

import rl_training
from rl_training.algorithms.spec import get_algorithm_spec


def test_training_updates_every_network_and_reports_its_result(tmp_path: Path) -> None:
    metrics = check_training("fql", tmp_path, networks={"actor", "actor_flow", "critic"})
    names = {"critic_loss", "actor_loss", "flow_loss", "distillation_loss", "target_q_mean"}
    assert {f"train/{name}" for name in names} <= metrics.keys()


def test_another_algorithms_config_is_refused(tmp_path: Path) -> None:
    check_refusal("fql", tmp_path)


@pytest.mark.parametrize("regime", ["online", "mixed"])
def test_it_also_learns_in_an_environment(regime: str, tmp_path: Path) -> None:
    pretraining = {"offline_pretrain_updates": 5} if regime == "mixed" else {}
    settings = tiny_of(get_algorithm_spec("fql"), tmp_path, regime=regime, algo_kwargs=pretraining)
    if regime == "online":
        del settings["dataset"]
    result = rl_training.train(settings)
    assert result.metrics["gradient_steps"] > 40
    if regime == "mixed":  # all transitions are equally likely
        rows = (
            result.metrics["train/offline_dataset_size"],
            result.metrics["train/online_buffer_size"],
        )
        share = rows[0] / sum(rows)
        assert result.metrics["train/offline_batch_size"] == round(16 * share)


def test_predictions_are_repeatable_or_sampled(tmp_path: Path) -> None:
    run = rl_training.train(tiny_of(get_algorithm_spec("fql"), tmp_path, total_timesteps=10))
    agent = rl_training.FQL.load(run.run_dir)
    obs = np.zeros((4, 3), np.float32)
    assert np.array_equal(agent.predict(obs), agent.predict(obs))
    sampled = agent.predict(obs, deterministic=False)
    assert len(np.unique(sampled)) > 1
