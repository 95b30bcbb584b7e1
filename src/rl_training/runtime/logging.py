"""What a run writes down: `metrics.jsonl` and TensorBoard, under the tags people know."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rl_training.runtime.callbacks import PeriodicCallback, TrainingContext
from rl_training.runtime.run_folder import RunFolder
from rl_training.types import Json

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MetricsLog(PeriodicCallback):
    """Writes rollout, training and speed figures at every `log_interval`, and each evaluation.

    Its place in the file is part of a checkpoint: a resumed run cuts off what was written after
    it, so that no row stands there twice.
    """

    def __init__(self, folder: RunFolder, interval: int) -> None:
        super().__init__(interval)
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._offset = 0
        self._tensorboard: SummaryWriter | None = None
        self._started_at, self._started_step = 0.0, 0

    def on_train_start(self, context: TrainingContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _cut_back(self._folder.metrics, self._offset)
        self._file = self._folder.metrics.open("ab")
        resumed_from = context.position
        self._tensorboard = SummaryWriter(
            str(self._folder.tensorboard), purge_step=resumed_from + 1 if resumed_from else None
        )
        self._started_at, self._started_step = time.perf_counter(), context.steps_of_phase

    def due(self, context: TrainingContext) -> None:
        elapsed = time.perf_counter() - self._started_at
        steps = context.steps_of_phase - self._started_step
        row = {f"rollout/{key}": value for key, value in context.rollout_metrics().items()}
        row |= {f"train/{key}": value for key, value in context.train_metrics().items()}
        row |= {
            "train/n_updates": context.gradient_steps,
            "time/fps": steps / elapsed,
            "time/time_elapsed": elapsed,
            "time/total_timesteps": context.global_step,
        }
        self._write(context, row)
        if context.ends_pretraining:  # speed is that of steps from here on
            self._started_at, self._started_step = time.perf_counter(), 0

    def on_evaluation_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        metrics = context.evaluation.metrics
        tags = {
            "eval/mean_reward": metrics["eval_return_mean"],
            "eval/std_reward": metrics["eval_return_std"],
            "eval/mean_ep_length": metrics["eval_length_mean"],
        }
        self._write(context, tags)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._file = self._tensorboard = None

    def state_dict(self) -> Json:
        if self._file is not None:
            self._file.flush()
            self._offset = self._file.tell()
        return {**super().state_dict(), "offset": self._offset}

    def load_state_dict(self, state: Json) -> None:
        super().load_state_dict(state)
        self._offset = int(state["offset"])

    def _write(self, context: TrainingContext, values: Mapping[str, float]) -> None:
        assert self._file is not None
        assert self._tensorboard is not None
        finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        row = {"step": context.global_step, "gradient_steps": context.gradient_steps, **finite}
        self._file.write((json.dumps(row) + "\n").encode())
        self._file.flush()
        for tag, value in values.items():
            self._tensorboard.add_scalar(tag, value, context.position)


def _cut_back(path: Path, offset: int) -> None:
    """Keep the whole rows among the first `offset` bytes; a power cut may have left fewer."""
    if path.exists():
        kept = path.read_bytes()[:offset]
        with path.open("r+b") as file:
            file.truncate(kept.rfind(b"\n") + 1)
