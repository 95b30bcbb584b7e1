"""Functions of JAX, and environments of Brax and MuJoCo Playground, as tensor environments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rl_training.envs.tensors.adapters.worlds import (
    AdaptedWorlds,
    final_observations,
    names_of,
    space_of,
)
from rl_training.envs.tensors.contract import TensorStep


class JaxWorlds(AdaptedWorlds):
    """Functions of JAX that are vectorized and reset by themselves, as `brax.envs.training.wrap`.

    `reset(seed)` returns a state, and `step(state, actions)` the next one. A state has `obs`,
    `reward`, `done` and `info`, in which `truncation` says which episodes were truncated, and which
    may have one of `FINAL_KEYS`. The arrays are passed by DLPack, without copies. Wrap the
    functions in `jax.jit`. `step` must also reset worlds whose numbers are not finite.
    """

    def __init__(
        self,
        reset: Callable[[int], Any],
        step: Callable[[Any, Any], Any],
        *,
        num_envs: int,
        device: str | torch.device,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        to_jax: Callable[[Tensor], Any] | None = None,
    ) -> None:
        """`to_jax` turns actions into an array; by default `jax.dlpack.from_dlpack`."""
        super().__init__(num_envs, device, observation_space, action_space)
        self._reset, self._step = reset, step
        self._state: Any = None
        self._to_jax = to_jax or _to_jax

    def begin(self, seed: int) -> Any:
        self._state = self._reset(seed)
        return _to_torch(self._state.obs)

    def step(self, actions: Tensor) -> TensorStep:
        state = self._state = self._step(self._state, self._to_jax(actions.contiguous()))
        obs, reward = self.rows(_to_torch(state.obs)), _to_torch(state.reward)
        done, late = _to_torch(state.done).bool(), state.info.get("truncation")
        truncated = torch.zeros_like(done) if late is None else _to_torch(late).bool() & done
        final = final_observations(state.info)
        reached = None if final is None else self.rows(_to_torch(final), "final observation")
        reward = self.numbers(reward, "reward")
        return self.completed(obs, reward, done & ~truncated, truncated, reached)


def brax_worlds(
    env: Any,
    num_envs: int,
    device: str | torch.device,
    *,
    episode_length: int,
    action_range: tuple[float, float] = (-1.0, 1.0),
    is_vectorized: bool = False,
    new_states: bool = True,
) -> JaxWorlds:
    """Worlds of an environment of Brax or MuJoCo Playground, as its package makes it.

    It has none of the wrappers for training, which lose the last observation of an episode. Those
    that vectorize it, for example to randomize the model, are the exception: set `is_vectorized`.
    Episodes are truncated after `episode_length` steps. Every step also computes `env.reset` for
    all worlds, so that episodes start from new states. To save that time, `new_states=False` starts
    all episodes of a world from its first state, as the packages do by default.
    """
    import jax

    functions = _functions(env, num_envs, episode_length, is_vectorized, new_states)
    first = jax.eval_shape(functions.reset, jax.random.PRNGKey(0))
    return JaxWorlds(
        functools.partial(_begin, functions.reset, _place(torch.device(device))),
        functions.step,
        num_envs=num_envs,
        device=device,
        observation_space=space_of(first.obs),
        action_space=gym.spaces.Box(*action_range, (int(env.action_size),)),
    )


class Episodes(NamedTuple):
    """The states of worlds after a step, as `JaxWorlds` reads them, and what the next one needs."""

    obs: Any
    reward: Any
    done: Any
    info: dict[str, Any]
    state: Any
    first: Any
    """The first state of each world; None if episodes start from new ones"""
    lengths: Any
    keys: Any


class _Functions(NamedTuple):
    reset: Callable[[Any], Episodes]
    step: Callable[[Episodes, Any], Episodes]


@functools.lru_cache(maxsize=16)
def _functions(
    env: Any, num_envs: int, episode_length: int, is_vectorized: bool, new_states: bool
) -> _Functions:
    """Compiled once for all evaluations of a run, which make their worlds again."""
    import jax
    from jax import numpy as jnp

    begin, advance = env.reset, env.step
    if not is_vectorized:
        begin, advance = jax.vmap(begin), jax.vmap(advance)

    def split(keys: Any) -> tuple[Any, Any]:
        pairs = jax.vmap(jax.random.split)(keys)
        return pairs[:, 0], pairs[:, 1]

    def typed(episodes: Episodes) -> Episodes:
        """The same numbers without weak types, for which `step` would be compiled once more."""
        same: Episodes = jax.tree.map(
            lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), episodes
        )
        return same

    def reset(key: Any) -> Episodes:
        keys, own = split(jax.random.split(key, num_envs))
        state = begin(own)
        never = jnp.zeros(num_envs, bool)
        info = {"truncation": never, "final_obs": state.obs}
        first = None if new_states else state
        lengths = jnp.zeros(num_envs, jnp.int32)
        begun = Episodes(state.obs, state.reward, never, info, state, first, lengths, keys)
        return typed(begun)

    def step(before: Episodes, actions: Any) -> Episodes:
        reached = advance(before.state, actions)
        lengths, finite = before.lengths + 1, jnp.isfinite(reached.reward)
        for leaf in jax.tree.leaves(reached.obs):
            finite &= jnp.isfinite(leaf).reshape(num_envs, -1).all(1)
        terminated = reached.done.astype(bool)
        truncated = (lengths >= episode_length) & ~terminated
        done = terminated | truncated | ~finite

        def chosen(fresh: Any, old: Any) -> Any:
            if jnp.shape(old)[:1] != (num_envs,):  # what all worlds share
                return old
            return jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), fresh, old)

        keys, own = split(before.keys)
        fresh = begin(own) if new_states else before.first
        state = jax.tree.map(chosen, fresh, reached)
        info = {"truncation": truncated, "final_obs": reached.obs}
        kept = before.first, jnp.where(done, 0, lengths), keys
        return typed(Episodes(state.obs, reached.reward, done, info, state, *kept))

    return _Functions(jax.jit(reset), jax.jit(step))


def _begin(reset: Callable[[Any], Episodes], place: Any, seed: int) -> Episodes:
    """Start on the device `place`, where all that follows is computed."""
    import jax

    return reset(jax.device_put(jax.random.PRNGKey(seed), place))


def _place(device: torch.device) -> Any:
    """The device of JAX that is a device of PyTorch."""
    import jax

    platform = "cpu" if device.type == "cpu" else "gpu"
    return jax.devices(platform)[device.index or 0]


def _to_torch(arrays: Any) -> Any:
    """An array, or dictionaries of arrays, as tensors."""
    if hasattr(arrays, "keys"):
        return {name: _to_torch(arrays[name]) for name in names_of(arrays)}
    return from_dlpack(arrays)


def _to_jax(actions: Tensor) -> Any:
    import jax

    return jax.dlpack.from_dlpack(actions)
