"""Helpers for tests of training runs."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from action_spaces import register_tasks
from torch import Tensor

from rl_training import resume_training, train
from rl_training.algorithms.hyperparameters import (
    ReturnHyperparameters,
    RolloutHyperparameters,
)
from rl_training.algorithms.spec import AlgorithmSpec, list_built_in_specs
from rl_training.callbacks import Callback, TrainingContext
from rl_training.types import ActionKind, TrainResult

BUILT_IN = list_built_in_specs()
ONLINE = [spec for spec in BUILT_IN if spec.regimes[0] == "online"]
OFFLINE = [spec for spec in BUILT_IN if spec.regimes[0] == "offline"]
MIXED = [spec for spec in BUILT_IN if "mixed" in spec.regimes]

REPLAYED = [
    spec for spec in ONLINE if not issubclass(spec.hyperparameters_type, RolloutHyperparameters)
]
"""Online algorithms with a replay buffer"""

each_algorithm = pytest.mark.parametrize("spec", BUILT_IN, ids=lambda spec: spec.name)
each_online = pytest.mark.parametrize("spec", ONLINE, ids=lambda spec: spec.name)
each_replayed = pytest.mark.parametrize("spec", REPLAYED, ids=lambda spec: spec.name)

register_tasks()

TINY = {"hidden_sizes": [16, 16], "batch_size": 16, "learning_starts": 40, "buffer_capacity": 500}


def tiny(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Return a config that reaches gradient updates within a second."""
    algo_kwargs = {**TINY, **changes.pop("algo_kwargs", {})}
    return {
        "algo": "sac",
        "env_id": "Pendulum-v1",
        "total_timesteps": 120,
        "eval_interval": 0,
        "eval_episodes": 1,
        "checkpoint_interval": 0,
        "log_interval": 40,
        "device": "cpu",
        "compile": "off",
        "output_dir": str(tmp_path),
        **changes,
        "algo_kwargs": algo_kwargs,
    }


TINY_OF: dict[str, dict[str, Any]] = {
    "a2c": {"rollout_steps": 8},
    "ppo": {"rollout_steps": 8, "batch_size": 4, "num_epochs": 2},
    "flash_sac": {"num_atoms": 11},
    "xqc": {"num_atoms": 11, "gradient_updates_per_step": 1},
    "cal_ql": {"num_cql_samples": 3},
    "cql": {"num_cql_samples": 3},
    "dqn": {"target_update_interval": 10},
    "edac": {"num_critics": 3},
    "fql": {"flow_steps": 3},
    "qr_dqn": {"target_update_interval": 10, "num_quantiles": 5},
    "redq": {"num_critics": 3, "gradient_updates_per_step": 2},
    "rlpd": {"num_critics": 3, "gradient_updates_per_step": 2},
    "tqc": {"num_critics": 2, "num_quantiles": 5, "top_quantiles_to_drop_per_critic": 1},
}
"""Where an algorithm's own defaults are too large, or too slow to be seen, for a tiny run"""


FIRST_TASKS: dict[ActionKind, str] = {
    "continuous": "Pendulum-v1",
    "discrete": "CartPole-v1",
    "multi_discrete": "MultiDiscrete-v0",
    "multi_binary": "MultiBinary-v0",
}


def first_task(spec: AlgorithmSpec) -> str:
    """Return the environment of an algorithm's first packaged config and of its tiny runs."""
    return FIRST_TASKS[spec.actions[0]]


def first_observations(spec: AlgorithmSpec, episodes: int = 4) -> np.ndarray:
    """Return the first observations of episodes in the first task."""
    environment = gym.make(first_task(spec))
    return np.stack([environment.reset(seed=seed)[0] for seed in range(episodes)])


def assert_actions_fit(spec: AlgorithmSpec, actions: Any) -> None:
    """Check that actions are valid in the first task, also after a round trip through JSON."""
    space = gym.make(first_task(spec)).action_space
    given = np.asarray(actions)
    assert given.shape == (len(actions), *space.shape)
    assert np.issubdtype(given.dtype, np.integer) == (spec.actions[0] == "discrete")
    assert [one for one in given if not space.contains(one.astype(space.dtype))] == []


def has_returns(spec: AlgorithmSpec) -> bool:
    """Return whether the batches of an algorithm have the returns of episodes."""
    return issubclass(spec.hyperparameters_type, ReturnHyperparameters)


def has_rollouts(spec: AlgorithmSpec) -> bool:
    """Return whether an algorithm learns from rollouts instead of a replay buffer."""
    return issubclass(spec.hyperparameters_type, RolloutHyperparameters)


