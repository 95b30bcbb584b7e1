"""Learn from recorded data with d3rlpy as documented, and print a learning curve."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import d3rlpy
import numpy as np
import torch
from learning_curve import LearningCurve


def main() -> None:
    task, began = json.loads(sys.argv[1]), time.perf_counter()
    torch.set_num_threads(task["threads"])
    d3rlpy.seed(task["seed"])
    files = [np.load(path, allow_pickle=False) for path in task["paths"]]
    rows = {
        key: np.concatenate([file[key] for file in files])
        for key in ("observations", "actions", "rewards", "terminals", "timeouts")
    }
    dataset = d3rlpy.dataset.MDPDataset(
        **{**rows, "rewards": rows["rewards"] * task["reward_scale"]}
    )
    options = dict(task["options"])
    normalized = options.pop("layer_norm", [])
    if options.pop("scaled_observations", False):
        options["observation_scaler"] = d3rlpy.preprocessing.StandardObservationScaler()
    for network in task["networks"]:
        options[f"{network}_encoder_factory" if network else "encoder_factory"] = (
            d3rlpy.models.VectorEncoderFactory(
                list(task["hidden_sizes"]), use_layer_norm=network in normalized
            )
        )
    algorithm = getattr(d3rlpy.algos, task["algo"] + "Config")(
        batch_size=task["batch_size"],
        gamma=task["gamma"],
        action_scaler=d3rlpy.preprocessing.MinMaxActionScaler(
            minimum=files[0]["action_low"], maximum=files[0]["action_high"]
        ),
        **options,
    ).create(device="cuda:0" if task["device"] == "cuda" else False)

    def act(obs: np.ndarray) -> np.ndarray:
        return algorithm.predict(obs[None])[0]

    def save(folder: Path) -> None:
        algorithm.save_model(folder / "model.pt")

    curve = LearningCurve(task, ["d3rlpy", "torch", "gymnasium"], act, save, began)
    if curve.saved is not None:
        algorithm.build_with_dataset(dataset)
        algorithm.load_model(curve.saved / "model.pt")
        d3rlpy.seed(task["seed"] + curve.step)  # other minibatches than at the start
    while curve.step < task["steps"]:
        updates = min(task["eval_interval"], task["steps"] - curve.step)
        algorithm.fit(
            dataset,
            n_steps=updates,
            n_steps_per_epoch=updates,
            logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
            show_progress=False,
        )
        curve.evaluate(curve.step + updates)


if __name__ == "__main__":
    main()
