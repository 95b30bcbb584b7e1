"""QR-DQN's trainer from config to result, with gradient updates."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_smoke import check_refusal, check_training


@pytest.mark.parametrize(
    ("settings", "networks"),
    [
        ({}, {"critic"}),
        (
            {"double": True, "dueling": True, "prioritized": True, "noisy": True, "n_step": 3},
            {"critic_body", "critic_value", "critic_advantage"},
        ),
    ],
    ids=["plain", "with every option"],
)
def test_training_updates_every_network_and_reports_its_result(
    tmp_path: Path, settings: dict, networks: set[str]
) -> None:
    metrics = check_training("qr_dqn", tmp_path, networks=networks, **settings)
    assert {"train/critic_loss", "train/target_q_mean"} <= metrics.keys()


def test_another_algorithms_config_is_refused(tmp_path: Path) -> None:
    check_refusal("qr_dqn", tmp_path)
