"""Run folders for tests of pages, written without training, and the dashboard as a process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_training.config_files import dump_yaml, load_config

HEALTH = {
    "health/q_minus_return": lambda share: 30 * math.exp(-4 * share) - 4,
    "health/q_mean": lambda share: 400 * share,
    "health/return_mean": lambda share: 400 * share - 20,
    "health/entropy": lambda share: 1 - 3 * share,
    "health/action_saturation": lambda share: 0.1 + 0.3 * share,
    "health/gradient_norm_actor": lambda share: 2 - share,
    "health/gradient_norm_critic": lambda share: 20 - 9 * share,
    "health/weight_norm_actor": lambda share: 10 + 9 * share,
    "health/weight_norm_critic": lambda share: 12 + 20 * share,
    "health/dead_units_actor": lambda share: 0.0,
    "health/dead_units_critic": lambda share: 0.01 + 0.02 * share,
}


@functools.cache
def _settings(algorithm: str) -> str:
    return json.dumps(load_config({"algo": algorithm, "env_id": "Pendulum-v1"}).to_mapping())


def write_run(
    folder: Path,
    *,
    algorithm: str = "sac",
    environment: str = "Hopper-v5",
    seed: int = 0,
    steps: int = 1_000_000,
    total: int | None = None,
    rows: int = 100,
    evaluations: int = 20,
    level: float = 2_000.0,
    finished: bool = True,
    **settings: Any,
) -> Path:
    """Write the folder of a run that reached `steps` and would end at `total`."""
    folder.mkdir(parents=True)
    config = {
        **json.loads(_settings(algorithm)),
        "env_id": environment,
        "seed": seed,
        "total_timesteps": total or steps,
        **settings,
    }
    (folder / "config.yaml").write_text(dump_yaml(config))
    metadata = {
        "created": f"2026-01-{1 + seed % 28:02d}T10:00:00+00:00",
        "command": ["rl-training", "train", "--algo", algorithm, "--env", environment],
        "git_commit": "0" * 40,
        "versions": {"rl_training": "0.4.0", "python": "3.11.7", "torch": "2.13.0"},
        "hardware": {"platform": "Linux", "processor": "CPU", "cpu_count": 2, "cuda": None},
        "environment": {"label": environment},
        "execution": {},
        "resume_level": "exact",
    }
    (folder / "metadata.json").write_text(json.dumps(metadata))
    lines = rows_of_run(seed, steps, rows, evaluations, level, total or steps)
    (folder / "metrics.jsonl").write_text("".join(lines))
    progress = {"global_step": steps, "should_stop": finished, "pretrain_updates": 0}
    progress["stop_reason"] = "total_timesteps" if finished else None
    _write_checkpoint(folder, steps, {"config": config, "progress": progress})
    return folder


def rows_of_run(
    seed: int, steps: int, rows: int, evaluations: int, level: float, total: int
) -> Iterator[str]:
    """Yield the lines of `metrics.jsonl`: learning that levels off, with noise."""
    noise = random.Random(seed)
    every = max(1, rows // max(1, evaluations))
    for number in range(1, rows + 1):
        step = steps * number // rows
        share = step / total
        value = level * (1 - math.exp(-4 * share)) + noise.gauss(0, 0.05 * level)
        seconds = step / 500
        counters = {"step": step, "gradient_steps": step, "time/wall_seconds": seconds}
        yield json.dumps({
            **counters,
            "rollout/ep_rew_mean": 0.9 * value,
            "rollout/ep_len_mean": 1000.0,
            **{f"train/{name}": noise.random() for name in ("actor_loss", "critic_loss", "alpha")},
            "time/fps": 500.0,
            "time/time_elapsed": seconds,
            "time/environments_seconds": 0.3 * seconds,
            "time/acting_seconds": 0.1 * seconds,
            "time/sampling_seconds": 0.05 * seconds,
            "time/update_seconds": 0.45 * seconds,
            "time/evaluation_seconds": 0.07 * seconds,
            "time/saving_seconds": 0.02 * seconds,
        }) + "\n"  # fmt: skip
        if evaluations and number % every == 0:
            yield json.dumps({
                **counters,
                "eval/mean_reward": value,
                "eval/std_reward": 0.1 * level,
                "eval/mean_ep_length": 1000.0,
                **{name: make(share) for name, make in HEALTH.items()},
            }) + "\n"  # fmt: skip


def evaluation_row(step: int, value: float) -> str:
    """Return the line of one more evaluation."""
    values = {"eval/mean_reward": value, "eval/std_reward": 1.0, "time/wall_seconds": step / 500}
    return json.dumps({"step": step, "gradient_steps": step, **values}) + "\n"


def _write_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    checkpoint = folder / "checkpoints" / f"step_{step:09d}"
    checkpoint.mkdir(parents=True)
    data = json.dumps(state).encode()
    (checkpoint / "state.json").write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"format_version": 1, "files": {"state.json": entry}}
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))


@contextlib.contextmanager
def dashboard_command(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command and yield its process and the address that it prints."""
    line = [sys.executable, "-m", "rl_training", "dashboard", *map(str, arguments)]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
