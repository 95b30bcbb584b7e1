"""Stable-Baselines3's DQN in an Atari game: steps per second, with the settings of `dqn/atari`.

    python sb3_atari.py TASK

TASK is JSON: `env_id`, `env_kwargs`, `num_envs`, `device`, `warm`, `steps`, and the settings of DQN
under its own names in `options`. The environments have the same wrappers and run in processes, as
this library documents. Time is measured from step `warm` to step `steps`. Prints a JSON line.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

import ale_py
import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, ClipReward, FrameStackObservation
from stable_baselines3 import DQN
from stable_baselines3.common.atari_wrappers import EpisodicLifeEnv
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import SubprocVecEnv


class Clock(BaseCallback):
    """Notes the time at two steps."""

    def __init__(self, marks: tuple[int, int]) -> None:
        super().__init__()
        self._marks = marks
        self.times: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        if (
            len(self.times) < len(self._marks)
            and self.num_timesteps >= self._marks[len(self.times)]
        ):
            self.times.append((self.num_timesteps, time.perf_counter()))
        return True


def make_game(task: dict[str, Any]) -> gym.Env[Any, Any]:
    gym.register_envs(ale_py)
    game = AtariPreprocessing(gym.make(task["env_id"], **task["env_kwargs"]))
    game = FrameStackObservation(game, stack_size=4)
    return ClipReward(EpisodicLifeEnv(Monitor(game)), -1, 1)


def main() -> None:
    task = json.loads(sys.argv[1])
    games = SubprocVecEnv([functools.partial(make_game, task)] * task["num_envs"])
    model = DQN("CnnPolicy", games, device=task["device"], seed=0, **task["options"])
    clock = Clock((task["warm"], task["steps"]))
    model.learn(task["steps"] + task["num_envs"], callback=clock)
    games.close()
    (first, start), (last, end) = clock.times
    print(json.dumps({"seeds": 1, "steps_per_second": (last - first) / (end - start)}))


if __name__ == "__main__":
    main()
