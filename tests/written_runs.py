"""Write run folders with given evaluations, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def write_run(
    folder: Path,
    *,
    algo: str = "sac",
    env: str | None = "Hopper-v5",
    seed: int | None = 0,
    steps: Sequence[int] = (100, 200, 300),
    returns: Sequence[float | None] | None = None,
    seconds: Sequence[float] | None = None,
    algo_kwargs: dict[str, Any] | None = None,
    label: str = "Hopper-v5",
    **settings: Any,
) -> Path:
    """Write the files of a stopped run; the returns are 1, 2, ... if none are given."""
    folder.mkdir(parents=True)
    config = {
        **{"algo": algo, "env_id": env, "env_kwargs": {}, "wrappers": [], "seed": seed},
        **{"total_timesteps": 300, "algo_kwargs": {"tau": 0.005, **(algo_kwargs or {})}},
        **settings,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metadata.json").write_text(json.dumps({"environment": {"label": label}}))
    values = range(1, len(steps) + 1) if returns is None else returns
    rows: list[dict[str, Any]] = [
        {"step": step, "eval/mean_reward": value} for step, value in zip(steps, values, strict=True)
    ]
    for row, time in zip(rows, seconds or (), strict=False):
        row["time/wall_seconds"] = time
    other = {"step": 50, "train/critic_loss": 1.0}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [other, *rows]))
    return folder
