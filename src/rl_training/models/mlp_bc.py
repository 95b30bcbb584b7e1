"""The network of behavior cloning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.models.actor_critic import LOG_STD_MIN, ActorHead, GaussianHead
from rl_training.models.choice_heads import choice_head
from rl_training.models.network_plan import NetworkPlan
from rl_training.observations import ObservationSpec
from rl_training.types import ActionSpec


class MLPBCModel(nn.Module):
    """An actor without critics, for actions in [-1, 1] or of any kind that `actions` describes."""

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        actions: ActionSpec | None = None,
        learned_std: bool = False,
        log_std_min: float = LOG_STD_MIN,
        activation: str = "relu",
        initialization: str = "default",
        generator: torch.Generator | None = None,
    ) -> None:
        """Without `learned_std`, log-probabilities are those of a standard deviation of one."""
        super().__init__()
        plan = NetworkPlan.of(obs_dim)
        self.obs_dim, self.action_dim = plan.observation.size, action_dim
        self.head: ActorHead = GaussianHead(log_std_min, learned=learned_std)
        if actions is not None and actions.kind != "continuous":
            self.head = choice_head(actions)
        self.actor = plan.build(
            "actor",
            hidden_sizes,
            self.head.outputs(action_dim),
            activation=activation,
            initialization=initialization,
            free_parameters=self.head.free_parameters(action_dim),
            generator=generator,
        )

    def actions(
        self, obs: Tensor, *, noise: Tensor | None = None, actor: Tensor | None = None
    ) -> Tensor:
        """Return the most likely actions, or the ones sampled with `noise`."""
        return self.head.actions(self.actor, obs, actor, noise)

    def action_logprobs(
        self, obs: Tensor, actions: Tensor, *, actor: Tensor | None = None
    ) -> Tensor:
        """Return log-probabilities `(batch,)` of given actions."""
        return self.head.log_probs(self.actor, obs, actions, actor)
