"""Pendulum that notes when it makes its first step, for `benchmarks/sweeps.py`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import PendulumEnv

STEPS_OF_A_RUN = 100
"""More than the steps by which a run measures an environment before it begins"""
ENVIRONMENT = "TimedPendulum-v0"
NOTES = "RL_TRAINING_FIRST_STEPS"
"""The variable with the path of the file that has a time, in seconds, per line"""


class TimedPendulum(PendulumEnv):
    """Pendulum-v1 with a note of its first step, written once it has made some more.

    So environments that are only tried out before a run leave no note.
    """

    _steps, _began = 0, 0.0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == 1:
            self._began = time.time()
        if self._steps == STEPS_OF_A_RUN and NOTES in os.environ:
            with Path(os.environ[NOTES]).open("a") as file:
                file.write(f"{self._began}\n")
        return super().step(action)


gym.register(ENVIRONMENT, f"{__name__}:{TimedPendulum.__name__}", max_episode_steps=200)