def rollout_fields(draw: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Return the fields of a batch that only rollouts have; `draw` returns one number per row."""
    fields = {name: draw() for name in ("returns", "advantages", "log_probs", "values")}
    return {**fields, "ended": torch.zeros_like(fields["values"])}


def tiny_settings(spec: AlgorithmSpec, **changes: Any) -> dict[str, Any]:
    """Return small hyper-parameters for any algorithm."""
    known = spec.hyperparameters_type.model_fields
    settings = {name: value for name, value in TINY.items() if name in known}
    return {**settings, **TINY_OF.get(spec.name, {}), **changes}


def keywords(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a config, without the environment, as keywords of a managed class."""
    others = {key: value for key, value in config.items() if key not in ("algo", "env_id")}
    return {**others.pop("algo_kwargs"), **others}


def tiny_of(spec: AlgorithmSpec, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Return a config for any algorithm that reaches gradient updates within a second."""
    config = {
        **tiny(tmp_path),
        "algo": spec.name,
        "env_id": first_task(spec),
        **changes,
        "algo_kwargs": tiny_settings(spec, **changes.get("algo_kwargs", {})),
    }
    if has_returns(spec):  # transitions are stored when their episode ends
        config.setdefault("env_kwargs", {"max_episode_steps": 5})
    if spec.regimes[0] != "online":
        config.setdefault("dataset", {"kind": "random", "size": 200, "seed": 0})
    return config


def trainer_of(spec: AlgorithmSpec) -> Callable[..., TrainResult]:
    """Return the `train_<name>` function of an algorithm."""
    module = importlib.import_module(f"rl_training.runtime.{spec.name}_trainer")
    found: Callable[..., TrainResult] = getattr(module, f"train_{spec.name}")
    return found


def hashes(checkpoint: Path) -> dict[str, str]:
    """Return the hash of every tensor file of a checkpoint."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint.glob("*.safetensors"))
    }


def model_bytes(result: TrainResult) -> bytes:
    return (result.checkpoint_path / "model.safetensors").read_bytes()


def metric_rows(run_dir: Path, *, timed: bool = False) -> list[dict[str, float]]:
    """Return the rows of a run's log without time-dependent values."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if timed or not k.startswith("time/")} for row in rows]


class StopAt(Callback):
    """Requests a stop once a step is reached."""

    def __init__(self, step: int, reason: str = "test") -> None:
        self.step, self.reason = step, reason

    def on_collect_end(self, context: TrainingContext) -> None:
        if context.global_step >= self.step:
            context.request_stop(self.reason)

    def on_update_end(self, context: TrainingContext) -> None:
        self.on_collect_end(context)  # offline runs collect nothing


class StopAtPosition(Callback):
    """Requests a stop, or kills the process, at a position in pretraining or training."""

    def __init__(self, position: int, *, kill: bool = False) -> None:
        self.position, self.kill = position, kill

    def on_update_end(self, context: TrainingContext) -> None:
        if context.position >= self.position:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            context.request_stop("test")


class Recorder(Callback):
    """Records the events of a run with the counters at each event."""

    def __init__(self, only: Iterable[str] | None = None) -> None:
        self.events: list[tuple[str, int, int]] = []
        self._only = only

    def _note(self, event: str, context: TrainingContext) -> None:
        if self._only is None or event in self._only:
            self.events.append((event, context.global_step, context.gradient_steps))

    def on_train_start(self, context: TrainingContext) -> None:
        self._note("train_start", context)

    def on_collect_end(self, context: TrainingContext) -> None:
        self._note("collect_end", context)

    def on_update_end(self, context: TrainingContext) -> None:
        self._note("update_end", context)

    def on_evaluation_end(self, context: TrainingContext) -> None:
        self._note("evaluation_end", context)

    def on_train_end(self, context: TrainingContext) -> None:
        self._note("train_end", context)

    def steps(self, event: str) -> list[int]:
        return [step for name, step, _ in self.events if name == event]


def assert_resumes_bit_for_bit(config: dict[str, Any]) -> None:
    """Train a run at once, and again with a stop at step 70; both must end with the same files."""
    complete = train({**config, "run_name": "complete"})
    stopped = train({**config, "run_name": "stopped"}, callbacks=[StopAt(70)])
    assert isinstance(complete, TrainResult)
    assert isinstance(stopped, TrainResult)
    resumed = resume_training(stopped.run_dir)
    assert hashes(resumed.checkpoint_path) == hashes(complete.checkpoint_path)
