"""EDAC's trainer from config to result, with gradient updates."""

from __future__ import annotations

from pathlib import Path

from trainer_smoke import check_refusal, check_training


def test_training_updates_every_network_and_reports_its_result(tmp_path: Path) -> None:
    metrics = check_training("edac", tmp_path, networks={"actor", "critic"})
    assert {"train/critic_loss", "train/actor_loss", "train/target_q_mean"} <= metrics.keys()


def test_another_algorithms_config_is_refused(tmp_path: Path) -> None:
    check_refusal("edac", tmp_path)
