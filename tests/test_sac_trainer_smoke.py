"""SAC's trainer from config to result, with gradient updates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import metric_rows, tiny
from safetensors.torch import load_file
from trainer_smoke import check_refusal, check_training

from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.runtime.sac_trainer import train_sac


def test_training_updates_every_network_and_reports_its_result(tmp_path: Path) -> None:
    metrics = check_training("sac", tmp_path, networks={"actor", "critic"})
    assert {"train/critic_loss", "train/actor_loss", "train/alpha"} <= metrics.keys()


def test_the_run_folder_describes_the_run(tmp_path: Path) -> None:
    config = tiny(tmp_path, eval_interval=60, env_id="MountainCarContinuous-v0")
    run = train_sac({**config, "env_kwargs": {"max_episode_steps": 50}}).run_dir
    expected = {"config.yaml", "metadata.json", "metrics.jsonl", "tensorboard", "checkpoints"}
    assert expected | {"learning_curve.png"} <= {path.name for path in run.iterdir()}
    assert list((run / "tensorboard").glob("events.*"))
    rows = metric_rows(run)
    tags = set().union(*rows)
    assert {"rollout/ep_rew_mean", "rollout/ep_len_mean"} <= tags
    assert {"eval/mean_reward", "train/critic_loss", "train/actor_loss", "train/alpha"} <= tags
    logged = [row["step"] for row in rows if "train/n_updates" in row]
    assert logged == [40, 80, 120]
    assert [row["step"] for row in rows if "eval/mean_reward" in row] == [60, 120]
    speeds = [
        json.loads(line).get("time/fps") for line in (run / "metrics.jsonl").open() if "fps" in line
    ]
    assert all(speed > 0 for speed in speeds)


@pytest.mark.parametrize("kind", ["mapping", "config", "path", "packaged"])
def test_a_config_can_be_given_in_every_form(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny(tmp_path, total_timesteps=50)
    if kind == "packaged":
        from rl_training import config_files

        monkeypatch.setattr(
            config_files, "packaged_configs", lambda: {"sac/tiny": tmp_path / "tiny.yaml"}
        )
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(values))
    given = {
        "mapping": {k: v for k, v in values.items() if k != "algo"},
        "config": TrainConfig(**values),
        "path": path,
        "packaged": "sac/tiny",
    }[kind]
    assert train_sac(given).metrics["gradient_steps"] == 10


def test_another_algorithms_config_is_refused(tmp_path: Path) -> None:
    check_refusal("sac", tmp_path)
    with pytest.raises(ConfigError, match="algo"):
        train_sac({**tiny(tmp_path), "algo": "td3000"})


@pytest.mark.parametrize(
    "changes",
    [
        {"normalize_observations": True},
        {"num_envs": 2, "vectorization": "async"},
        {"algo_kwargs": {"alpha": 0.1, "num_critics": 4, "critic_layer_norm": True}},
        {
            "algo_kwargs": {
                "n_step": 4,
                "entropy_in_target": False,
                "policy_delay": 3,
                "activation": "tanh",
            }
        },
    ],
    ids=lambda changes: ",".join(changes),
)
def test_options_train(tmp_path: Path, changes: dict) -> None:
    result = train_sac(tiny(tmp_path, **changes))
    assert result.metrics["gradient_steps"] == 80
    assert all(
        torch.isfinite(t).all()
        for t in load_file(result.checkpoint_path / "model.safetensors").values()
    )
