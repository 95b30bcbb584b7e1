"""Dropout in critics: where it is, which losses use it, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import conformance
import pytest
import torch
from helpers import BUILT_IN, StopAt, hashes, metric_rows, tiny, tiny_settings
from torch import Tensor, nn

import rl_training
from rl_training.algorithms.base import Algorithm, draw_noise
from rl_training.algorithms.hyperparameters import ActorCriticHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.errors import ConfigError
from rl_training.execution import execution
from rl_training.models.mlp import MLP
from rl_training.runtime.workflows import resume_together
from rl_training.training.needs import memory_needs
from rl_training.types import ActionSpec, Batch, SpaceInfo

RATE = 0.3
NAMES = ("critic_dropout", "target_dropout", "policy_dropout")
ACTOR_CRITIC = [
    spec for spec in BUILT_IN if issubclass(spec.hyperparameters_type, ActorCriticHyperparameters)
]
WITHOUT_DROPOUT = ("crossq", "flash_sac", "fql", "xqc")
"""Algorithms whose losses have no dropout"""
each_actor_critic = pytest.mark.parametrize("spec", ACTOR_CRITIC, ids=lambda spec: spec.name)
each_with_dropout = pytest.mark.parametrize(
    "spec",
    [spec for spec in ACTOR_CRITIC if spec.name not in WITHOUT_DROPOUT],
    ids=lambda spec: spec.name,
)


def learner(spec: AlgorithmSpec, **changes: Any) -> Algorithm:
    settings = tiny_settings(spec, critic_dropout=RATE, **changes)
    settings = {k: v for k, v in settings.items() if k != "learning_starts"}
    return spec.algorithm(3, 2, settings)


def a_batch(rows: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(1)
    obs, next_obs = torch.randn(2, rows, 3, generator=generator)
    action, next_action = torch.rand(2, rows, 2, generator=generator) * 2 - 1
    reward = torch.randn(rows, generator=generator)
    discount = torch.full((rows,), 0.9)
    returns = torch.full((rows,), -100.0)
    return Batch(obs, action, reward, discount, next_obs, next_action=next_action, returns=returns)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_units_are_dropped_between_the_linear_layer_and_layer_norm(layer_norm: bool) -> None:
    """Against PyTorch's modules, member by member, with the same masks."""
    network = MLP(
        3,
        (8, 6),
        2,
        ensemble=2,
        layer_norm=layer_norm,
        dropout=RATE,
        generator=torch.Generator().manual_seed(0),
    )
    assert network.dropout_size == 14
    inputs, uniform = torch.randn(5, 3), torch.rand(2, 5, 14)
    outputs = network(inputs, dropout=uniform)
    parameters = network.unflatten(network.vector)
    for member in range(2):
        hidden, first = inputs, 0
        for layer, size in enumerate((8, 6)):
            weight, bias = (parameters[f"{n}_{layer}"][member] for n in ("weight", "bias"))
            hidden = hidden @ weight + bias
            kept = uniform[member, :, first : first + size] >= RATE
            hidden = torch.where(kept, hidden / (1 - RATE), torch.zeros_like(hidden))
            if layer_norm:
                hidden = nn.LayerNorm(size)(hidden)
            hidden = hidden.relu()
            first += size
        expected = hidden @ parameters["weight_2"][member] + parameters["bias_2"][member]
        torch.testing.assert_close(outputs[member], expected)


def test_nothing_is_dropped_in_evaluation() -> None:
    plain, dropping = (
        MLP(3, (8,), 1, dropout=rate, generator=torch.Generator().manual_seed(0))
        for rate in (0.0, RATE)
    )
    inputs = torch.randn(5, 3)
    assert plain.dropout_size == 0
    assert torch.equal(plain(inputs), dropping(inputs))
    assert not torch.equal(plain(inputs), dropping(inputs, dropout=torch.rand(5, 8)))


@each_with_dropout
def test_each_loss_drops_units_with_its_own_numbers(spec: AlgorithmSpec) -> None:
    # Divided by its mean, a value that is always negative gives a loss that is always 1.
    fixed = "normalize_q" in spec.hyperparameters_type.model_fields
    algorithm, batch = learner(spec, **({"normalize_q": False} if fixed else {})), a_batch()
    noise = draw_noise(algorithm.update_noise(16), algorithm.generator)
    assert set(NAMES) <= set(noise)

    def losses(noise: dict[str, Tensor]) -> dict[str, float]:
        objectives = algorithm.objectives(update_policy=True)
        found = [objective.loss(algorithm.state, batch, noise)[0] for objective in objectives]
        return dict(zip(("critic", "policy"), map(float, found), strict=True))

    before = losses(noise)
    assert losses(noise) == before
    for name in NAMES:
        changed = losses({**noise, name: noise[name].flip(-1)})
        of_policy = name == "policy_dropout"
        assert (changed["policy"] != before["policy"]) == of_policy
        assert (changed["critic"] != before["critic"]) != of_policy


@each_actor_critic
def test_without_dropout_no_numbers_are_drawn(spec: AlgorithmSpec) -> None:
    settings = tiny_settings(spec)
    algorithm = spec.algorithm(3, 2, {k: v for k, v in settings.items() if k != "learning_starts"})
    assert not set(NAMES) & set(algorithm.update_noise(16))


