"""This package, through its public API."""

from __future__ import annotations

import json
import sys
import tempfile

from pace import Pace

import rl_training
from rl_training.runtime.callbacks import Callback, TrainingContext


class Turns(Callback):
    """Takes turns with the other contestants, a step of the environment at a time."""

    def __init__(self, steps: int) -> None:
        self._pace = Pace(steps)

    def on_collect_end(self, context: TrainingContext) -> None:
        self._pace.step()


def main() -> None:
    task = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        rl_training.train(
            {
                "algo": task["algo"],
                "env_id": task["environment"],
                "device": "cpu",
                "compile": task["compile"],
                "num_threads": task["threads"],
                "total_timesteps": 10**9,
                "eval_interval": 0,
                "checkpoint_interval": 0,
                "log_interval": 10_000,
                "output_dir": folder,
                "algo_kwargs": task["algo_kwargs"],
            },
            callbacks=[Turns(task["steps"])],
        )


if __name__ == "__main__":
    main()
