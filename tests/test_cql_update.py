"""CQL's update, compared with an independent implementation."""

from __future__ import annotations

import math

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import CQLAlgorithm
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.cql import MAX_CQL_ALPHA, SPEC, cql_loss
from rl_training.algorithms.sac import SAC
from rl_training.errors import ConfigError
from rl_training.types import ActionSpec, Batch, Noise, State

CRITIC_METRICS = {"critic_loss", "bellman_loss", "cql_gap", "q_mean", "target_q_mean"}
POLICY_METRICS = {"actor_loss", "alpha", "alpha_loss", "entropy"}
SAMPLES = 3


def make_cql(action_dim: int = 2, **settings: object) -> CQLAlgorithm:
    chosen = {
        "hidden_sizes": [8, 8],
        "learning_rate": 1e-2,
        "num_cql_samples": SAMPLES,
        **settings,
    }
    algorithm = CQLAlgorithm(3, action_dim, chosen, seed=3)
    algorithm.state["target_critic"].mul_(0.7)  # to detect a mix-up with the critic
    algorithm.state["log_alpha"].fill_(math.log(0.3))
    return algorithm


def draw(algorithm: CQLAlgorithm, rows: int = 2) -> Noise:
    return draw_noise(algorithm.update_noise(rows), algorithm.generator)


def critic_gradients(algorithm: CQLAlgorithm, batch: Batch, noise: Noise, *names: str) -> State:
    def loss(state: State) -> torch.Tensor:
        return algorithm.critic_loss(state, batch, noise)[0]

    return by_hand.gradients(loss, algorithm.state, names or ["critic"])


def gap(algorithm: CQLAlgorithm, batch: Batch, noise: Noise) -> float:
    return algorithm.critic_loss(algorithm.state, batch, noise)[1]["cql_gap"].item()


