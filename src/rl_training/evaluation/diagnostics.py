"""Compare a policy, its critics and its losses with recorded data, without any update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rl_training.algorithms.base import draw_noise
from rl_training.algorithms.hyperparameters import RolloutHyperparameters
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.transforms import normalize_batch
from rl_training.evaluation.evaluator import critics_of
from rl_training.execution.policy import Policy
from rl_training.types import Batch, Metrics

CHUNK_ROWS = 8_192
MAX_BATCHES = 200
"""Maximum number of batches for the losses, some of which are expensive to compute"""

Q_METRICS = ("ope_q_mean", "ope_q_policy_mean", "ope_q_gap", "ope_td_error")


def policy_actions(policy: Policy, obs: Tensor) -> Tensor:
    """Deterministic actions of the policy for raw observations, in [-1, 1] or as indices."""
    return torch.from_numpy(policy.act(obs.numpy()))


def batches(dataset: OfflineDataset) -> Iterator[Batch]:
    """Yield all rows in order."""
    for rows in torch.split(torch.arange(len(dataset)), CHUNK_ROWS):
        yield dataset.rows(rows)


@torch.no_grad()
def policy_metrics(policy: Policy, dataset: OfflineDataset) -> dict[str, float]:
    """Metrics of the policy and its critics on the data, averaged over all rows.

    The Q metrics need a model with `q_values`, the likelihood one with `action_logprobs`.
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
    """The algorithm's losses and their sum, averaged over batches of its batch size.

    Empty for algorithms that learn from rollouts: their losses need the policy that acted.
    """
    algorithm = policy.algorithm
    if learns_from_rollouts(policy):
        return {}
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


def learns_from_rollouts(policy: Policy) -> bool:
    return isinstance(policy.algorithm.hyperparameters, RolloutHyperparameters)


def _losses(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if name.endswith("_loss")}


def _row_metrics(policy: Policy, batch: Batch) -> dict[str, Tensor]:
    """Metrics of each row, `(rows,)`."""
    own = policy_actions(policy, batch.obs)
    found = {"ope_action_distance": _distance(policy, own, batch.action)}
    inputs = _normalized(policy, batch)
    likelihood = getattr(policy.algorithm.model, "action_logprobs", None)
    if likelihood is not None:
        actor_inputs = policy.algorithm.actor_input(policy.algorithm.state, inputs.obs)
        found["ope_log_likelihood"] = likelihood(actor_inputs, batch.action)
    critics = critics_of(policy)
    if critics is not None:
        next_own = policy_actions(policy, batch.next_obs)
        q, q_policy = critics(inputs.obs, batch.action), critics(inputs.obs, own)
        target = batch.reward + batch.discount * critics(inputs.next_obs, next_own)
        numbers = (q, q_policy, q_policy - q, (q - target).square())
        found |= dict(zip(Q_METRICS, numbers, strict=True))
    return found


def _distance(policy: Policy, own: Tensor, recorded: Tensor) -> Tensor:
    """Mean squared difference of the actions; for choices, the fraction that differs."""
    if policy.spaces.action_kind == "discrete":
        return (own != recorded).float()
    if not policy.spaces.is_continuous:
        return (own != recorded).float().mean(-1)
    return (own - recorded).square().mean(-1)


def _normalized(policy: Policy, batch: Batch) -> Batch:
    """Normalize the observations of a batch if the policy has a normalizer."""
    if policy.normalizer is None:
        return batch
    return normalize_batch(batch, policy.normalizer.shift, policy.normalizer.scale)


def missing_metrics(policy: Policy, metrics: Mapping[str, float]) -> Iterator[str]:
    """Explain which metrics are missing for this policy."""
    if Q_METRICS[0] not in metrics:
        yield f"{', '.join(Q_METRICS)}: not available, this policy has no critics"
    if "ope_log_likelihood" not in metrics:
        yield "ope_log_likelihood: not available, this policy has no action probabilities"
    if "ope_validation_loss" not in metrics and learns_from_rollouts(policy):
        yield "ope_validation_loss: not available, this algorithm learns from its own rollouts"
    elif "ope_validation_loss" not in metrics:
        yield (
            "ope_validation_loss: not available, a saved policy has no target networks and "
            "temperature; use a checkpoint of the run"
        )
