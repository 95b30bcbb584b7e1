"""ReBRAC's update, compared with an independent implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, make_batch

from rl_training.algorithms import ReBRACAlgorithm, TD3Algorithm
from rl_training.algorithms.rebrac import SPEC, rebrac_loss
from rl_training.config_files import load_config
from rl_training.data import DatasetPart, OfflineDataset, array_recording, load_dataset
from rl_training.errors import ConfigError
from rl_training.models import MLP
from rl_training.types import Batch, State

TINY = {"hidden_sizes": [8, 8, 8], "batch_size": 4}
NOWHERE = float("nan")
Critics = list[dict[str, np.ndarray]]


def make_rebrac(**settings: Any) -> ReBRACAlgorithm:
    algorithm = ReBRACAlgorithm(3, 2, {**TINY, **settings}, seed=3)
    disturb(algorithm)
    return algorithm


def disturb(algorithm: ReBRACAlgorithm | TD3Algorithm) -> None:
    """Move all networks apart, so that a mistaken one gives another number."""
    generator = torch.Generator().manual_seed(1)
    for name in ("actor", "critic", "target_actor", "target_critic"):
        noise = torch.randn(algorithm.state[name].shape, generator=generator)
        algorithm.state[name].add_(0.2 * noise)


def make_data(rows: int = 4, seed: int = 0) -> Batch:
    """Return random rows with next actions. The first is terminated, the second is truncated."""
    batch = make_batch(rows, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    next_action = torch.rand(rows, 2, generator=generator) * 2 - 1
    next_action[:2] = NOWHERE
    return batch._replace(next_action=next_action)


def normed_critics(network: MLP, vector: torch.Tensor) -> Critics:
    """Return the parameters of each critic."""
    parts = {name: part.double().numpy() for name, part in network.unflatten(vector).items()}
    return [{name: part[member] for name, part in parts.items()} for member in range(2)]


def normed_value(critic: dict[str, np.ndarray], *inputs: np.ndarray) -> float:
    """Evaluate a critic with LayerNorm in its three hidden layers, in NumPy."""
    x = np.concatenate(inputs)
    for layer in range(3):
        x = x @ critic[f"weight_{layer}"] + critic[f"bias_{layer}"].ravel()
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
        x = x * critic[f"scale_{layer}"].ravel() + critic[f"shift_{layer}"].ravel()
        x = np.maximum(x, 0.0)
    return float((x @ critic["weight_3"] + critic["bias_3"].ravel())[0])


def target_by_hand(
    algorithm: ReBRACAlgorithm,
    reward: float,
    discount: float,
    next_obs: np.ndarray,
    noise: np.ndarray,
    recorded: np.ndarray | None,
) -> float:
    """Return one target; `recorded` is the next action of the data, None where it has none."""
    networks, state = algorithm.networks(), algorithm.state
    settings = algorithm.hyperparameters
    actor = by_hand.layers(networks["actor"], state["target_actor"])
    smoothing = np.clip(noise * settings.policy_noise, -settings.noise_clip, settings.noise_clip)
    action = np.clip(np.tanh(by_hand.forward(actor, next_obs)) + smoothing, -1, 1)
    critics = normed_critics(networks["critic"], state["target_critic"])
    value = min(normed_value(critic, next_obs, action) for critic in critics)
    if recorded is not None:
        value -= settings.critic_bc_alpha * ((action - recorded) ** 2).sum()
    return reward + discount * value


def test_losses_and_targets_agree_with_an_independent_implementation() -> None:
    algorithm = make_rebrac(
        policy_noise=0.25, noise_clip=0.4, actor_bc_alpha=0.3, critic_bc_alpha=0.7
    )
    batch, generator = make_data(), torch.Generator().manual_seed(8)
    noise = {"next_action": 2 * torch.randn(4, 2, generator=generator)}
    total, metrics = rebrac_loss(algorithm, algorithm.state, batch, noise)

    networks, state = algorithm.networks(), algorithm.state
    actor = by_hand.layers(networks["actor"], state["actor"])
    critics = normed_critics(networks["critic"], state["critic"])
    critic_terms, values, distances, targets = [], [], [], []
    for index in range(4):
        obs, action, reward, discount, next_obs, *_ = by_hand.row(batch, index)
        recorded = batch.next_action[index].double().numpy() if index > 1 else None
        standard = noise["next_action"][index].double().numpy()
        targets.append(target_by_hand(algorithm, reward, discount, next_obs, standard, recorded))
        q_values = [normed_value(critic, obs, action) for critic in critics]
        critic_terms.append([(q - targets[-1]) ** 2 for q in q_values])
        chosen = np.tanh(by_hand.forward(actor, obs))
        values.append(min(normed_value(critic, obs, chosen) for critic in critics))
        distances.append(((chosen - action) ** 2).sum())

    assert targets[0] == pytest.approx(float(batch.reward[0]))  # termination does not bootstrap
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(targets), rel=1e-4)
    critic_loss = 0.5 * np.mean(critic_terms, axis=0).sum()
    assert metrics["critic_loss"].item() == pytest.approx(critic_loss, rel=1e-4)
    bc_lambda = 1 / np.mean(np.abs(values))
    assert metrics["bc_lambda"].item() == pytest.approx(bc_lambda, rel=1e-4)
    assert metrics["bc_loss"].item() == pytest.approx(np.mean(distances), rel=1e-4)
    actor_loss = 0.3 * np.mean(distances) - bc_lambda * np.mean(values)
    assert metrics["actor_loss"].item() == pytest.approx(actor_loss, rel=1e-4)
    assert total.item() == pytest.approx(critic_loss + actor_loss, rel=1e-4)


# The data's next actions


def recorded_episodes() -> dict[str, np.ndarray]:
    """Return a truncated, a terminated and an open episode, whose actions are all different."""
    rows = 9
    generator = np.random.default_rng(5)
    ends = np.zeros((2, rows), np.bool_)
    ends[0, 3] = ends[1, 6] = True
    return {
        "observations": generator.normal(size=(rows, 3)).astype(np.float32),
        "actions": generator.uniform(-1, 1, size=(rows, 2)).astype(np.float32),
        "rewards": generator.normal(size=rows).astype(np.float32),
        "timeouts": ends[0],
        "terminals": ends[1],
        "next_observations": generator.normal(size=(rows, 3)).astype(np.float32),
    }


def load(arrays: dict[str, np.ndarray], **options: Any) -> OfflineDataset:
    part = DatasetPart(array_recording(arrays), action_bounds=(np.full(2, -1.0), np.full(2, 1.0)))
    return load_dataset([part], gamma=0.9, next_actions=True, **options)


@pytest.mark.parametrize("n_step", [1, 2, 3])
def test_targets_on_recorded_data_use_next_actions_of_the_same_episode_only(n_step: int) -> None:
    algorithm, arrays = make_rebrac(critic_bc_alpha=5.0), recorded_episodes()
    dataset = load(arrays, n_step=n_step)
    actions, rewards = arrays["actions"].astype(np.float64), arrays["rewards"].astype(np.float64)
    last_of = [3] * 4 + [6] * 3 + [8] * 2
    for start, last in enumerate(last_of):
        stop = min(start + n_step - 1, last)  # the last step in the target
        reward = sum(0.9**k * rewards[start + k] for k in range(stop - start + 1))
        discount = 0.0 if stop == 6 else 0.9 ** (stop - start + 1)
        expected = target_by_hand(
            algorithm,
            reward,
            discount,
            arrays["next_observations"][stop].astype(np.float64),
            np.zeros(2),
            actions[stop + 1] if stop < last else None,
        )
        batch = dataset.rows(torch.tensor([start]))
        noise = {"next_action": torch.zeros(1, 2)}
        _, metrics = algorithm.critic_loss(algorithm.state, batch, noise)
        found = metrics["target_q_mean"].item()
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4), f"row {start}"


def test_the_action_after_an_episode_end_does_not_change_an_update() -> None:
    """The first actions of later episodes follow ends; no target may depend on them."""
    arrays = recorded_episodes()
    others = {**arrays, "actions": arrays["actions"].copy()}
    others["actions"][[4, 7]] *= -1  # the first actions of the second and third episode
    rows = torch.tensor([0, 1, 2, 3, 5, 6, 8])  # all others
    first, second = (make_rebrac(critic_bc_alpha=5.0, policy_delay=1) for _ in range(2))
    for algorithm, data in ((first, arrays), (second, others)):
        algorithm.update(load(data).rows(rows))
    assert changed(first.state, second) == set()
    others["actions"][2] *= -1  # the next action of row 1 counts
    third = make_rebrac(critic_bc_alpha=5.0, policy_delay=1)
    third.update(load(others).rows(torch.tensor([0, 1, 3, 5, 6, 8])))
    fourth = make_rebrac(critic_bc_alpha=5.0, policy_delay=1)
    fourth.update(load(arrays).rows(torch.tensor([0, 1, 3, 5, 6, 8])))
    assert "critic" in changed(third.state, fourth)


def test_batches_without_next_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="next_action"):
        make_rebrac().update(make_batch())


def test_without_penalties_targets_are_those_of_td3() -> None:
    plain = TD3Algorithm(3, 2, {**TINY, "critic_layer_norm": True}, seed=3)
    disturb(plain)
    algorithm, batch = make_rebrac(critic_bc_alpha=0.0), make_data(16)
    noise = {"next_action": torch.randn(16, 2, generator=torch.Generator().manual_seed(2))}
    expected = plain.critic_loss(plain.state, batch, noise)[1]
    found = algorithm.critic_loss(algorithm.state, batch, noise)[1]
    assert by_hand.numbers(found) == by_hand.numbers(expected)


def test_the_critics_penalty_lowers_targets_by_its_weight() -> None:
    batch, noise = make_data(16), {"next_action": torch.zeros(16, 2)}

    def mean_target(weight: float) -> float:
        algorithm = make_rebrac(critic_bc_alpha=weight)
        _, metrics = algorithm.critic_loss(algorithm.state, batch, noise)
        return metrics["target_q_mean"].item()

    first, second = mean_target(0.0) - mean_target(1.0), mean_target(0.0) - mean_target(3.0)
    assert first > 0.05
    assert second == pytest.approx(3 * first, rel=1e-3)


# The loss of the actor


def actor_gradient(algorithm: ReBRACAlgorithm, batch: Batch) -> torch.Tensor:
    def loss(state: State) -> torch.Tensor:
        return algorithm.actor_loss(state, batch, {})[0]

    return by_hand.gradients(loss, algorithm.state, ["actor"])["actor"]


@pytest.mark.parametrize("normalize_q", [True, False])
def test_lambda_normalizes_the_least_value_and_has_no_gradient(normalize_q: bool) -> None:
    algorithm, batch = make_rebrac(normalize_q=normalize_q, actor_bc_alpha=0.0), make_data(16)
    # With values of one sign, mean(Q) / mean|Q| is constant: with a gradient through lambda, the
    # actor would have none.
    algorithm.networks()["critic"].unflatten(algorithm.state["critic"])["bias_3"].add_(5.0)

    def least(state: State) -> torch.Tensor:
        actions = algorithm.model.actions(batch.obs, actor=state["actor"])
        return algorithm.model.q_values(batch.obs, actions, critic=state["critic"]).amin(-1)

    values = least(algorithm.state)
    scale = 1 / values.abs().mean().item() if normalize_q else 1.0
    _, metrics = algorithm.actor_loss(algorithm.state, batch, {})
    assert metrics["bc_lambda"].item() == pytest.approx(scale, rel=1e-5)
    assert metrics["actor_loss"].item() == pytest.approx(-scale * values.mean().item(), rel=1e-5)
    expected = by_hand.gradients(
        lambda state: -scale * least(state).mean(), algorithm.state, ["actor"]
    )["actor"]
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(actor_gradient(algorithm, batch), expected, rtol=1e-4, atol=1e-7)


# Which parameters move


def test_each_loss_has_gradients_only_for_its_own_parameters() -> None:
    algorithm, batch = make_rebrac(), make_data()
    noise = {"next_action": torch.ones(4, 2)}
    names = ("actor", "critic", "target_actor", "target_critic")

    def critic(state: State) -> torch.Tensor:
        return algorithm.critic_loss(state, batch, noise)[0]

    def actor(state: State) -> torch.Tensor:
        return algorithm.actor_loss(state, batch, noise)[0]

    assert by_hand.reached(critic, algorithm.state, names) == {"critic"}
    assert by_hand.reached(actor, algorithm.state, names) == {"actor"}


def test_actor_and_targets_are_unchanged_and_not_logged_between_policy_updates() -> None:
    algorithm = make_rebrac()
    before = copy_state(algorithm)
    off = algorithm.update(make_data())
    moments = {f"critic.adam_{part}" for part in ("mean", "square", "count")}
    assert changed(before, algorithm) == {"critic", "updates", *moments}
    assert off.metrics.keys() == {"critic_loss", "q_mean", "target_q_mean"}
    before = copy_state(algorithm)
    on = algorithm.update(make_data())
    assert {"actor", "target_actor", "target_critic"} <= changed(before, algorithm)
    assert on.metrics.keys() - off.metrics.keys() == {"actor_loss", "bc_loss", "bc_lambda"}


def test_only_the_critics_have_layer_norm() -> None:
    networks = make_rebrac().networks()
    assert (networks["actor"].layer_norm, networks["critic"].layer_norm) == (False, True)


# Settings


def test_defaults_are_the_papers_for_locomotion() -> None:
    chosen = ReBRACAlgorithm(3, 2).hyperparameters
    assert (chosen.hidden_sizes, chosen.critic_layer_norm) == ((256, 256, 256), True)
    assert (chosen.learning_rate, chosen.batch_size, chosen.tau) == (1e-3, 1024, 0.005)
    assert (chosen.gamma, chosen.num_critics, chosen.policy_delay) == (0.99, 2, 2)
    assert (chosen.policy_noise, chosen.noise_clip) == (0.2, 0.5)
    assert chosen.normalize_q
    assert not SPEC.normalizes_observations


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"actor_bc_alpha": -0.1}, "actor_bc_alpha"),
        ({"critic_bc_alpha": float("inf")}, "critic_bc_alpha"),
        ({"critic_bc_alpha": -1.0}, "critic_bc_alpha"),
        ({"normalize_q": 1.0}, "normalize_q"),
        ({"n_step": 0}, "n_step"),
        ({"buffer_capacity": 10}, "buffer_capacity"),
    ],
)
def test_invalid_hyperparameters_fail_in_the_constructor(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_rebrac(**settings)


@pytest.mark.parametrize("regime", ["online", "mixed"])
def test_other_regimes_are_refused_with_advice(regime: str) -> None:
    with pytest.raises(ConfigError, match=r"rebrac supports offline; .* another algorithm"):
        load_config({"algo": "rebrac", "regime": regime, "env_id": "Pendulum-v1"})


@pytest.mark.parametrize("change", [{"regimes": ("offline", "online")}, {"actions": ("discrete",)}])
def test_only_recorded_continuous_data_can_provide_next_actions(change: dict) -> None:
    with pytest.raises(ValueError, match="uses_next_actions"):
        replace(SPEC, **change)
