"""Random numbers as an algorithm asks for them: by name, distribution and shape.

An algorithm only declares what it needs. Whoever runs it draws, once for many updates if that is
faster, so that eager, compiled and captured updates see the same numbers.

The contract of an algorithm: a model, a state of named tensors, and pure losses on them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from rl_training.algorithms.functional import gradients, schedule_factor
from rl_training.algorithms.hyperparameters import Hyperparameters
from rl_training.algorithms.optimizer import Adam, clip_norm
from rl_training.errors import ConfigError
from rl_training.models.mlp import MLP
from rl_training.types import ROW_ERRORS, Batch, Metrics, Noise, State, UpdateResult
from rl_training.validation import validate


class Draw(NamedTuple):
    """Independent random numbers of one kind."""

    kind: Literal["normal", "uniform", "bits"]
    """Standard normal, uniform in [0, 1), or integers uniform in [0, 2^63)"""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Draws = Mapping[str, Draw]

KIND_TYPES = {"normal": torch.float32, "uniform": torch.float32, "bits": torch.int64}


def draw_kind(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers of one kind, on the generator's device."""
    numbers = torch.empty(shape, dtype=KIND_TYPES[kind], device=generator.device)
    if kind == "normal":
        return numbers.normal_(generator=generator)
    if kind == "uniform":
        return numbers.uniform_(generator=generator)
    return numbers.random_(generator=generator)


def draw_noise(draws: Draws, generator: torch.Generator) -> Noise:
    """All the numbers that are asked for, drawn one after another."""
    return {name: draw_kind(draw.kind, draw.shape, generator) for name, draw in draws.items()}


class Objective(NamedTuple):
    """Parts of the state that are learned together, and the loss they descend."""

    parameters: tuple[str, ...]
    loss: Callable[[State, Batch, Noise], tuple[Tensor, Metrics]]
    """Of the complete state; differentiated with respect to `parameters` alone"""
    max_grad_norm: float | None = None
    """Clips the gradient of all `parameters` together; optimisers can clip each one's alone"""


