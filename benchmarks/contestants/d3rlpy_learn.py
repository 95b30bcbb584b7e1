"""Train d3rlpy on recorded steps, play new episodes, and print one JSON line."""

from __future__ import annotations

import json
import sys

import d3rlpy
import gymnasium
import numpy as np
import torch


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    d3rlpy.seed(task["seed"])
    rows = np.load(task["path"], allow_pickle=False)
    dataset = d3rlpy.dataset.MDPDataset(
        observations=rows["observations"],
        actions=rows["actions"],
        rewards=rows["rewards"],
        terminals=rows["terminals"],
        timeouts=rows["timeouts"],
    )
    layers = d3rlpy.models.VectorEncoderFactory(list(task["hidden_sizes"]))
    options = dict(task["options"])
    if options.pop("scaled_observations", False):
        options["observation_scaler"] = d3rlpy.preprocessing.StandardObservationScaler()
    for network in task["networks"]:
        options[f"{network}_encoder_factory" if network else "encoder_factory"] = layers
    low, high = rows["action_low"], rows["action_high"]
    algorithm = getattr(d3rlpy.algos, task["algo"] + "Config")(
        batch_size=task["batch_size"],
        action_scaler=d3rlpy.preprocessing.MinMaxActionScaler(minimum=low, maximum=high),
        **options,
    ).create(device=False)
    algorithm.fit(
        dataset,
        n_steps=task["updates"],
        n_steps_per_epoch=task["updates"],
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
        show_progress=False,
    )
    environment = gymnasium.make(task["environment"])
    returns = [play(environment, algorithm, 1_000 + episode) for episode in range(task["episodes"])]
    print(json.dumps({"return_mean": np.mean(returns), "return_std": np.std(returns)}))


def play(environment: gymnasium.Env, algorithm: d3rlpy.algos.QLearningAlgoBase, seed: int) -> float:
    obs, _ = environment.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        action = algorithm.predict(np.asarray(obs, dtype=np.float32)[None])[0]
        obs, reward, terminated, truncated, _ = environment.step(action)
        total, ended = total + float(reward), terminated or truncated
    return total


if __name__ == "__main__":
    main()
