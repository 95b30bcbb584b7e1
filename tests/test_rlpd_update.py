"""RLPD's update, compared with an independent implementation."""

from __future__ import annotations

import math

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import RLPDAlgorithm
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.rlpd import rlpd_loss
from rl_training.errors import ConfigError
from rl_training.models import MLP, MLPSACModel

CRITICS, SUBSET = 5, 2


def make_rlpd(**settings: object) -> RLPDAlgorithm:
    chosen = {
        "hidden_sizes": [8, 8],
        "learning_rate": 1e-2,
        "num_critics": CRITICS,
        "subset_size": SUBSET,
        "gradient_updates_per_step": 4,
        **settings,
    }
    return RLPDAlgorithm(3, 2, chosen, seed=3)


def normed_critics(network: MLP, vector: torch.Tensor) -> list:
    """Return each critic as a function of observation and action, with explicit LayerNorm."""
    parts = {name: part.double().numpy() for name, part in network.unflatten(vector).items()}

    def critic(member: int, obs: np.ndarray, action: np.ndarray) -> float:
        x = np.concatenate([obs, action])
        for layer in range(2):
            x = x @ parts[f"weight_{layer}"][member] + parts[f"bias_{layer}"][member, 0]
            x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
            x = x * parts[f"scale_{layer}"][member, 0] + parts[f"shift_{layer}"][member, 0]
            x = np.maximum(x, 0.0)
        return float(x @ parts["weight_2"][member, :, 0] + parts["bias_2"][member, 0, 0])

    return [lambda obs, action, m=member: critic(m, obs, action) for member in range(CRITICS)]


@pytest.mark.parametrize("entropy_in_target", [True, False])
def test_losses_and_targets_agree_with_an_independent_implementation(
    entropy_in_target: bool,
) -> None:
    algorithm, batch = make_rlpd(entropy_in_target=entropy_in_target), make_batch()
    networks, state = algorithm.networks(), algorithm.state
    state["log_alpha"].fill_(math.log(0.3))
    state["critic"].add_(
        0.1 * torch.sin(torch.arange(len(state["critic"])))
    )  # so that scales differ from one
    state["target_critic"].copy_(state["critic"] * 0.7)
    noise = draw_noise(algorithm.update_noise(2), algorithm.generator)
    noise["subset"] = torch.tensor([0.9, 0.2, 0.8, 0.1, 0.7])  # the smallest two: 3 and 1
    marked = batch._replace(is_offline=torch.tensor([True, False]))
    _, metrics = rlpd_loss(algorithm, state, marked, noise)

    actor = by_hand.layers(networks["actor"], state["actor"])
    critics = normed_critics(networks["critic"], state["critic"])
    target_critics = normed_critics(networks["critic"], state["target_critic"])
    critic_terms, actor_terms, targets, values, entropies = [], [], [], [], []
    for index in range(2):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_action, next_log_prob = by_hand.squashed_gaussian(
            actor, next_obs, noise["next_action"][index]
        )
        next_value = min(target_critics[m](next_obs, next_action) for m in (1, 3))
        if entropy_in_target:
            next_value -= 0.3 * next_log_prob
        targets.append(reward + discount * next_value)
        q_values = [q(obs, action) for q in critics]
        values.append(np.mean(q_values))
        critic_terms.append([(q - targets[-1]) ** 2 for q in q_values])
        chosen, log_prob = by_hand.squashed_gaussian(actor, obs, noise["action"][index])
        entropies.append(-log_prob)
        actor_terms.append(0.3 * log_prob - np.mean([q(obs, chosen) for q in critics]))

    expected = {
        "target_q_mean": np.mean(targets),
        "critic_loss": 0.5 * np.mean(critic_terms, axis=0).sum(),
        "actor_loss": np.mean(actor_terms),
        "alpha_loss": math.log(0.3) * (np.mean(entropies) + 1.0),
        "q_offline_mean": values[0],
        "q_online_mean": values[1],
        "q_gap": values[0] - values[1],
    }
    found = {name: metrics[name].item() for name in expected}
    assert found == pytest.approx(expected, rel=1e-4)


def test_defaults_are_the_papers_and_not_those_of_sac() -> None:
    algorithm = RLPDAlgorithm(3, 2)
    chosen = algorithm.hyperparameters
    assert isinstance(algorithm.model, MLPSACModel)
    assert algorithm.model.critic.layer_norm
    assert not algorithm.model.actor.layer_norm
    assert (chosen.num_critics, chosen.subset_size) == (10, 2)
    assert (chosen.gradient_updates_per_step, chosen.policy_delay) == (20, 20)
    assert (chosen.offline_batch_ratio, chosen.offline_pretrain_updates) == (0.5, 0)
    assert algorithm.target_entropy == -1.0  # half of the two action components


def test_layer_norm_bounds_the_values_of_unseen_actions() -> None:
    """The main property in the paper: |Q| is at most the norm of the last layer."""
    obs, far = torch.zeros(1, 3), 1e6 * torch.ones(1, 2)
    normed, plain = make_rlpd(), make_rlpd(critic_layer_norm=False)
    weights = normed.model.critic.unflatten(normed.state["critic"])
    bound = weights["weight_2"].norm(dim=(1, 2)) * math.sqrt(8) + weights["bias_2"].abs().flatten()
    assert (normed.model.q_values(obs, far).abs() <= bound).all()
    assert plain.model.q_values(obs, far).abs().mean() > 1_000


def test_the_policy_is_updated_once_per_block_and_targets_at_every_update() -> None:
    algorithm = make_rlpd()
    moves = []
    for _ in range(8):
        before = copy_state(algorithm)
        result = algorithm.update(make_batch())
        moved = changed(before, algorithm)
        assert result.num_gradient_steps == 1
        assert {"critic", "target_critic"} <= moved
        assert ("actor" in moved) == ("log_alpha" in moved) == ("actor_loss" in result.metrics)
        moves.append("actor" in moved)
    assert moves == [False, False, False, True] * 2


def test_a_fixed_temperature_does_not_change() -> None:
    algorithm = make_rlpd(alpha=0.2, policy_delay=1)
    for _ in range(3):
        metrics = algorithm.update(make_batch()).metrics
    assert metrics["alpha"].item() == pytest.approx(0.2)
    assert "alpha_loss" not in metrics
    assert algorithm.state["log_alpha"].item() == pytest.approx(math.log(0.2))


def test_values_of_recorded_and_live_rows_are_logged_separately_only_if_rows_are_marked() -> None:
    algorithm, batch = make_rlpd(), make_batch(4)
    assert "q_gap" not in algorithm.update(batch).metrics
    marked = batch._replace(is_offline=torch.tensor([True, True, True, False]))
    q = algorithm.model.q_values(batch.obs, batch.action).mean(-1)
    metrics = algorithm.update(marked).metrics
    assert metrics["q_offline_mean"].item() == pytest.approx(q[:3].mean().item(), rel=1e-5)
    assert metrics["q_online_mean"].item() == pytest.approx(q[3].item(), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"subset_size": CRITICS + 1}, "subset_size"),
        ({"offline_batch_ratio": 1.5}, "offline_batch_ratio"),
        ({"offline_batch_ratio": -0.1}, "offline_batch_ratio"),
        ({"offline_pretrain_updates": -1}, "offline_pretrain_updates"),
        ({"alpha": -0.1}, "alpha"),
        ({"policy_delay": 0}, "policy_delay"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_rlpd(**settings)
