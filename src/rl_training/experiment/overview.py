"""Overview of the runs in a folder: their state and results.

Reads JSON and YAML files only, so that it does not need PyTorch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rl_training.checkpoints.format import STATE, CheckpointReader, checkpoint_folders, read_json
from rl_training.checkpoints.run_folder import MOST_TRIED, RUN, RunFolder, last_metrics
from rl_training.config_files import MAX_BYTES, parse_yaml
from rl_training.errors import CheckpointError, UserError, one_line
from rl_training.types import FINISHED, Json
from rl_training.validation import suggestion

SORT_KEYS = ("name", "algo", "env", "seed", "state", "step", "best", "last", "date")
FILTER_KEYS = ("name", "algo", "env", "seed", "state", "date")
MAX_TEXT = 200
"""Longest name or reason that is shown"""
RUNNING, FINISHED_STATE, STOPPED, UNREADABLE = "running", "finished", "stopped", "unreadable"


@dataclass(frozen=True)
class RunOverview:
    """State and results of one run. A value that could not be read is None."""

    path: Path
    state: str
    """running, finished, stopped or unreadable"""
    detail: str = ""
    """What else to know about the state, such as why the run stopped"""
    algo: str | None = None
    environment: str | None = None
    seed: int | None = None
    step: int | None = None
    total_timesteps: int | None = None
    best_return: float | None = None
    last_return: float | None = None
    created: str | None = None
    """Time when the run was started, in ISO format and UTC"""

    def to_json(self) -> Json:
        """Return the values by the names that `sort_runs` and `filter_runs` use."""
        return {
            "name": self.path.name,
            "path": str(self.path),
            "algo": self.algo,
            "env": self.environment,
            "seed": self.seed,
            "state": self.state,
            "detail": self.detail,
            "step": self.step,
            "total_timesteps": self.total_timesteps,
            "best": self.best_return,
            "last": self.last_return,
            "date": self.created,
        }


def list_runs(folder: Path) -> list[RunOverview]:
    """Return all runs in `folder` and its subfolders, oldest first."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; the default is `runs`, or output_dir if it was set"
        )
    return sort_runs([_overview(path) for path in sorted(run_folders(folder))], "date")


def sort_runs(runs: Iterable[RunOverview], key: str) -> list[RunOverview]:
    """Sort runs by one of `SORT_KEYS`, descending if it starts with `-`.

    Runs without a value come last.
    """
    name = key.removeprefix("-")
    if name not in SORT_KEYS:
        raise UserError(_unknown_key("--sort", name, SORT_KEYS))
    with_values = [(run.to_json()[name], run) for run in runs]
    known = [pair for pair in with_values if pair[0] is not None]
    known.sort(key=lambda pair: pair[0], reverse=key.startswith("-"))
    return [run for _, run in known] + [run for value, run in with_values if value is None]


def filter_runs(runs: Iterable[RunOverview], filters: Sequence[str]) -> list[RunOverview]:
    """Return the runs that match every filter `KEY=VALUE`.

    KEY is one of `FILTER_KEYS`. VALUE may contain the wildcards `*`, `?` and `[...]`; upper and
    lower case are equal.
    """
    wanted = [_parse_filter(text) for text in filters]
    return [run for run in runs if all(_matches(run, key, value) for key, value in wanted)]


def _parse_filter(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise UserError(f"--filter {text!r}: must be KEY=VALUE, such as algo=sac")
    if key not in FILTER_KEYS:
        raise UserError(_unknown_key("--filter", key, FILTER_KEYS))
    return key, value


def _matches(run: RunOverview, key: str, pattern: str) -> bool:
    value = run.to_json()[key]
    return value is not None and fnmatchcase(str(value).lower(), pattern.lower())


def _unknown_key(option: str, key: str, known: Sequence[str]) -> str:
    return f"{option} {key!r}: unknown key{suggestion(key, known)} (known: {', '.join(known)})"


def run_folders(folder: Path) -> Iterator[Path]:
    """Find folders with a config and metadata; folders inside a run are not searched."""
    for parent, folders, files in os.walk(folder):
        if "config.yaml" in files and ("metadata.json" in files or RUN in files):
            folders.clear()
            yield Path(parent)
        folders[:] = [name for name in folders if not name.startswith(".")]


def _overview(path: Path) -> RunOverview:
    try:
        return _read_overview(path)
    except Exception as error:  # whatever one folder contains, the others are shown
        reason = str(error) if isinstance(error, UserError | OSError) else repr(error)
        return RunOverview(path, UNREADABLE, shown_text(f"cannot be read: {reason}"))


def _read_overview(path: Path) -> RunOverview:
    run = RunFolder(path)
    saved = newest_state(run)
    config = saved_settings(run) if saved is None else saved["config"]
    newest, evaluation = last_metrics(run), last_metrics(run, "eval/mean_reward")
    best = run.best()
    state, detail = run_state(run, saved)
    has_metadata = run.plain.has_file("metadata.json")
    created = read_json(path / "metadata.json").get("created") if has_metadata else None
    return RunOverview(
        path=path,
        state=state,
        detail=shown_text(detail),
        algo=shown_text(str(config["algo"])),
        environment=shown_text(str(config["env_id"] or "(own)")),
        seed=int(config["seed"]),
        step=_last_step(saved, newest),
        total_timesteps=int(config["total_timesteps"]),
        best_return=None if best is None else _finite(best["eval_return_mean"]),
        last_return=_finite(evaluation.get("eval/mean_reward")),
        created=shown_text(created) if isinstance(created, str) else None,
    )


def saved_settings(run: RunFolder) -> Json:
    text = run.plain.read("config.yaml", MAX_BYTES).decode()
    config: Json = parse_yaml(text, str(run.path / "config.yaml"))
    return config


def newest_state(run: RunFolder) -> Json | None:
    for folder in checkpoint_folders(run.checkpoints)[:MOST_TRIED]:
        try:
            return CheckpointReader(folder).verify([STATE]).json(STATE)
        except CheckpointError:
            continue
    return None


def run_state(run: RunFolder, saved: Json | None) -> tuple[str, str]:
    """Return the state and what else to know about it."""
    if run.is_locked():
        return RUNNING, ""
    if saved is None:
        what_next = "; can be resumed" if run.is_unstarted() else ""
        return STOPPED, f"stopped before its first checkpoint{what_next}"
    progress = saved["progress"]
    if progress["should_stop"] and progress["stop_reason"] in FINISHED:
        return FINISHED_STATE, f"stop reason: {progress['stop_reason']}"
    if progress["global_step"] == 0 < progress["pretrain_updates"]:
        updates = f"{progress['pretrain_updates']:,}"
        return STOPPED, f"stopped in pretraining, at update {updates}; can be resumed"
    return STOPPED, "can be resumed"


def _last_step(saved: Json | None, row: Json) -> int:
    newest = 0 if saved is None else saved["progress"]["global_step"]
    return int(max(newest, row.get("step", 0)))


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def shown_text(value: str) -> str:
    return one_line(value, MAX_TEXT)
