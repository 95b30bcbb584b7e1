"""Offline updates of d3rlpy: what its `fit` does at every step, without logs and evaluation."""

from __future__ import annotations

import importlib
import json
import sys

import d3rlpy
import torch
from offline_rows import offline_rows
from pace import Pace


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    d3rlpy.seed(0)
    layers = d3rlpy.models.VectorEncoderFactory(list(task["hidden_sizes"]))
    options = dict(task.get("options", {}))
    if options.pop("scaled_observations", False):
        options["observation_scaler"] = d3rlpy.preprocessing.StandardObservationScaler()
    for network in task["networks"]:
        options[f"{network}_encoder_factory"] = layers
    algorithm = getattr(importlib.import_module(task["module"]), task["algo"] + "Config")(
        batch_size=task["batch_size"], **options
    ).create(device=task.get("device", False))
    rows = offline_rows(task["rows"])
    dataset = d3rlpy.dataset.MDPDataset(
        observations=rows["observations"],
        actions=rows["actions"],
        rewards=rows["rewards"],
        terminals=rows["terminals"],
        timeouts=rows["timeouts"],
    )
    algorithm.build_with_dataset(dataset)
    if algorithm.observation_scaler is not None:
        algorithm.observation_scaler.fit_with_trajectory_slicer(
            dataset.episodes, dataset.trajectory_slicer
        )
    pace = Pace(task["steps"])
    while True:
        algorithm.update(dataset.sample_transition_batch(task["batch_size"]))
        pace.step()


if __name__ == "__main__":
    main()
