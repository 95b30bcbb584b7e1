"""PPO's losses against NumPy, and what an update changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from by_hand import changed, copy_state, free_std, gaussian_log_prob, layers, log_softmax

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.ppo import PPO, STOPPED, ppo_loss
from rl_training.types import ActionSpec, Batch

ROWS = 6
SMALL = {"hidden_sizes": [5, 4], "initialization": "default", "actor_output_scale": 1.0}


def make_batch(choices: int = 0, seed: int = 0) -> Batch:
    """Return random rows as they are in a minibatch; half of the ratios are far from one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    action = torch.randint(choices, (ROWS,), generator=generator) if choices else draw(ROWS, 2)
    return Batch(
        draw(ROWS, 3),
        action,
        draw(ROWS),
        torch.full((ROWS,), 0.9),
        torch.zeros(ROWS, 0),
        returns=draw(ROWS),
        ended=torch.zeros(ROWS),
        advantages=draw(ROWS),
        log_probs=draw(ROWS) - 2.0,
        values=draw(ROWS),
    )


def tanh_network(network: list[tuple[np.ndarray, np.ndarray]], inputs: np.ndarray) -> np.ndarray:
    for weight, bias in network[:-1]:
        inputs = np.tanh(inputs @ weight + bias)
    return inputs @ network[-1][0] + network[-1][1]


def expected_metrics(
    ppo: Algorithm, batch: Batch, clip: float, value_clip: float | None, normalize: bool
) -> dict[str, float]:
    """Compute the losses one row at a time, in double precision."""
    actor, critic = (layers(ppo.networks()[n], ppo.state[n]) for n in ("actor", "critic"))
    fields = {k: None if v is None else v.double().numpy() for k, v in batch._asdict().items()}
    advantages = fields["advantages"]
    if normalize:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    rows = []
    for i in range(ROWS):
        outputs = tanh_network(actor, fields["obs"][i])
        if ppo.actions.kind == "discrete":
            log_probs = log_softmax(outputs)
            log_prob = log_probs[int(batch.action[i])]
            entropy = -(np.exp(log_probs) * log_probs).sum()
        else:
            std = free_std(ppo.model.actor, ppo.state["actor"])
            log_prob = gaussian_log_prob(fields["action"][i], outputs, std)
            entropy = np.log(std * math.sqrt(2 * math.pi * math.e)).sum()
        ratio = np.exp(log_prob - fields["log_probs"][i])
        gains = ratio * advantages[i], np.clip(ratio, 1 - clip, 1 + clip) * advantages[i]
        value, old = tanh_network(critic, fields["obs"][i])[0], fields["values"][i]
        errors = [(value - fields["returns"][i]) ** 2]
        if value_clip is not None:
            limited = old + np.clip(value - old, -value_clip, value_clip)
            errors.append((limited - fields["returns"][i]) ** 2)
        kl = ratio - 1 - np.log(ratio)
        rows.append((-min(gains), 0.5 * max(errors), entropy, kl, abs(ratio - 1) > clip))
    names = ("actor_loss", "critic_loss", "entropy", "approximate_kl", "clip_fraction")
    return dict(zip(names, np.mean(rows, axis=0), strict=True))


@pytest.mark.parametrize("choices", [0, 3])
@pytest.mark.parametrize(
    ("clip", "value_clip", "normalize"), [(0.2, None, True), (0.5, 0.1, False)]
)
def test_the_losses_are_those_of_the_paper(
    choices: int, clip: float, value_clip: float | None, normalize: bool
) -> None:
    actions = ActionSpec("discrete", choices) if choices else 2
    settings = {
        **SMALL,
        "clip_range": clip,
        "value_clip_range": value_clip,
        "normalize_advantages": normalize,
        "initial_log_std": -0.5,
    }
    ppo, batch = PPO(3, actions, settings, seed=3), make_batch(choices)
    loss, metrics = ppo_loss(
        ppo, ppo.state, batch, {}, value_coefficient=0.7, entropy_coefficient=0.02
    )
    expected = expected_metrics(ppo, batch, clip, value_clip, normalize)
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    total = expected["actor_loss"] + 0.7 * expected["critic_loss"] - 0.02 * expected["entropy"]
    assert float(loss) == pytest.approx(total, rel=1e-4)
    assert expected["clip_fraction"] > 0


@pytest.mark.parametrize("normalize", [True, False])
def test_a_lost_transition_does_not_change_the_probability_of_its_action(normalize: bool) -> None:
    settings = {**SMALL, "normalize_advantages": normalize, "value_coefficient": 0.0}
    ppo = PPO(3, 2, settings, seed=3)
    batch = make_batch()
    lost = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0, 0.0])
    advantages = torch.where(lost > 1, 0.0, torch.arange(1.0, 1.0 + ROWS))
    log_probs = ppo.model.action_logprobs(batch.obs, batch.action).detach()

    def gradient(action: torch.Tensor) -> torch.Tensor:
        rows = batch.with_fields(
            action=action, ended=lost, advantages=advantages, log_probs=log_probs
        )
        actor = ppo.state["actor"].clone().requires_grad_()
        loss, _ = ppo_loss(ppo, {**ppo.state, "actor": actor}, rows, {})
        (found,) = torch.autograd.grad(loss, [actor])
        return found

    other = batch.action.clone()
    other[1] += 0.1
    torch.testing.assert_close(gradient(other), gradient(batch.action))
    other[2] += 0.1
    assert not torch.allclose(gradient(other), gradient(batch.action))


