"""This package, through its public API."""

from __future__ import annotations

import json
import sys
import tempfile

from offline_rows import offline_rows
from pace import Pace

import rl_training
from rl_training.callbacks import Callback, TrainingContext


class Turns(Callback):
    """Takes turns with the other contestants, counting steps of all environments together."""

    def __init__(self, steps: int) -> None:
        self._pace = Pace(steps)

    def on_collect_end(self, context: TrainingContext) -> None:
        self._pace.step()

    def on_update_end(self, context: TrainingContext) -> None:
        if context.config.resolved_regime == "offline":  # a step is an update
            self._pace.step()


def main() -> None:
    task = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        rl_training.train(
            {
                "algo": task["algo"],
                "env_id": task.get("environment"),
                "device": "cpu",
                "compile": task["compile"],
                "float32_precision": task["float32_precision"],
                "num_threads": task["threads"],
                "total_timesteps": 10**9,
                "eval_interval": 0,
                "checkpoint_interval": 0,
                "log_interval": 10_000,
                "output_dir": folder,
                "num_envs": task.get("num_envs", 1),
                **task.get("config", {}),
                "algo_kwargs": task["algo_kwargs"],
            },
            callbacks=[Turns(task["steps"])],
            dataset=offline_rows(task["rows"]) if "rows" in task else None,
        )


if __name__ == "__main__":
    main()
