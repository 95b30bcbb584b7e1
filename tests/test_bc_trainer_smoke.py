"""BC's trainer from config to result, with gradient updates."""

from __future__ import annotations

from pathlib import Path

from trainer_smoke import check_refusal, check_training


def test_training_updates_every_network_and_reports_its_result(tmp_path: Path) -> None:
    metrics = check_training("bc", tmp_path, networks={"actor"})
    assert {"train/bc_loss"} <= metrics.keys()


def test_another_algorithms_config_is_refused(tmp_path: Path) -> None:
    check_refusal("bc", tmp_path)