@pytest.mark.parametrize("algo", WITHOUT_DROPOUT)
def test_losses_without_dropout_refuse_it(algo: str) -> None:
    with pytest.raises(ConfigError, match=r"critic_dropout = 0\.3"):
        learner(get_algorithm_spec(algo))


@each_with_dropout
def test_policies_act_without_dropout(spec: AlgorithmSpec) -> None:
    settings = {k: v for k, v in tiny_settings(spec).items() if k != "learning_starts"}
    plain, dropping = spec.algorithm(3, 2, settings), learner(spec)
    obs = a_batch().obs
    assert torch.equal(plain.act(plain.state, obs), dropping.act(dropping.state, obs))


@pytest.mark.parametrize("algo", ["sac", "cql"])
def test_critics_of_discrete_actions_drop_units(algo: str) -> None:
    spec = get_algorithm_spec(algo)
    algorithm = spec.algorithm(
        3, ActionSpec("discrete", 4), {"critic_dropout": RATE, "hidden_sizes": [16]}
    )
    batch = a_batch()._replace(action=torch.arange(16) % 4, next_action=None)
    noise = draw_noise(algorithm.update_noise(16), algorithm.generator)
    loss = algorithm.total_loss(algorithm.state, batch, noise)[0]
    for name in NAMES:
        changed = {**noise, name: noise[name].flip(-1)}
        assert algorithm.total_loss(algorithm.state, batch, changed)[0] != loss


@pytest.mark.parametrize("algo", ["sac", "redq", "td3"])
def test_a_resumed_run_drops_the_same_units(tmp_path: Path, algo: str) -> None:
    config = tiny(tmp_path, algo=algo, algo_kwargs={"critic_dropout": 0.1})
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(73)])
    resumed = rl_training.resume_training(stopped.run_dir)
    assert hashes(uninterrupted.checkpoint_path) == hashes(resumed.checkpoint_path)
    assert metric_rows(uninterrupted.run_dir) == metric_rows(resumed.run_dir)


@pytest.mark.thorough
def test_a_resumed_population_drops_the_same_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    config = tiny(tmp_path, seeds=[3, 1], algo_kwargs={"critic_dropout": 0.1})
    uninterrupted = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(73)])
    resumed = resume_together([each.run_dir for each in stopped])
    for first, second in zip(uninterrupted, resumed, strict=True):
        assert hashes(first.checkpoint_path) == hashes(second.checkpoint_path)


@pytest.mark.parametrize("algo", ["sac", "redq", "td3", "cql"])
def test_a_population_agrees_with_single_learners(algo: str) -> None:
    spec = get_algorithm_spec(algo)
    case = conformance.CASES[algo]
    changes = {"activation": "tanh", **case.smooth, "critic_dropout": RATE}
    conformance.check_that_a_population_agrees_with_single_learners(spec, case, changes, updates=20)


@pytest.mark.compiled
def test_a_compiled_update_drops_the_same_units(tmp_path: Path) -> None:
    config = tiny(tmp_path, total_timesteps=45, algo_kwargs={"critic_dropout": 0.1})
    eager, compiled = (
        rl_training.train({**config, "compile": mode}).metrics for mode in ("off", "on")
    )
    assert compiled["train/critic_loss"] == pytest.approx(eager["train/critic_loss"], rel=1e-3)


@pytest.mark.parametrize("rate", [-0.1, 1.0, "much"])
def test_rates_outside_the_range_are_refused(rate: Any) -> None:
    with pytest.raises(ConfigError, match=r"algo_kwargs\.critic_dropout"):
        rl_training.TrainConfig(
            algo="sac", env_id="Pendulum-v1", algo_kwargs={"critic_dropout": rate}
        )


def test_critics_without_hidden_layers_have_nothing_to_drop() -> None:
    with pytest.raises(ConfigError, match=r"critic_dropout = 0\.3: the critics of this algorithm"):
        rl_training.algorithms.SAC(3, 2, critic_dropout=RATE, critic_hidden_sizes=[])


class OwnCritic:
    """A user's factory of critics."""

    def critic(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(inputs, outputs)


def test_a_users_critics_have_their_own_layers() -> None:
    with pytest.raises(ConfigError, match=r"critic_dropout = 0\.3: needs the built-in critic"):
        rl_training.algorithms.SAC(3, 2, critic_dropout=RATE, custom_networks=OwnCritic())


def test_random_numbers_for_dropout_are_counted_as_memory() -> None:
    plain, dropping = (
        rl_training.TrainConfig(
            algo="sac", env_id="Pendulum-v1", algo_kwargs={"critic_dropout": rate}
        )
        for rate in (0.0, 0.01)
    )
    needs = [memory_needs([each], SpaceInfo(3, 1), online=True) for each in (plain, dropping)]
    numbers = 64 * 3 * 2 * 256 * (256 + 256)
    assert needs[1]["batch_size"] - needs[0]["batch_size"] == 4 * numbers


@pytest.mark.parametrize("algo", ["cql", "cal_ql"])
def test_only_the_critics_of_a_target_drop_units_for_it(algo: str) -> None:
    spec = get_algorithm_spec(algo)
    algorithm = learner(spec, num_critics=4, subset_size=2)
    noise = draw_noise(algorithm.update_noise(16), algorithm.generator)
    assert noise["target_dropout"].shape[0] == 2
    assert noise["critic_dropout"].shape[0] == 4
    loss, _ = algorithm.total_loss(algorithm.state, a_batch(), noise)
    assert torch.isfinite(loss)
