"""A2C's trainer from config to result, with gradient updates."""

from __future__ import annotations

from pathlib import Path

from trainer_smoke import check_refusal, check_training


def test_training_updates_every_network_and_reports_its_result(tmp_path: Path) -> None:
    metrics = check_training("a2c", tmp_path, networks={"actor", "critic"})
    expected = {"actor_loss", "critic_loss", "entropy", "explained_variance"}
    assert {f"train/{name}" for name in expected} <= metrics.keys()


def test_another_algorithms_config_is_refused(tmp_path: Path) -> None:
    check_refusal("a2c", tmp_path)
