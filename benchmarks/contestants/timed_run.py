"""Run one training and print a line when its first update is done, so that it can be timed.

python timed_run.py '{"config": "sac/mujoco", "changes": {"compile": "on"}}'
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys

from rl_training.cli.application import reduce_garbage_collection

reduce_garbage_collection()  # as in `rl-training train`, before large imports

import torch

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.config_files import load_config
from rl_training.training.seed_run import INTERRUPTED


class FirstUpdate(Callback):
    """Prints a line after the first update, and may end the run there."""

    def __init__(self, stop: bool) -> None:
        self._stop, self._seen = stop, False

    def on_update_end(self, context: TrainingContext) -> None:
        if self._seen:
            return
        self._seen = True
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print("first_update", flush=True)
        if self._stop:
            context.request_stop(INTERRUPTED)  # skips the final evaluation


def main() -> None:
    task = json.loads(sys.argv[1])
    config = load_config(task["config"], **task["changes"])
    rl_training.train(config, callbacks=[FirstUpdate(task["stop_at_first_update"])], progress=False)


if __name__ == "__main__":
    main()
