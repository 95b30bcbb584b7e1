"""Online training with d3rlpy, as in its documentation."""

from __future__ import annotations

import importlib
import json
import sys

import d3rlpy
import gymnasium
import torch
from pace import Pace


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    d3rlpy.seed(0)
    pace = Pace(task["steps"])
    layers = d3rlpy.models.VectorEncoderFactory(list(task["hidden_sizes"]))
    environment = gymnasium.make(task["environment"])
    algorithm = getattr(importlib.import_module(task["module"]), task["algo"] + "Config")(
        batch_size=task["batch_size"],
        actor_encoder_factory=layers,
        critic_encoder_factory=layers,
        **task.get("options", {}),
    ).create(device=task.get("device", False))
    algorithm.fit_online(
        environment,
        d3rlpy.dataset.create_fifo_replay_buffer(1_000_000, env=environment),
        n_steps=10**9,
        update_start_step=task["learning_starts"],
        random_steps=task["learning_starts"],
        save_interval=10**9,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
        show_progress=False,
        callback=lambda *_: pace.step(),  # once per step
    )


if __name__ == "__main__":
    main()
