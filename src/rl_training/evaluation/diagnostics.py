"""What a policy, its critics and its losses make of recorded steps; nothing is updated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from rl_training.algorithms.base import draw_noise
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.transforms import normalize_batch
from rl_training.execution.policy import Policy
from rl_training.types import Batch, Metrics

CHUNK_ROWS = 8_192
MAX_BATCHES = 200
"""Batches that losses are averaged over: some cost a hundred times what an action does"""

Q_METRICS = ("ope_q_mean", "ope_q_policy_mean", "ope_q_gap", "ope_td_error")


def policy_actions(policy: Policy, obs: Tensor) -> Tensor:
    """The policy's best actions for observations as recorded, in the model's units."""
    return torch.from_numpy(policy.act(obs.numpy()))


def batches(dataset: OfflineDataset) -> Iterator[Batch]:
    """All rows, in their order."""
    for rows in torch.split(torch.arange(len(dataset)), CHUNK_ROWS):
        yield dataset.rows(rows)


@torch.no_grad()
def policy_metrics(policy: Policy, dataset: OfflineDataset) -> dict[str, float]:
    """How policy and critics differ from the data, averaged over all rows.

    Critics' numbers are there if the model has `q_values`, the likelihood if `action_logprobs`.
    """
    totals: dict[str, float] = defaultdict(float)
    for batch in batches(dataset):
        for name, values in _row_metrics(policy, batch).items():
            totals[name] += float(values.double().sum())
    return {name: total / len(dataset) for name, total in totals.items()}


@torch.no_grad()
def validation_losses(
    policy: Policy, dataset: OfflineDataset, generator: torch.Generator
) -> dict[str, float]:
    """The algorithm's own losses on batches of its own size, averaged: their sum, and each."""
    algorithm = policy.algorithm
    size = min(algorithm.hyperparameters.batch_size, len(dataset))
    order = torch.randperm(len(dataset), generator=generator)
    chosen = order[: len(order) // size * size].view(-1, size)[:MAX_BATCHES]
    totals: dict[str, float] = defaultdict(float)
    for rows in chosen:
        batch = _normalized(policy, dataset.rows(rows))
        noise = draw_noise(algorithm.update_noise(size), generator)
        for objective in algorithm.objectives(update_policy=True):
            loss, metrics = objective.loss(algorithm.state, batch, noise)
            totals["ope_validation_loss"] += float(loss)
            for name, value in _losses(metrics).items():
                totals[f"ope_validation_{name}"] += float(value)
    return {name: total / len(chosen) for name, total in totals.items()}


def _losses(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if name.endswith("_loss")}


def _row_metrics(policy: Policy, batch: Batch) -> dict[str, Tensor]:
    """Each number for each row, `(rows,)`."""
    own = policy_actions(policy, batch.obs)
    found = {"ope_action_distance": _distance(policy, own, batch.action)}
    inputs = _normalized(policy, batch)
    likelihood = getattr(policy.algorithm.model, "action_logprobs", None)
    if likelihood is not None:
        found["ope_log_likelihood"] = likelihood(inputs.obs, batch.action)
    critics = _critics(policy)
    if critics is not None:
        next_own = policy_actions(policy, batch.next_obs)
        q, q_policy = critics(inputs.obs, batch.action), critics(inputs.obs, own)
        target = batch.reward + batch.discount * critics(inputs.next_obs, next_own)
        numbers = (q, q_policy, q_policy - q, (q - target).square())
        found |= dict(zip(Q_METRICS, numbers, strict=True))
    return found


def _critics(policy: Policy) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The mean of the critics `(rows,)` for observations and actions; None without critics."""
    q_values = getattr(policy.algorithm.model, "q_values", None)
    if q_values is None:
        return None

    def of_choices(obs: Tensor, actions: Tensor) -> Tensor:
        values: Tensor = q_values(obs).gather(-1, actions[:, None]).squeeze(-1)
        return values

    def of_actions(obs: Tensor, actions: Tensor) -> Tensor:
        values: Tensor = q_values(obs, actions).mean(-1)
        return values

    return of_choices if policy.spaces.discrete else of_actions


def _distance(policy: Policy, own: Tensor, recorded: Tensor) -> Tensor:
    """Squared, averaged over an action's components; of choices, whether they differ."""
    if policy.spaces.discrete:
        return (own != recorded).float()
    return (own - recorded).square().mean(-1)


def _normalized(policy: Policy, batch: Batch) -> Batch:
    """As the networks see it."""
    normalizer = policy.normalizer
    return (
        batch if normalizer is None else normalize_batch(batch, normalizer.shift, normalizer.scale)
    )


def missing_metrics(metrics: Mapping[str, float]) -> Iterator[str]:
    """What the policy could not be asked for, and why."""
    if Q_METRICS[0] not in metrics:
        yield f"{', '.join(Q_METRICS)}: absent, this policy has no critics"
    if "ope_log_likelihood" not in metrics:
        yield "ope_log_likelihood: absent, this policy gives no probabilities"
    if "ope_validation_loss" not in metrics:
        yield (
            "ope_validation_loss: absent, a saved policy lacks what its losses need besides "
            "(targets, temperature); a run's checkpoint has it"
        )
