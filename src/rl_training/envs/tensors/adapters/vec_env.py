"""The `VecEnv` of rsl_rl, which Isaac Lab and mjlab have too, as a tensor environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from rl_training.envs.tensors.adapters.worlds import (
    AdaptedWorlds,
    are_finite,
    final_observations,
    names_of,
    space_of,
)
from rl_training.envs.tensors.contract import TensorStep
from rl_training.errors import EnvironmentSetupError

ACTOR_GROUPS = ("policy", "actor")
"""Names of what the actor observes: in Isaac Lab, and in mjlab"""
TERMINATED = "reset_terminated"
"""Where environments of Isaac Lab and mjlab say which episodes reached a final state"""


class VecEnvWorlds(AdaptedWorlds):
    """A `VecEnv` of rsl_rl 2 or later, or an environment of Isaac Lab or mjlab that is one.

    `extras["time_outs"]` says which episodes were truncated. One that reached a final state in the
    same step has terminated, if the environment says so (`TERMINATED`). There are three kinds of
    ends:

    - With `auto_reset = False` in the config of an environment of mjlab, this class resets worlds,
      and knows what the last step led to.
    - If the extras have one of `FINAL_KEYS`, that is the final observation.
    - Else the last transition of a truncated episode is left out.

    A world that breaks is reset at once if this class resets worlds. Else it is told that its time
    is over (`episode_length_buf`), and its simulator resets it in the next step.
    """

    def __init__(
        self,
        env: Any,
        *,
        group: str | Sequence[str] | None = None,
        action_range: tuple[float, float] | None = None,
    ) -> None:
        """`group` is the group of observations to learn from; by default "policy" or "actor".

        Several groups are a dictionary, of which `networks.actor_obs` and `networks.critic_obs`
        may select some. A `VecEnv` does not bound its actions, so `action_range` states their
        bounds. By default these are the environment's `clip_actions`, or -1 and 1.
        """
        self._env = env
        given = _without_extras(env.get_observations())
        self._group = _default_group(given) if group is None else group
        clip = getattr(env, "clip_actions", None) or 1.0
        low, high = (-clip, clip) if action_range is None else action_range
        actions = gym.spaces.Box(low, high, (int(env.num_actions),))
        super().__init__(int(env.num_envs), env.device, space_of(self._select(given)), actions)
        self._inner = getattr(env, "unwrapped", env)
        self._resets = getattr(getattr(self._inner, "cfg", None), "auto_reset", True) is False
        self._told = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        """Broken worlds whose simulator was told to reset them"""

    def begin(self, seed: int) -> Any:
        if hasattr(self._env, "seed"):
            self._env.seed(seed)
        if hasattr(self._env, "reset"):
            return self._select(self._env.reset())
        return self._select(self._env.get_observations())

    def step(self, actions: Tensor) -> TensorStep:
        given, reward, dones, extras = self._env.step(actions)
        obs, reward = self.rows(self._select(given)), self.numbers(reward, "reward")
        done, late = dones.bool(), extras.get("time_outs")
        truncated = torch.zeros_like(done) if late is None else late.bool() & done
        final_states = getattr(self._inner, TERMINATED, None)
        if isinstance(final_states, Tensor) and final_states.shape == done.shape:
            truncated = truncated & ~final_states.bool().to(done.device)
        if self._resets:
            return self._reset_ended(obs, reward, done & ~truncated, truncated)
        final = final_observations(extras)
        reached = None if final is None else self.rows(self._select(final), "final observation")
        return self._renewed(self.completed(obs, reward, done & ~truncated, truncated, reached))

    def _reset_ended(
        self, reached: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor
    ) -> TensorStep:
        """Reset the worlds whose episode has ended or that broke, and return the step."""
        broken = ~are_finite(reached, reward)
        ended = terminated | truncated | broken
        obs, which = reached, ended.nonzero().squeeze(-1)
        if len(which):
            reached = reached.clone()  # a simulator may write the new observations over these
            given, _ = self._inner.reset(env_ids=which)
            obs = torch.where(ended[:, None], self.rows(self._select(given)), reached)
        return self.completed(obs, reward, terminated | broken, truncated, reached)

    def _renewed(self, step: TensorStep) -> TensorStep:
        """Tell the simulator to reset broken worlds, and leave out the steps that do so."""
        assert step.left_out is not None
        over = self._told & (step.terminated | step.truncated) & ~step.broken
        self._told = step.broken
        lengths = getattr(self._env, "episode_length_buf", None)
        if lengths is not None:
            limit = torch.as_tensor(self._env.max_episode_length, device=lengths.device)
            lengths.copy_(torch.where(step.broken, limit.to(lengths.dtype), lengths))
        return step._replace(
            reward=torch.where(over, 0.0, step.reward),
            terminated=step.terminated & ~over,
            truncated=step.truncated & ~over,
            final_obs=torch.where(over[:, None], step.obs, step.final_obs),
            left_out=step.left_out | over,
        )

    def _select(self, given: Any) -> Any:
        """The observations of the chosen groups."""
        given = _without_extras(given)
        if isinstance(given, Tensor):
            return given
        try:
            if isinstance(self._group, str):
                return given[self._group]
            return {name: given[name] for name in self._group}
        except KeyError as missing:
            raise EnvironmentSetupError(
                f"VecEnvWorlds: there is no group {missing} of observations; there are "
                f"{', '.join(names_of(given))}; pass one of them, or several, as group"
            ) from None

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()


def _without_extras(given: Any) -> Any:
    """The observations alone: `reset`, and `get_observations` of rsl_rl 2, return a pair."""
    return given[0] if isinstance(given, tuple) else given


def _default_group(given: Any) -> str:
    if isinstance(given, Tensor):
        return ACTOR_GROUPS[0]
    return next((name for name in ACTOR_GROUPS if name in names_of(given)), ACTOR_GROUPS[0])
