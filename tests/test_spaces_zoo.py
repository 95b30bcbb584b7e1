"""Every algorithm with observations and actions of every kind that it supports.

A run is trained, stopped and resumed; its policy predicts and is exported. Two seeds are trained as
one program.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance import assert_same
from gymnasium import spaces
from helpers import BUILT_IN, StopAt, tiny_of
from observation_zoo import CONTINUOUS, OBSERVATIONS, Zoo

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.envs.spaces import describe_observations
from rl_training.execution import execution
from rl_training.types import ActionKind

ACTIONS: dict[ActionKind, spaces.Space[Any]] = {
    "continuous": CONTINUOUS,
    "discrete": spaces.Discrete(3, start=1),
    "multi_discrete": spaces.MultiDiscrete([3, 2]),
    "multi_binary": spaces.MultiBinary(2),
}
STEPS, STOP, FEW_UPDATES = 60, 43, 8

PAIRS = [
    pytest.param(spec, kind, id=f"{spec.name}-{kind}") for spec in BUILT_IN for kind in spec.actions
]


def config_of(spec: AlgorithmSpec, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    config = tiny_of(spec, tmp_path, normalize_observations=False, **changes)
    config |= {"env_id": None, "env_kwargs": {}, "total_timesteps": STEPS, "health": False}
    config["algo_kwargs"] = {**config["algo_kwargs"], "batch_size": 4, "hidden_sizes": [8, 8]}
    return config


def check_spaces(spec: AlgorithmSpec, kind: ActionKind, observation: str, tmp_path: Path) -> None:
    env = partial(Zoo, observation, ACTIONS[kind])
    config = config_of(spec, tmp_path)
    uninterrupted = rl_training.train(config, env=env)
    stopped = rl_training.train(config, env=env, callbacks=[StopAt(STOP)])
    assert stopped.metrics["global_step"] < uninterrupted.metrics["global_step"]
    resumed = rl_training.resume_training(stopped.run_dir, env=env)
    assert uninterrupted.metrics["gradient_steps"] > 0
    assert_same(uninterrupted, resumed)
    check_predictions(resumed.run_dir, kind, observation, tmp_path)


def check_predictions(run: Path, kind: ActionKind, observation: str, tmp_path: Path) -> None:
    """Compare the policy with its export, on observations of the environment."""
    space = OBSERVATIONS[observation]
    space.seed(5)
    seen = [space.sample() for _ in range(3)]
    actions = np.stack([rl_training.predict_checkpoint(run, each) for each in seen])
    assert all(ACTIONS[kind].contains(each.astype(ACTIONS[kind].dtype)) for each in actions)
    exported = rl_training.export(run, tmp_path / "policy.pt2", format="torch")
    module = torch.export.load(exported).module()
    described = describe_observations(space)
    rows = np.concatenate([described.rows_of(each)[0] for each in seen])
    arrays = described.unpack(rows)
    parts = [(leaf.kind, torch.from_numpy(arrays[leaf.name])) for leaf in described.leaves]
    found = module(*(part.long() if kind == "discrete" else part for kind, part in parts))
    first = found[0] if isinstance(found, tuple | list) else found
    np.testing.assert_allclose(first.numpy(force=True), actions, atol=1e-5)


@pytest.mark.parametrize(("spec", "kind"), PAIRS)
@pytest.mark.fast_cases("sac-continuous", "dqn-discrete", "ppo-multi_discrete")
def test_an_algorithm_takes_dictionaries(
    spec: AlgorithmSpec, kind: ActionKind, tmp_path: Path
) -> None:
    check_spaces(spec, kind, "dictionary", tmp_path)


@pytest.mark.parametrize(("name", "observation"), [("sac", "bytes"), ("dqn", "typed")])
def test_numbers_keep_their_types(name: str, observation: str, tmp_path: Path) -> None:
    spec = get_algorithm_spec(name)
    check_spaces(spec, spec.actions[0], observation, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("observation", [name for name in OBSERVATIONS if name != "dictionary"])
@pytest.mark.parametrize(("spec", "kind"), PAIRS)
def test_an_algorithm_takes_every_observation(
    spec: AlgorithmSpec, kind: ActionKind, observation: str, tmp_path: Path
) -> None:
    check_spaces(spec, kind, observation, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(("spec", "kind"), PAIRS)
def test_seeds_with_dictionaries_are_one_program(
    spec: AlgorithmSpec, kind: ActionKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed has nearly the same parameters alone as together with another one.

    Batch normalization of a few nearly constant features amplifies rounding, and so does Adam where
    a gradient is almost zero. So there are only a few updates, with an epsilon that is not small.
    """
    env = partial(Zoo, "dictionary", ACTIONS[kind])
    config = config_of(spec, tmp_path, max_updates=FEW_UPDATES)
    config["total_timesteps"] = 8 * FEW_UPDATES  # as many rollouts
    config["algo_kwargs"] |= {"batch_size": 16, "adam_epsilon": 1e-3}
    alone = rl_training.train({**config, "seed": 4}, env=env)
    monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    _, together = rl_training.train({**config, "seeds": [3, 4]}, env=env)
    assert alone.metrics["gradient_steps"] == FEW_UPDATES
    space = OBSERVATIONS["dictionary"]
    space.seed(5)
    for _ in range(3):
        obs = space.sample()
        one, other = (
            rl_training.predict_checkpoint(each.run_dir, obs) for each in (alone, together)
        )
        np.testing.assert_allclose(one, other, atol=1e-3)
