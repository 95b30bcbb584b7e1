"""A trained policy, ready to be asked for actions: no environment, nothing reloaded."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from rl_training.algorithms.base import Algorithm, draw_noise
from rl_training.algorithms.hyperparameters import Hyperparameters
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.data.transforms import ObservationNormalizer, RewardTransform
from rl_training.envs import ActionScaler
from rl_training.envs.wrapper_statistics import MAX_WRAPPERS, WrapperStatistics
from rl_training.errors import CheckpointError, UserError
from rl_training.types import Json, SpaceInfo, State
from rl_training.validation import StrictModel, validate

NORMALIZER_PREFIX = "normalizer."


class Policy:
    """Maps observations to actions, in the model's units or the environment's."""

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
        """How what it was trained on was scaled; where it goes on, live rewards are too.

        None where that differed from one data set to another."""
        self.settings: Hyperparameters | None = None
        """The algorithm's settings with every `auto` left as it is, where some were resolved"""
        self.wrapper_statistics: list[Json] | None = None
        """What the wrappers of its training environment had learned; None where that is unknown"""
        self._scaler = None
        if spaces.action_low is not None and spaces.action_high is not None:
            self._scaler = ActionScaler(spaces.action_low, spaces.action_high)
        self._generator = torch.Generator(algorithm.device).manual_seed(0)

    def act(self, obs: np.ndarray, *, explore: bool = False) -> np.ndarray:
        """Actions as the model gives them for observations `(batch, obs_dim)`."""
        with torch.inference_mode():
            # A copy into PyTorch's own memory: kernels give the same bits only at equal alignment.
            inputs = torch.tensor(obs, dtype=torch.float32)
            if self.normalizer is not None:
                inputs = self.normalizer.normalize(inputs)
            algorithm = self.algorithm
            inputs = inputs.to(algorithm.device)
            if explore:
                noise = draw_noise(algorithm.exploration_noise(len(obs)), self._generator)
                progress = torch.ones((), device=algorithm.device)
                actions = algorithm.explore(algorithm.state, inputs, noise, progress)
            else:
                actions = algorithm.act(algorithm.state, inputs)
            result: np.ndarray = actions.cpu().numpy()
            return result

    def predict(self, obs: Any, *, deterministic: bool = True) -> np.ndarray:
        """Actions in environment units for one observation or a batch of them."""
        array = _as_observations(obs)
        if array.ndim not in (1, 2) or array.shape[-1] != self.spaces.obs_dim:
            raise UserError(
                f"obs has shape {array.shape}; this policy takes ({self.spaces.obs_dim},) or "
                f"(batch, {self.spaces.obs_dim})"
            )
        if not np.isfinite(array).all():
            raise UserError("obs has values that are not finite numbers")
        actions = self.act(np.atleast_2d(array), explore=not deterministic)
        if self._scaler is not None:
            actions = self._scaler.to_environment(actions)
        else:
            actions = actions + self.spaces.action_start
        return actions if array.ndim == 2 else actions[0]

    def describe(self) -> Json:
        """What `from_parts` needs beside the tensors, as plain values."""
        spaces = self.spaces
        description = PolicyDescription(
            algo=self.algorithm_name,
            algo_kwargs=(self.settings or self.algorithm.hyperparameters).model_dump(mode="json"),
            obs_dim=spaces.obs_dim,
            action_dim=spaces.action_dim,
            discrete=spaces.discrete,
            action_start=spaces.action_start,
            action_low=None if spaces.action_low is None else spaces.action_low.tolist(),
            action_high=None if spaces.action_high is None else spaces.action_high.tolist(),
            normalize_observations=self.normalizer is not None,
            rewards=self.rewards,
            wrapper_statistics=self._described_wrappers(),
        )
        return description.model_dump(mode="json")

    def _described_wrappers(self) -> list[WrapperStatistics] | None:
        learned = self.wrapper_statistics
        return None if learned is None else [WrapperStatistics(**each) for each in learned]

    def tensors(self) -> State:
        """Networks by layer, and the normaliser: all that evaluation and prediction need."""
        named = {
            f"{name}.{part}": tensor
            for name, network in self.algorithm.networks().items()
            for part, tensor in network.unflatten(self.algorithm.state[name]).items()
        }
        if self.normalizer is not None:
            named |= {NORMALIZER_PREFIX + k: v for k, v in self.normalizer.state.items()}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    def load_tensors(self, tensors: State) -> None:
        """Take back what `tensors` gave, in place."""
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
            if vector.shape != expected_shape:  # as many networks in the ensemble
                raise CheckpointError(
                    f"policy tensors do not fit this model: {name} has {len(vector):,} numbers, "
                    f"expected {len(self.algorithm.state[name]):,}"
                )
            self.algorithm.state[name].copy_(vector)
        if self.normalizer is not None:
            state = {name: tensors[NORMALIZER_PREFIX + name] for name in self.normalizer.state}
            self.normalizer.load_state(state)

    @classmethod
    def from_parts(cls, description: Json, tensors: State, device: str = "cpu") -> Policy:
        """Build the policy that `describe` and `tensors` were taken from."""
        values = {k: v for k, v in description.items() if k in PolicyDescription.model_fields}
        try:
            saved = validate(PolicyDescription, values)
            spec = get_algorithm_spec(saved.algo)
            # Sizes that the tensors do not bear out would only be found after allocating them.
            if max(saved.obs_dim, saved.action_dim) > sum(t.numel() for t in tensors.values()):
                raise ValueError("its sizes are not those of its tensors")
            settings = spec.hyperparameters_type.upgrade(saved.algo_kwargs)
            algorithm = spec.algorithm(saved.obs_dim, saved.action_dim, settings, device=device)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"policy.json is not a usable policy's: {error}") from None
        normalizer = None
        if saved.normalize_observations:
            normalizer = ObservationNormalizer(saved.obs_dim)
        policy = cls(algorithm, saved.spaces(), normalizer, algorithm_name=saved.algo)
        policy.rewards = saved.rewards
        if saved.wrapper_statistics is not None:
            policy.wrapper_statistics = [each.model_dump() for each in saved.wrapper_statistics]
        policy.load_tensors(tensors)
        return policy


class PolicyDescription(StrictModel):
    """What `policy.json` says of a policy."""

    algo: str
    algo_kwargs: dict[str, Any]
    obs_dim: Annotated[int, Field(ge=1, le=10**7)]
    action_dim: Annotated[int, Field(ge=1, le=10**7)]
    discrete: bool
    action_start: int
    action_low: list[float] | None
    action_high: list[float] | None
    normalize_observations: bool
    rewards: RewardTransform | None = RewardTransform()
    wrapper_statistics: (
        Annotated[list[WrapperStatistics], Field(max_length=MAX_WRAPPERS)] | None
    ) = None

    def spaces(self) -> SpaceInfo:
        return SpaceInfo(
            self.obs_dim,
            self.action_dim,
            discrete=self.discrete,
            action_start=self.action_start,
            action_low=_bound(self.action_low),
            action_high=_bound(self.action_high),
        )


def _as_observations(obs: Any) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):  # too large for float32: infinite, and refused as such
            return np.asarray(obs, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"obs: must be numbers, one list or a list of equal lists ({error})"
        ) from None


def _bound(values: list[float] | None) -> np.ndarray | None:
    return None if values is None else np.asarray(values, dtype=np.float32)
