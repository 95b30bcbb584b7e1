"""The interface of an algorithm: a model, named tensors as its state, and pure losses on them.

An algorithm does not draw random numbers. It declares by name, distribution and shape what an
update needs, and the caller draws them, possibly for many updates at once. That way eager, compiled
and captured updates see the same numbers.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.algorithms.functional import (
    METRICS_BY_ORIGIN,
    Adam,
    clip_norm,
    gradients,
    schedule_factor,
)
from rl_training.algorithms.hyperparameters import Hyperparameters, action_chunk, memory_size
from rl_training.errors import ConfigError
from rl_training.models.custom_networks import CustomNetworks
from rl_training.models.mlp import Network
from rl_training.models.network_plan import NetworkPlan
from rl_training.models.networks import EncodedNetwork, ModuleNetwork
from rl_training.observations import ObservationLeaf, ObservationSpec
from rl_training.types import (
    BUFFERS,
    ROW_ERRORS,
    ActionKind,
    ActionSpec,
    Batch,
    Metrics,
    Noise,
    State,
    UpdateResult,
)
from rl_training.validation import validate


class Draw(NamedTuple):
    """A request for independent random numbers of one kind."""

    kind: Literal["normal", "uniform", "bits"]
    """Standard normal, uniform in [0, 1), or integers uniform in [0, 2^63)"""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Draws = Mapping[str, Draw]

STATISTICS = "_statistics"
"""Follows a network's name in the name of its running statistics"""

CRITIC_DROPOUT = "critic_dropout"
"""Setting of the critics, and the name of its random numbers in their loss"""

KIND_TYPES = {"normal": torch.float32, "uniform": torch.float32, "bits": torch.int64}


