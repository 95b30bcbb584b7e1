"""Losses that are called by hand refuse the settings that the learners' constructors refuse."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import BUILT_IN, tiny_settings

from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.errors import ConfigError
from rl_training.types import Batch

GOOD: dict[str, dict[str, Any]] = {
    "td3": {"policy_noise": 0.2, "noise_clip": 0.5},
    "td3_bc": {"policy_noise": 0.2, "noise_clip": 0.5, "bc_alpha": 2.5},
    "awac": {"awac_lambda": 1.0, "max_advantage_weight": 100.0},
    "iql": {"expectile": 0.7, "beta": 3.0, "max_advantage_weight": 100.0},
    "cql": {"cql_alpha": 5.0, "cql_target_gap": None, "target_entropy": -1.0},
    "redq": {"subset_size": 2, "target_entropy": -1.0},
    "rlpd": {"subset_size": 2, "target_entropy": -1.0},
    "tqc": {"dropped": 2, "target_entropy": -1.0},
    "bc": {"objective": "squared_error"},
}
WITHOUT_BOUNDS = {"sac", "ddpg", "dqn"}
BAD = [
    ("td3", "policy_noise", -0.1),
    ("td3", "noise_clip", -1.0),
    ("td3_bc", "bc_alpha", -1),
    ("td3_bc", "bc_alpha", 0.0),
    ("td3_bc", "policy_noise", float("nan")),
    ("awac", "awac_lambda", 0.0),
    ("awac", "max_advantage_weight", -1.0),
    ("iql", "expectile", 0.0),
    ("iql", "expectile", 1.0),
    ("iql", "beta", -1.0),
    ("iql", "max_advantage_weight", 0.0),
    ("cql", "cql_alpha", -1.0),
    ("cql", "cql_target_gap", -1.0),
    ("redq", "subset_size", 0),
    ("redq", "subset_size", 4),
    ("rlpd", "subset_size", 4),
    ("tqc", "dropped", -1),
    ("tqc", "dropped", 10),
    ("bc", "objective", "likelyhood"),
]


def call(name: str, **settings: Any) -> Any:
    """The public loss of a tiny learner on a random batch."""
    spec = get_algorithm_spec(name)
    algorithm = spec.algorithm(3, 1, tiny_settings(spec), seed=0)
    obs, action, reward = torch.randn(8, 3), torch.rand(8, 1), torch.randn(8)
    batch = Batch(obs, action, reward, torch.full((8,), 0.99), torch.randn(8, 3))
    draws = algorithm.update_noise(8)
    noise = draw_noise(draws, torch.Generator().manual_seed(0))
    loss = getattr(importlib.import_module(f"rl_training.algorithms.{name}"), f"{name}_loss")
    arguments = (batch, noise) if draws else (batch,)
    return loss(algorithm.model, algorithm.state, *arguments, **settings)


def test_every_loss_with_bounds_is_here() -> None:
    assert {spec.name for spec in BUILT_IN} == GOOD.keys() | WITHOUT_BOUNDS


@pytest.mark.parametrize("name", GOOD)
def test_good_settings_pass(name: str) -> None:
    total, _ = call(name, **GOOD[name])
    assert torch.isfinite(total)


@pytest.mark.parametrize(("name", "setting", "value"), BAD)
def test_bad_settings_are_refused_by_name(name: str, setting: str, value: Any) -> None:
    known = {"dropped": "top_quantiles_to_drop_per_critic"}.get(setting, setting)
    with pytest.raises(ConfigError, match=rf"{known} = .*: must be"):
        call(name, **{**GOOD[name], setting: value})


def test_the_message_is_the_constructors() -> None:
    spec = get_algorithm_spec("td3_bc")
    with pytest.raises(ConfigError) as constructor:
        spec.algorithm(3, 1, {"bc_alpha": -1.0})
    with pytest.raises(ConfigError) as loss:
        call("td3_bc", **{**GOOD["td3_bc"], "bc_alpha": -1.0})
    assert str(loss.value) == str(constructor.value)
