"""Vector environments of Gymnasium that return tensors, as tensor environments."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from rl_training.envs.tensors.adapters.worlds import (
    AdaptedWorlds,
    final_observations,
)
from rl_training.envs.tensors.contract import TensorStep
from rl_training.errors import EnvironmentSetupError


class VectorWorlds(AdaptedWorlds):
    """A vector environment of Gymnasium that returns tensors.

    It may start a new episode in the step that ends one (`AutoresetMode.SAME_STEP`), as
    `ManiSkillVectorEnv` does, with one of `FINAL_KEYS` in its infos. With `AutoresetMode.DISABLED`,
    this class starts new episodes, as it does in any mode where worlds break. That is the mode for
    `gymnasium.wrappers.vector.NumpyToTorch`.
    """

    def __init__(
        self, env: gym.vector.VectorEnv[Any, Any, Any], device: str | torch.device
    ) -> None:
        self._env = env
        mode = env.metadata.get("autoreset_mode", AutoresetMode.SAME_STEP)
        if mode == AutoresetMode.NEXT_STEP:
            _refuse(mode, "the step after an end ignores its action and is no step of an episode")
        if mode == AutoresetMode.SAME_STEP and _converts_arrays(env):
            _refuse(mode, "Gymnasium's wrapper fails at the end of an episode")
        self._resets = mode == AutoresetMode.DISABLED
        super().__init__(
            env.num_envs, device, env.single_observation_space, env.single_action_space
        )

    def begin(self, seed: int) -> Any:
        return self._env.reset(seed=seed)[0]

    def step(self, actions: Tensor) -> TensorStep:
        given, reward, terminated, truncated, infos = self._env.step(actions)
        obs, reward = self.rows(given), self.numbers(reward, "reward")
        # Gymnasium and ManiSkill add it only to the infos of steps in which episodes end.
        final = given if self._resets else final_observations(infos)
        reached = None if final is None else self.rows(final, "final observation")
        step = self.completed(obs, reward, terminated, truncated, reached)
        due = step.broken
        if self._resets:
            due = due | step.terminated | step.truncated
        return self._restarted(step, due)

    def _restarted(self, step: TensorStep, chosen: Tensor) -> TensorStep:
        """Start new episodes in the `chosen` worlds, a mask."""
        if not bool(chosen.any()):
            return step
        # Gymnasium reads the first option, and ManiSkill the second one.
        options = {"reset_mask": chosen.cpu().numpy(), "env_idx": chosen.nonzero().squeeze(-1)}
        first = self.rows(self._env.reset(options=options)[0])
        return step._replace(obs=torch.where(chosen[:, None], first, step.obs))

    def close(self) -> None:
        self._env.close()


def _refuse(mode: AutoresetMode, reason: str) -> None:
    raise EnvironmentSetupError(
        f"VectorWorlds: the environment has AutoresetMode.{mode.name}: {reason}; make it with "
        "autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED"
    )


def _converts_arrays(env: Any) -> bool:
    """Whether one of Gymnasium's wrappers, such as `NumpyToTorch`, converts its arrays."""
    while env is not None:
        if any(each.__name__ == "ArrayConversion" for each in type(env).__mro__):
            return True
        env = getattr(env, "env", None)
    return False
