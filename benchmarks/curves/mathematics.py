"""Does this code still compute what a stored result was computed with?

A result is kept for months, while the code changes around it. Most changes leave the mathematics
alone: a comparison of source files would discard results without a reason. So each result stores
the numbers of a rehearsal: a run of a few seconds with its algorithm and settings, on a CPU, in a
small environment of our own. If the code of today computes other numbers, the result is stale.

The rehearsal has smaller networks and batches and larger learning rates. The real ones are compared
as settings.
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

import rl_training
from curves.data import OPTIONS
from rl_training.algorithms import get_algorithm_spec
from rl_training.callbacks import TrainingContext
from rl_training.config import TrainConfig
from rl_training.config_files import load_config

RANDOM_STEPS, STEPS, RECORDED = 40, 80, 200
REHEARSED = {
    "actor_hidden_sizes": [16, 16],
    "batch_size": 16,
    "buffer_capacity": 1000,
    "critic_hidden_sizes": [16, 16],
    "hidden_sizes": [16, 16],
    "learning_starts": RANDOM_STEPS,
    **dict.fromkeys(("learning_rate", "actor_learning_rate", "critic_learning_rate"), 1e-2),
}
"""Sizes that take little time, and learning rates with which few updates change a lot"""
RELATIVE, ABSOLUTE = 1e-2, 2e-4
"""Rounding on other processors and in other versions of PyTorch changes the numbers by less"""
EPISODE = 15
FAR = 1.5
NO_REHEARSAL = "it does not contain the numbers of its code, so nobody knows if they still hold"


class Rehearsal(gym.Env[np.ndarray, Any]):
    """A smooth system of two numbers whose episodes are short, and end early far from the origin.

    It needs no physics engine, so its numbers do not depend on the version of one.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (as the base class has it)

    def __init__(self, *, discrete: bool = False) -> None:
        self.action_space = (
            gym.spaces.Discrete(3) if discrete else gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        )
        self._discrete = discrete
        self._state, self._steps = np.zeros(2), 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._state, self._steps = self.np_random.uniform(-1.0, 1.0, 2), 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        push = np.array([action - 1.0, 0.0]) if self._discrete else np.asarray(action, np.float64)
        first, second = self._state
        turned = np.array([first + 0.2 * second, second - 0.2 * np.sin(first)])
        self._state = turned + 0.3 * push
        self._steps += 1
        reward = 1.0 - float(self._state @ self._state) - 0.1 * float(push @ push)
        is_far = bool(np.abs(self._state).max() > FAR)
        return self._observation(), reward, is_far, self._steps >= EPISODE, {}

    def _observation(self) -> np.ndarray:
        return np.array([*self._state, np.cos(self._state[0])], np.float32)


class _Numbers(rl_training.Callback):
    """Collects the numbers of a run when it ends."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def on_train_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        places = np.linspace(-1.0, 1.0, 9, dtype=np.float32).reshape(3, 3)
        actions = np.ravel(context.policy.predict(places))
        self.found = {
            "evaluation": context.evaluation.metrics["eval_return_mean"],
            **{f"action_{index}": float(value) for index, value in enumerate(actions)},
            **{name: float(value) for name, value in context.train_metrics().items()},
        }


def mathematics(config: TrainConfig) -> dict[str, Any]:
    """The settings of the algorithm, and the numbers that this code computes with them."""
    return {"settings": dict(config.to_mapping()["algo_kwargs"]), "numbers": rehearse(config)}


Mathematics = Callable[[TrainConfig], Mapping[str, Any]]


def cached_mathematics() -> Mathematics:
    """`mathematics`, which rehearses each algorithm with the same settings only once."""
    known: dict[str, Mapping[str, Any]] = {}

    def found(config: TrainConfig) -> Mapping[str, Any]:
        values = config.to_mapping()
        parts = [values[key] for key in ("algo", "algo_kwargs", "regime", "dataset")]
        key = json.dumps(parts, sort_keys=True)
        if key not in known:
            known[key] = mathematics(config)
        return known[key]

    return found


def rehearse(config: TrainConfig) -> dict[str, float]:
    """Train briefly with the algorithm and settings of a config; return what came out.

    Recorded data is replaced by random steps, with the same options of rewards.
    """
    spec, numbers = get_algorithm_spec(config.algo), _Numbers()
    known = config.to_mapping()["algo_kwargs"]
    rehearsed = {f"algo_kwargs.{key}": value for key, value in REHEARSED.items() if key in known}
    if config.pretraining_updates:
        rehearsed["algo_kwargs.offline_pretrain_updates"] = RANDOM_STEPS
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        small = load_config(
            config,
            [f"{key}={json.dumps(value)}" for key, value in rehearsed.items()],
            env_id=None,
            env_kwargs={},
            wrappers=[],
            dataset=_random_steps(config),
            init_from=None,
            seed=0,
            seeds=None,
            num_envs=1,
            device="cpu",
            compile="off",
            vectorization="sync",
            float32_precision="highest",
            overlap="off",
            total_timesteps=STEPS,
            max_updates=None,
            eval_interval=STEPS,
            eval_episodes=2,
            health=False,
            checkpoint_interval=0,
            log_interval=STEPS,
            output_dir=folder,
            run_name=None,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of so short a run
            rl_training.train(
                small,
                env=lambda: Rehearsal(discrete=(spec.actions[0] == "discrete")),
                callbacks=[numbers],
                progress=False,
            )
    return numbers.found


def _random_steps(config: TrainConfig) -> dict[str, Any] | None:
    """A recipe in place of the recorded data of a config, None if it has none."""
    if not (sections := config.dataset_sections):
        return None
    options = sections[0].model_dump(mode="json", exclude_defaults=True, include=OPTIONS)
    return {"kind": "random", "size": RECORDED, "seed": 0, **options}


def stale(kept: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str | None:
    """Why a result with the mathematics `kept` is not one of this code, or None if it is."""
    if not kept:
        return NO_REHEARSAL
    # A setting that is new since then has a default that leaves the numbers as they were, or the
    # numbers differ.
    absent = object()
    for key, value in kept["settings"].items():
        if (today := now["settings"].get(key, absent)) != value:
            shown = "no longer a setting" if today is absent else f"{today!r} now"
            return f"it was made with {key} = {value!r}, which is {shown}"
    before, after = kept["numbers"], now["numbers"]
    if before.keys() != after.keys():
        names = ", ".join(sorted(before.keys() ^ after.keys()))
        return f"the code computes other quantities now ({names})"
    for name, value in before.items():
        if not math.isclose(value, after[name], rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            return (
                f"the code computes something else now ({name} is {after[name]:.6g}, and was "
                f"{value:.6g} when the result was made)"
            )
    return None
