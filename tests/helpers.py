"""What several tests of runs need."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_training.runtime.callbacks import Callback, TrainingContext
from rl_training.types import TrainResult

TINY = {"hidden_sizes": [16, 16], "batch_size": 16, "learning_starts": 40, "buffer_capacity": 500}


def tiny(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A config that reaches gradient updates within a second."""
    algo_kwargs = {**TINY, **changes.pop("algo_kwargs", {})}
    return {
        "algo": "sac",
        "env_id": "Pendulum-v1",
        "total_timesteps": 120,
        "eval_interval": 0,
        "eval_episodes": 1,
        "checkpoint_interval": 0,
        "log_interval": 40,
        "device": "cpu",
        "compile": "off",
        "output_dir": str(tmp_path),
        **changes,
        "algo_kwargs": algo_kwargs,
    }


def hashes(checkpoint: Path) -> dict[str, str]:
    """Every tensor file of a checkpoint, by content."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint.glob("*.safetensors"))
    }


def model_bytes(result: TrainResult) -> bytes:
    return (result.checkpoint_path / "model.safetensors").read_bytes()


def metric_rows(run_dir: Path, *, timed: bool = False) -> list[dict[str, float]]:
    """The rows of a run's log, without what depends on the clock."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if timed or not k.startswith("time/")} for row in rows]


class StopAt(Callback):
    """Asks for a stop once a step is reached."""

    def __init__(self, step: int, reason: str = "test") -> None:
        self.step, self.reason = step, reason

    def on_collect_end(self, context: TrainingContext) -> None:
        if context.global_step >= self.step:
            context.request_stop(self.reason)


class Recorder(Callback):
    """Remembers the events of a run, with the counters at each."""

    def __init__(self, only: Iterable[str] | None = None) -> None:
        self.events: list[tuple[str, int, int]] = []
        self._only = only

    def _note(self, event: str, context: TrainingContext) -> None:
        if self._only is None or event in self._only:
            self.events.append((event, context.global_step, context.gradient_steps))

    def on_train_start(self, context: TrainingContext) -> None:
        self._note("train_start", context)

    def on_collect_end(self, context: TrainingContext) -> None:
        self._note("collect_end", context)

    def on_update_end(self, context: TrainingContext) -> None:
        self._note("update_end", context)

    def on_evaluation_end(self, context: TrainingContext) -> None:
        self._note("evaluation_end", context)

    def on_train_end(self, context: TrainingContext) -> None:
        self._note("train_end", context)

    def steps(self, event: str) -> list[int]:
        return [step for name, step, _ in self.events if name == event]
