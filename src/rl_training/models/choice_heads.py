"""Heads of actors that choose: distributions over choices, with the methods of `ActorHead`.

Actions are sampled by inverting the distribution function, from one uniform number per choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.models.mlp import Network
from rl_training.types import ActionSpec


class CategoricalHead:
    """Independent choices, each from probabilities that are the softmax of some outputs.

    Actions are indices: `(batch,)` of a single choice, else `(batch, choices)`.
    """

    noise_kind: ClassVar[Literal["uniform"]] = "uniform"
    is_distribution = True

    def __init__(self, choices: Sequence[int], *, single: bool) -> None:
        """`choices` is the number of possibilities of each choice."""
        self._choices, self._single = list(choices), single

    def outputs(self, action_dim: int) -> int:
        return sum(self._choices)

    def noise_size(self, action_dim: int) -> int:
        return len(self._choices)

    def free_parameters(self, action_dim: int) -> dict[str, tuple[int, ...]]:
        return {}

    def actions(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor | None = None
    ) -> Tensor:
        return self._chosen(self._log_probs(actor, obs, vector), noise)

    def sample(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = self._log_probs(actor, obs, vector)
        actions = self._chosen(parts, noise)
        return actions, self._of_actions(parts, actions)

    def log_probs(
        self, actor: Network, obs: Tensor, actions: Tensor, vector: Tensor | None
    ) -> Tensor:
        return self._of_actions(self._log_probs(actor, obs, vector), actions)

    def log_probs_and_entropy(
        self, actor: Network, obs: Tensor, actions: Tensor, vector: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `(batch,)` of given actions, and the exact entropy."""
        parts = self._log_probs(actor, obs, vector)
        entropies = [-(part.exp() * part).sum(-1) for part in parts]
        return self._of_actions(parts, actions), torch.stack(entropies, -1).sum(-1)

    def all_log_probs(self, actor: Network, obs: Tensor, vector: Tensor | None) -> Tensor:
        """Return the log-probability of every action of a single choice, `(batch, actions)`."""
        (log_probs,) = self._log_probs(actor, obs, vector)
        return log_probs

    def _log_probs(self, actor: Network, obs: Tensor, vector: Tensor | None) -> list[Tensor]:
        """Return the log-probabilities of each choice, `(batch, possibilities)`."""
        parts = torch.split(actor(obs, vector), self._choices, dim=-1)
        return [torch.log_softmax(part, -1) for part in parts]

    def _chosen(self, log_probs: list[Tensor], noise: Tensor | None) -> Tensor:
        """Return the most likely indices, or those at which the probabilities add up to `noise`."""
        if noise is None:
            indices = [part.argmax(-1) for part in log_probs]
        else:
            indices = [
                # Rounding can keep the sum of all probabilities below 1.
                (uniform[..., None] >= part.exp().cumsum(-1)).sum(-1).clamp(max=part.shape[-1] - 1)
                for part, uniform in zip(log_probs, noise.unbind(-1), strict=True)
            ]
        return indices[0] if self._single else torch.stack(indices, -1)

    def _of_actions(self, log_probs: list[Tensor], actions: Tensor) -> Tensor:
        indices = [actions] if self._single else actions.unbind(-1)
        chosen = [
            part.gather(-1, index[..., None]).squeeze(-1)
            for part, index in zip(log_probs, indices, strict=True)
        ]
        return chosen[0] if self._single else torch.stack(chosen, -1).sum(-1)


class BernoulliHead:
    """Independent switches, each on with a probability that is the sigmoid of an output.

    Actions are `(batch, switches)` of 0 and 1.
    """

    noise_kind: ClassVar[Literal["uniform"]] = "uniform"
    is_distribution = True

    def outputs(self, action_dim: int) -> int:
        return action_dim

    def noise_size(self, action_dim: int) -> int:
        return action_dim

    def free_parameters(self, action_dim: int) -> dict[str, tuple[int, ...]]:
        return {}

    def actions(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor | None = None
    ) -> Tensor:
        return self._switched(actor(obs, vector), noise)

    def sample(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = actor(obs, vector)
        actions = self._switched(logits, noise)
        return actions, self._of_actions(logits, actions)

    def log_probs(
        self, actor: Network, obs: Tensor, actions: Tensor, vector: Tensor | None
    ) -> Tensor:
        return self._of_actions(actor(obs, vector), actions)

    def log_probs_and_entropy(
        self, actor: Network, obs: Tensor, actions: Tensor, vector: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `(batch,)` of given actions, and the exact entropy."""
        logits = actor(obs, vector)
        on = torch.sigmoid(logits)
        entropy = -(on * F.logsigmoid(logits) + (1 - on) * F.logsigmoid(-logits)).sum(-1)
        return self._of_actions(logits, actions), entropy

    def _switched(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        return (logits > 0 if noise is None else noise < torch.sigmoid(logits)).long()

    def _of_actions(self, logits: Tensor, actions: Tensor) -> Tensor:
        return F.logsigmoid(torch.where(actions > 0, logits, -logits)).sum(-1)


def choice_head(actions: ActionSpec) -> CategoricalHead | BernoulliHead:
    """Return the head for actions that are not continuous."""
    if actions.kind == "multi_binary":
        return BernoulliHead()
    return CategoricalHead(actions.num_choices, single=actions.kind == "discrete")