class Algorithm(ABC):
    """An algorithm for one problem size, with its state; subclasses say what is learned.

    An update computes every objective's gradients from the state as it was before, then applies
    them all. So objectives are independent: they can be compiled into one program or run at the
    same time. A loss may touch nothing but the tensors it is given: no attribute is written,
    nothing is read back to the host, no random number is drawn. That is what lets one place
    compile it, capture it, map it over seeds, save it and restore it.
    """

    hyperparameters_type: ClassVar[type[Hyperparameters]]

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hyperparameters: Any = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        planned_updates: int | None = None,
        **overrides: Any,
    ) -> None:
        """`hyperparameters` is a model or a mapping; `overrides` are single ones by name.

        `planned_updates` is the horizon of the learning-rate schedule.
        """
        self.obs_dim, self.action_dim = obs_dim, action_dim
        self.hyperparameters = self._resolve(hyperparameters, overrides)
        self.device = torch.device(device)
        self.planned_updates = planned_updates
        # Parameters are drawn on the CPU, so that a seed means the same on every device.
        self.model = self.build_model(torch.Generator().manual_seed(seed)).to(self.device)
        self.state: State = {"updates": torch.zeros((), dtype=torch.int64, device=self.device)}
        self.state.update(self.initial_state())
        self.generator = torch.Generator(self.device).manual_seed(seed)

    @abstractmethod
    def build_model(self, generator: torch.Generator) -> nn.Module:
        """The networks, with parameters drawn from `generator`."""

    @abstractmethod
    def networks(self) -> dict[str, MLP]:
        """The networks whose parameters a saved policy holds, by their name in the state."""

    def extra_state(self) -> State:
        """Tensors to learn beside the networks; none unless an algorithm says so."""
        return {}

    @abstractmethod
    def targets(self) -> dict[str, str]:
        """Slowly moving copies: the name of each, and of the network that it follows."""

    @abstractmethod
    def optimizers(self) -> dict[str, Adam]:
        """One optimiser for each part of the state that follows a gradient, by its name."""

    @abstractmethod
    def objectives(self, *, update_policy: bool) -> list[Objective]:
        """What one update descends; without the policy's part if so told."""

    @abstractmethod
    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        """Move the targets, in place, after the gradients of an update were applied.

        `state["updates"]` counts that update already.
        """

    @final
    def initial_state(self) -> State:
        """All that is saved: the model's own vectors (not copies), targets, moments, the rest."""
        state = {name: network.vector.data for name, network in self.networks().items()}
        state |= self.extra_state()
        state |= {target: state[source].clone() for target, source in self.targets().items()}
        for name, optimizer in self.optimizers().items():
            state |= optimizer.initial_state(name, state[name])
        return state

    @abstractmethod
    def update_noise(self, batch_size: int) -> Draws:
        """The random numbers that the losses of one update need."""

    @abstractmethod
    def act(self, state: State, obs: Tensor) -> Tensor:
        """The policy's best actions for observations `(batch, obs_dim)`."""

    @abstractmethod
    def exploration_noise(self, batch_size: int) -> Draws:
        """The random numbers that one `explore` needs."""

    @abstractmethod
    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        """Actions to gather experience with; `progress` runs from 0 to 1 over the run."""

    @final
    def update(self, batch: Batch) -> UpdateResult:
        """One gradient step on `batch`; on steps without a policy update its metrics are absent."""
        noise = draw_noise(self.update_noise(batch.obs.shape[0]), self.generator)
        made = int(self.state["updates"].item())
        with torch.no_grad():
            metrics = self.step(
                self.state, batch, noise, update_policy=self.updates_policy_after(made)
            )
        errors = metrics.pop(ROW_ERRORS, None)
        return UpdateResult(metrics, row_errors=errors)

    @final
    def updates_policy_after(self, updates: int) -> bool:
        """Whether the update that follows `updates` others moves the policy too.

        The last of each `policy_delay` does, as in TD3 and REDQ.
        """
        return (updates + 1) % self.hyperparameters.policy_delay == 0

    @final
    def step(self, state: State, batch: Batch, noise: Noise, *, update_policy: bool) -> Metrics:
        """One gradient step, in place on `state`; without the policy's part if so told."""
        found: State = {}
        metrics: Metrics = {}
        for objective in self.objectives(update_policy=update_policy):
            its_gradients, its_metrics = self.differentiate(objective, state, batch, noise)
            found |= its_gradients
            metrics |= its_metrics
        self.apply(state, found, policy_updated=update_policy)
        return metrics

    @final
    def differentiate(
        self, objective: Objective, state: State, batch: Batch, noise: Noise
    ) -> tuple[State, Metrics]:
        """The gradient of each of the objective's parameters, and its metrics."""

        def loss(learned: State) -> tuple[Tensor, Metrics]:
            value, metrics = objective.loss({**state, **learned}, batch, noise)
            return value, {name: metric.detach() for name, metric in metrics.items()}

        found, metrics = gradients(loss, {name: state[name] for name in objective.parameters})
        if objective.max_grad_norm is not None:
            found = clip_norm(found, objective.max_grad_norm)
        return found, metrics

    @final
    def apply(self, state: State, found: State, *, policy_updated: bool) -> None:
        """Step every optimiser that has a gradient, then the targets and the count, in place."""
        factor = self.learning_rate_factor(state)
        optimizers = self.optimizers()
        for name, gradient in found.items():
            optimizer = optimizers[name]
            optimizer.step(state, name, gradient, factor if optimizer.scheduled else 1.0)
        state["updates"].add_(1)
        self.update_targets(state, policy_updated=policy_updated)

    @final
    def load_state(self, state: State) -> None:
        """Overwrite the state in place, so that every view of it stays valid."""
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
        """Keep the state in these tensors from now on, such as one row of a population's."""
        for name, tensor in storage.items():
            tensor.copy_(self.state[name])
        self.state = dict(storage)
        for name, network in self.networks().items():
            network.vector.data = self.state[name]

    @final
    def learning_rate_factor(self, state: State) -> Tensor | float:
        """The schedule's factor for the update that is about to be made."""
        chosen = self.hyperparameters
        return schedule_factor(
            chosen.decay,
            state["updates"],
            self.planned_updates,
            chosen.warmup_steps,
            chosen.learning_rate_end_factor,
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
