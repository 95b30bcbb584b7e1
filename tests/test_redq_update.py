"""REDQ's update, compared with an independent implementation."""

from __future__ import annotations

import math
from collections import Counter

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch
from torch import nn

from rl_training.algorithms import REDQAlgorithm
from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.functional import random_subset
from rl_training.algorithms.redq import REDQHyperparameters, redq_loss
from rl_training.config_files import load_config
from rl_training.errors import ConfigError

CRITICS, SUBSET = 5, 2


def make_redq(**settings: object) -> REDQAlgorithm:
    chosen = {
        "hidden_sizes": [8, 8],
        "learning_rate": 1e-2,
        "num_critics": CRITICS,
        "subset_size": SUBSET,
        "gradient_updates_per_step": 4,
        **settings,
    }
    return REDQAlgorithm(3, 2, chosen, seed=3)


def test_losses_and_targets_agree_with_an_independent_implementation() -> None:
    algorithm, batch = make_redq(), make_batch()
    algorithm.state["log_alpha"].fill_(math.log(0.3))
    algorithm.state["target_critic"].mul_(0.7)
    noise = draw_noise(algorithm.update_noise(2), algorithm.generator)
    noise["subset"] = torch.tensor([0.9, 0.2, 0.8, 0.1, 0.7])  # the smallest two: 3 and 1
    _, metrics = redq_loss(algorithm, algorithm.state, batch, noise)

    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    critics = by_hand.members(networks["critic"], state["critic"])
    target_critics = by_hand.members(networks["critic"], state["target_critic"])
    critic_terms, actor_terms, targets = [], [], []
    for index in range(2):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        next_action, next_log_prob = by_hand.squashed_gaussian(
            actor, next_obs, noise["next_action"][index]
        )
        next_q = [by_hand.forward(q, next_obs, next_action)[0] for q in target_critics]
        soft_value = min(next_q[1], next_q[3]) - 0.3 * next_log_prob
        targets.append(reward + discount * soft_value)
        q_values = [by_hand.forward(q, obs, action)[0] for q in critics]
        critic_terms.append([(q - targets[-1]) ** 2 for q in q_values])
        chosen, log_prob = by_hand.squashed_gaussian(actor, obs, noise["action"][index])
        value = np.mean([by_hand.forward(q, obs, chosen)[0] for q in critics])
        actor_terms.append(0.3 * log_prob - value)

    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)
    expected = 0.5 * np.mean(critic_terms, axis=0).sum()
    assert metrics["critic_loss"].item() == pytest.approx(expected, rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(np.mean(actor_terms), rel=1e-4)


class DroQCritic(nn.Module):
    """A critic as the paper of DroQ describes it, with masks instead of random numbers."""

    def __init__(self, parameters: dict[str, torch.Tensor], member: int) -> None:
        super().__init__()
        own = {name: values[member] for name, values in parameters.items()}
        sizes = [own[f"weight_{layer}"].shape for layer in range(3)]
        self.linear = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.norm = nn.ModuleList(nn.LayerNorm(size[1]) for size in sizes[:2])
        for index, linear in enumerate(self.linear):
            linear.weight.data, linear.bias.data = (
                own[f"weight_{index}"].mT,
                own[f"bias_{index}"][0],
            )
        for index, norm in enumerate(self.norm):
            norm.weight.data, norm.bias.data = own[f"scale_{index}"][0], own[f"shift_{index}"][0]

    def forward(self, inputs: torch.Tensor, masks: list[torch.Tensor], rate: float) -> torch.Tensor:
        hidden = inputs
        for linear, norm, mask in zip(self.linear[:2], self.norm, masks, strict=True):
            hidden = norm(linear(hidden) * mask / (1 - rate)).relu()
        return self.linear[2](hidden).squeeze(-1)


def test_droq_agrees_with_an_independent_implementation_with_given_masks() -> None:
    """Line by line as in the authors' code, whose dropout is on in all three losses."""
    rate, rows = 0.25, 6
    algorithm = make_redq(
        num_critics=2, critic_dropout=rate, critic_layer_norm=True, hidden_sizes=[8, 5]
    )
    batch, state = make_batch(rows), algorithm.state
    state["log_alpha"].fill_(math.log(0.3))
    noise = draw_noise(algorithm.update_noise(rows), algorithm.generator)
    state["critic"].add_(0.05 * torch.randn(state["critic"].shape))  # LayerNorms differ from 1
    state["target_critic"].copy_(0.9 * state["critic"])
    noise["subset"] = torch.tensor([0.9, 0.2])  # targets evaluate the second critic first
    network = algorithm.networks()["critic"]

    def q_values(name: str, loss: str, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        order = [1, 0] if loss == "target" else [0, 1]
        kept = (noise[f"{loss}_dropout"] >= rate).float().split([8, 5], dim=-1)
        parameters = network.unflatten(state[name].detach())
        values = [
            DroQCritic(parameters, member)(
                torch.cat([obs, action], 1), [mask[place] for mask in kept], rate
            )
            for place, member in enumerate(order)
        ]
        return torch.stack(values)

    next_action, next_log_prob = algorithm.model.sample_actions(
        batch.next_obs, noise=noise["next_action"], actor=state["actor"]
    )
    next_q = q_values("target_critic", "target", batch.next_obs, next_action).min(0).values
    target = batch.reward + batch.discount * (next_q - 0.3 * next_log_prob)
    q = q_values("critic", "critic", batch.obs, batch.action)
    critic_loss = sum(0.5 * nn.functional.mse_loss(values, target) for values in q)
    action, log_prob = algorithm.model.sample_actions(
        batch.obs, noise=noise["action"], actor=state["actor"]
    )
    average = q_values("critic", "policy", batch.obs, action).mean(0)
    actor_loss = (0.3 * log_prob - average).mean()

    _, metrics = redq_loss(algorithm, state, batch, noise)
    torch.testing.assert_close(metrics["target_q_mean"], target.mean())
    torch.testing.assert_close(metrics["critic_loss"], critic_loss)
    torch.testing.assert_close(metrics["actor_loss"], actor_loss)


def test_the_config_of_droq_has_the_settings_of_its_authors() -> None:
    chosen = load_config("redq/droq").hyperparameters
    assert isinstance(chosen, REDQHyperparameters)
    assert (chosen.num_critics, chosen.subset_size, chosen.policy_delay) == (2, 2, 20)
    assert (chosen.critic_dropout, chosen.critic_layer_norm) == (0.01, True)
    assert (chosen.initialization, chosen.learning_starts) == ("xavier", 5_000)


def test_the_target_uses_only_the_sampled_critics() -> None:
    algorithm, batch = make_redq(), make_batch()
    noise = draw_noise(algorithm.update_noise(2), algorithm.generator)
    drawn = set(random_subset(noise["subset"], SUBSET).tolist())
    _, before = algorithm.critic_loss(algorithm.state, batch, noise)
    for member in range(CRITICS):
        state = copy_state(algorithm)
        state["target_critic"].view(CRITICS, -1)[member] -= 1.0
        _, after = algorithm.critic_loss(state, batch, noise)
        is_read = bool(after["target_q_mean"] != before["target_q_mean"])
        # The other critic may already be the minimum, so only a lower value always has an effect.
        assert is_read == (member in drawn)


def test_subsets_have_no_duplicates_and_are_all_equally_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(5_000):
        chosen = random_subset(torch.rand(CRITICS, generator=generator), SUBSET).tolist()
        assert len(set(chosen)) == SUBSET
        counts[tuple(sorted(chosen))] += 1
    assert len(counts) == math.comb(CRITICS, SUBSET)
    assert min(counts.values()) > 0.8 * 5_000 / len(counts)


def test_the_policy_is_updated_once_per_block_and_targets_at_every_update() -> None:
    algorithm = make_redq()
    moves = []
    for _ in range(8):
        before = copy_state(algorithm)
        result = algorithm.update(make_batch())
        moved = changed(before, algorithm)
        assert {"critic", "target_critic"} <= moved
        assert ("actor" in moved) == ("log_alpha" in moved) == ("actor_loss" in result.metrics)
        moves.append("actor" in moved)
    assert moves == [False, False, False, True] * 2


def test_the_default_policy_delay_is_the_number_of_updates_per_step() -> None:
    assert REDQAlgorithm(3, 2).hyperparameters.policy_delay == 20
    assert make_redq(gradient_updates_per_step=7).hyperparameters.policy_delay == 7
    assert make_redq(policy_delay=2).hyperparameters.policy_delay == 2


def test_defaults_are_ten_critics_and_subsets_of_two() -> None:
    chosen = REDQAlgorithm(3, 2).hyperparameters
    assert (chosen.num_critics, chosen.subset_size, chosen.gradient_updates_per_step) == (10, 2, 20)


@pytest.mark.parametrize("size", [0.0, 1.0, 1e3, 1e8, 1e30], ids=str)
def test_actions_are_bounded_for_any_observation(size: float) -> None:
    """This holds after updates and for very large observations."""
    algorithm = make_redq(policy_delay=1)
    for _ in range(3):
        algorithm.update(make_batch())
    obs = size * torch.randn(500, 3)
    model, state = algorithm.model, algorithm.state
    noise = draw_noise(algorithm.exploration_noise(500), algorithm.generator)
    best, sampled = (model.sample_actions(obs, deterministic=flag)[0] for flag in (True, False))
    explored = algorithm.explore(state, obs, noise, torch.tensor(0.5))
    for actions in (best, sampled, explored, algorithm.act(state, obs)):
        assert actions.shape == (500, 2)
        assert (actions.abs() <= 1.0).all()  # also false for NaN
    assert torch.equal(best, algorithm.act(state, obs))
    if size >= 1e8:
        assert (best.abs() == 1.0).any()
    else:
        assert not torch.equal(sampled, best)


def test_q_values_have_a_column_for_each_critic() -> None:
    algorithm, batch = make_redq(), make_batch()
    assert algorithm.model.q_values(batch.obs, batch.action).shape == (2, CRITICS)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"subset_size": CRITICS + 1}, "subset_size"),
        ({"subset_size": 0}, "subset_size"),
        ({"policy_delay": 0}, "policy_delay"),
        ({"gradient_updates_per_step": 0}, "gradient_updates_per_step"),
        ({"gradient_updates_per_step": "many"}, "gradient_updates_per_step"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_redq(**settings)
