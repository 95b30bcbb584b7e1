"""A public loss accepts hyper-parameters by name and validates them like the constructor."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import BUILT_IN, has_returns, has_rollouts, rollout_fields, tiny_settings
from torch import Tensor

from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.errors import ConfigError
from rl_training.types import Batch

CHANGES: dict[str, dict[str, Any]] = {
    "td3": {"policy_noise": 0.9},
    "td3_bc": {"bc_alpha": 0.5},
    "rebrac": {"critic_bc_alpha": 0.5},
    "fql": {"actor_bc_alpha": 0.5},
    "awac": {"awac_lambda": 0.1},
    "iql": {"expectile": 0.95},
    "cal_ql": {"cql_alpha": 0.0},
    "cql": {"cql_alpha": 0.0},
    "edac": {"eta": 0.0},
    "redq": {"subset_size": 1},
    "rlpd": {"subset_size": 1},
    "tqc": {"top_quantiles_to_drop_per_critic": 0},
    "sac": {"entropy_in_target": False},
    "ppo": {"clip_range": 0.01},
    "a2c": {"value_coefficient": 1.0},
}
BAD = [
    ("td3", "policy_noise", -0.1),
    ("td3", "noise_clip", -1.0),
    ("td3_bc", "bc_alpha", -1),
    ("td3_bc", "bc_alpha", 0.0),
    ("td3_bc", "policy_noise", float("nan")),
    ("rebrac", "critic_bc_alpha", -1.0),
    ("fql", "q_aggregation", "max"),
    ("awac", "awac_lambda", 0.0),
    ("awac", "max_advantage_weight", -1.0),
    ("iql", "expectile", 0.0),
    ("iql", "expectile", 1.0),
    ("iql", "beta", -1.0),
    ("iql", "max_advantage_weight", 0.0),
    ("cal_ql", "return_after_truncation", "never"),
    ("edac", "eta", -1.0),
    ("cql", "cql_alpha", -1.0),
    ("cql", "cql_target_gap", -1.0),
    ("redq", "subset_size", 0),
    ("redq", "subset_size", 4),
    ("rlpd", "subset_size", 4),
    ("tqc", "top_quantiles_to_drop_per_critic", -1),
    ("bc", "objective", "likelyhood"),
    ("ppo", "clip_range", 0.0),
    ("ppo", "value_clip_range", -1.0),
    ("a2c", "gae_lambda", 1.1),
]


def call(spec: AlgorithmSpec, **settings: Any) -> Tensor:
    """Return the public loss of a tiny learner on a fixed batch."""
    learner = spec.algorithm(3, 1, tiny_settings(spec), seed=0)
    random = torch.Generator().manual_seed(1)
    obs, next_obs = torch.randn(2, 8, 3, generator=random)
    action = torch.rand(8, 1, generator=random)
    if spec.actions[0] == "discrete":
        action = torch.zeros(8, dtype=torch.int64)
    batch = Batch(obs, action, torch.ones(8), torch.full((8,), 0.99), next_obs)
    if spec.uses_next_actions:
        batch = batch._replace(next_action=-action)
    if has_rollouts(spec):
        batch = batch._replace(**rollout_fields(lambda: torch.linspace(-1, 1, 8)))
    if has_returns(spec):
        batch = batch._replace(returns=torch.linspace(-1, 1, 8))
    noise = draw_noise(learner.update_noise(8), random)
    module = importlib.import_module(f"rl_training.algorithms.{spec.name}")
    total, _ = getattr(module, f"{spec.name}_loss")(
        learner, learner.state, batch, noise, **settings
    )
    assert learner.hyperparameters == spec.algorithm(3, 1, tiny_settings(spec)).hyperparameters
    return total


@pytest.mark.parametrize("spec", BUILT_IN, ids=lambda spec: spec.name)
def test_the_loss_is_finite_and_takes_settings_that_change_it(spec: AlgorithmSpec) -> None:
    own = call(spec)
    assert torch.isfinite(own)
    if spec.name in CHANGES:
        assert not torch.equal(call(spec, **CHANGES[spec.name]), own)


@pytest.mark.parametrize(("name", "setting", "value"), BAD)
def test_bad_settings_are_refused_by_name(name: str, setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{setting} = .*: must be"):
        call(get_algorithm_spec(name), **{setting: value})


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="bc_alpa"):
        call(get_algorithm_spec("td3_bc"), bc_alpa=1.0)


def test_the_error_message_equals_that_of_the_constructor() -> None:
    spec = get_algorithm_spec("td3_bc")
    with pytest.raises(ConfigError) as constructor:
        spec.algorithm(3, 1, {"bc_alpha": -1.0})
    with pytest.raises(ConfigError) as loss:
        call(spec, bc_alpha=-1.0)
    assert str(loss.value) == str(constructor.value)
