"""The contract of a tensor environment: many worlds on one device, which give and take tensors.

Everything has a leading axis of worlds. A step moves no data to the host, so that the host can
launch the next one while the device still computes this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rl_training.types import ResumeLevel

if TYPE_CHECKING:  # commands that make no environment start faster without PyTorch
    import gymnasium as gym
    import torch
    from torch import Tensor


class TensorStep(NamedTuple):
    """The results of one step of all worlds; `(num_envs,)` unless another shape is given."""

    obs: Tensor
    """`(num_envs, obs_dim)` float32: what to act on next. Where an episode ended, it is the first
    observation of the next one"""
    reward: Tensor
    """float32"""
    terminated: Tensor
    """bool: the episode reached a final state"""
    truncated: Tensor
    """bool: the episode was cut off, for example by a time limit"""
    final_obs: Tensor
    """`(num_envs, obs_dim)` float32: what the step led to, also where an episode ended"""
    broken: Tensor
    """bool: numbers of the world were not finite. Its episode is discarded, and a new one has
    begun: of this step's results only `obs` counts"""
    left_out: Tensor | None = None
    """bool: transitions that cannot be learned from, because `final_obs` is unknown. None: never"""


class TensorEnvironment(ABC):
    """`num_envs` worlds on one device.

    A world whose episode ends starts the next one in the same step. The worlds of a seed, and all
    that happens in them, must not depend on the other seeds.
    """

    num_envs: int
    device: torch.device
    is_restorable: ClassVar[bool] = True
    """Whether `snapshot` and `restore` work. Else a resumed run starts new episodes"""
    is_capturable: ClassVar[bool] = False
    """Whether `step` can be captured in a CUDA graph. It must then launch everything on PyTorch's
    current stream, work in place, wait for nothing and not branch on data"""
    observation_space: gym.Space[Any]
    """Of one world: a vector of numbers, or a dictionary of `Box`es of numbers. `obs` then has them
    side by side, in the order of the space"""
    action_space: gym.Space[Any]
    """Of one world: `Box` with finite bounds, `Discrete`, `MultiDiscrete` or `MultiBinary`"""

    @abstractmethod
    def reset(self, seeds: Sequence[int]) -> Tensor:
        """Start the first episode of every world and return `(num_envs, obs_dim)` observations.

        The worlds are split evenly between the seeds: the first ones belong to the first seed.
        """

    @abstractmethod
    def step(self, actions: Tensor) -> TensorStep:
        """Step all worlds with actions in the units of the action space.

        `actions` are `(num_envs, action_dim)` float32 for `Box`, else int64, and `(num_envs,)` for
        `Discrete`. The results may be overwritten by the next step.
        """

    @abstractmethod
    def snapshot(self) -> dict[str, Tensor]:
        """Everything that the next steps depend on, as tensors with a leading axis of worlds."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `snapshot` returned, perhaps on another device; call `reset` first."""

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Free what the environment holds; called once, after the last step."""


@dataclass(frozen=True)
class TensorSource:
    """How the tensor environment of a run is made: pass it to `train` as `env`.

    `make` is called with the number of worlds, the device, and the keyword arguments of the config
    (`env_kwargs`). It is called again for evaluations, and to find out the spaces, with few worlds.
    """

    make: Callable[..., TensorEnvironment]
    exact: bool = True
    """Whether steps after `restore` give the same bits as without it"""
    evaluated: bool = True
    """False if a process can have the simulator only once: `make` must then always return the same
    environment, runs have no evaluations, and do not close it"""

    @property
    def resume_level(self) -> ResumeLevel:
        return ResumeLevel.BIT_EXACT if self.exact else ResumeLevel.STATISTICAL
