"""Stable-Baselines3, sb3-contrib and SBX, which share one API, used as documented."""

from __future__ import annotations

import importlib
import json
import sys

import torch
from pace import Pace
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecNormalize


class Turns(BaseCallback):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self._pace = Pace(steps)

    def _on_step(self) -> bool:
        self._pace.step()
        return True


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    environment: VecEnv | str = task["environment"]
    if task.get("num_envs", 1) > 1 or task.get("normalize"):
        environment = make_vec_env(task["environment"], task.get("num_envs", 1))
    if task.get("normalize"):
        environment = VecNormalize(environment)
    model = getattr(importlib.import_module(task["module"]), task["algo"])(
        "MlpPolicy",
        environment,
        batch_size=task["batch_size"],
        policy_kwargs={"net_arch": list(task["hidden_sizes"]), **task.get("policy_kwargs", {})},
        device=task.get("device", "cpu"),
        seed=0,
        **{name: task[name] for name in ("learning_starts",) if name in task},
        **task.get("options", {}),
    )
    model.learn(10**9, callback=Turns(task["steps"]))


if __name__ == "__main__":
    main()