def test_an_update_changes_both_networks_and_clips_their_joint_gradient() -> None:
    ppo = PPO(3, 2, {**SMALL, "max_grad_norm": 0.1, "adam_betas": [0.0, 0.0]}, seed=1)
    before = copy_state(ppo)
    ppo.update(make_batch())
    moments = {f"{n}.adam_{m}" for n in ("actor", "critic") for m in ("mean", "square", "count")}
    # With a decay of zero, the first moment is the gradient.
    assert changed(before, ppo) == {"actor", "critic", "updates", *moments}
    parts = [ppo.state[f"{name}.adam_mean"] for name in ("actor", "critic")]
    assert torch.cat(parts).norm() == pytest.approx(0.1, rel=1e-4)


def test_a_shared_encoder_is_trained_by_both_losses() -> None:
    settings = {**SMALL, "networks": {"encoders": {"observation": "mlp"}, "shared_encoder": True}}
    ppo, batch = PPO(3, 2, settings, seed=1), make_batch()

    def encoder_gradient(**weights: float) -> torch.Tensor:
        critic = ppo.state["critic"].clone().requires_grad_()
        loss, _ = ppo_loss(ppo, {**ppo.state, "critic": critic}, batch, {}, **weights)
        (gradient,) = torch.autograd.grad(loss, [critic])
        parts = ppo.networks()["critic"].unflatten(gradient)
        return torch.cat([part.flatten() for name, part in parts.items() if "encoder" in name])

    policy_alone, both = encoder_gradient(value_coefficient=0.0), encoder_gradient()
    assert policy_alone.norm() > 1e-3
    assert (both - policy_alone).norm() > 1e-3


def test_the_initial_policy_prefers_no_action() -> None:
    ppo = PPO(3, 2, {"initial_log_std": -1.0}, seed=0)
    obs = torch.randn(50, 3)
    assert ppo.act(ppo.state, obs).abs().max() < 0.05
    assert torch.equal(
        ppo.model.actor.unflatten(ppo.state["actor"])["log_std"], torch.full((2,), -1.0)
    )
    values = ppo.model.state_values(obs)
    assert values.std() > 0.1


def test_hidden_layers_are_orthogonal_with_the_gains_of_the_paper() -> None:
    ppo = PPO(8, 2, {"hidden_sizes": [8, 8]}, seed=0)
    for name, gain in (("actor", 0.01), ("critic", 1.0)):
        parts = ppo.networks()[name].unflatten(ppo.state[name])
        for layer, scale in ((0, math.sqrt(2)), (1, math.sqrt(2)), (2, gain)):
            weight = parts[f"weight_{layer}"]
            square = weight.T @ weight
            torch.testing.assert_close(
                square, scale**2 * torch.eye(len(square)), rtol=1e-4, atol=1e-5
            )
            assert not parts[f"bias_{layer}"].any()


def test_actions_are_stored_as_they_were_sampled_and_the_mean_is_limited() -> None:
    ppo = PPO(3, 2, {**SMALL, "initial_log_std": 2.0}, seed=0)
    obs, noise = torch.randn(20, 3), {"action": torch.randn(20, 2)}
    sampled = ppo.explore(ppo.state, obs, noise, torch.zeros(()))
    assert sampled.abs().max() > 1
    log_probs = ppo.model.action_logprobs(obs, sampled)
    torch.testing.assert_close(
        log_probs, ppo.model.head.sample(ppo.model.actor, obs, None, noise["action"])[1]
    )
    ppo.state["actor"].mul_(50)
    assert ppo.act(ppo.state, obs).abs().max() == 1


# Stopping at a divergence


def test_updates_stop_when_the_policy_is_too_far_from_the_one_that_acted() -> None:
    ppo = PPO(3, 2, {**SMALL, "target_kl": 0.01, "learning_rate": 0.05}, seed=1)
    batch = make_batch()
    log_probs = ppo.model.action_logprobs(batch.obs, batch.action).detach()
    batch = batch.with_fields(log_probs=log_probs)
    kept, divergences = [], []
    for _ in range(8):
        before = copy_state(ppo)
        divergences.append(float(ppo.update(batch).metrics["approximate_kl"]))
        kept.append(changed(before, ppo) <= {"updates", STOPPED})
    stopped = kept.index(True)
    assert 0 < stopped < 8
    assert kept == [False] * stopped + [True] * (8 - stopped)
    assert divergences[stopped] > 1.5 * 0.01 >= divergences[stopped - 1]
    assert bool(ppo.state[STOPPED])


def test_the_next_rollout_is_learned_from_again() -> None:
    ppo = PPO(3, 2, {**SMALL, "target_kl": 1e-9, "rollout_steps": 3}, seed=1)
    batch = make_batch()
    ppo.update(batch)
    assert bool(ppo.state[STOPPED])
    rollout = batch.with_fields(next_obs=batch.obs)
    ppo.begin_rollout(ppo.state, rollout)
    assert not bool(ppo.state[STOPPED])
