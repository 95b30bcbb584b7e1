"""The networks of IQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from rl_training.models.actor_critic import LOG_STD_MIN, NetworkOptions, StochasticActorCritic
from rl_training.models.network_plan import NetworkPlan
from rl_training.observations import ObservationSpec


class MLPIQLModel(StochasticActorCritic):
    """A Gaussian actor with state-independent standard deviation, critics, and a state value.

    If actions are discrete, the actor chooses one of them.
    """

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_critics: int = 2,
        discrete: bool = False,
        log_std_min: float = LOG_STD_MIN,
        **options: Unpack[NetworkOptions],
    ) -> None:
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            num_critics=num_critics,
            discrete=discrete,
            actor_head="gaussian",
            log_std_min=log_std_min,
            **options,
        )
        value_sizes = options.get("critic_hidden_sizes")
        self.value = NetworkPlan.of(obs_dim).build(
            "value",
            hidden_sizes if value_sizes is None else value_sizes,
            1,
            activation=options.get("activation", "relu"),
            layer_norm=options.get("critic_layer_norm", False),
            initialization=options.get("initialization", "default"),
            generator=options.get("generator"),
        )

    def state_values(self, obs: Tensor, *, value: Tensor | None = None) -> Tensor:
        """Return the values of states, `(batch,)`."""
        values: Tensor = self.value(obs, value)
        return values.squeeze(-1)
