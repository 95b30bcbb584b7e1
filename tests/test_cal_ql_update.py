"""Cal-QL's update, compared with an independent implementation; returns are tested elsewhere."""

from __future__ import annotations

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import CalQLAlgorithm, CQLAlgorithm
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.cal_ql import SPEC, cal_ql_loss
from rl_training.errors import ConfigError
from rl_training.types import Batch, Noise, State

SAMPLES = 3
SETTINGS = {"hidden_sizes": [8, 8], "learning_rate": 1e-2, "num_cql_samples": SAMPLES}


def make_cal_ql(**settings: object) -> CalQLAlgorithm:
    algorithm = CalQLAlgorithm(3, 2, {**SETTINGS, **settings}, seed=3)
    algorithm.state["target_critic"].mul_(0.7)  # to detect a mix-up with the critic
    return algorithm


def make_data(rows: int = 2, returns: float | None = None) -> Batch:
    """Return rows whose returns are among the values of untrained critics, or all the same."""
    given = torch.linspace(-0.3, 0.3, rows) if returns is None else torch.full((rows,), returns)
    return make_batch(rows)._replace(returns=given)


def draw(algorithm: CQLAlgorithm, rows: int = 2) -> Noise:
    return draw_noise(algorithm.update_noise(rows), torch.Generator().manual_seed(0))


def test_the_conservative_term_agrees_with_an_independent_implementation() -> None:
    algorithm, batch = make_cal_ql(cql_alpha=1.5), make_data(4)
    noise = draw(algorithm, 4)
    _, metrics = cal_ql_loss(algorithm, algorithm.state, batch, noise)
    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    gaps, is_bound = [], []
    for index in range(4):
        obs, action, _, _, next_obs, *_ = by_hand.row(batch, index)
        bound = float(batch.returns[index])
        for critic in critics:
            total = 0.0
            for number in range(SAMPLES):
                uniform = noise["random_actions"][number, index].double().numpy()
                # Density of a uniform action in [-1, 1]^2. Its value has no lower bound.
                total += np.exp(by_hand.forward(critic, obs, 2 * uniform - 1)[0]) / 0.25
                for where, name in ((obs, "current_actions"), (next_obs, "next_actions")):
                    own, log_prob = by_hand.squashed_gaussian(
                        actor, where, noise[name][number, index]
                    )
                    value = by_hand.forward(critic, obs, own)[0]
                    is_bound.append(value < bound)
                    total += np.exp(max(value, bound)) / np.exp(log_prob)
            gaps.append(np.log(total) - by_hand.forward(critic, obs, action)[0])
    assert 0 < np.mean(is_bound) < 1  # both cases occur
    assert metrics["bound_rate"].item() == pytest.approx(np.mean(is_bound))
    assert metrics["cql_gap"].item() == pytest.approx(np.mean(gaps), rel=1e-4)
    penalty = metrics["critic_loss"] - metrics["bellman_loss"]
    assert penalty.item() == pytest.approx(1.5 * 2 * np.mean(gaps), rel=1e-4)


def test_with_low_returns_the_update_is_cqls_bit_for_bit() -> None:
    algorithm = make_cal_ql()
    plain = CQLAlgorithm(3, 2, SETTINGS, seed=3)
    plain.state["target_critic"].mul_(0.7)
    result = algorithm.update(make_data(8, returns=-1e6))
    expected = plain.update(make_batch(8))
    assert changed(plain.state, algorithm) == set()
    assert result.metrics["bound_rate"].item() == 0
    assert result.metrics.keys() - expected.metrics.keys() == {"bound_rate"}


def test_with_high_returns_only_random_actions_are_lowered() -> None:
    """The gradient of the policy's actions is zero where their value is bounded."""
    algorithm, batch = make_cal_ql(cql_alpha=1.0), make_data(4, returns=50.0)
    noise = draw(algorithm, 4)
    queries: list[torch.Tensor] = []
    sampled_values = algorithm.sampled_values

    def watch(q: torch.Tensor, data: Batch) -> tuple[torch.Tensor, dict]:
        queries.append(q)
        q.retain_grad()
        return sampled_values(q, data)

    algorithm.sampled_values = watch  # type: ignore[method-assign]
    critic = algorithm.state["critic"].clone().requires_grad_()
    loss, metrics = algorithm.critic_loss({**algorithm.state, "critic": critic}, batch, noise)
    loss.backward()
    slopes = queries[0].grad
    assert metrics["bound_rate"].item() == 1
    assert (slopes[:SAMPLES] > 0).any()
    assert (slopes[SAMPLES:] == 0).all()


def test_values_of_the_policys_actions_stop_at_the_return() -> None:
    """CQL lowers them without end; Cal-QL down to the return of the data."""
    batch = make_data(64, returns=-1.0)._replace(
        action=torch.full((64, 2), 0.5), discount=torch.zeros(64), reward=torch.full((64,), -1.0)
    )
    lowest = []
    for kind in (CalQLAlgorithm, CQLAlgorithm):
        algorithm = kind(3, 2, {**SETTINGS, "cql_alpha": 20.0}, seed=3)
        algorithm.state["actor"].zero_()  # actions around 0, which the data lacks
        still = algorithm.state["actor"].clone()
        for _ in range(200):
            algorithm.update(batch)
            algorithm.state["actor"].copy_(still)
        lowest.append(algorithm.model.q_values(batch.obs, torch.zeros(64, 2)).mean().item())
    assert lowest[0] > lowest[1] + 0.5


def test_each_loss_has_gradients_only_for_its_own_parameters() -> None:
    algorithm, batch = make_cal_ql(), make_data()
    noise, names = draw(algorithm), ("actor", "critic", "target_critic", "log_alpha")

    def critic(state: State) -> torch.Tensor:
        return algorithm.critic_loss(state, batch, noise)[0]

    def policy(state: State) -> torch.Tensor:
        return algorithm.policy_loss(state, batch, noise)[0]

    assert by_hand.reached(critic, algorithm.state, names) == {"critic"}
    assert by_hand.reached(policy, algorithm.state, names) == {"actor", "log_alpha"}
    before = copy_state(algorithm)
    algorithm.update(batch)
    assert {"actor", "critic", "target_critic"} <= changed(before, algorithm)


def test_batches_without_returns_are_refused() -> None:
    with pytest.raises(ValueError, match="returns"):
        make_cal_ql().update(make_batch())


def test_an_endless_sum_of_rewards_needs_a_discount() -> None:
    with pytest.raises(ConfigError, match="return_after_truncation: zero"):
        make_cal_ql(gamma=1.0)
    assert make_cal_ql(gamma=1.0, return_after_truncation="zero").hyperparameters.gamma == 1


def test_defaults_are_cqls() -> None:
    chosen = CalQLAlgorithm(3, 2).hyperparameters
    plain = CQLAlgorithm(3, 2).hyperparameters
    own = chosen.model_dump()
    assert own.pop("return_after_truncation") == "last_reward"
    assert own == plain.model_dump()
    assert SPEC.regimes == ("offline", "mixed", "online")
