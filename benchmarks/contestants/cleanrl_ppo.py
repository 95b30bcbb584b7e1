"""A PPO script of CleanRL, run unchanged from a checkout."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from pace import Pace


class Turns(gym.Wrapper):  # type: ignore[type-arg]
    """Takes turns with the other contestants at the steps of one environment."""

    def __init__(self, env: gym.Env[Any, Any], pace: Pace) -> None:
        super().__init__(env)
        self._pace = pace

    def step(self, action: Any) -> Any:
        self._pace.step()
        return super().step(action)


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    make, pace = gym.make, Pace(task["steps"])
    made: list[gym.Env[Any, Any]] = []

    def make_first_paced(*arguments: Any, **options: Any) -> gym.Env[Any, Any]:
        """All environments are stepped in turn, so the first one counts for all."""
        made.append(make(*arguments, **options))
        return Turns(made[0], pace) if len(made) == 1 else made[-1]

    gym.make = make_first_paced  # type: ignore[assignment]
    settings = {
        "env-id": task["environment"],
        "num-envs": task.get("num_envs", 1),
        "num-steps": task["num_steps"],
        "num-minibatches": task["num_minibatches"],
        "update-epochs": task["update_epochs"],
        "total-timesteps": 10**9,
    }
    script = Path(task["source"]) / "cleanrl" / task["script"]
    sys.argv = [str(script), "--no-cuda", *(f"--{key}={value}" for key, value in settings.items())]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