@pytest.mark.parametrize("entropy_in_target", [False, True])
def test_losses_and_targets_agree_with_an_independent_implementation(
    entropy_in_target: bool,
) -> None:
    algorithm = make_cql(cql_alpha=1.5, entropy_in_target=entropy_in_target)
    batch, noise = make_batch(), draw(algorithm)
    total, metrics = cql_loss(algorithm, algorithm.state, batch, noise)

    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    target_critics = by_hand.members(networks["critic"], state["target_critic"])
    critic_terms, gaps, actor_terms, log_probs, targets = [], [], [], [], []
    for index in range(2):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_action, next_log_prob = by_hand.squashed_gaussian(
            actor, next_obs, noise["next_action"][index]
        )
        next_value = min(by_hand.forward(q, next_obs, next_action)[0] for q in target_critics)
        if entropy_in_target:
            next_value -= 0.3 * next_log_prob
        targets.append(reward + discount * next_value)
        q_values = [by_hand.forward(q, obs, action)[0] for q in critics]
        critic_terms.append([(q - targets[-1]) ** 2 for q in q_values])

        queries = []  # actions and their densities, all evaluated in this state
        for number in range(SAMPLES):
            uniform = noise["random_actions"][number, index].double().numpy()
            queries.append((2 * uniform - 1, 0.25))
            for where, name in ((obs, "current_actions"), (next_obs, "next_actions")):
                own, log_prob = by_hand.squashed_gaussian(actor, where, noise[name][number, index])
                queries.append((own, np.exp(log_prob)))
        soft_maxima = [
            np.log(sum(np.exp(by_hand.forward(q, obs, a)[0]) / density for a, density in queries))
            for q in critics
        ]
        gaps.append(np.array(soft_maxima) - q_values)

        chosen, log_prob = by_hand.squashed_gaussian(actor, obs, noise["action"][index])
        log_probs.append(log_prob)
        value = min(by_hand.forward(q, obs, chosen)[0] for q in critics)
        actor_terms.append(0.3 * log_prob - value)

    assert targets[0] == pytest.approx(float(batch.reward[0]))  # termination does not bootstrap
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)
    bellman_loss = np.mean(critic_terms, axis=0).sum()  # the mean square, as in the reference code
    assert metrics["bellman_loss"].item() == pytest.approx(bellman_loss, rel=1e-4)
    assert metrics["cql_gap"].item() == pytest.approx(np.mean(gaps), rel=1e-4)
    critic_loss = bellman_loss + 1.5 * np.mean(gaps, axis=0).sum()
    assert metrics["critic_loss"].item() == pytest.approx(critic_loss, rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(np.mean(actor_terms), rel=1e-4)
    alpha_loss = math.log(0.3) * (-np.mean(log_probs) + 2)
    assert metrics["alpha_loss"].item() == pytest.approx(alpha_loss, rel=1e-4)
    expected = critic_loss + np.mean(actor_terms) + alpha_loss
    assert total.item() == pytest.approx(expected, rel=1e-4)


def even_noise(number: int, rows: int) -> Noise:
    """Return evenly spaced quantiles of each distribution in place of random numbers."""
    uniform = (torch.arange(number) + 0.5) / number
    uniform = uniform[:, None, None].expand(number, rows, 1)
    normal = torch.special.ndtri(uniform.double()).float()
    return {"random_actions": uniform, "current_actions": normal, "next_actions": normal}


@pytest.mark.parametrize("log_std", [-0.6, 0.0, 0.6])
@pytest.mark.parametrize("mean", [0.0, 0.5])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_the_soft_maximum_does_not_depend_on_the_policy(
    log_std: float, mean: float, scale: float
) -> None:
    """It estimates the logarithm of an integral over all actions. Compare with brute force."""
    algorithm, batch = make_cql(action_dim=1), make_batch(action_dim=1)
    actor = algorithm.model.actor.unflatten(algorithm.state["actor"])
    actor["weight_2"].zero_()
    actor["bias_2"].copy_(torch.tensor([mean, log_std]))
    critics = algorithm.model.critic.unflatten(algorithm.state["critic"])
    critics["weight_2"].mul_(scale)  # no conservative term, and critics are constant
    critics["bias_2"].copy_(torch.tensor([[[2.0]], [[-1.0]]]))

    number = 4_000
    found = algorithm.soft_maximum(algorithm.state, batch, even_noise(number, 2))[0]
    grid = torch.linspace(-1, 1, 2_001)[:, None]
    expected = torch.stack(
        [
            torch.trapezoid(
                algorithm.model.q_values(obs.expand(2_001, 3), grid).exp().mT, grid[:, 0]
            )
            for obs in batch.obs
        ]
    ).log()
    if scale == 0.0:
        volume = torch.tensor([2.0, -1.0]) + math.log(2)
        torch.testing.assert_close(expected, volume.expand(2, 2), rtol=0, atol=1e-3)
    torch.testing.assert_close(found - math.log(3 * number), expected, rtol=0, atol=0.05)


def test_the_policys_actions_for_the_next_state_are_evaluated_in_the_current_state() -> None:
    algorithm, batch = make_cql(), make_batch(rows=4)
    queries = by_hand.watch_q_values(algorithm)
    noise = draw(algorithm, 4)
    algorithm.soft_maximum(algorithm.state, batch, noise)
    ((obs, actions),) = queries
    obs, actions = obs.view(3 * SAMPLES, 4, 3), actions.view(3 * SAMPLES, 4, 2)
    assert torch.equal(obs, batch.obs.expand(3 * SAMPLES, 4, 3))
    for number in range(SAMPLES):
        expected = algorithm.model.actions(batch.next_obs, noise=noise["next_actions"][number])
        assert (actions - expected).abs().amax((1, 2)).min() < 1e-6


@pytest.mark.parametrize(("drawn", "action"), [(0.0, -1.0), (0.5, 0.0), (1.0, 1.0)])
def test_uniform_actions_cover_the_range_of_actions(drawn: float, action: float) -> None:
    algorithm, batch = make_cql(num_cql_samples=1), make_batch()
    noise = draw(algorithm) | {"random_actions": torch.full((1, 2, 2), drawn)}
    queries = by_hand.watch_q_values(algorithm)
    algorithm.soft_maximum(algorithm.state, batch, noise)
    assert (queries[0][1] == action).all(-1).sum() == 2


def test_the_target_excludes_entropy_by_default() -> None:
    for entropy_in_target, differs in ((None, False), (False, False), (True, True)):
        settings = {} if entropy_in_target is None else {"entropy_in_target": entropy_in_target}
        algorithm, batch = make_cql(**settings), make_batch()
        noise = draw(algorithm)
        _, before = algorithm.critic_loss(algorithm.state, batch, noise)
        algorithm.state["log_alpha"].fill_(1.0)
        _, after = algorithm.critic_loss(algorithm.state, batch, noise)
        assert bool(before["target_q_mean"] != after["target_q_mean"]) == differs


def test_without_the_conservative_term_the_update_equals_sac() -> None:
    algorithm, batch = make_cql(cql_alpha=0.0, entropy_in_target=True), make_batch(rows=8)
    noise = draw(algorithm, 8)
    expected = by_hand.gradients(
        lambda state: SAC.critic_loss(algorithm, state, batch, noise)[0],
        algorithm.state,
        ["critic"],
    )
    found = critic_gradients(algorithm, batch, noise)
    # Twice the loss of SAC: the Bellman loss is the mean square, without the factor one half.
    torch.testing.assert_close(found["critic"], 2 * expected["critic"])


def test_the_conservative_term_lowers_values_outside_the_data() -> None:
    batch, gaps = make_batch(rows=64), []
    batch = batch._replace(action=torch.full((64, 2), 0.5))
    for cql_alpha in (0.0, 5.0):
        algorithm = make_cql(cql_alpha=cql_alpha)
        for _ in range(60):
            algorithm.update(batch)
        gaps.append(gap(algorithm, batch, draw(make_cql(), 64)))
    assert gaps[1] < gaps[0] - 1.0


@pytest.mark.parametrize(("excess", "direction"), [(-1.0, 1), (1.0, -1)])
def test_the_lagrange_weight_rises_while_the_gap_is_above_its_target(
    excess: float, direction: int
) -> None:
    batch = make_batch(rows=16)
    fixed = make_cql(cql_alpha=2.0)
    target = gap(fixed, batch, draw(fixed, 16)) + excess
    algorithm = make_cql(cql_alpha=2.0, cql_target_gap=target)
    before = copy_state(algorithm)
    assert before["log_cql_alpha"].exp().item() == pytest.approx(2.0)
    result = algorithm.update(batch)
    assert result.metrics["cql_alpha"].item() == pytest.approx(2.0)
    moved = (algorithm.state["log_cql_alpha"] - before["log_cql_alpha"]).item()
    assert moved == pytest.approx(direction * 1e-2, rel=1e-2)


def test_the_lagrange_weight_is_constant_in_the_critic_loss() -> None:
    batch = make_batch(rows=16)
    fixed, tuned = make_cql(cql_alpha=2.0), make_cql(cql_alpha=2.0, cql_target_gap=1.0)
    noise = draw(fixed, 16)
    expected = critic_gradients(fixed, batch, noise)["critic"]
    found = critic_gradients(tuned, batch, noise, "critic", "log_cql_alpha")
    torch.testing.assert_close(found["critic"], expected)
    # Two critics: twice the weight times the mean excess, maximized.
    climb = -2 * 2.0 * (gap(tuned, batch, noise) - 1.0)
    assert found["log_cql_alpha"].item() == pytest.approx(climb, rel=1e-4)
    _, metrics = tuned.critic_loss(tuned.state, batch, noise)
    penalty = metrics["critic_loss"] - metrics["bellman_loss"]
    assert penalty.item() == pytest.approx(-climb, rel=1e-3)


@pytest.mark.parametrize(("target", "moved"), [(0.0, 0.0), (1e3, -1e-2)])
def test_the_lagrange_weight_is_capped_and_can_decrease_again(target: float, moved: float) -> None:
    algorithm, batch = make_cql(cql_target_gap=target), make_batch(rows=16)
    first = math.log(MAX_CQL_ALPHA) + 0.5
    algorithm.state["log_cql_alpha"].fill_(first)
    metrics = algorithm.update(batch).metrics
    assert metrics["cql_alpha"].item() == pytest.approx(MAX_CQL_ALPHA)
    assert algorithm.state["log_cql_alpha"].item() - first == pytest.approx(moved, abs=1e-4)


def test_each_loss_has_gradients_only_for_its_own_parameters() -> None:
    algorithm, batch = make_cql(cql_target_gap=1.0), make_batch()
    noise = draw(algorithm)
    names = ("actor", "critic", "target_critic", "log_alpha", "log_cql_alpha")

    def critic(state: State) -> torch.Tensor:
        return algorithm.critic_loss(state, batch, noise)[0]

    def policy(state: State) -> torch.Tensor:
        return algorithm.policy_loss(state, batch, noise)[0]

    assert by_hand.reached(critic, algorithm.state, names) == {"critic", "log_cql_alpha"}
    assert by_hand.reached(policy, algorithm.state, names) == {"actor", "log_alpha"}


def test_each_network_uses_its_own_learning_rate() -> None:
    algorithm = make_cql(
        actor_learning_rate=1e-3,
        critic_learning_rate=1e-1,
        alpha_learning_rate=1e-4,
        cql_target_gap=1.0,
    )
    before = copy_state(algorithm)
    algorithm.update(make_batch())
    for name, rate in {
        "actor": 1e-3,
        "critic": 1e-1,
        "log_alpha": 1e-4,
        "log_cql_alpha": 1e-2,
    }.items():
        assert by_hand.largest_step(before, algorithm, name) == pytest.approx(rate, rel=1e-2)


def test_a_delayed_policy_is_unchanged_and_not_logged_between_its_updates() -> None:
    algorithm = make_cql(policy_delay=2, tau=0.25, cql_target_gap=1.0)
    before = copy_state(algorithm)
    off = algorithm.update(make_batch(seed=1))
    moved = changed(before, algorithm)
    assert {"critic", "target_critic", "log_cql_alpha"} <= moved
    assert not {name for name in moved if name.startswith(("actor", "log_alpha"))}
    assert off.metrics.keys() == CRITIC_METRICS | {"cql_alpha"}
    expected = 0.75 * before["target_critic"] + 0.25 * algorithm.state["critic"]
    torch.testing.assert_close(algorithm.state["target_critic"], expected)
    before = copy_state(algorithm)
    on = algorithm.update(make_batch())
    assert {"actor", "log_alpha", "target_critic"} <= changed(before, algorithm)
    assert on.metrics.keys() == CRITIC_METRICS | POLICY_METRICS | {"cql_alpha"}


def test_without_a_target_gap_there_is_no_lagrange_weight() -> None:
    algorithm = make_cql()
    assert not [name for name in algorithm.state if name.startswith("log_cql_alpha")]
    assert algorithm.update(make_batch()).metrics.keys() == CRITIC_METRICS | POLICY_METRICS


def test_defaults_are_the_papers() -> None:
    algorithm = CQLAlgorithm(3, 2)
    chosen, optimizers = algorithm.hyperparameters, algorithm.optimizers()
    assert (chosen.cql_alpha, chosen.cql_target_gap, chosen.num_cql_samples) == (5.0, None, 10)
    assert optimizers["actor"].learning_rate == 1e-4
    assert optimizers["critic"].learning_rate == 3e-4
    assert algorithm.model.actor.sizes[1:-1] == (256, 256, 256)
    assert algorithm.model.critic.sizes[1:-1] == (256, 256, 256)
    assert (chosen.batch_size, chosen.tau, chosen.gamma) == (256, 0.005, 0.99)
    assert (chosen.num_critics, chosen.alpha, algorithm.target_entropy) == (2, "auto", -2.0)
    assert not chosen.entropy_in_target
    assert SPEC.regimes[0] == "offline"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"cql_alpha": -0.1}, "cql_alpha"),
        ({"cql_alpha": math.nan}, "cql_alpha"),
        ({"cql_alpha": 0.0, "cql_target_gap": 5.0}, "cql_alpha"),
        ({"cql_target_gap": -1.0}, "cql_target_gap"),
        ({"num_cql_samples": 0}, "num_cql_samples"),
        ({"num_cql_samples": 2.5}, "num_cql_samples"),
        ({"entropy_in_target": "yes"}, "entropy_in_target"),
        ({"alpha": -1.0}, "alpha"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_cql(**settings)


def test_the_discrete_conservative_term_is_over_all_actions() -> None:
    algorithm = CQLAlgorithm(
        3, ActionSpec("discrete", 4), {"hidden_sizes": [8], "cql_alpha": 2.0}, seed=3
    )
    algorithm.state["target_critic"].mul_(-0.7)
    batch = by_hand.make_batch(rows=6, choices=4)
    assert algorithm.update_noise(6) == {}
    _, metrics = cql_loss(algorithm, algorithm.state, batch, {})
    state, networks = algorithm.state, algorithm.networks()
    actor = by_hand.layers(networks["actor"], state["actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    targets = by_hand.members(networks["critic"], state["target_critic"])

    gaps, squares = [], []
    for index in range(6):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        probabilities = np.exp(by_hand.log_softmax(by_hand.forward(actor, next_obs)))
        least = np.min([by_hand.forward(critic, next_obs) for critic in targets], axis=0)
        target = reward + discount * (probabilities @ least)  # entropy is not in the target
        for critic in critics:
            q = by_hand.forward(critic, obs)
            gaps.append(np.log(np.exp(q).sum()) - q[int(action)])
            squares.append((q[int(action)] - target) ** 2)
    assert metrics["cql_gap"].item() == pytest.approx(np.mean(gaps), rel=1e-4)
    expected = 2 * np.mean(squares) + 2.0 * 2 * np.mean(gaps)  # sums over two critics
    assert metrics["critic_loss"].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("member", [0, 1, 2])
def test_a_target_can_use_a_random_subset_of_the_critics(member: int) -> None:
    algorithm, batch = make_cql(num_critics=3, subset_size=1), make_batch(4)
    noise = draw(algorithm, 4)
    assert make_cql().update_noise(4).keys() == noise.keys() - {"subset"}
    noise["subset"] = torch.tensor([float(index != member) for index in range(3)])
    _, metrics = algorithm.critic_loss(algorithm.state, batch, noise)
    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    target_critic = by_hand.members(networks["critic"], state["target_critic"])[member]
    targets = []
    for index in range(4):
        _, _, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        action, _ = by_hand.squashed_gaussian(actor, next_obs, noise["next_action"][index])
        value = by_hand.forward(target_critic, next_obs, action)[0]
        targets.append(reward + discount * value)
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)


def test_a_subset_is_not_larger_than_the_ensemble() -> None:
    with pytest.raises(ConfigError, match="subset_size = 4: must be at most num_critics"):
        make_cql(num_critics=3, subset_size=4)
