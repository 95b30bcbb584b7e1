"""Environments of other packages, which give and take tensors, as tensor environments.

`VecEnvWorlds` adapts the `VecEnv` of rsl_rl, which Isaac Lab and mjlab have too. `VectorWorlds`
adapts vector environments of Gymnasium that return tensors, such as ManiSkill's. `JaxWorlds` adapts
functions of JAX, such as those of MuJoCo Playground and Brax. None of them can save its simulator:
a resumed run starts new episodes.

Where a package does not tell what the last step of a truncated episode led to, that transition
cannot be learned from, because its value after the step is unknown, and is left out. A terminated
episode has no value after it, so that none of its transitions is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rl_training.envs.tensors.contract import TensorEnvironment, TensorStep
from rl_training.errors import EnvironmentSetupError

FINAL_KEYS = ("final_obs", "final_observation", "terminal_obs", "terminal_observation")
"""Where packages tell what the last step of an episode led to"""


class AdaptedWorlds(TensorEnvironment):
    """What adapters share: one seed, no snapshots, and checks of what they are given."""

    is_restorable = False

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str,
        obs_dim: int,
        action_space: gym.Space[Any],
    ) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (obs_dim,))
        self.action_space = action_space

    @abstractmethod
    def begin(self, seed: int) -> Tensor:
        """Start the first episodes and return observations."""

    def reset(self, seeds: Sequence[int]) -> Tensor:
        if len(seeds) != 1:
            raise EnvironmentSetupError(
                f"{type(self).__name__}: the simulator of another package cannot be split between "
                "seeds; train one seed at a time"
            )
        return self._checked(self.begin(seeds[0]), "observation").float()

    def snapshot(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """There is nothing to restore."""

    def completed(
        self,
        obs: Tensor,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        final_obs: Tensor | None,
    ) -> TensorStep:
        """Return a step; without `final_obs`, those that were truncated are left out."""
        obs = self._checked(obs, "observation").float()
        reward = self._checked(reward, "reward").float()
        terminated, truncated = terminated.bool(), truncated.bool()
        ended = (terminated | truncated)[:, None]
        reached, left_out = obs, truncated & ~terminated
        if final_obs is not None:
            known = self._checked(final_obs, "final observation").float()
            reached, left_out = torch.where(ended, known, obs), torch.zeros_like(truncated)
        # A simulator that resets a broken world itself shows it in the final observation alone.
        healthy = torch.isfinite(obs).all(-1) & torch.isfinite(reached).all(-1)
        healthy &= torch.isfinite(reward)
        return TensorStep(
            torch.nan_to_num(obs, 0.0, 0.0, 0.0),
            reward,
            terminated & healthy,
            truncated & healthy,
            reached,
            ~healthy,
            left_out,
        )

    def _checked(self, values: Any, what: str) -> Tensor:
        if not isinstance(values, Tensor):
            raise EnvironmentSetupError(
                f"{type(self).__name__}: the {what} is {type(values).__name__}, not a tensor"
            )
        if len(values) != self.num_envs or values.device.type != self.device.type:
            raise EnvironmentSetupError(
                f"{type(self).__name__}: the {what} has the shape {tuple(values.shape)} on "
                f"{values.device}; expected {self.num_envs} worlds on {self.device}"
            )
        return values


class VecEnvWorlds(AdaptedWorlds):
    """A `VecEnv` of rsl_rl 2 or later, or an environment of Isaac Lab or mjlab that is one.

    `group` is the group of observations to learn from. A `VecEnv` does not bound its actions, so
    `action_range` states their bounds. `extras["time_outs"]` says which episodes were truncated. If
    the extras have one of `FINAL_KEYS`, that is used as the final observation.
    """

    def __init__(
        self, env: Any, *, group: str = "policy", action_range: tuple[float, float] = (-1.0, 1.0)
    ) -> None:
        self._env, self._group = env, group
        obs = self._observations(env.get_observations())
        low, high = action_range
        actions = gym.spaces.Box(low, high, (int(env.num_actions),))
        super().__init__(int(env.num_envs), env.device, obs.shape[-1], actions)

    def begin(self, seed: int) -> Tensor:
        if hasattr(self._env, "seed"):
            self._env.seed(seed % 2**31)
        if hasattr(self._env, "reset"):
            return self._observations(self._env.reset())
        return self._observations(self._env.get_observations())

    def step(self, actions: Tensor) -> TensorStep:
        given, reward, dones, extras = self._env.step(actions)
        done = dones.bool()
        late = extras.get("time_outs")
        truncated = torch.zeros_like(done) if late is None else late.bool() & done
        final = next((extras[key] for key in FINAL_KEYS if key in extras), None)
        final = None if final is None else self._observations(final)
        obs = self._observations(given)
        return self.completed(obs, reward, done & ~truncated, truncated, final)

    def _observations(self, given: Any) -> Tensor:
        """The observations of the group; earlier versions of rsl_rl return a pair."""
        if isinstance(given, tuple):
            given = given[0]
        if isinstance(given, Tensor):
            return given
        try:
            found: Tensor = given[self._group]
        except KeyError:
            raise EnvironmentSetupError(
                f"VecEnvWorlds: there is no group {self._group!r} of observations; there are "
                f"{', '.join(map(str, given.keys()))}; pass one of them as group"
            ) from None
        return found

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()


class VectorWorlds(AdaptedWorlds):
    """A vector environment of Gymnasium that returns tensors, such as `ManiSkillVectorEnv`.

    It must start a new episode in the step that ends one. The infos may have one of `FINAL_KEYS`.
    """

    def __init__(
        self, env: gym.vector.VectorEnv[Any, Any, Any], device: str | torch.device
    ) -> None:
        self._env = env
        mode = env.metadata.get("autoreset_mode")
        if mode is not None and mode != gym.vector.AutoresetMode.SAME_STEP:
            raise EnvironmentSetupError(
                f"VectorWorlds: autoreset_mode is {mode}; make the environment with "
                "autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP"
            )
        space = env.single_observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise EnvironmentSetupError(
                f"VectorWorlds: the observation space is {space}; one vector of numbers is needed"
            )
        super().__init__(env.num_envs, device, space.shape[0], env.single_action_space)

    def begin(self, seed: int) -> Tensor:
        obs, _ = self._env.reset(seed=seed % 2**31)
        found: Tensor = obs
        return found

    def step(self, actions: Tensor) -> TensorStep:
        obs, reward, terminated, truncated, infos = self._env.step(actions)
        # Gymnasium and ManiSkill add it only to the infos of steps in which episodes end.
        final = next((infos[key] for key in FINAL_KEYS if key in infos), None)
        return self.completed(obs, reward, terminated, truncated, final)

    def close(self) -> None:
        self._env.close()


class JaxWorlds(AdaptedWorlds):
    """Functions of JAX that are vectorized and reset by themselves, as `brax.envs.training.wrap`.

    `reset(seed)` returns a state, and `step(state, actions)` the next one. A state has `obs`,
    `reward`, `done` and `info`, in which `truncation` says which episodes were truncated. The
    arrays are passed by DLPack, without copies. Wrap the functions in `jax.jit`.
    """

    def __init__(
        self,
        reset: Callable[[int], Any],
        step: Callable[[Any, Any], Any],
        *,
        num_envs: int,
        device: str | torch.device,
        obs_dim: int,
        action_space: gym.spaces.Box,
        to_jax: Callable[[Tensor], Any] | None = None,
    ) -> None:
        """`to_jax` turns actions into an array; by default `jax.dlpack.from_dlpack`."""
        super().__init__(num_envs, device, obs_dim, action_space)
        self._reset, self._step = reset, step
        self._state: Any = None
        self._to_jax = to_jax or _to_jax

    def begin(self, seed: int) -> Tensor:
        self._state = self._reset(seed % 2**31)
        return from_dlpack(self._state.obs)

    def step(self, actions: Tensor) -> TensorStep:
        state = self._state = self._step(self._state, self._to_jax(actions.contiguous()))
        obs, reward, done = (from_dlpack(x) for x in (state.obs, state.reward, state.done))
        late = state.info.get("truncation")
        truncated = torch.zeros_like(done) if late is None else from_dlpack(late)
        truncated = truncated.bool() & done.bool()
        final = next((state.info[key] for key in FINAL_KEYS if key in state.info), None)
        reached = None if final is None else from_dlpack(final)
        return self.completed(obs, reward, done.bool() & ~truncated, truncated, reached)


def _to_jax(actions: Tensor) -> Any:
    import jax

    return jax.dlpack.from_dlpack(actions)
