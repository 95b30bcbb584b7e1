"""Overview of the runs in a folder: their state and results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl_training.checkpoints.format import STATE, CheckpointReader, checkpoint_folders
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.config_files import read_yaml
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.reporting.logging import read_metrics
from rl_training.training.seed_run import FINISHED
from rl_training.types import Json


@dataclass(frozen=True)
class RunOverview:
    """State and results of one run."""

    path: Path
    algo: str
    environment: str
    seed: int
    state: str
    step: int
    total_timesteps: int
    best_return: float | None
    last_return: float | None


def list_runs(folder: Path) -> list[RunOverview]:
    """Return all runs in `folder` and its subfolders, oldest first."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; the default is `runs`, or output_dir if it was set"
        )
    found = {path.parent for path in folder.glob("**/config.yaml")}
    runs = [path for path in found if (path / "metadata.json").is_file()]
    overviews = [_overview(path) for path in sorted(runs, key=lambda p: p.stat().st_mtime)]
    return [overview for overview in overviews if overview is not None]


def _overview(path: Path) -> RunOverview | None:
    run = RunFolder(path)
    try:
        saved = _newest_state(run)
        config = read_yaml(path / "config.yaml") if saved is None else saved["config"]
        rows = read_metrics(run.metrics) if run.metrics.is_file() else []
        evaluations = [row["eval/mean_reward"] for row in rows if "eval/mean_reward" in row]
        best = run.best()
        return RunOverview(
            path=path,
            algo=str(config["algo"]),
            environment=str(config["env_id"] or "(own)"),
            seed=int(config["seed"]),
            state=_state(run, saved),
            step=_last_step(saved, rows),
            total_timesteps=int(config["total_timesteps"]),
            best_return=None if best is None else float(best["eval_return_mean"]),
            last_return=evaluations[-1] if evaluations else None,
        )
    except (ConfigError, KeyError, TypeError, ValueError):
        return None  # not a run folder of this package


def _newest_state(run: RunFolder) -> Json | None:
    for folder in checkpoint_folders(run.checkpoints):
        try:
            return CheckpointReader(folder).verify([STATE]).json(STATE)
        except CheckpointError:
            continue
    return None


def _state(run: RunFolder, saved: Json | None) -> str:
    if run.is_locked():
        return "running"
    if saved is None:
        return "stopped before its first checkpoint"
    progress = saved["progress"]
    if progress["should_stop"] and progress["stop_reason"] in FINISHED:
        return f"finished ({progress['stop_reason']})"
    if progress["global_step"] == 0 < progress["pretrain_updates"]:
        return f"stopped in pretraining (update {progress['pretrain_updates']:,}), can be resumed"
    return "stopped, can be resumed"


def _last_step(saved: Json | None, rows: list[Json]) -> int:
    newest = 0 if saved is None else saved["progress"]["global_step"]
    return int(max([newest, *(row["step"] for row in rows[-1:])]))
