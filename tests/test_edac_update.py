"""EDAC's update, compared with an independent implementation."""

from __future__ import annotations

import itertools

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch
from torch import Tensor

from rl_training.algorithms import EDACAlgorithm, SACAlgorithm
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.edac import SPEC, edac_loss, mean_similarity
from rl_training.errors import ConfigError
from rl_training.types import Noise, State

CRITICS = 4


def make_edac(**settings: object) -> EDACAlgorithm:
    chosen = {"hidden_sizes": [8, 8], "learning_rate": 1e-2, "num_critics": CRITICS, **settings}
    algorithm = EDACAlgorithm(3, 2, chosen, seed=3)
    algorithm.state["target_critic"].mul_(0.7)  # to detect a mix-up with the critic
    return algorithm


def draw(algorithm: EDACAlgorithm, rows: int = 2) -> Noise:
    return draw_noise(algorithm.update_noise(rows), torch.Generator().manual_seed(0))


def slope(critic: by_hand.Layers, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Return the gradient of a critic's value with respect to the action, layer by layer."""
    x, masks = np.concatenate([obs, action]), []
    for weight, bias in critic[:-1]:
        x = x @ weight + bias
        masks.append(x > 0)
        x = np.maximum(x, 0)
    found = critic[-1][0][:, 0]
    for (weight, _), mask in zip(reversed(critic[:-1]), reversed(masks), strict=True):
        found = weight @ (found * mask)
    return found[len(obs) :]


def test_losses_agree_with_an_independent_implementation() -> None:
    algorithm, batch = make_edac(eta=0.7), make_batch(5)
    noise, state = draw(algorithm, 5), algorithm.state
    _, metrics = edac_loss(algorithm, state, batch, noise)
    networks = algorithm.networks()
    actor = by_hand.layers(networks["actor"], state["actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    targets = by_hand.members(networks["critic"], state["target_critic"])
    squares, pair_sums, actor_terms = [], [], []
    for index in range(5):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_action, log_prob = by_hand.squashed_gaussian(
            actor, next_obs, noise["next_action"][index]
        )
        least = min(by_hand.forward(q, next_obs, next_action)[0] for q in targets)
        target = reward + discount * (least - log_prob)  # the temperature starts at one
        squares.append([(by_hand.forward(q, obs, action)[0] - target) ** 2 for q in critics])
        slopes = [slope(q, obs, action) for q in critics]
        pair_sums.append(
            sum(
                one @ other / np.linalg.norm(one) / np.linalg.norm(other)
                for one, other in itertools.permutations(slopes, 2)
            )
        )
        own, own_log_prob = by_hand.squashed_gaussian(actor, obs, noise["action"][index])
        value = min(by_hand.forward(q, obs, own)[0] for q in critics)
        actor_terms.append(own_log_prob - value)
    bellman_loss = np.mean(squares, axis=0).sum()
    assert metrics["bellman_loss"].item() == pytest.approx(bellman_loss, rel=1e-4)
    # As in the authors' code: the sum over ordered pairs, over N - 1.
    diversity = np.mean(pair_sums) / (CRITICS - 1)
    assert metrics["critic_loss"].item() == pytest.approx(bellman_loss + 0.7 * diversity, rel=1e-4)
    assert metrics["gradient_similarity"].item() == pytest.approx(diversity / CRITICS, rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(np.mean(actor_terms), rel=1e-4)


def test_the_gradient_of_the_diversity_term_is_that_of_plain_autograd() -> None:
    algorithm, batch = make_edac(eta=3.0, activation="tanh"), make_batch(6)
    noise = draw(algorithm, 6)
    found = by_hand.gradients(
        lambda state: algorithm.critic_loss(state, batch, noise)[0], algorithm.state, ["critic"]
    )

    def expected_loss(state: State) -> Tensor:
        q = algorithm.model.q_values(batch.obs, batch.action, critic=state["critic"])
        target = algorithm.soft_target(state, batch, noise)
        total = (q - target[:, None]).square().mean(0).sum()
        slopes = []
        for member in range(CRITICS):
            action = batch.action.clone().requires_grad_()
            own = algorithm.model.q_values(batch.obs, action, critic=state["critic"])[:, member]
            slopes.append(torch.autograd.grad(own.sum(), action, create_graph=True)[0])
        cosines = [
            torch.cosine_similarity(one, other, dim=-1).mean()
            for one, other in itertools.permutations(slopes, 2)
        ]
        return total + 3.0 * torch.stack(cosines).sum() / (CRITICS - 1)

    expected = by_hand.gradients(expected_loss, algorithm.state, ["critic"])
    torch.testing.assert_close(found["critic"], expected["critic"], rtol=1e-4, atol=1e-5)


def test_similarity_is_one_for_equal_directions_and_negative_for_opposite_ones() -> None:
    one = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert mean_similarity(torch.stack([one, 2 * one, 3 * one])).item() == pytest.approx(
        1, abs=1e-5
    )
    assert mean_similarity(torch.stack([one, -one])).item() == pytest.approx(-1, abs=1e-5)
    square = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])[:, None]
    assert mean_similarity(square).item() == pytest.approx(-1 / 3, abs=1e-6)


def test_a_critic_that_ignores_the_action_has_no_direction_and_no_nan() -> None:
    algorithm, batch = make_edac(), make_batch(6)
    weights = algorithm.model.critic.unflatten(algorithm.state["critic"])["weight_0"]
    weights[0, 3:] = 0  # the first critic's weights of the action
    before = copy_state(algorithm)
    metrics = algorithm.update(batch).metrics
    assert all(value.isfinite() for value in metrics.values())
    assert algorithm.state["critic"].isfinite().all()
    assert "critic" in changed(before, algorithm)


def test_the_term_makes_gradients_differ() -> None:
    similarities = []
    for eta in (0.0001, 5.0):
        algorithm, batch = make_edac(eta=eta), make_batch(64)
        for _ in range(60):
            metrics = algorithm.update(batch).metrics
        similarities.append(metrics["gradient_similarity"].item())
    assert similarities[1] < similarities[0] - 0.2


def test_without_the_term_it_is_sac_n() -> None:
    algorithm, batch = make_edac(eta=0.0), make_batch(8)
    plain = SACAlgorithm(3, 2, {"hidden_sizes": [8, 8], "num_critics": CRITICS}, seed=3)
    plain.state["target_critic"].mul_(0.7)
    noise = draw(algorithm, 8)
    expected = by_hand.gradients(
        lambda state: plain.critic_loss(state, batch, noise)[0], plain.state, ["critic"]
    )
    found = by_hand.gradients(
        lambda state: algorithm.critic_loss(state, batch, noise)[0], algorithm.state, ["critic"]
    )
    # Twice the loss of SAC: the Bellman loss is the mean square, without the factor one half.
    torch.testing.assert_close(found["critic"], 2 * expected["critic"])
    _, metrics = algorithm.critic_loss(algorithm.state, batch, noise)
    assert "gradient_similarity" not in metrics


def test_each_loss_has_gradients_only_for_its_own_parameters() -> None:
    algorithm, batch = make_edac(), make_batch()
    noise, names = draw(algorithm), ("actor", "critic", "target_critic", "log_alpha")

    def critic(state: State) -> Tensor:
        return algorithm.critic_loss(state, batch, noise)[0]

    def policy(state: State) -> Tensor:
        return algorithm.policy_loss(state, batch, noise)[0]

    assert by_hand.reached(critic, algorithm.state, names) == {"critic"}
    assert by_hand.reached(policy, algorithm.state, names) == {"actor", "log_alpha"}


def test_defaults_are_the_papers() -> None:
    algorithm = EDACAlgorithm(3, 2)
    chosen = algorithm.hyperparameters
    assert (chosen.num_critics, chosen.eta, chosen.learning_rate) == (10, 1.0, 3e-4)
    assert algorithm.model.critic.sizes[1:-1] == (256, 256, 256)
    assert algorithm.model.actor.sizes[1:-1] == (256, 256, 256)
    assert (chosen.batch_size, chosen.tau, chosen.gamma) == (256, 0.005, 0.99)
    assert chosen.entropy_in_target
    assert SPEC.regimes[0] == "offline"


@pytest.mark.parametrize("settings", [{"eta": -0.1}, {"num_critics": 1}, {"eta": "auto"}])
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict) -> None:
    with pytest.raises(ConfigError, match="eta"):
        make_edac(**settings)
    assert make_edac(num_critics=1, eta=0.0).hyperparameters.num_critics == 1
