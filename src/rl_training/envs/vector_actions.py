"""A policy's actions, checked and in the environments' own units."""

from __future__ import annotations

import numpy as np

from rl_training.envs.spaces import ActionScaler
from rl_training.envs.vector_checks import Faults, all_finite, faults_of_values
from rl_training.types import SpaceInfo


class ActionTranslator:
    """From [-1, 1], or indices from 0 where actions are discrete, to what environments accept."""

    def __init__(self, spaces: SpaceInfo, num_envs: int, num_groups: int) -> None:
        self.scaler: ActionScaler | None = None
        if spaces.action_low is not None and spaces.action_high is not None:
            self.scaler = ActionScaler(spaces.action_low, spaces.action_high)
        self._spaces, self._num_envs = spaces, num_envs
        self._choices = np.uint64(spaces.action_dim)
        self._total = num_envs * num_groups
        self._shape = (self._total, spaces.action_dim) if self.scaler else (self._total,)

    def write(self, actions: np.ndarray, acting: np.ndarray | None, target: np.ndarray) -> Faults:
        """Put the actions into `target`; returns the groups whose actions are not finite.

        `acting` says which groups act, `(num_groups,)`, or None for all: others are not checked.
        """
        if self.scaler is None:
            target[...] = self._discrete(actions, acting)
            return {}
        if actions.shape != self._shape:
            raise ValueError(f"Actions have shape {actions.shape}; {self._shape} is expected.")
        faults: Faults = {}
        if not all_finite(actions):
            faults = faults_of_values("action", actions, actions, self._num_envs)
            if acting is not None:
                faults = {group: fault for group, fault in faults.items() if acting[group]}
            actions = np.where(np.isfinite(actions), actions, 0.0)  # of those that will not act
        target[...] = self.scaler.to_environment(actions)
        return faults

    def _discrete(self, actions: np.ndarray, acting: np.ndarray | None) -> np.ndarray:
        if actions.shape != self._shape or actions.dtype.kind not in "iu":
            raise ValueError(
                f"Discrete actions are {self._total} integers, not {actions.dtype} of shape "
                f"{actions.shape}."
            )
        if acting is not None:
            actions = np.where(np.repeat(acting, self._num_envs), actions, 0)
        # Negative numbers become huge ones without a sign, so that one comparison finds both.
        if b"\0" in (actions.astype(np.uint64) < self._choices).tobytes():
            raise ValueError(f"Actions {actions} are not all in [0, {self._choices}).")
        return actions + self._spaces.action_start if self._spaces.action_start else actions
