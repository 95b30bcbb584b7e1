"""The contract of an algorithm: a model, a state of named tensors, and a pure step on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol, final

import torch
from torch import Tensor, nn

from rl_training.algorithms.functional import schedule_factor
from rl_training.algorithms.hyperparameters import Hyperparameters
from rl_training.errors import ConfigError
from rl_training.models.mlp import MLP
from rl_training.types import Batch, Metrics, Noise, State, UpdateResult
from rl_training.validation import validate


class StepProgram(Protocol):
    """A way to execute `Algorithm.step`: as it is, compiled, or captured."""

    def __call__(
        self, state: State, batch: Batch, noise: Noise, *, update_policy: bool
    ) -> Metrics: ...


class Algorithm(ABC):
    """An algorithm for one problem size, with its state; subclasses say what is learned.

    `step` may touch nothing but the tensors it is given: no attribute is written, nothing is read
    back to the host, no random number is drawn. That is what lets one place compile it, capture
    it, map it over seeds, save it and restore it.
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
        self.gradient_steps = 0
        self.program: StepProgram = self.step

    @abstractmethod
    def build_model(self, generator: torch.Generator) -> nn.Module:
        """The networks, with parameters drawn from `generator`."""

    @abstractmethod
    def initial_state(self) -> State:
        """Named tensors to learn; the model's own parameter vectors among them, not copies."""

    @abstractmethod
    def networks(self) -> dict[str, MLP]:
        """The networks whose parameters a saved policy holds, by their name in the state."""

    @abstractmethod
    def draw_noise(self, batch_size: int, generator: torch.Generator) -> Noise:
        """The random numbers that one `step` needs."""

    @abstractmethod
    def step(self, state: State, batch: Batch, noise: Noise, *, update_policy: bool) -> Metrics:
        """One gradient step, in place on `state`; without the policy's part if so told."""

    @abstractmethod
    def act(self, state: State, obs: Tensor) -> Tensor:
        """The policy's best actions for observations `(batch, obs_dim)`."""

    @abstractmethod
    def draw_exploration_noise(self, batch_size: int, generator: torch.Generator) -> Noise:
        """The random numbers that one `explore` needs."""

    @abstractmethod
    def explore(self, state: State, obs: Tensor, noise: Noise, progress: float) -> Tensor:
        """Actions to gather experience with; `progress` runs from 0 to 1 over the run."""

    @final
    def update(self, batch: Batch) -> UpdateResult:
        """One gradient step on `batch`; on steps without a policy update its metrics are absent."""
        noise = self.draw_noise(batch.obs.shape[0], self.generator)
        # The last of each `policy_delay` updates moves the policy too, as in TD3 and REDQ.
        update_policy = (self.gradient_steps + 1) % self.hyperparameters.policy_delay == 0
        with torch.no_grad():
            metrics = self.program(self.state, batch, noise, update_policy=update_policy)
        self.gradient_steps += 1
        return UpdateResult(metrics)

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
        self.gradient_steps = int(self.state["updates"].item())

    @final
    def learning_rate_factor(self, state: State) -> Tensor | float:
        """The schedule's factor for the update that is about to be made."""
        chosen = self.hyperparameters
        return schedule_factor(
            chosen.learning_rate_schedule,
            state["updates"],
            self.planned_updates,
            chosen.warmup_steps,
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
        return validate(cls.hyperparameters_type, {**given.model_dump(), **overrides})
