"""A trained policy, which maps observations to actions without an environment."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, overload

import numpy as np
import torch
from pydantic import Field

from rl_training.algorithms.base import Algorithm, draw_noise
from rl_training.algorithms.hyperparameters import Hyperparameters
from rl_training.algorithms.spec import action_kinds, get_algorithm_spec
from rl_training.data.leaves.description import LeafDescription
from rl_training.data.transforms import ObservationNormalizer, RewardTransform
from rl_training.envs import ActionScaler
from rl_training.envs.wrapper_statistics import MAX_WRAPPERS, WrapperStatistics
from rl_training.errors import (
    CheckpointError,
    MissingNetworksError,
    OtherNetworksError,
    UserError,
    brief,
)
from rl_training.execution.open_loop import ActionQueue
from rl_training.internals import available_memory
from rl_training.models.custom_networks import current_networks, networks_name
from rl_training.models.mlp import at_most_parameters
from rl_training.observations import ObservationSpec
from rl_training.types import BUFFERS, ActionKind, Json, SpaceInfo, State
from rl_training.validation import StrictModel, validate

if TYPE_CHECKING:
    from rl_training.execution.policy_module import LeafInputs, PolicyLayers

NORMALIZER_PREFIX = "normalizer."
COPIES, SMALL = 8, 2**28
"""Copies of a saved tensor while it is loaded (its file, optimizer moments, target networks, ...),
and the bytes from which their memory is checked"""
MAX_CHOICES = 10**7
NEEDS_STATE = (
    "state: this policy is recurrent; begin an episode with "
    "action, state = predict(obs, episode_start=True), and continue it with "
    "action, state = predict(obs, state=state)"
)
EpisodeStart = bool | Sequence[bool] | np.ndarray
"""Whether an episode begins, for all observations or for each one of a batch"""
ROOM_FACTOR, ROOM = 4, 2**16
"""A saved policy may have this many parameters per saved number, and this many besides: algorithms
may have networks that are not saved with the policy"""


class Policy:
    """Maps observations to actions, in the units of the model or of the environment."""

    def __init__(
        self,
        algorithm: Algorithm,
        spaces: SpaceInfo,
        normalizer: ObservationNormalizer | None = None,
        *,
        algorithm_name: str,
    ) -> None:
        self.algorithm, self.spaces, self.normalizer = algorithm, spaces, normalizer
        self.algorithm_name = algorithm_name
        self.rewards: RewardTransform | None = RewardTransform()
        """The reward scaling of its training data, which continued training applies as well.

        None if datasets were scaled differently."""
        self.settings: Hyperparameters | None = None
        """The algorithm's settings before each `auto` was resolved; None if there was none"""
        self.wrapper_statistics: list[Json] | None = None
        """Running statistics of the training environment's wrappers; None if unknown"""
        self._scaler = None
        if spaces.is_continuous:
            self._scaler = ActionScaler(*spaces.bounds)
        self._generator = torch.Generator(algorithm.device).manual_seed(0)

    @property
    def action_chunk(self) -> int:
        """How many actions the policy chooses at once, to be executed one after another."""
        return self.algorithm.action_chunk

    @property
    def memory_size(self) -> int:
        """Numbers that the policy remembers from step to step of an episode; 0 if nothing."""
        return self.algorithm.memory_size

    def initial_state(self, number: int | None = None) -> np.ndarray:
        """Return the state of an episode that begins: zeros.

        It is `(memory_size,)` for one observation, and `(number, memory_size)` for a batch of that
        many.
        """
        lead = () if number is None else (number,)
        return np.zeros((*lead, self.memory_size), np.float32)

    def act(self, obs: np.ndarray, *, explore: bool = False) -> np.ndarray:
        """Return actions in model units for observations `(batch, obs_dim)`.

        The actions of a chunk are side by side, as critics take them.
        """
        return self.act_and_remember(obs, None, explore=explore)[0]

    def act_and_remember(
        self, obs: np.ndarray, memory: np.ndarray | None, *, explore: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return actions, as `act` does, and what a recurrent policy remembers after them.

        `memory` is what it remembers so far, `(batch, memory_size)`.
        """
        if not len(obs):  # encoders cannot infer the shapes of leaves from no rows
            one = None if memory is None else self.initial_state(1)
            rows = self.spaces.observation.smallest_rows(1)
            return self.act_and_remember(rows, one, explore=explore)[0][:0], memory
        with torch.inference_mode():
            algorithm = self.algorithm
            inputs, memory = self.remember(self._inputs(obs), memory)
            if explore:
                noise = draw_noise(algorithm.exploration_noise(len(obs)), self._generator)
                progress = torch.ones((), device=algorithm.device)
                actions = algorithm.explore(algorithm.state, inputs, noise, progress)
            else:
                actions = algorithm.act(algorithm.state, inputs)
            result: np.ndarray = actions.cpu().numpy()
            return result, memory

    def remember(
        self, inputs: torch.Tensor, memory: np.ndarray | None
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """Return what actions depend on, and the next memory of a recurrent policy.

        `inputs` are observations as the networks take them.
        """
        if not self.memory_size:
            return inputs, memory
        if memory is None:
            raise UserError(NEEDS_STATE)
        algorithm = self.algorithm
        given = torch.tensor(memory, dtype=torch.float32).to(algorithm.device)
        inputs, after = algorithm.remember(algorithm.state, inputs, given)
        return inputs, after.cpu().numpy()

    @overload
    def predict(
        self, obs: Any, *, deterministic: bool = ..., state: None = ..., episode_start: None = ...
    ) -> np.ndarray: ...

    @overload
    def predict(
        self,
        obs: Any,
        *,
        deterministic: bool = ...,
        state: np.ndarray,
        episode_start: EpisodeStart | None = ...,
    ) -> tuple[np.ndarray, np.ndarray]: ...

    @overload
    def predict(
        self,
        obs: Any,
        *,
        deterministic: bool = ...,
        state: np.ndarray | None = ...,
        episode_start: EpisodeStart,
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def predict(
        self,
        obs: Any,
        *,
        deterministic: bool = True,
        state: np.ndarray | None = None,
        episode_start: EpisodeStart | None = None,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Return actions in environment units for one observation or a batch of observations.

        With an `action_chunk` above 1, an action has a leading axis of that length.

        With `state` or `episode_start`, return the actions and the next state, which a recurrent
        policy needs. Its first call has `episode_start=True` and the following ones the `state`
        that the one before returned. With both, `episode_start` says for which observations of a
        batch an episode begins, whose state is then not used. The state of a policy that is not
        recurrent has no numbers.
        """
        rows, is_batch = self._rows_of(obs)
        if not self.spaces.observation.are_finite(rows):
            kind = self.spaces.observation.narrowest_float
            raise UserError(f"obs contains values that are NaN, or infinite in {kind}")
        memory = self._memory_of(state, episode_start, len(rows) if is_batch else None)
        chosen, after = self.act_and_remember(rows, memory, explore=not deterministic)
        actions = self._in_environment_units(chosen)
        if after is None:
            return actions if is_batch else actions[0]
        return (actions, after) if is_batch else (actions[0], after[0])

    def _memory_of(self, state: Any, episode_start: Any, number: int | None) -> np.ndarray | None:
        """Return the memory `(batch, memory_size)` of a state; `number` is that of a batch.

        None if neither state nor starts are given.
        """
        if state is None and episode_start is None:
            if self.memory_size:
                raise UserError(NEEDS_STATE)
            return None
        starts = np.asarray(False if episode_start is None else episode_start)
        initial = self.initial_state(number)
        if starts.shape not in ((), initial.shape[:-1]) or starts.dtype != np.bool_:
            raise UserError(
                "episode_start must be True, False, or one of them for each observation of a batch"
            )
        if state is None:
            if not starts.all():
                raise UserError(NEEDS_STATE)
            return np.atleast_2d(initial)
        try:
            memory = np.array(state, np.float32)
        except (TypeError, ValueError) as error:
            raise UserError(f"state must be an array of numbers ({error})") from None
        if memory.shape != initial.shape:
            raise UserError(
                f"state has shape {memory.shape}, but these observations need {initial.shape}: "
                "their number stays the same from step to step; use what the step before "
                "returned, or episode_start=True to begin"
            )
        if not np.isfinite(memory).all():
            raise UserError("state contains NaN or infinite values")
        memory[starts] = 0.0
        return np.atleast_2d(memory)

    def act_in_environment(
        self, rows: np.ndarray, memory: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return actions in environment units for observation rows `(batch, obs_dim)`.

        They are followed by what a recurrent policy that remembers `memory` remembers after them.
        """
        actions, after = self.act_and_remember(rows, memory)
        return self._in_environment_units(actions), after

    def rows_of_leaves(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """Return observation rows of a batch of the leaves that actions depend on, in order."""
        observation = self.spaces.observation
        if observation.is_vector:
            return leaves[0]
        names = (leaf.name for leaf in self.algorithm.acting_leaves())
        return observation.pack_some(dict(zip(names, leaves, strict=True)))

    def _rows_of(self, obs: Any) -> tuple[np.ndarray, bool]:
        """Return observations of the environment as rows, and whether they are a batch."""
        observation = self.spaces.observation
        if not observation.is_vector:
            needed = self.algorithm.acting_leaves()
            try:
                return observation.rows_of(obs, needed)
            except (ValueError, TypeError) as error:
                taken = ObservationSpec(needed).describe()
                raise UserError(
                    f"obs: {error}; this policy takes {taken}, or a batch of them"
                ) from None
        array = _as_observations(obs)
        if array.ndim not in (1, 2) or array.shape[-1] != self.spaces.obs_dim:
            raise UserError(
                f"obs has shape {array.shape}; this policy takes ({self.spaces.obs_dim},) or "
                f"(batch, {self.spaces.obs_dim})"
            )
        return np.atleast_2d(array), array.ndim == 2

    def sample(
        self, obs: np.ndarray, noise: np.ndarray, memory: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the same as `act_in_environment`, with actions that are sampled with given noise.

        `obs` is `(batch, obs_dim)` and `noise` is what `exploration_noise` of the algorithm says.
        Its policy must be a distribution: its `why_deterministic` is None.
        """
        algorithm = self.algorithm
        with torch.inference_mode():
            inputs, memory = self.remember(self._inputs(obs), memory)
            drawn = {"action": torch.tensor(noise, dtype=torch.float32, device=algorithm.device)}
            progress = torch.ones((), device=algorithm.device)
            actions = algorithm.explore(algorithm.state, inputs, drawn, progress)
        return self._in_environment_units(actions.cpu().numpy()), memory

    def action_values(self, obs: np.ndarray) -> np.ndarray | None:
        """Return the value of each discrete action `(batch, actions)`; None if there are none."""
        with torch.inference_mode():
            values = self.algorithm.action_values(self.algorithm.state, self._inputs(obs))
        return None if values is None else values.cpu().numpy()

    def _inputs(self, obs: np.ndarray) -> torch.Tensor:
        """Return what the networks take."""
        # A copy in memory of PyTorch: kernels give the same bits only at equal alignment.
        inputs = torch.tensor(obs, dtype=torch.float32)
        if self.normalizer is not None:
            inputs = self.normalizer.normalize(inputs)
        return inputs.to(self.algorithm.device)

    def _in_environment_units(self, actions: np.ndarray) -> np.ndarray:
        if self.action_chunk > 1:
            single = self._single_in_environment_units(
                actions.reshape(len(actions) * self.action_chunk, -1)
            )
            return single.reshape(len(actions), self.action_chunk, *single.shape[1:])
        return self._single_in_environment_units(actions)

    def _single_in_environment_units(self, actions: np.ndarray) -> np.ndarray:
        if self._scaler is not None:
            return self.spaces.shaped(self._scaler.to_environment(actions))
        return self.spaces.shaped(actions + self.spaces.first_choice)

    def player(self, num_envs: int) -> Player:
        """Return what acts with this policy in parallel environments, step by step."""
        if self.memory_size:
            return RecurrentPlayer(self, num_envs)
        return Player(self) if self.action_chunk == 1 else OpenLoopPlayer(self, num_envs)

    @property
    def module(self) -> PolicyLayers | LeafInputs:
        """A `torch.nn.Module` that maps observations to deterministic actions.

        Observations `(batch, obs_dim)` and actions are in environment units, as in `predict`. If an
        observation is not one vector, its parts that the actions depend on are separate inputs.
        Chunks of actions are `(batch, action_chunk, ...)`. The module of a recurrent policy also
        takes the state `(batch, memory_size)`, after the observations, and also returns the next.
        Every access returns a new copy; changing or moving it does not change the policy.
        """
        from rl_training.execution.policy_module import LeafInputs, policy_module

        module = policy_module(self.algorithm, self.spaces, self.normalizer)
        observation = self.spaces.observation
        if observation.is_vector:
            return module
        return LeafInputs(module, observation, self.algorithm.acting_leaves())

    def describe(self) -> Json:
        """Return the JSON values that `from_parts` needs in addition to the tensors."""
        spaces = self.spaces
        description = PolicyDescription(
            algo=self.algorithm_name,
            algo_kwargs=(self.settings or self.algorithm.hyperparameters).model_dump(mode="json"),
            obs_dim=spaces.obs_dim,
            observation=_described_leaves(spaces.observation),
            action_dim=spaces.action_dim,
            discrete=not spaces.is_continuous,
            action_kind=spaces.action_kind,
            action_shape=None if spaces.action_shape is None else list(spaces.action_shape),
            action_start=spaces.action_start,
            action_low=None if spaces.action_low is None else spaces.action_low.tolist(),
            action_high=None if spaces.action_high is None else spaces.action_high.tolist(),
            normalize_observations=self.normalizer is not None,
            rewards=self.rewards,
            wrapper_statistics=self._described_wrappers(),
            custom_networks=self.algorithm.plan.custom_name,
        )
        return description.model_dump(mode="json")

    def _described_wrappers(self) -> list[WrapperStatistics] | None:
        statistics = self.wrapper_statistics
        return None if statistics is None else [WrapperStatistics(**each) for each in statistics]

    def tensors(self) -> State:
        """Return the tensors that prediction needs: layers, buffers and the normalizer."""
        named = {
            f"{name}.{part}": tensor
            for name, network in self.algorithm.networks().items()
            for part, tensor in network.unflatten(self.algorithm.state[name]).items()
        }
        named |= {BUFFERS + name: self.algorithm.state[name] for name in self.algorithm.buffers()}
        if self.normalizer is not None:
            named |= {NORMALIZER_PREFIX + k: v for k, v in self.normalizer.state.items()}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    def first_not_finite(self) -> str | None:
        """Name the first of the policy's `tensors` that is not finite."""
        named = self.tensors().items()
        return next((name for name, tensor in named if not tensor.isfinite().all()), None)

    def load_tensors(self, tensors: State) -> None:
        """Load the result of `tensors` in place; raise `CheckpointError` if it does not fit."""
        if tensors.keys() != (expected := self.tensors()).keys():
            differing = sorted(tensors.keys() ^ expected.keys())
            raise CheckpointError(f"policy tensors do not fit this model: {', '.join(differing)}")
        for name, network in self.algorithm.networks().items():
            parts = {part: tensors[f"{name}.{part}"] for part in network.layout.shapes}
            try:
                vector = network.flatten(parts)
            except ValueError as error:
                raise CheckpointError(f"policy tensors do not fit this model: {error}") from None
            expected_shape = self.algorithm.state[name].shape
            if vector.shape != expected_shape:  # a different number of networks in the ensemble
                raise CheckpointError(
                    f"policy tensors do not fit this model: {name} has {len(vector):,} numbers, "
                    f"expected {len(self.algorithm.state[name]):,}"
                )
            self.algorithm.state[name].copy_(vector)
        for name in self.algorithm.buffers():
            self.algorithm.state[name].copy_(tensors[BUFFERS + name])
        if self.normalizer is not None:
            state = {name: tensors[NORMALIZER_PREFIX + name] for name in self.normalizer.state}
            self.normalizer.load_state(state)

    @classmethod
    def from_parts(cls, description: Json, tensors: State, device: str = "cpu") -> Policy:
        """Build a policy from the results of `describe` and `tensors`."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        policy = cls.untrained(description, shapes, device)
        policy.load_tensors(tensors)
        return policy

    @classmethod
    def untrained(
        cls, description: Json, shapes: Mapping[str, tuple[int, ...]], device: str = "cpu"
    ) -> Policy:
        """Build a policy from the result of `describe`, with initial parameters.

        `shapes` are those of its saved tensors. Raises `CheckpointError` if the description asks
        for anything else, before it decides how much memory is allocated.
        """
        numbers = sum(map(math.prod, shapes.values()))
        try:
            saved = PolicyDescription.of(description)
            spec = get_algorithm_spec(saved.algo)
            # An encoder may have fewer parameters than an image has words.
            inputs = saved.obs_dim if saved.observation is None else 0
            if max(inputs, saved.action_dim) > numbers:
                raise ValueError("obs_dim and action_dim do not match the tensors")
            _check_memory(numbers)
            spaces = saved.spaces()
            if not spec.fits(spaces):
                kinds = action_kinds(spec.actions, " or ")
                raise ValueError(f"{saved.algo} needs {kinds} actions")
            settings = spec.hyperparameters_type.upgrade(saved.algo_kwargs)
            custom = None if saved.custom_networks is None else current_networks()
            if saved.custom_networks is not None and custom is None:
                raise MissingNetworksError("this policy", saved.custom_networks)
            room = ROOM_FACTOR * numbers + ROOM
            with _comparing_networks(saved.custom_networks, custom), at_most_parameters(room):
                algorithm = spec.algorithm(
                    spaces.observation,
                    spaces.actions,
                    settings,
                    device=device,
                    custom_networks=custom,
                )
        except (ValueError, RuntimeError, TypeError, ArithmeticError, LookupError) as error:
            raise CheckpointError(f"policy.json: not a valid policy: {brief(error)}") from None
        normalizer = None
        if saved.normalize_observations:
            normalizer = ObservationNormalizer(saved.obs_dim)
        policy = cls(algorithm, spaces, normalizer, algorithm_name=saved.algo)
        policy.rewards = saved.rewards
        if saved.wrapper_statistics is not None:
            policy.wrapper_statistics = [each.model_dump() for each in saved.wrapper_statistics]
        with _comparing_networks(saved.custom_networks, custom):
            policy._check_shapes(shapes)
        return policy

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `CheckpointError` if tensors of these shapes do not fit."""
        expected = {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}
        wrong = sorted(
            name
            for name in expected.keys() | shapes.keys()
            if expected.get(name) != shapes.get(name)
        )
        if wrong:
            name = wrong[0]
            raise CheckpointError(
                f"policy tensors do not fit this model: {name} has shape {shapes.get(name)}, "
                f"expected {expected.get(name)}"
            )


@contextlib.contextmanager
def _comparing_networks(saved: str | None, given: object) -> Iterator[None]:
    """Let a policy that does not fit a user's networks name those that were saved and given."""
    try:
        yield
    except (ValueError, RuntimeError, TypeError, ArithmeticError, LookupError) as error:
        name = networks_name(given)
        if saved is None or name is None:
            raise
        raise OtherNetworksError(saved, name, brief(error)) from None


class Player:
    """Acts deterministically in parallel environments, one step at a time."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def memory(self) -> np.ndarray | None:
        """What a recurrent policy remembers, `(num_envs, memory_size)`; None for others."""
        return None

    def act(self, obs: np.ndarray) -> np.ndarray:
        """Return the next actions `(num_envs, ...)` in model units."""
        return self.policy.act(obs)

    def end(self, ended: np.ndarray) -> None:
        """Note whose episode is over, `(num_envs,)` bool; each action is chosen anew anyway."""


class RecurrentPlayer(Player):
    """Remembers the episodes that are played."""

    def __init__(self, policy: Policy, num_envs: int) -> None:
        super().__init__(policy)
        self._memory = policy.initial_state(num_envs)

    @property
    def memory(self) -> np.ndarray:
        return self._memory

    def act(self, obs: np.ndarray) -> np.ndarray:
        actions, after = self.policy.act_and_remember(obs, self._memory)
        assert after is not None
        self._memory = after
        return actions

    def end(self, ended: np.ndarray) -> None:
        self._memory = np.where(ended[:, None], np.float32(0), self._memory)


class OpenLoopPlayer(Player):
    """Executes a chunk of actions before it chooses the next one."""

    def __init__(self, policy: Policy, num_envs: int) -> None:
        super().__init__(policy)
        self._queue = ActionQueue(policy.action_chunk, num_envs, policy.spaces.action_dim)

    def act(self, obs: np.ndarray) -> np.ndarray:
        if self._queue.is_empty.any():
            self._queue.fill(self.policy.act(obs))
        return self._queue.take()

    def end(self, ended: np.ndarray) -> None:
        self._queue.discard(ended)


def _check_memory(numbers: int) -> None:
    """Raise `ValueError` if a policy with this many saved numbers does not fit into memory."""
    needed = 4 * COPIES * numbers
    available = None if needed < SMALL else available_memory("cpu")
    if available is not None and needed > available:
        raise ValueError(
            f"its tensors have {numbers:,} numbers, which need {needed:,} bytes of memory; "
            f"{available:,} are available"
        )


class PolicyDescription(StrictModel):
    """The content of `policy.json`."""

    algo: str
    algo_kwargs: dict[str, Any]
    obs_dim: Annotated[int, Field(ge=1, le=10**7)]
    observation: Annotated[list[LeafDescription], Field(min_length=1, max_length=10**4)] | None = (
        None
    )
    """The leaves of an observation; None: one vector of `obs_dim` numbers"""
    action_dim: Annotated[int, Field(ge=1, le=10**7)]
    discrete: bool
    """Whether actions are choices of any kind"""
    action_kind: ActionKind | None = None
    """None in files of versions that had only `continuous` and `discrete` actions"""
    action_shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=32)] | None = None
    action_start: Annotated[int, Field(ge=-(2**31), lt=2**31)]
    action_low: list[float] | None
    action_high: list[float] | None
    normalize_observations: bool
    rewards: RewardTransform | None = RewardTransform()
    wrapper_statistics: (
        Annotated[list[WrapperStatistics], Field(max_length=MAX_WRAPPERS)] | None
    ) = None
    custom_networks: Annotated[str, Field(max_length=1000)] | None = None
    """Name of the class of a user's networks, which has to be given again"""

    @classmethod
    def of(cls, description: Json) -> PolicyDescription:
        """Read the result of `Policy.describe`, which may have further keys."""
        return validate(cls, {k: v for k, v in description.items() if k in cls.model_fields})

    def spaces(self) -> SpaceInfo:
        kind = self.action_kind or ("discrete" if self.discrete else "continuous")
        bounds = (self.action_low, self.action_high)
        if any((bound is None) != (kind == "discrete") for bound in bounds) or any(
            bound is not None and len(bound) != self.action_dim for bound in bounds
        ):
            raise ValueError(f"action_low and action_high do not fit {self.action_dim} actions")
        if self.action_shape is not None and math.prod(self.action_shape) != self.action_dim:
            raise ValueError(f"action_shape does not fit {self.action_dim} actions")
        spaces = SpaceInfo(
            self.obs_dim,
            self.action_dim,
            kind,
            action_start=self.action_start,
            action_low=_bound(self.action_low),
            action_high=_bound(self.action_high),
            given_observation=self._observation(),
            action_shape=None if self.action_shape is None else tuple(self.action_shape),
        )
        if not all(1 <= number <= MAX_CHOICES for number in spaces.choices):
            raise ValueError("action_low and action_high leave no choice, or too many")
        return spaces

    def _observation(self) -> ObservationSpec | None:
        if self.observation is None:
            return None
        spec = ObservationSpec(tuple(leaf.leaf() for leaf in self.observation))
        if spec.size != self.obs_dim or len({leaf.name for leaf in spec.leaves}) < len(spec.leaves):
            raise ValueError(f"the observation does not fit obs_dim = {self.obs_dim}")
        return spec


def _described_leaves(observation: ObservationSpec) -> list[LeafDescription] | None:
    if observation.is_vector:
        return None
    return [LeafDescription(**leaf) for leaf in observation.to_json()]


def _as_observations(obs: Any) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):  # values too large for float32 are refused as infinite
            return np.asarray(obs, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"obs must be a list of numbers or a list of equally long lists ({error})"
        ) from None


def _bound(values: list[float] | None) -> np.ndarray | None:
    return None if values is None else np.asarray(values, dtype=np.float32)