def draw_kind(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw numbers of one kind, on the generator's device."""
    numbers = torch.empty(shape, dtype=KIND_TYPES[kind], device=generator.device)
    if kind == "normal":
        return numbers.normal_(generator=generator)
    if kind == "uniform":
        return numbers.uniform_(generator=generator)
    return numbers.random_(generator=generator)


def draw_noise(draws: Draws, generator: torch.Generator) -> Noise:
    """Draw all requested numbers, in the order of `draws`."""
    return {name: draw_kind(draw.kind, draw.shape, generator) for name, draw in draws.items()}


class ExplorationMemory(ABC):
    """Changes the random numbers of `explore` by those of earlier steps, on the host.

    A run has one per seed. Prediction has none: it samples each action independently.
    """

    state: dict[str, np.ndarray]
    """What it remembers: arrays that keep their shapes and types, changed in place"""

    @abstractmethod
    def draws(self) -> Draws:
        """Return the random numbers that it needs in addition to `exploration_noise`."""

    @abstractmethod
    def __call__(self, noise: Mapping[str, np.ndarray]) -> None:
        """Change the numbers of one step of the environments, in place."""

    def change(self, noise: Noise, state: State) -> None:
        """Do the same with tensors, of which `state` has those of `self.state`, in place.

        It has no branches, so that it can be captured. Only runs in which exploration never leaves
        the device need it.
        """
        raise ConfigError(
            f"algo: {type(self).__name__} works with environments on the host only, because it has "
            "no method change(noise, state) for tensor environments"
        )


def part_of(network: str) -> str:
    """Return the part of a learner that a network belongs to: `critic` for `critic_body`."""
    return network.partition("_")[0]


class Objective(NamedTuple):
    """Parts of the state that are trained together, and the loss they minimize."""

    parameters: tuple[str, ...]
    loss: Callable[[State, Batch, Noise], tuple[Tensor, Metrics]]
    """Takes the complete state; only the gradient with respect to `parameters` is used"""
    max_grad_norm: float | None = None
    """Clips the joint gradient of all `parameters`; an optimizer can clip each one separately"""


class Algorithm(ABC):
    """Base class of all algorithms: the settings and the state of one learner.

    An update first computes the gradients of all objectives from the same state, then applies
    them. The objectives are therefore independent of each other: they can be compiled into one
    program or run concurrently. A loss must be a pure function of its tensors: it sets no
    attribute, copies nothing to the host and draws no random numbers. This makes it possible to
    compile an update, capture it as a CUDA graph, map it over seeds, save it and restore it.
    """

    hyperparameters_type: ClassVar[type[Hyperparameters]]
    plain_actions: ClassVar[ActionKind] = "continuous"
    """The kind of actions if the constructor gets only their number"""

    def __init__(
        self,
        obs_dim: int | ObservationSpec,
        action_dim: int | ActionSpec,
        hyperparameters: Any = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        planned_updates: int | None = None,
        custom_networks: object = None,
        **overrides: Any,
    ) -> None:
        """Build the model and the initial state.

        `obs_dim` is the size of an observation that is one vector, or the description of another.
        `action_dim` describes the actions of the environment. For actions of the kind
        `plain_actions` it can be a number: of components, or of choices if actions are discrete.
        `hyperparameters` is an instance of `hyperparameters_type` or a mapping, `overrides` are
        single hyper-parameters by name. `planned_updates` is the horizon of the learning-rate
        schedule. `custom_networks` is a factory of modules, see `models.custom_networks`.
        """
        if not isinstance(obs_dim, ObservationSpec):
            obs_dim = ObservationSpec.vector(obs_dim)
        self.observation, self.obs_dim = obs_dim, obs_dim.size
        if isinstance(action_dim, int):
            action_dim = ActionSpec(self.plain_actions, action_dim)
        self.hyperparameters = self._resolve(hyperparameters, overrides)
        self.action_chunk = action_chunk(self.hyperparameters)
        """How many actions of the environment one action of the model is"""
        self.memory_size = memory_size(self.hyperparameters)
        """Numbers that the policy remembers from step to step of an episode; 0 if nothing"""
        self.actions = action_dim.chunks_of(self.action_chunk)
        self.action_dim = self.actions.size
        self.device = torch.device(device)
        self.planned_updates = planned_updates
        self.plan = NetworkPlan(
            self.observation,
            self.hyperparameters.networks,
            None if custom_networks is None else CustomNetworks(custom_networks),
        )
        # Parameters are drawn on the CPU, so that a seed means the same on every device.
        self.model = self.build_model(torch.Generator().manual_seed(seed)).to(self.device)
        self.plan.check(self.networks())
        self._check_dropout()
        self.state: State = {"updates": torch.zeros((), dtype=torch.int64, device=self.device)}
        self.state.update(self.initial_state())
        self.generator = torch.Generator(self.device).manual_seed(seed)

    @abstractmethod
    def build_model(self, generator: torch.Generator) -> nn.Module:
        """Build the networks, with parameters drawn from `generator`."""

    @abstractmethod
    def networks(self) -> Mapping[str, Network]:
        """Return the networks that a saved policy contains, by their name in the state."""

    def extra_state(self) -> State:
        """Return the tensors that are trained in addition to the networks."""
        return {}

    def buffers(self) -> State:
        """Return the initial values of tensors that losses change, such as running statistics.

        They are part of the state and of a saved policy. A loss returns their new values among its
        metrics, as `BUFFERS + name`. They are copied when the gradients are applied. By default
        they are the running statistics of the networks.
        """
        given = {name: network.statistics for name, network in self.networks().items()}
        return {name + STATISTICS: part for name, part in given.items() if part is not None}

    def may_be_not_finite(self) -> frozenset[str]:
        """Return the names of metrics and state that can be NaN or infinite in a healthy run.

        If any other metric or part of the state is not finite, the run stops and is not saved.
        """
        return frozenset(METRICS_BY_ORIGIN)

    @abstractmethod
    def targets(self) -> dict[str, str]:
        """Map the name of each target network to the name of the network that it tracks."""

    @abstractmethod
    def optimizers(self) -> dict[str, Adam]:
        """Return one optimizer for each part of the state that is trained by gradients."""

    @abstractmethod
    def objectives(self, *, update_policy: bool) -> list[Objective]:
        """Return the objectives of one update; the policy's only if `update_policy`."""

    def project(self, state: State, *, policy_updated: bool) -> None:  # noqa: B027
        """Move parameters back to where they must be, in place, after the optimizers have stepped.

        By default they may be anywhere.
        """

    @abstractmethod
    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        """Move the target networks, in place, after the optimizers have stepped.

        `state["updates"]` already includes the current update.
        """

    @final
    def initial_state(self) -> State:
        """Return everything that is saved, except the update counter.

        The parameter vectors are the model's own, not copies.
        """
        state = {name: network.vector.data for name, network in self.networks().items()}
        state |= self.extra_state()
        # Like the vectors, they stay what they are if the rest starts again.
        state |= {name: self.state.get(name, value) for name, value in self.buffers().items()}
        state |= {target: state[source].clone() for target, source in self.targets().items()}
        for name, optimizer in self.optimizers().items():
            state |= optimizer.initial_state(name, state[name])
        return state

    @abstractmethod
    def update_noise(self, batch_size: int) -> Draws:
        """Return the random numbers that the losses of one update need."""

    @final
    def dropout_noise(self, batch_size: int, target_critics: int | None = None) -> Draws:
        """Return the random numbers for dropout in the critics, for `update_noise`; often none.

        `critic_dropout` is for the critics' own loss, `target_dropout` for the critics of targets,
        of which `target_critics` are evaluated, and `policy_dropout` for the loss of the policy.
        """
        critic = self.networks().get("critic")
        if critic is None or not critic.dropout_size:
            return {}
        number = critic.ensemble or 1
        counts = {"critic": number, "target": target_critics or number, "policy": number}
        return {
            f"{name}_dropout": Draw("uniform", (count, batch_size, critic.dropout_size))
            for name, count in counts.items()
        }

    def _check_dropout(self) -> None:
        """Raise `ConfigError` if dropout is set and nothing would be dropped."""
        rate = getattr(self.hyperparameters, CRITIC_DROPOUT, 0.0)
        if rate and CRITIC_DROPOUT not in self.update_noise(1):
            raise ConfigError(
                f"{CRITIC_DROPOUT} = {rate}: the critics of this algorithm have no hidden layers, "
                f"or its losses no dropout; use {CRITIC_DROPOUT}: 0"
            )

    def remember(self, state: State, obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `act` and `explore` take instead of observations, and the next memory.

        Only for policies with a `memory_size`. The memory is `(batch, memory_size)`, and zero at
        the start of an episode.
        """
        raise NotImplementedError("the policy of this algorithm remembers nothing")

    @final
    def act_and_remember(self, state: State, obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return deterministic actions and the next memory."""
        inputs, memory = self.remember(state, obs, memory)
        return self.act(state, inputs), memory

    @final
    def explore_and_remember(
        self, state: State, obs: Tensor, noise: Noise, progress: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return actions for collecting experience and the next memory."""
        inputs, memory = self.remember(state, obs, memory)
        return self.explore(state, inputs, noise, progress), memory

    @abstractmethod
    def act(self, state: State, obs: Tensor) -> Tensor:
        """Return the policy's deterministic actions for observations `(batch, obs_dim)`."""

    @abstractmethod
    def exploration_noise(self, batch_size: int) -> Draws:
        """Return the random numbers that one call of `explore` needs."""

    @abstractmethod
    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        """Return actions for collecting experience; `progress` goes from 0 to 1 over the run."""

    def exploration_memory(self, num_envs: int) -> ExplorationMemory | None:
        """Return what exploration remembers from step to step, for one seed; None if nothing."""
        return None

    def why_deterministic(self) -> str | None:
        """Say why the policy is no distribution over actions; None if it is one.

        `explore` then samples from it, with `noise["action"]` alone.
        """
        return "its policy is deterministic, and the noise in training only serves to explore"

    def begin_rollout(self, state: State, rollout: Batch) -> tuple[Metrics, Metrics]:
        """Return what updates need to know about each transition of a rollout, and metrics.

        Called once before the first update on a rollout, and only for algorithms with
        `RolloutHyperparameters`. `rollout` has all transitions of one seed, `(rows, ...)`: the
        first ones are those of the first step of all environments. The fields of `Batch` that the
        result names are those of later minibatches. Like a loss, it is compiled and mapped over
        seeds; it may also change `state`, in place.
        """
        raise NotImplementedError("this algorithm does not learn from rollouts")

    def update_counts(self, state: State, found: State) -> Tensor | None:
        """Return whether gradients are applied, as a tensor; None if they always are.

        `found` are the gradients and the new values of buffers. If it is False, parameters and
        moments stay what they are.
        """
        return None

    def action_values(self, state: State, obs: Tensor) -> Tensor | None:
        """Return the value of each discrete action `(batch, actions)`; None if there are none."""
        return None

    @final
    def actor_input(self, state: State, obs: Tensor) -> Tensor:
        """Return what the actor's network takes: observations, or the critics' features of them.

        With `shared_encoder`, the features are those of the current critics, without a gradient.
        """
        if not self.plan.shares_encoder:
            return obs
        features: Tensor = self.model.actor_input(obs, state["critic"])  # type: ignore[operator]
        return features

    @final
    def acting_leaves(self) -> tuple[ObservationLeaf, ...]:
        """Return the leaves of observations that actions depend on: critics may see others."""
        networks = self.networks()
        part = next((name for name in ("memory", "actor") if name in networks), "critic")
        acting = [network for name, network in networks.items() if part_of(name) == part]
        is_encoded = any(isinstance(network, EncodedNetwork) for network in acting)
        return self.plan.leaves(part) if is_encoded else self.observation.leaves

    @final
    def why_not_mapped(self) -> str | None:
        """Say why its updates can neither be mapped over seeds nor compiled; None if they can."""
        for name, network in self.networks().items():
            for module in network.modules():
                if isinstance(module, ModuleNetwork) and module.why_not_mapped:
                    return f"{name}: {module.why_not_mapped}"
        return None

    @final
    def update(self, batch: Batch) -> UpdateResult:
        """Take one gradient step on `batch`.

        The policy's metrics are absent from steps that do not update the policy.
        """
        noise = draw_noise(self.update_noise(batch.obs.shape[0]), self.generator)
        updates = int(self.state["updates"].item())
        with torch.no_grad():
            metrics = self.step(
                self.state, batch, noise, update_policy=self.updates_policy_after(updates)
            )
        errors = metrics.pop(ROW_ERRORS, None)
        return UpdateResult(metrics, row_errors=errors)

    @final
    def updates_policy_after(self, updates: int) -> bool:
        """Return whether the update after the first `updates` ones updates the policy.

        As in TD3 and REDQ, it is the last one of each block of `policy_delay` updates.
        """
        return (updates + 1) % self.hyperparameters.policy_delay == 0

    @final
    def step(self, state: State, batch: Batch, noise: Noise, *, update_policy: bool) -> Metrics:
        """Take one gradient step, in place on `state`; on the policy only if `update_policy`."""
        all_gradients: State = {}
        all_metrics: Metrics = {}
        for objective in self.objectives(update_policy=update_policy):
            found, metrics = self.differentiate(objective, state, batch, noise)
            all_gradients |= found
            all_metrics |= metrics
        self.apply(state, all_gradients, policy_updated=update_policy)
        return all_metrics

    @final
    def total_loss(
        self, state: State, batch: Batch, noise: Noise, **settings: Any
    ) -> tuple[Tensor, Metrics]:
        """Return the sum of all losses, the policy's included, and their metrics.

        Each loss has a gradient only with respect to the parameters of its own objective, so the
        gradients of the sum are the ones that `step` applies. `settings` are hyper-parameters that
        replace the learner's own for this call, checked as in its constructor.
        """
        learner = self
        if settings:
            learner = copy.copy(self)
            learner.hyperparameters = self._resolve(self.hyperparameters, settings)
        first, *others = learner.objectives(update_policy=True)
        total, metrics = first.loss(state, batch, noise)
        for objective in others:
            loss, more = objective.loss(state, batch, noise)
            total, metrics = total + loss, metrics | more
        return total, metrics

    @final
    def differentiate(
        self, objective: Objective, state: State, batch: Batch, noise: Noise
    ) -> tuple[State, Metrics]:
        """Return the gradient of each of the objective's parameters, and its metrics.

        New values of buffers are among the gradients.
        """

        def loss(trained: State) -> tuple[Tensor, Metrics]:
            value, metrics = objective.loss({**state, **trained}, batch, noise)
            return value, {name: metric.detach() for name, metric in metrics.items()}

        found, metrics = gradients(loss, {name: state[name] for name in objective.parameters})
        if objective.max_grad_norm is not None:
            found = clip_norm(found, objective.max_grad_norm)
        for name in [name for name in metrics if name.startswith(BUFFERS)]:
            found[name.removeprefix(BUFFERS)] = metrics.pop(name)
        return found, metrics

    @final
    def apply(self, state: State, found: State, *, policy_updated: bool) -> None:
        """Apply gradients and new buffers, project, then move counter and targets, in place."""
        factor = self.learning_rate_factor(state)
        optimizers, counts = self.optimizers(), self.update_counts(state, found)
        networks = self.networks()
        for name, gradient in found.items():
            if name not in optimizers:
                state[name].copy_(gradient)
                continue
            optimizer = optimizers[name]
            own = factor
            if optimizer.delay > 1:
                own = self.learning_rate_factor(state, optimizer.delay)
            own = own if optimizer.scheduled else 1.0
            network = networks.get(name) if optimizer.weight_decay else None
            kept = None if network is None or not network.constants else state[name].clone()
            if counts is None:
                optimizer.step(state, name, gradient, own)
            else:
                optimizer.step_if(counts, state, name, gradient, own)
            if network is not None and kept is not None:  # constants would decay
                state[name].copy_(network.with_constants_of(state[name], kept))
        self.project(state, policy_updated=policy_updated)
        state["updates"].add_(1)
        self.update_targets(state, policy_updated=policy_updated)

    @final
    def load_state(self, state: State) -> None:
        """Overwrite the state in place, so that views of it stay valid."""
        if state.keys() != self.state.keys():
            missing, extra = self.state.keys() - state.keys(), state.keys() - self.state.keys()
            raise ValueError(
                f"state does not fit: missing {sorted(missing)}, extra {sorted(extra)}"
            )
        with torch.no_grad():
            for name, tensor in self.state.items():
                given, expected = tuple(state[name].shape), tuple(tensor.shape)
                if given != expected:
                    raise ValueError(f"{name} has shape {given}, expected {expected}")
                tensor.copy_(state[name])

    @final
    def move_state(self, storage: State) -> None:
        """Move the state into the given tensors, for example one row of a population's state."""
        for name, tensor in storage.items():
            tensor.copy_(self.state[name])
        self.state = dict(storage)
        for name, network in self.networks().items():
            network.vector.data = self.state[name]
            if name + STATISTICS in self.state:
                network.use_statistics(self.state[name + STATISTICS])

    @final
    def learning_rate_factor(self, state: State, delay: int = 1) -> Tensor | float:
        """Return the schedule's factor for the next update, if it counts one of `delay` updates."""
        settings, updates = self.hyperparameters, state["updates"]
        return schedule_factor(
            settings.decay,
            updates if delay == 1 else updates // delay,
            self.planned_updates,
            settings.warmup_steps,
            settings.learning_rate_end_factor,
        )

    @classmethod
    def _resolve(cls, given: Any, overrides: dict[str, Any]) -> Hyperparameters:
        if given is None or isinstance(given, dict):
            return validate(cls.hyperparameters_type, {**(given or {}), **overrides})
        if not isinstance(given, cls.hyperparameters_type):
            raise ConfigError(
                f"hyperparameters must be {cls.hyperparameters_type.__name__} or a mapping, "
                f"got {type(given).__name__}"
            )
        return validate(cls.hyperparameters_type, {**given.given(), **overrides})
