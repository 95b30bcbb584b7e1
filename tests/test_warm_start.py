"""Runs that start from another algorithm's policy: what is taken over, adapted and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_of, tiny_settings
from safetensors.torch import load_file

import rl_training
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.checkpoints.loading import find_checkpoint, load_policy
from rl_training.config_files import load_config
from rl_training.errors import ConfigError
from rl_training.execution.policy import Policy
from rl_training.training.initialization import ADAPTED_STD
from rl_training.types import TrainResult

OBSERVATIONS = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)


def pretrained(
    tmp_path: Path, algo: str, env_id: str = "Pendulum-v1", **settings: Any
) -> TrainResult:
    spec = get_algorithm_spec(algo)
    regime = {"regime": "offline", "dataset": {"kind": "random", "size": 60, "seed": 0}}
    online = {} if "offline" in spec.regimes else {"total_timesteps": 60}
    changes = {"total_timesteps": 12, "eval_interval": 0, "env_id": env_id, **regime}
    if online:
        changes = {**changes, **online, "regime": None, "dataset": None}
    return rl_training.train(tiny_of(spec, tmp_path / "before", **changes, algo_kwargs=settings))


def continued(
    tmp_path: Path, algo: str, before: TrainResult, env_id: str = "Pendulum-v1", **settings: Any
) -> TrainResult:
    spec = get_algorithm_spec(algo)
    regime = {"regime": "online", "dataset": None}
    if "online" not in spec.regimes:
        regime = {"regime": "offline", "dataset": {"kind": "random", "size": 60, "seed": 0}}
    changes = {"total_timesteps": 30, "env_id": env_id, **regime, "init_from": str(before.run_dir)}
    return rl_training.train(tiny_of(spec, tmp_path / "after", **changes, algo_kwargs=settings))


def first_checkpoint(result: TrainResult) -> Path:
    return result.run_dir / "checkpoints" / "step_000000000"


def policy_of(checkpoint: Path) -> Policy:
    return load_policy(find_checkpoint(checkpoint))


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return everything that a checkpoint has learned, by name."""
    return {
        f"{name}:{key}": value
        for name in ("model", "learner")
        for key, value in load_file(checkpoint / f"{name}.safetensors").items()
    }


CONTINUOUS = [
    ("td3", {}),
    ("ddpg", {}),
    ("td3_bc", {}),
    ("rebrac", {}),
    ("sac", {}),
    ("tqc", {}),
    ("redq", {}),
    ("rlpd", {}),
    ("cql", {}),
    ("cal_ql", {}),
    ("edac", {}),
    ("awac", {}),
    ("awac", {"actor_head": "squashed_gaussian"}),
    ("iql", {}),
]


