"""Train with Stable-Baselines3 as documented, and print a learning curve."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import stable_baselines3
import torch
from learning_curve import LearningCurve
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise


class Evaluations(BaseCallback):
    def __init__(self, curve: LearningCurve, interval: int) -> None:
        super().__init__()
        self._curve, self._interval = curve, interval

    def _on_step(self) -> bool:
        # Called before the updates of a step, so the policy is that of the step before.
        step = self.num_timesteps - 1
        if step > self._curve.step and step % self._interval == 0:
            self._curve.evaluate(step)
        return True


def main() -> None:
    task, began = json.loads(sys.argv[1]), time.perf_counter()
    torch.set_num_threads(task["threads"])
    kind = getattr(stable_baselines3, task["algo"])
    environment = gymnasium.make(task["environment"])
    options = dict(task["options"])
    if (deviation := options.pop("action_noise", None)) is not None:
        shape = environment.action_space.shape
        options["action_noise"] = NormalActionNoise(np.zeros(shape), np.full(shape, deviation))
    model = kind(
        "MlpPolicy",
        environment,
        device=task["device"],
        seed=task["seed"],
        batch_size=task["batch_size"],
        learning_rate=task["learning_rate"],
        learning_starts=task["learning_starts"],
        buffer_size=min(task["buffer_size"], task["steps"] + 1),
        gamma=task["gamma"],
        tau=task["tau"],
        policy_kwargs={"net_arch": list(task["hidden_sizes"])},
        **options,
    )

    def act(obs: np.ndarray) -> np.ndarray:
        return model.predict(obs, deterministic=True)[0]

    def save(folder: Path) -> None:
        model.save(folder / "model.zip")
        model.save_replay_buffer(folder / "replay.pkl")

    curve = LearningCurve(task, ["stable-baselines3", "torch", "gymnasium"], act, save, began)
    if curve.saved is not None:
        model = kind.load(curve.saved / "model.zip", env=environment, device=task["device"])
        model.load_replay_buffer(curve.saved / "replay.pkl")
        # The model was saved after a step whose updates were not made yet.
        model.num_timesteps = curve.step
    if curve.step < task["steps"]:
        model.learn(
            task["steps"] - curve.step,
            callback=Evaluations(curve, task["eval_interval"]),
            reset_num_timesteps=False,
        )
        curve.evaluate(task["steps"])


if __name__ == "__main__":
    main()
