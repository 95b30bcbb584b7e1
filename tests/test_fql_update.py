"""FQL's update, compared with an independent implementation."""

from __future__ import annotations

import math
from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import FQLAlgorithm
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.fql import SPEC, fql_loss
from rl_training.errors import ConfigError
from rl_training.models import MLP
from rl_training.types import Batch, Noise, State

TINY = {"hidden_sizes": [8, 8], "batch_size": 4}
NETWORKS = ("actor", "actor_flow", "critic", "target_critic")
ROWS = 4
Part = dict[str, np.ndarray]


def make_fql(**settings: Any) -> FQLAlgorithm:
    """Return a learner whose networks differ, so that a mistaken one gives another number."""
    algorithm = FQLAlgorithm(3, 2, {**TINY, **settings}, seed=3)
    generator = torch.Generator().manual_seed(1)
    for name in NETWORKS:
        noise = torch.randn(algorithm.state[name].shape, generator=generator)
        algorithm.state[name].add_(0.4 * noise)
    return algorithm


def draw(algorithm: FQLAlgorithm, rows: int = ROWS) -> Noise:
    return draw_noise(algorithm.update_noise(rows), torch.Generator().manual_seed(5))


# An independent implementation, one row at a time and in double precision


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.array([math.erf(each / math.sqrt(2)) for each in x]))


def evaluate(part: Part, *inputs: np.ndarray) -> np.ndarray:
    """Evaluate a network with two hidden layers, with LayerNorm if it has one."""
    x = np.concatenate(inputs)
    for layer in range(2):
        x = x @ part[f"weight_{layer}"] + part[f"bias_{layer}"].ravel()
        if f"scale_{layer}" in part:
            x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
            x = x * part[f"scale_{layer}"].ravel() + part[f"shift_{layer}"].ravel()
        x = gelu(x)
    return np.asarray(x @ part["weight_2"] + part["bias_2"].ravel())


def parts_of(algorithm: FQLAlgorithm, name: str) -> Part:
    network = algorithm.networks()[name.removeprefix("target_")]
    named = network.unflatten(algorithm.state[name])
    return {key: value.double().numpy() for key, value in named.items()}


def values(algorithm: FQLAlgorithm, name: str, obs: np.ndarray, action: np.ndarray) -> list[float]:
    stacked = parts_of(algorithm, name)
    members = [{key: value[member] for key, value in stacked.items()} for member in range(2)]
    return [float(evaluate(member, obs, action)[0]) for member in members]


