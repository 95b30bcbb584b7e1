"""RLPD's trainer from config to result: pretraining, then gradient updates on mixed batches."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Recorder, metric_rows, tiny_of
from trainer_smoke import check_refusal, check_training

from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.callbacks import Callback, TrainingContext
from rl_training.data import OfflineDataset, ReplayBuffer
from rl_training.runtime.rlpd_trainer import train_rlpd

PRETRAINING, STEPS, LEARNING_STARTS, PER_STEP = 30, 60, 40, 2
MIXED_UPDATES = (STEPS - LEARNING_STARTS) * PER_STEP


def pretrained(tmp_path: Path, **algo_kwargs: Any) -> dict[str, Any]:
    """Return a config with pretraining, then live steps. A quarter of each batch is prior data."""
    settings = {
        "offline_pretrain_updates": PRETRAINING,
        "offline_batch_ratio": 0.25,
        "learning_starts": LEARNING_STARTS,
        "gradient_updates_per_step": PER_STEP,
        "batch_size": 16,
        **algo_kwargs,
    }
    spec = get_algorithm_spec("rlpd")
    return tiny_of(spec, tmp_path, total_timesteps=STEPS, log_interval=10, algo_kwargs=settings)


class KeepNetworks(Callback):
    """Copies the networks at the start, after pretraining, and at the end."""

    def __init__(self) -> None:
        self.kept: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, context: TrainingContext) -> None:
        tensors = context._run.policy.tensors()
        self.kept.append({name: tensor.clone() for name, tensor in tensors.items()})

    def on_update_end(self, context: TrainingContext) -> None:
        if context.ends_pretraining:
            self.on_train_start(context)

    def on_train_end(self, context: TrainingContext) -> None:
        self.on_train_start(context)


def test_training_updates_every_network_and_reports_its_result(tmp_path: Path) -> None:
    metrics = check_training("rlpd", tmp_path, networks={"actor", "critic"})
    assert {"train/critic_loss", "train/actor_loss", "train/target_q_mean"} <= metrics.keys()
    assert metrics["train/offline_batch_size"] == metrics["train/online_batch_size"] == 8
    assert metrics["train/pretrain_updates_done"] == 0


def test_pretraining_changes_every_network_before_the_first_step(tmp_path: Path) -> None:
    recorder, networks = Recorder(only=["update_end", "collect_end"]), KeepNetworks()
    result = train_rlpd(pretrained(tmp_path), callbacks=[recorder, networks])
    before_steps = recorder.events.index(("collect_end", 1, PRETRAINING))
    expected = [("update_end", 0, number) for number in range(1, PRETRAINING + 1)]
    assert recorder.events[:before_steps] == expected
    assert recorder.steps("collect_end") == list(range(1, STEPS + 1))
    assert result.metrics["gradient_steps"] == PRETRAINING + MIXED_UPDATES
    assert result.metrics["train/pretrain_updates_done"] == PRETRAINING
    assert len(networks.kept) == 3
    for before, after in pairwise(networks.kept):
        assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_batches_are_prior_data_in_pretraining_and_mixed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, int]] = []
    for kind in (OfflineDataset, ReplayBuffer):
        original = kind.draw

        def draw(self: Any, bits: torch.Tensor, original: Any = original) -> Any:
            drawn.append((type(self).__name__, bits.shape[-1]))
            return original(self, bits)

        monkeypatch.setattr(kind, "draw", draw)
    result = train_rlpd({**pretrained(tmp_path), "health": False})
    assert drawn[:PRETRAINING] == [("OfflineDataset", 16)] * PRETRAINING
    assert drawn[PRETRAINING:] == [("OfflineDataset", 4), ("ReplayBuffer", 12)] * MIXED_UPDATES

    names = ("offline_batch_size", "online_batch_size", "pretrain_updates_done")
    rows = [
        (row["step"], *(row[f"train/{name}"] for name in names))
        for row in metric_rows(result.run_dir)
        if "train/offline_batch_size" in row
    ]
    assert [row for row in rows if row[0] == 0] == [(0, 16, 0, done) for done in (10, 20, 30)]
    assert rows[-2:] == [(50, 4, 12, PRETRAINING), (60, 4, 12, PRETRAINING)]


def test_another_algorithms_config_is_refused(tmp_path: Path) -> None:
    check_refusal("rlpd", tmp_path)
