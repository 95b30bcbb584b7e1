"""Wrappers for training in Atari games."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym

_NO_OPERATION = 0
"""The first action of every Atari game"""


class EpisodicLife(gym.Wrapper[Any, Any, Any, Any]):
    """Ends an episode when a life is lost; the next one continues the same game.

    The agent then learns that losing a life is bad. Use it in `training_wrappers`, so that
    evaluations play entire games.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.lives = 0
        self.game_is_over = True

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.game_is_over = terminated or truncated
        lives = info.get("lives", 0)
        # Some games show no lives for a few frames before they are over.
        if 0 < lives < self.lives:
            terminated = True
        self.lives = lives
        return observation, reward, terminated, truncated, info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if not self.game_is_over and seed is None:
            observation, _, terminated, truncated, info = self.env.step(_NO_OPERATION)
            self.game_is_over = terminated or truncated
        if self.game_is_over or seed is not None:
            observation, info = self.env.reset(seed=seed, options=options)
            self.game_is_over = False
        self.lives = info.get("lives", 0)
        return observation, info