def flow_by_hand(algorithm: FQLAlgorithm, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
    flow, action = parts_of(algorithm, "actor_flow"), noise
    steps = algorithm.hyperparameters.flow_steps
    for step in range(steps):
        action = action + evaluate(flow, obs, action, np.array([step / steps])) / steps
    return np.clip(action, -1, 1)


@pytest.mark.parametrize("normalize_q", [False, True])
@pytest.mark.parametrize("q_aggregation", ["mean", "min"])
def test_losses_agree_with_an_independent_implementation(
    q_aggregation: str, normalize_q: bool
) -> None:
    settings = {"actor_bc_alpha": 0.7, "flow_steps": 5}
    algorithm = make_fql(q_aggregation=q_aggregation, normalize_q=normalize_q, **settings)
    batch, noise = make_batch(ROWS), draw(algorithm)
    total, metrics = fql_loss(algorithm, algorithm.state, batch, noise)
    found = by_hand.numbers(metrics)

    actor, flow = parts_of(algorithm, "actor"), parts_of(algorithm, "actor_flow")
    reduce = np.mean if q_aggregation == "mean" else np.min
    targets, errors, flow_errors, distances, chosen_values = [], [], [], [], []
    clipped = 0
    for index in range(ROWS):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        drawn = {name: numbers[index].double().numpy() for name, numbers in noise.items()}
        next_action = np.clip(evaluate(actor, next_obs, drawn["next_action"]), -1, 1)
        next_q = values(algorithm, "target_critic", next_obs, next_action)
        targets.append(reward + discount * reduce(next_q))
        errors.append([(q - targets[-1]) ** 2 for q in values(algorithm, "critic", obs, action)])
        start, time = drawn["flow_start"], drawn["flow_time"]
        velocity = evaluate(flow, obs, (1 - time) * start + time * action, time)
        flow_errors.append((velocity - (action - start)) ** 2)
        output = evaluate(actor, obs, drawn["action"])
        clipped += int((np.abs(output) > 1).any())
        distances.append((output - flow_by_hand(algorithm, obs, drawn["action"])) ** 2)
        chosen_values.append(np.mean(values(algorithm, "critic", obs, np.clip(output, -1, 1))))

    assert clipped, "no action is clipped, so that clipping is not tested"
    assert targets[0] == pytest.approx(float(batch.reward[0]))  # termination does not bootstrap
    assert found["target_q_mean"] == pytest.approx(np.mean(targets), rel=1e-4)
    # With two critics, half of the sum over them is the authors' mean.
    critic_loss = np.mean(errors)
    assert found["critic_loss"] == pytest.approx(critic_loss, rel=1e-4)
    assert found["flow_loss"] == pytest.approx(np.mean(flow_errors), rel=1e-4)
    assert found["distillation_loss"] == pytest.approx(np.mean(distances), rel=1e-4)
    scale = 1 / np.abs(chosen_values).mean() if normalize_q else 1.0
    assert found["bc_lambda"] == pytest.approx(scale, rel=1e-4)
    actor_loss = 0.7 * np.mean(distances) - scale * np.mean(chosen_values)
    assert found["actor_loss"] == pytest.approx(actor_loss, rel=1e-4)
    assert total.item() == pytest.approx(critic_loss + np.mean(flow_errors) + actor_loss, rel=1e-4)


# Gradients


def loss_of(algorithm: FQLAlgorithm, name: str, batch: Batch) -> Any:
    noise = draw(algorithm)

    def loss(state: State) -> torch.Tensor:
        found: torch.Tensor = getattr(algorithm, name)(state, batch, noise)[0]
        return found

    return loss


def test_each_loss_has_gradients_only_for_its_own_parameters() -> None:
    algorithm, batch = make_fql(normalize_q=True), make_batch(ROWS)
    expected = {"critic_loss": "critic", "flow_loss": "actor_flow", "actor_loss": "actor"}
    for name, part in expected.items():
        loss = loss_of(algorithm, name, batch)
        assert by_hand.reached(loss, algorithm.state, NETWORKS) == {part}


def test_the_scale_of_the_value_has_no_gradient() -> None:
    algorithm, batch = make_fql(normalize_q=True, actor_bc_alpha=0.0), make_batch(ROWS)
    plain = make_fql(normalize_q=False, actor_bc_alpha=0.0)
    # With values of one sign, mean(Q) / mean|Q| is constant.
    for each in (algorithm, plain):
        each.networks()["critic"].unflatten(each.state["critic"])["bias_2"].add_(50.0)
    scaled, unscaled = (
        by_hand.gradients(loss_of(each, "actor_loss", batch), each.state, ["actor"])["actor"]
        for each in (algorithm, plain)
    )
    _, metrics = algorithm.actor_loss(algorithm.state, batch, draw(algorithm))
    assert unscaled.abs().max() > 1e-3
    torch.testing.assert_close(scaled, unscaled * metrics["bc_lambda"], rtol=1e-4, atol=1e-7)


def test_the_policy_is_skipped_between_its_updates() -> None:
    algorithm = make_fql(policy_delay=2)
    before = copy_state(algorithm)
    off = algorithm.update(make_batch(ROWS))
    moments = {f"critic.adam_{part}" for part in ("mean", "square", "count")}
    assert changed(before, algorithm) == {"critic", "target_critic", "updates", *moments}
    before = copy_state(algorithm)
    on = algorithm.update(make_batch(ROWS))
    assert {"actor", "actor_flow", "critic", "target_critic"} <= changed(before, algorithm)
    policy = {"actor_loss", "flow_loss", "distillation_loss", "bc_lambda"}
    assert on.metrics.keys() - off.metrics.keys() == policy


# What is learned


def train_on(algorithm: FQLAlgorithm, actions: torch.Tensor, updates: int) -> None:
    """Train on actions that do not depend on the state, with rewards of zero."""
    rows = len(actions)
    obs, nothing = torch.zeros(rows, 3), torch.zeros(rows)
    for _ in range(updates):
        algorithm.update(Batch(obs, actions, nothing, nothing, obs))


def test_flow_and_policy_imitate_an_action_distribution_with_two_modes() -> None:
    algorithm = FQLAlgorithm(
        3, 1, {"hidden_sizes": [32, 32], "learning_rate": 3e-3, "actor_bc_alpha": 30.0}, seed=0
    )
    modes = torch.tensor([-0.7, 0.7]).repeat(64)[:, None]
    train_on(algorithm, modes, 600)
    noise = torch.randn(400, 1, generator=torch.Generator().manual_seed(0))
    obs, state = torch.zeros(400, 3), algorithm.state
    for actions in (
        algorithm.model.flow_actions(obs, noise, 10),
        algorithm.explore(state, obs, {"action": noise}, torch.ones(())),
    ):
        lower, upper = (actions < -0.4).float().mean(), (actions > 0.4).float().mean()
        assert 0.3 < lower < 0.6
        assert 0.3 < upper < 0.6
        # A Gaussian with these moments would have 44 % of its actions between the modes.
        assert (actions.abs() < 0.4).float().mean() < 0.25


def test_the_deterministic_action_is_the_one_of_zero_noise() -> None:
    algorithm = make_fql()
    obs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    zero = {"action": torch.zeros(5, 2)}
    sampled = algorithm.explore(algorithm.state, obs, zero, torch.ones(()))
    assert torch.equal(algorithm.act(algorithm.state, obs), sampled)
    other = {"action": torch.ones(5, 2)}
    assert not torch.equal(sampled, algorithm.explore(algorithm.state, obs, other, torch.ones(())))
    assert algorithm.why_deterministic() is None


def test_actions_are_clipped_not_squashed() -> None:
    algorithm = make_fql()
    algorithm.networks()["actor"].unflatten(algorithm.state["actor"])["bias_2"].add_(50.0)
    assert torch.equal(algorithm.act(algorithm.state, torch.zeros(1, 3)), torch.ones(1, 2))


# Settings


def test_defaults_are_those_of_the_authors_code() -> None:
    algorithm = FQLAlgorithm(3, 2)
    chosen = algorithm.hyperparameters
    assert (chosen.hidden_sizes, chosen.activation) == ((512,) * 4, "gelu")
    assert (chosen.learning_rate, chosen.batch_size, chosen.tau) == (3e-4, 256, 0.005)
    assert (chosen.gamma, chosen.num_critics, chosen.flow_steps) == (0.99, 2, 10)
    assert (chosen.actor_bc_alpha, chosen.normalize_q) == (10.0, False)
    assert (chosen.q_aggregation, chosen.offline_batch_ratio) == ("mean", "uniform")
    networks = algorithm.networks()
    normed = {name for name, each in networks.items() if isinstance(each, MLP) and each.layer_norm}
    assert normed == {"critic"}
    assert SPEC.regimes == ("offline", "mixed", "online")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"actor_bc_alpha": -0.1}, "actor_bc_alpha"),
        ({"q_aggregation": "max"}, "q_aggregation"),
        ({"flow_steps": 0}, "flow_steps"),
        ({"normalize_q": 1.0}, "normalize_q"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_fql(**settings)
