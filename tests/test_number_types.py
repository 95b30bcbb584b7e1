"""Numbers of observations keep their types in storage, and nothing that is learned depends on it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import BUILT_IN, hashes, metric_rows
from test_spaces_zoo import ACTIONS, config_of

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec

TYPES = {"memory": np.uint8, "counts": np.int16, "half": np.float16}


class Typed(gym.Env[Any, Any]):
    """Whole numbers that are declared in a given type, or several leaves of different types."""

    def __init__(self, dtype: Any = np.uint8, action_space: Any = ACTIONS["continuous"]) -> None:
        self.observation_space: spaces.Space[Any] = spaces.Box(0, 100, (7,), dtype)
        self.action_space, self.time = action_space, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        ended = bool(self.np_random.random() < 0.1)
        return self._observe(), -(float(np.sum(action)) ** 2), ended, self.time >= 9, {}

    def _observe(self) -> Any:
        return self.np_random.integers(0, 101, 7).astype(self.observation_space.dtype)


def learned(result: rl_training.TrainResult) -> dict[str, str]:
    found = hashes(result.checkpoint_path)
    return {name: found[name] for name in ("model.safetensors", "learner.safetensors")}


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
@pytest.mark.parametrize("spec", BUILT_IN, ids=lambda spec: spec.name)
def test_a_vector_of_bytes_is_learned_from_as_one_of_floats(
    spec: AlgorithmSpec, kind: Any, tmp_path: Path
) -> None:
    if kind not in spec.actions:
        pytest.skip("it has no use for these actions")
    config = config_of(spec, tmp_path)
    typed, floats = (
        rl_training.train(config, env=partial(Typed, dtype, ACTIONS[kind]))
        for dtype in (np.uint8, np.float32)
    )
    assert typed.metrics["gradient_steps"] > 0
    assert learned(typed) == learned(floats)
    assert metric_rows(typed.run_dir) == metric_rows(floats.run_dir)
