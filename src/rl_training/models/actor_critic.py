"""Models with an actor and an ensemble of critics.

`ActorCritic` builds the networks and evaluates the critics. `StochasticActorCritic` has an actor
that is a distribution over actions: its head turns the outputs of the actor's network into one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, Protocol, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.choice_heads import CategoricalHead
from rl_training.models.mlp import Network
from rl_training.models.network_plan import NetworkPlan
from rl_training.models.networks import EncodedNetwork
from rl_training.observations import ObservationSpec

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
ACTION_LIMIT = 1.0 - 1e-6
"""Given actions are clipped to this before atanh, so that actions on the bounds stay finite."""

ActorHeadName = Literal["gaussian", "squashed_gaussian"]
"""Heads for continuous actions, in [-1, 1]"""


class ActorHead(Protocol):
    """A distribution over actions: vectors in [-1, 1], or choices (see `choice_heads.py`).

    `vector` replaces the actor's own parameters if given. `noise` is `(batch, noise_size)`.
    """

    @property
    def noise_kind(self) -> Literal["normal", "uniform"]:
        """Whether `noise` is standard normal, or uniform in [0, 1)."""
        ...

    @property
    def is_distribution(self) -> bool:
        """Whether the spread of actions is learned, so that samples are useful."""
        ...

    def noise_size(self, action_dim: int) -> int:
        """Return how many random numbers one action needs."""
        ...

    def outputs(self, action_dim: int) -> int:
        """Return the number of outputs of the actor's network."""
        ...

    def free_parameters(self, action_dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the actor's parameters that belong to no layer."""
        ...

    def actions(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor | None = None
    ) -> Tensor:
        """Return the most likely actions `(batch, action_dim)`, or ones sampled with `noise`."""
        ...

    def sample(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return actions `(batch, action_dim)` and their log-probabilities `(batch,)`."""
        ...

    def log_probs(
        self, actor: Network, obs: Tensor, actions: Tensor, vector: Tensor | None
    ) -> Tensor:
        """Return log-probabilities `(batch,)` of given actions, finite with finite gradients."""
        ...


class SquashedGaussianHead:
    """The tanh of a Gaussian with state-dependent mean and standard deviation, as in SAC."""

    noise_kind: ClassVar[Literal["normal"]] = "normal"
    is_distribution = True

    def __init__(self, log_std_min: float = LOG_STD_MIN, *, smooth: bool = False) -> None:
        """Clip the logarithm of the standard deviation, or limit it by a tanh if `smooth`."""
        self._log_std_min, self._smooth = log_std_min, smooth

    def noise_size(self, action_dim: int) -> int:
        return action_dim

    def outputs(self, action_dim: int) -> int:
        return 2 * action_dim

    def free_parameters(self, action_dim: int) -> dict[str, tuple[int, ...]]:
        return {}

    def actions(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor | None = None
    ) -> Tensor:
        return self.actions_of(actor(obs, vector), noise)

    def actions_of(self, outputs: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return what `actions` does, from the outputs of the actor's network."""
        mean, log_std = self._gaussian(outputs)
        return torch.tanh(mean if noise is None else mean + log_std.exp() * noise)

    def sample(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.sample_of(actor(obs, vector), noise)

    def sample_of(self, outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `sample` does, from the outputs of the actor's network."""
        mean, log_std = self._gaussian(outputs)
        unsquashed = mean + log_std.exp() * noise
        log_prob = gaussian_log_prob(noise, log_std) - squash_log_det(unsquashed)
        return torch.tanh(unsquashed), log_prob.sum(-1)

    def log_probs(
        self, actor: Network, obs: Tensor, actions: Tensor, vector: Tensor | None
    ) -> Tensor:
        mean, log_std = self._gaussian(actor(obs, vector))
        unsquashed = torch.atanh(actions.clamp(-ACTION_LIMIT, ACTION_LIMIT))
        noise = (unsquashed - mean) * torch.exp(-log_std)
        return (gaussian_log_prob(noise, log_std) - squash_log_det(unsquashed)).sum(-1)

    def _gaussian(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = outputs.chunk(2, dim=-1)
        if self._smooth:
            half = 0.5 * (LOG_STD_MAX - self._log_std_min)
            return mean, self._log_std_min + half * (1 + torch.tanh(log_std))
        return mean, log_std.clamp(self._log_std_min, LOG_STD_MAX)


class GaussianHead:
    """A Gaussian around the tanh of the outputs, with a state-independent standard deviation.

    It is not squashed; samples are clipped instead. Regression on recorded actions needs this:
    under a squashed Gaussian, an action on a bound is infinitely far from the mean.
    """

    noise_kind: ClassVar[Literal["normal"]] = "normal"

    def __init__(self, log_std_min: float = LOG_STD_MIN, *, learned: bool = True) -> None:
        """The standard deviation is one if it is not `learned`."""
        self._log_std_min, self._learned = log_std_min, learned

    @property
    def is_distribution(self) -> bool:
        return self._learned

    def noise_size(self, action_dim: int) -> int:
        return action_dim

    def outputs(self, action_dim: int) -> int:
        return action_dim

    def free_parameters(self, action_dim: int) -> dict[str, tuple[int, ...]]:
        return {"log_std": (action_dim,)} if self._learned else {}

    def actions(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor | None = None
    ) -> Tensor:
        mean = torch.tanh(actor(obs, vector))
        if noise is None:
            return mean
        return (mean + self._log_std(actor, vector).exp() * noise).clamp(-1, 1)

    def sample(
        self, actor: Network, obs: Tensor, vector: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        mean, log_std = torch.tanh(actor(obs, vector)), self._log_std(actor, vector)
        actions = (mean + log_std.exp() * noise).clamp(-1, 1)
        return actions, gaussian_log_prob(noise, log_std).sum(-1)

    def log_probs(
        self, actor: Network, obs: Tensor, actions: Tensor, vector: Tensor | None
    ) -> Tensor:
        log_std = self._log_std(actor, vector)
        noise = (actions - torch.tanh(actor(obs, vector))) * torch.exp(-log_std)
        return gaussian_log_prob(noise, log_std).sum(-1)

    def _log_std(self, actor: Network, vector: Tensor | None) -> Tensor:
        parameters = actor.unflatten(actor.vector if vector is None else vector)
        if not self._learned:
            return next(iter(parameters.values())).new_zeros(())
        return parameters["log_std"].clamp(self._log_std_min, LOG_STD_MAX)


def make_head(name: ActorHeadName, log_std_min: float = LOG_STD_MIN) -> ActorHead:
    """Return the head of that name; `log_std_min` applies to `gaussian` only."""
    return GaussianHead(log_std_min) if name == "gaussian" else SquashedGaussianHead()


def gaussian_log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-density of `mean + std * noise`, per component."""
    return -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)


def squash_log_det(unsquashed: Tensor) -> Tensor:
    """Return `log(1 - tanh(u)^2)`, computed without overflow or cancellation."""
    return 2.0 * (math.log(2.0) - unsquashed - F.softplus(-2.0 * unsquashed))


class NetworkOptions(TypedDict, total=False):
    """Optional keyword arguments of actor-critic models."""

    actor_hidden_sizes: Sequence[int] | None
    critic_hidden_sizes: Sequence[int] | None
    activation: str
    critic_layer_norm: bool
    critic_dropout: float
    actor_layer_norm: bool
    initialization: str
    generator: torch.Generator | None
    make: Callable[..., Network] | None


class ActorCritic(nn.Module):
    """An actor on observations, and critics on observations and actions in [-1, 1].

    If actions are discrete, the critics take observations and have one output for each action.

    Every method uses the model's own parameters unless it is given a parameter vector. Losses pass
    a vector to differentiate with respect to one network, or to evaluate a target network. They
    also pass random numbers for dropout in the critics, `(critics, batch, dropout_size)`; without
    them, no units are dropped.
    """

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
        action_dim: int,
        hidden_sizes: Sequence[int],
        *,
        actor_outputs: int,
        num_critics: int,
        critic_outputs: int = 1,
        discrete: bool = False,
        actor_free_parameters: Mapping[str, tuple[int, ...]] | None = None,
        actor_other_inputs: int = 0,
        **options: Unpack[NetworkOptions],
    ) -> None:
        """`actor_other_inputs` is how many numbers the actor takes besides observations."""
        super().__init__()
        plan = NetworkPlan.of(obs_dim)
        self.obs_dim, self.action_dim = plan.observation.size, action_dim
        self.num_critics, self.shares_encoder = num_critics, plan.shares_encoder
        self._discrete = discrete
        activation, generator = options.get("activation", "relu"), options.get("generator")
        initialization = options.get("initialization", "default")
        actor_sizes = options.get("actor_hidden_sizes")
        critic_sizes = options.get("critic_hidden_sizes")
        self.actor = plan.build(
            "actor",
            hidden_sizes if actor_sizes is None else actor_sizes,
            actor_outputs,
            other_inputs=actor_other_inputs,
            activation=activation,
            layer_norm=options.get("actor_layer_norm", False),
            initialization=initialization,
            free_parameters=actor_free_parameters,
            generator=generator,
            make=options.get("make"),
        )
        self.critic = plan.build(
            "critic",
            hidden_sizes if critic_sizes is None else critic_sizes,
            action_dim if discrete else critic_outputs,
            other_inputs=0 if discrete else action_dim,
            ensemble=num_critics,
            activation=activation,
            layer_norm=options.get("critic_layer_norm", False),
            dropout=options.get("critic_dropout", 0.0),
            initialization=initialization,
            generator=generator,
            make=options.get("make"),
        )

    def actor_input(self, obs: Tensor, critic: Tensor | None = None) -> Tensor:
        """Return what the actor's network takes: observations, or the critics' features of them.

        The features have no gradient.
        """
        if not self.shares_encoder:
            return obs
        assert isinstance(self.critic, EncodedNetwork)
        return self.critic.encode(obs, critic).detach()

    def with_current_encoder(self, target: Tensor, critic: Tensor) -> Tensor:
        """Return the target critics' parameters, with the current encoder if it is shared."""
        if not self.shares_encoder:
            return target
        assert isinstance(self.critic, EncodedNetwork)
        return self.critic.with_encoder_of(target, critic)

    def q_values(
        self,
        obs: Tensor,
        actions: Tensor,
        *,
        critic: Tensor | None = None,
        subset: Tensor | slice | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """Return Q-values `(batch, num_critics)`, or only those of a `subset` of the critics."""
        if self._discrete:
            values = self.all_q_values(obs, critic=critic, subset=subset, dropout=dropout)
            index = actions[:, None, None].expand(-1, 1, values.shape[-1])
            return values.gather(-2, index).squeeze(-2)
        # Several outputs are the quantiles of a distribution, whose mean is the Q-value.
        several = self.critic.sizes[-1] > 1
        outputs = self.critic_outputs(
            obs, actions, critic, subset, mean_output=several, dropout=dropout
        )
        return outputs.squeeze(-1).mT

    def q_slopes(
        self,
        obs: Tensor,
        actions: Tensor,
        *,
        critic: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return Q-values `(batch, num_critics)` and their gradients with respect to the actions.

        The gradients, `(num_critics, batch, action_dim)`, can be differentiated with respect to
        the parameters.
        """
        of_each = (self.num_critics, -1, -1)  # each critic has its own copy of the actions

        def total(own_actions: Tensor) -> tuple[Tensor, Tensor]:
            inputs = obs.expand(of_each), own_actions
            q = self.critic_outputs(*inputs, critic, dropout=dropout).squeeze(-1)
            return q.sum(), q

        # Unlike autograd, the functional transform can be compiled and mapped inside a loss.
        slopes, q = torch.func.grad(total, has_aux=True)(actions.expand(of_each))
        return q.mT, slopes

    def all_q_values(
        self,
        obs: Tensor,
        *,
        critic: Tensor | None = None,
        subset: Tensor | slice | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """Return the Q-values of all discrete actions, `(batch, actions, num_critics)`."""
        outputs: Tensor = self.critic(obs, self._critic_vector(critic, subset), dropout=dropout)
        return outputs.permute(1, 2, 0)

    def critic_outputs(
        self,
        obs: Tensor,
        actions: Tensor,
        critic: Tensor | None = None,
        subset: Tensor | slice | None = None,
        *,
        mean_output: bool = False,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs `(critics, batch, critic_outputs)`, or their mean as a last axis."""
        vector = self._critic_vector(critic, subset)
        inputs = torch.cat([obs, actions], dim=-1)
        outputs: Tensor = self.critic(inputs, vector, mean_output=mean_output, dropout=dropout)
        return outputs

    def _critic_vector(self, critic: Tensor | None, subset: Tensor | slice | None) -> Tensor:
        vector = self.critic.vector if critic is None else critic
        return vector if subset is None else self.critic.select(vector, subset)


class StochasticActorCritic(ActorCritic):
    """A Gaussian actor, squashed or not, or one that chooses, and an ensemble of critics."""

    def __init__(
        self,
        obs_dim: int | ObservationSpec | NetworkPlan,
        action_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        num_critics: int = 2,
        critic_outputs: int = 1,
        discrete: bool = False,
        actor_head: ActorHeadName = "squashed_gaussian",
        log_std_min: float = LOG_STD_MIN,
        head: ActorHead | None = None,
        **options: Unpack[NetworkOptions],
    ) -> None:
        """`log_std_min` applies to the head `gaussian`; `actor_head` to continuous actions.

        `head` replaces the head of these names.
        """
        self._choices = CategoricalHead([action_dim], single=True) if discrete else None
        self.head: ActorHead = self._choices or head or make_head(actor_head, log_std_min)
        super().__init__(
            obs_dim,
            action_dim,
            hidden_sizes,
            actor_outputs=self.head.outputs(action_dim),
            actor_free_parameters=self.head.free_parameters(action_dim),
            num_critics=num_critics,
            critic_outputs=critic_outputs,
            discrete=discrete,
            **options,
        )

    def expected_q(
        self,
        obs: Tensor,
        reduce: Callable[[Tensor], Tensor],
        *,
        actor_input: Tensor,
        noise: Tensor | None,
        actor: Tensor,
        critic: Tensor,
        subset: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean Q-value and log-probability `(batch,)` of the policy's actions.

        `reduce` maps the Q-values of the critics, the last axis, to one. `actor_input` is what the
        actor takes instead of the observations, if it shares the critics' encoder. The means are
        exact for discrete actions. For continuous ones they are estimated from one action, which is
        sampled with `noise`.
        """
        if self._choices is not None:
            log_probs = self._choices.all_log_probs(self.actor, actor_input, actor)
            q = reduce(self.all_q_values(obs, critic=critic, subset=subset, dropout=dropout))
            probabilities = log_probs.exp()
            return (probabilities * q).sum(-1), (probabilities * log_probs).sum(-1)
        action, log_prob = self.sample_actions(actor_input, noise=noise, actor=actor)
        q = self.q_values(obs, action, critic=critic, subset=subset, dropout=dropout)
        return reduce(q), log_prob

    def sample_actions(
        self,
        obs: Tensor,
        deterministic: bool = False,
        *,
        noise: Tensor | None = None,
        actor: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return actions `(batch, action_dim)` in [-1, 1] and their log-probabilities `(batch,)`.

        Discrete actions are `(batch,)`. `noise` is that of the head. It is drawn here if not given.
        """
        if deterministic and self._choices is not None:
            actions = self.actions(obs, actor=actor)
            return actions, self.action_logprobs(obs, actions, actor=actor)
        if deterministic:
            noise = obs.new_zeros(*obs.shape[:-1], self.action_dim)
        elif noise is None:
            shape = (*obs.shape[:-1], self.head.noise_size(self.action_dim))
            draw = torch.randn if self.head.noise_kind == "normal" else torch.rand
            noise = draw(shape, dtype=obs.dtype, device=obs.device)
        return self.head.sample(self.actor, obs, actor, noise)

    def actions(
        self, obs: Tensor, *, noise: Tensor | None = None, actor: Tensor | None = None
    ) -> Tensor:
        """Return the most likely actions, or the ones sampled with `noise`."""
        return self.head.actions(self.actor, obs, actor, noise)

    def action_logprobs(
        self, obs: Tensor, actions: Tensor, *, actor: Tensor | None = None
    ) -> Tensor:
        """Return log-probabilities `(batch,)` of given actions, finite with finite gradients."""
        return self.head.log_probs(self.actor, obs, actions, actor)
