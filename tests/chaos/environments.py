"""Environments that misbehave once, at a chosen moment.

What they do is in an environment variable, not in an attribute: attributes are part of a snapshot,
and a run that was disturbed must equal one that was not.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from gymnasium.wrappers import TimeLimit
from probes import Countdown

FAULT = "CHAOS_FAULT"
EPISODE = 40


def misbehave(
    what: str, moment: int, how: str, folder: Path, *, in_training: bool = False, times: int = 1
) -> None:
    """Let environments of this process and its children misbehave at the n-th event of a kind.

    `what` is `make`, `reset` or `step`. With `in_training`, events count after `begin` was called;
    otherwise from the start, but only in worker processes.
    """
    values = {
        "what": what,
        "moment": moment,
        "how": how,
        "folder": str(folder),
        "spared": 0 if in_training else os.getpid(),
        "times": times,
    }
    os.environ[FAULT] = json.dumps(values)
    if not in_training:
        begin(folder)


def begin(folder: Path) -> None:
    """Count events from now on."""
    (folder / "begun").touch()


def _due(what: str) -> str | None:
    """Count an event of all processes together; return how to misbehave, if it is time to."""
    fault = json.loads(os.environ.get(FAULT, "null"))
    if fault is None or fault["what"] != what or os.getpid() == fault["spared"]:
        return None
    if not Path(fault["folder"], "begun").exists():
        return None
    log = Path(fault["folder"], "events")
    with log.open("a") as file:
        file.write(".")
        count = file.tell()
    is_due = fault["moment"] <= count < fault["moment"] + fault["times"]
    return str(fault["how"]) if is_due else None


def _end_or_hang(how: str | None) -> None:
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hang":
        time.sleep(1000)
    elif how == "exit":
        raise SystemExit(3)


class _Faulty:
    """Overrides the methods of an environment."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _end_or_hang(_due("make"))

    def reset(self, **options: Any) -> Any:
        _end_or_hang(_due("reset"))
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        how = _due("step")
        _end_or_hang(how)
        result = super().step(action)
        return result if how is None else distorted(how, *result)


class FaultyPendulum(_Faulty, PendulumEnv):
    pass


class FaultyCartPole(_Faulty, CartPoleEnv):
    pass


class FaultyCountdown(_Faulty, Countdown):
    """Its observations tell the episode and the step, so that a torn transition shows."""


class OpaqueCountdown(FaultyCountdown):
    """Its state cannot be captured."""

    def __init__(self) -> None:
        super().__init__(EPISODE // 4)
        self.handle = iter(())


def pendulum() -> gym.Env:
    return TimeLimit(FaultyPendulum(), EPISODE)


def cart_pole() -> gym.Env:
    return TimeLimit(FaultyCartPole(), EPISODE)


def opaque() -> gym.Env:
    return OpaqueCountdown()


def distorted(how: str, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
    """Return the result of a step with one value that is wrong, and note that it was returned."""
    fault = json.loads(os.environ[FAULT])
    Path(fault["folder"], "returned").write_text(how)
    wrong = np.array(obs, dtype=np.float32)
    if how.startswith("observation"):
        obs = _wrong_observation(how, wrong)
    elif how.startswith("reward"):
        reward = WRONG_REWARDS[how]
    elif how == "terminated nan":
        terminated = float("nan")
    elif how == "truncated text":
        truncated = "no"
    return obs, reward, terminated, truncated, info


WRONG_REWARDS: dict[str, Any] = {
    "reward nan": float("nan"),
    "reward inf": float("-inf"),
    "reward too large": 1e300,
    "reward shape": np.zeros(3),
    "reward text": "high",
    "reward none": None,
    "reward 1e30": 1e30,
}


def _wrong_observation(how: str, wrong: np.ndarray) -> Any:
    if how == "observation shape":
        return wrong[:-1]
    if how == "observation list":
        return [[1.0], [2.0, 3.0]]
    if how == "observation too large":
        return np.full(wrong.shape, 1e300)
    wrong[-1] = np.nan if how == "observation nan" else np.inf
    return wrong


class Aliased(gym.Wrapper):
    """Returns the same array at every step and overwrites it, as some simulators do."""

    def __init__(self, environment: gym.Env) -> None:
        super().__init__(environment)
        self.shared = np.zeros(environment.observation_space.shape, np.float32)

    def reset(self, **options: Any) -> Any:
        self.shared[:] = np.nan
        obs, info = self.env.reset(**options)
        self.shared[:] = obs
        return self.shared, info

    def step(self, action: Any) -> Any:
        self.shared[:] = np.nan
        obs, *rest = self.env.step(action)
        self.shared[:] = obs
        return self.shared, *rest


def aliased() -> gym.Env:
    return Aliased(pendulum())
