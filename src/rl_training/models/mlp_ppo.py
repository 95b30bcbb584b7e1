"""The networks of PPO and A2C."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from rl_training.models.actor_critic import ActorHead, gaussian_log_prob
from rl_training.models.choice_heads import choice_head
from rl_training.models.mlp import Network
from rl_training.models.network_plan import LayerOptions, NetworkPlan
from rl_training.models.networks import EncodedNetwork
from rl_training.models.recurrent import RecurrentNetwork
from rl_training.observations import ObservationSpec
from rl_training.types import ActionSpec

LOG_STD = "log_std"
ENTROPY_OF_UNIT = 0.5 * math.log(2 * math.pi * math.e)
"""Entropy of a standard normal distribution"""


class PolicyHead(ActorHead, Protocol):
    """A head that also knows the entropy of its distribution."""

    def log_probs_and_entropy(
        self, actor: Network, obs: Tensor, actions: Tensor, vector: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `(batch,)` of given actions, and the entropy `(batch,)`."""
        ...


class UnboundedGaussianHead:
    """A Gaussian around the outputs, with a state-independent standard deviation.

    Neither its mean nor its samples are limited: an environment clips actions that are out of
    range, and the policy is trained on the actions as they were sampled.
    """

    noise_kind: ClassVar[Literal["normal"]] = "normal"
    is_distribution = True

    def noise_size(self, action_dim: int) -> int:
        return action_dim

    def outputs(self, action_dim: int) -> int:
        return action_dim

    def free_parameters(self, action_dim: int) -> dict[str, tuple[int, ...]]:
        return {LOG_STD: (action_dim,)}

    def actions(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor | None = None
    ) -> Tensor:
        """Return the mean, or a sample; the mean is limited to the range of actions."""
        mean: Tensor = actor(obs, vector)
        if noise is None:
            return mean.clamp(-1, 1)
        return mean + self._log_std(actor, vector).exp() * noise

    def sample(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(obs, vector), self._log_std(actor, vector)
        return mean + log_std.exp() * noise, gaussian_log_prob(noise, log_std).sum(-1)

    def log_probs(
        self, actor: Network, obs: Tensor, actions: Tensor, vector: Tensor | None
    ) -> Tensor:
        return self.log_probs_and_entropy(actor, obs, actions, vector)[0]

    def log_probs_and_entropy(
        self, actor: Network, obs: Tensor, actions: Tensor, vector: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(obs, vector), self._log_std(actor, vector)
        log_probs = gaussian_log_prob((actions - mean) * torch.exp(-log_std), log_std).sum(-1)
        entropy = (log_std + ENTROPY_OF_UNIT).sum(-1)
        return log_probs, entropy.expand(log_probs.shape)

    def _log_std(self, actor: Network, vector: Tensor | None) -> Tensor:
        return actor.unflatten(actor.vector if vector is None else vector)[LOG_STD]


class MLPPPOModel(nn.Module):
    """An actor and the value of states, for actions of any kind.

    The two networks are separate. With `shared_encoder` the encoder of observations belongs to
    both: unlike in methods with a replay buffer, both losses train it. So does a recurrent layer
    with its encoder: actor and critic are then networks on its outputs.
    """

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
        actions: int | ActionSpec,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        actor_hidden_sizes: Sequence[int] | None = None,
        critic_hidden_sizes: Sequence[int] | None = None,
        activation: str = "tanh",
        initialization: str = "orthogonal",
        actor_output_scale: float = 0.01,
        initial_log_std: float = 0.0,
        recurrent: str = "none",
        recurrent_size: int = 64,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        plan = NetworkPlan.of(obs_dim)
        if isinstance(actions, int):
            actions = ActionSpec("continuous", actions)
        self.obs_dim, self.action_dim = plan.observation.size, actions.size
        self.shares_encoder = plan.shares_encoder and recurrent == "none"
        self.head: PolicyHead = (
            UnboundedGaussianHead() if actions.kind == "continuous" else choice_head(actions)
        )
        options: LayerOptions = {
            "activation": activation,
            "initialization": initialization,
            "generator": generator,
        }
        policy: LayerOptions = {
            **options,
            "free_parameters": self.head.free_parameters(actions.size),
        }
        actor_sizes = hidden_sizes if actor_hidden_sizes is None else actor_hidden_sizes
        critic_sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        build = plan.build
        self.memory: Network | None = None
        if recurrent != "none":
            self.memory = _recurrent_network(plan, recurrent, recurrent_size, options)
            build = functools.partial(plan.build_on, recurrent_size)
        self.actor = build("actor", actor_sizes, self.head.outputs(actions.size), **policy)
        self.critic = build("critic", critic_sizes, 1, **options)
        self._set_initial_policy(actor_output_scale, initial_log_std)

    @torch.no_grad()
    def _set_initial_policy(self, output_scale: float, log_std: float) -> None:
        """Scale the last layer of the actor, unless a user built it, and set the deviation."""
        parameters = self.actor.unflatten(self.actor.vector.data)
        if LOG_STD in parameters:
            parameters[LOG_STD].fill_(log_std)
        layers = [name for name in parameters if name.startswith("weight_")]
        if layers:
            parameters[layers[-1]].mul_(output_scale)

    def actor_input(self, obs: Tensor, critic: Tensor | None = None) -> Tensor:
        """Return what the actor's network takes: observations, or the shared features of them."""
        if not self.shares_encoder:
            return obs
        assert isinstance(self.critic, EncodedNetwork)
        return self.critic.encode(obs, critic)

    def state_values(self, obs: Tensor, *, critic: Tensor | None = None) -> Tensor:
        """Return the values of states, `(batch,)`."""
        values: Tensor = self.critic(obs, critic)
        return values.squeeze(-1)

    def evaluate(
        self,
        obs: Tensor,
        actions: Tensor,
        *,
        actor: Tensor | None = None,
        critic: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of actions, the policy's entropy and values, `(batch,)` each.

        A shared encoder is evaluated once.
        """
        if not self.shares_encoder:
            values, inputs = self.state_values(obs, critic=critic), obs
        else:
            assert isinstance(self.critic, EncodedNetwork)
            inputs = self.critic.encode(obs, critic)
            values = self.critic.decode(inputs, critic).squeeze(-1)
        return *self.head.log_probs_and_entropy(self.actor, inputs, actions, actor), values

    def remember(
        self, obs: Tensor, memory: Tensor, vector: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what actor and critic take instead of observations, and the next memory."""
        layer, inputs, parameters = self._recurrent_inputs(obs, vector)
        memory = layer.step(inputs, memory, parameters)
        return layer.outputs(memory), memory

    def rebuild(
        self, obs: Tensor, memory: Tensor, ended: Tensor, vector: Tensor | None = None
    ) -> Tensor:
        """Return what actor and critic take for the steps of sequences, `(steps * batch, size)`.

        `obs` has the first steps of all sequences, then the second ones, and so on. `memory` is
        that of the first steps, `(batch, memory_size)`. `ended` says after which steps an episode
        ended: it is not zero there.
        """
        layer, inputs, parameters = self._recurrent_inputs(obs, vector)
        ends = ended.view(-1, len(memory))
        # The stored memory is zero already if an episode begins with the first step.
        continues = torch.cat([torch.ones_like(ends[:1]), (ends[:-1] == 0).to(ends.dtype)])
        outputs = layer.unroll(inputs.reshape(*ends.shape, -1), memory, continues, parameters)
        return outputs.flatten(0, 1)

    def _recurrent_inputs(
        self, obs: Tensor, vector: Tensor | None
    ) -> tuple[RecurrentNetwork, Tensor, Tensor | None]:
        """Return the recurrent layer, and its inputs and parameters."""
        network = self.memory
        if isinstance(network, EncodedNetwork):
            assert isinstance(network.head, RecurrentNetwork)
            return network.head, *network.head_inputs(obs, vector)
        assert isinstance(network, RecurrentNetwork)
        return network, obs, vector

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


def _recurrent_network(plan: NetworkPlan, kind: str, size: int, options: LayerOptions) -> Network:
    """Build a recurrent layer on observations, or on what an encoder makes of them."""

    def make(
        inputs: int,
        hidden_sizes: Sequence[int],
        outputs: int,
        *,
        initialization: str,
        generator: torch.Generator | None,
        **others: object,
    ) -> Network:
        return RecurrentNetwork(
            kind, inputs, outputs, initialization=initialization, generator=generator
        )

    return plan.build("memory", (), size, make=make, **options)