@pytest.mark.parametrize("objective", ["squared_error", "likelihood"])
@pytest.mark.parametrize(("algo", "settings"), CONTINUOUS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_cloned_policy_starts_every_actor(
    algo: str, settings: dict[str, Any], objective: str, tmp_path: Path
) -> None:
    before = pretrained(tmp_path, "bc", objective=objective)
    after = continued(tmp_path, algo, before, **settings)
    np.testing.assert_allclose(
        rl_training.predict_checkpoint(first_checkpoint(after), OBSERVATIONS),
        rl_training.predict_checkpoint(before.run_dir, OBSERVATIONS),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("algo", ["sac", "cql", "iql"])
@pytest.mark.filterwarnings("ignore")
def test_a_cloned_policy_of_discrete_actions_starts_every_actor(algo: str, tmp_path: Path) -> None:
    before = pretrained(tmp_path, "bc", env_id="CartPole-v1")
    after = continued(tmp_path, algo, before, env_id="CartPole-v1")
    observations = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.testing.assert_array_equal(
        rl_training.predict_checkpoint(first_checkpoint(after), observations),
        rl_training.predict_checkpoint(before.run_dir, observations),
    )


@pytest.mark.parametrize("algo", ["xqc", "flash_sac", "crossq"])
@pytest.mark.parametrize("after", ["td3", "iql", "bc"])
def test_an_actor_with_other_layers_is_refused(algo: str, after: str, tmp_path: Path) -> None:
    before = pretrained(tmp_path, algo)
    with pytest.raises(ConfigError, match=f"the actor of '{algo}' does not fit '{after}'"):
        continued(tmp_path, after, before)


def test_what_is_adapted_is_said(tmp_path: Path) -> None:
    before = pretrained(tmp_path, "bc")
    with (
        pytest.warns(UserWarning, match="takes its actor from 'bc' and starts with a new critic"),
        pytest.warns(UserWarning, match="the head of the actor of 'bc' is adapted to 'sac'"),
    ):
        continued(tmp_path, "sac", before)


@pytest.mark.parametrize(
    ("first", "second"), [("bc", "ppo"), ("sac", "ppo"), ("ppo", "sac"), ("ppo", "td3")]
)
def test_an_actor_without_a_tanh_says_that_actions_change(
    first: str, second: str, tmp_path: Path
) -> None:
    activation = {"activation": "tanh"}
    before = pretrained(tmp_path, first, **activation)
    message = "limits actions by a tanh and that of 'ppo' does not"
    with pytest.warns(UserWarning, match=message) as given:
        continued(tmp_path, second, before, **activation)
    assert not any("most likely actions are the same" in str(each.message) for each in given)


@pytest.mark.filterwarnings("ignore")
def test_the_standard_deviation_is_the_learned_one_or_a_small_one(tmp_path: Path) -> None:
    for objective in ("likelihood", "squared_error"):
        before = pretrained(tmp_path, "bc", objective=objective, learning_rate=0.1)
        after = continued(tmp_path, "sac", before)
        policy = policy_of(first_checkpoint(after))
        obs = torch.from_numpy(OBSERVATIONS)
        _, log_std = policy.algorithm.model.actor(obs).chunk(2, dim=-1)
        expected = np.log(ADAPTED_STD)
        if objective == "likelihood":
            expected = policy_of(before.checkpoint_path).algorithm.model.actor
            expected = expected.unflatten(expected.vector.detach())["log_std"].item()
            assert expected != 0
        np.testing.assert_allclose(log_std.detach().numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("first", "second"), [("sac", "td3"), ("sac", "awac"), ("iql", "sac"), ("td3", "redq")]
)
@pytest.mark.filterwarnings("ignore")
def test_other_heads_are_adapted_too(first: str, second: str, tmp_path: Path) -> None:
    before = pretrained(tmp_path, first)
    after = continued(tmp_path, second, before)
    np.testing.assert_allclose(
        rl_training.predict_checkpoint(first_checkpoint(after), OBSERVATIONS),
        rl_training.predict_checkpoint(before.run_dir, OBSERVATIONS),
        rtol=1e-5,
        atol=1e-6,
    )


def test_another_shape_is_refused(tmp_path: Path) -> None:
    before = pretrained(tmp_path, "bc")
    for settings in ({"actor_hidden_sizes": [8]}, {"actor_layer_norm": True}):
        with pytest.raises(ConfigError, match="the actor of 'bc' does not fit 'sac'"):
            continued(tmp_path, "sac", before, **settings)


# Critics, and the rest of a learner


@pytest.mark.parametrize("algo", ["cql", "cal_ql"])
def test_an_ensemble_continues_with_its_targets_moments_and_temperature(
    algo: str, tmp_path: Path
) -> None:
    """As in WSRL: nothing of the learner starts again, so that the policy does not collapse."""
    same = {"num_critics": 4, "critic_layer_norm": True, "actor_layer_norm": True}
    before = pretrained(tmp_path, algo, **same, subset_size=2)
    after = continued(tmp_path, "redq", before, **same)
    old, new = tensors(before.checkpoint_path), tensors(first_checkpoint(after))
    own = {name for name in new if name not in ("learner:updates",)}
    assert own <= old.keys()
    for name in own:
        assert torch.equal(new[name], old[name]), name
    assert new["learner:log_alpha"].item() != 0
    assert new["learner:updates"].item() == 0


@pytest.mark.filterwarnings("ignore")
def test_iqls_critics_continue_without_its_value(tmp_path: Path) -> None:
    same = {"num_critics": 3}
    before = pretrained(tmp_path, "iql", **same)
    after = continued(tmp_path, "redq", before, **same)
    old, new = tensors(before.checkpoint_path), tensors(first_checkpoint(after))
    names = [name for name in new if "critic" in name and name in old]
    assert any("target" in name for name in names)
    for name in names:
        assert torch.equal(new[name], old[name]), name
    assert new["learner:actor.adam_count"].item() == 0  # its head has new outputs
    assert new["learner:log_alpha"].item() == 0  # IQL has no temperature


@pytest.mark.filterwarnings("ignore")
def test_critics_of_another_number_start_again(tmp_path: Path) -> None:
    before = pretrained(tmp_path, "cal_ql", num_critics=3)
    with pytest.warns(UserWarning, match="takes its actor from 'cal_ql' and starts with a new cri"):
        after = continued(tmp_path, "redq", before, num_critics=4)
    assert tensors(first_checkpoint(after))["learner:actor.adam_count"].item() == 0


# WSRL


def test_the_online_phase_of_wsrl_has_the_authors_settings() -> None:
    online, offline = (load_config(f"{algo}/wsrl") for algo in ("redq", "cal_ql"))
    chosen = online.algo_kwargs
    assert online.dataset is None
    assert (chosen.learning_starts, chosen.gradient_updates_per_step) == (5_000, 4)
    assert (chosen.num_critics, chosen.subset_size, chosen.actor_value) == (10, 2, "minimum")
    assert chosen.policy_delay == 4  # one update of the policy per step
    # The authors' 0 stands for -1 per action component.
    assert {chosen.target_entropy, offline.algo_kwargs.target_entropy} == {"auto"}
    same = ("hidden_sizes", "num_critics", "critic_layer_norm", "actor_layer_norm", "activation")
    for name in same:
        assert getattr(chosen, name) == getattr(offline.algo_kwargs, name), name


def test_the_frozen_policy_acts_until_the_first_update(tmp_path: Path) -> None:
    before = pretrained(tmp_path, "cal_ql", num_critics=3)
    spec, start = get_algorithm_spec("redq"), {"init_from": str(before.run_dir)}
    settings = {"learning_starts": 20, "gradient_updates_per_step": 4, "num_critics": 3}
    settings |= {"actor_value": "minimum", "policy_delay": 4}
    config = tiny_of(spec, tmp_path / "after", **start, total_timesteps=26, algo_kwargs=settings)
    result = rl_training.train(config | {"eval_interval": 0})
    assert result.metrics["gradient_steps"] == 4 * 6
    early = tensors(first_checkpoint(result))
    warm = rl_training.train(
        config | {"run_name": "warm", "total_timesteps": 20, "eval_interval": 0}
    )
    for name, value in tensors(warm.checkpoint_path).items():
        assert torch.equal(value, early[name]), name


@pytest.mark.filterwarnings("ignore")
def test_the_first_actions_are_the_policys_and_not_random(tmp_path: Path) -> None:
    before = pretrained(tmp_path, "bc")  # adapted, its standard deviation is small
    result = continued(tmp_path, "redq", before, learning_starts=30)
    rows = load_file(result.checkpoint_path / "replay-00000.safetensors")["rows"]
    obs, action = rows[:, :3], rows[:, 3]
    mean, _ = policy_of(first_checkpoint(result)).algorithm.model.actor(obs).chunk(2, dim=-1)
    noise = (torch.atanh(action) - mean[:, 0]) / ADAPTED_STD
    assert len(rows) == 30
    assert noise.abs().max() < 4
    assert 0.5 < noise.std() < 1.5


def test_the_actor_can_maximize_the_minimum_of_the_critics() -> None:
    spec = get_algorithm_spec("redq")
    q = torch.tensor([[1.0, 2.0, 6.0], [0.0, -3.0, 3.0]])
    for value, expected in (("mean", [3.0, 0.0]), ("minimum", [1.0, -3.0])):
        algorithm = spec.algorithm(3, 1, tiny_settings(spec, actor_value=value))
        assert algorithm.policy_value(q).tolist() == expected


def test_critics_with_another_support_are_refused(tmp_path: Path) -> None:
    before = pretrained(tmp_path, "flash_sac")
    with pytest.raises(ConfigError, match=r"was trained with value_max = 5\.0, but this run uses"):
        continued(tmp_path, "flash_sac", before, value_max=50.0)
