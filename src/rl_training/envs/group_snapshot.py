"""What is saved of a group of environments, and how it is told from something else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rl_training.envs.snapshot_codec import Decoder, Encoder
from rl_training.types import Json


@dataclass(frozen=True)
class GroupSnapshot:
    """The state of `num_envs` environments, one row each, whatever else ran beside them."""

    episode_numbers: np.ndarray
    episode_returns: np.ndarray
    episode_lengths: np.ndarray
    obs: np.ndarray
    """`(num_envs, obs_dim)` float32"""
    environments: list[Json]

    def to_json(self) -> Json:
        return {
            "seed_every_reset": False,
            "episode_numbers": self.episode_numbers.tolist(),
            "episode_returns": self.episode_returns.tolist(),
            "episode_lengths": self.episode_lengths.tolist(),
            "observations": Encoder().encode(self.obs),
            "environments": self.environments,
        }

    @classmethod
    def from_json(cls, snapshot: Json, num_envs: int, obs_dim: int) -> GroupSnapshot:
        """KeyError, TypeError, ValueError or OverflowError where the snapshot does not fit."""
        _check_seeding(snapshot, seed_every_reset=False)
        states = snapshot["environments"]
        if not isinstance(states, list) or len(states) != num_envs:
            raise ValueError(f"it is not of {num_envs} environments")
        obs, expected = Decoder().decode(snapshot["observations"]), (num_envs, obs_dim)
        if not isinstance(obs, np.ndarray) or obs.shape != expected or obs.dtype != np.float32:
            raise ValueError(f"its observations are not float32 of shape {expected}")
        if not np.isfinite(obs).all():
            raise ValueError("its observations are not finite")
        return cls(
            _counters(snapshot["episode_numbers"], np.int64, num_envs),
            _counters(snapshot["episode_returns"], np.float64, num_envs),
            _counters(snapshot["episode_lengths"], np.int64, num_envs),
            obs,
            states,
        )


def seeded_snapshot(episodes_begun: np.ndarray) -> Json:
    """Of environments whose episodes follow from their seeds: which one each comes to next."""
    return {"seed_every_reset": True, "episode_numbers": episodes_begun.tolist()}


def seeded_numbers(snapshot: Json, num_envs: int) -> np.ndarray:
    """What `seeded_snapshot` was given; raises as `GroupSnapshot.from_json` does."""
    _check_seeding(snapshot, seed_every_reset=True)
    return _counters(snapshot["episode_numbers"], np.int64, num_envs)


def _check_seeding(snapshot: Json, *, seed_every_reset: bool) -> None:
    if snapshot["seed_every_reset"] is not seed_every_reset:
        raise ValueError("it was taken with another setting of seed_every_reset")


def _counters(values: object, dtype: type[np.generic], num_envs: int) -> np.ndarray:
    counters = np.array(values, dtype=dtype)
    if counters.shape != (num_envs,) or not np.isfinite(counters).all():
        raise ValueError(f"{values!r} are not counters of {num_envs} environments")
    return counters
