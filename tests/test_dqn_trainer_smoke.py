"""DQN's trainer from config to result, with gradient updates."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_smoke import check_refusal, check_training


@pytest.mark.parametrize(
    ("settings", "networks"),
    [
        ({}, {"critic"}),
        (
            {"dueling": True, "prioritized": True, "n_step": 3},
            {"critic_body", "critic_value", "critic_advantage"},
        ),
        (
            {"dueling": True, "noisy": True, "num_atoms": 11, "prioritized": True, "n_step": 3},
            {"critic_body", "critic_value", "critic_advantage"},
        ),
        ({"double": False, "tau": 0.01, "target_update_interval": 1}, {"critic"}),
    ],
    ids=["plain", "before rainbow", "rainbow", "single with a polyak target"],
)
def test_training_updates_every_network_and_reports_its_result(
    tmp_path: Path, settings: dict, networks: set[str]
) -> None:
    metrics = check_training("dqn", tmp_path, networks=networks, **settings)
    assert {"train/critic_loss", "train/target_q_mean"} <= metrics.keys()


def test_another_algorithms_config_is_refused(tmp_path: Path) -> None:
    check_refusal("dqn", tmp_path)
