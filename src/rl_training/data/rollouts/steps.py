"""Turn the steps of environments into the rows of a rollout."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rl_training.data.n_step import Transitions
from rl_training.types import Batch

ENDED, LOST = 1.0, 2.0
"""Values of `Batch.ended`: the last transition of an episode, and one that was lost"""


def with_ends(batch: Batch, ended: Tensor, lost: Tensor) -> Batch:
    """Return the transitions of one step of all worlds as rows of a rollout.

    `ended` says which are the last of their episode, and `lost` of which nothing can be learned.
    """
    return batch.with_fields(
        reward=torch.where(lost, 0.0, batch.reward),
        next_obs=torch.where(lost[:, None], batch.obs, batch.next_obs),
        ended=torch.where(lost, LOST, ENDED * ended.float()),
    )


class RolloutSteps:
    """Returns one row for every environment and step, so that a row's position says which it is.

    It has the interface of `NStepAccumulator`. An environment that was not stepped, because its
    episode was lost or its seed is no longer trained, gets a row that says so.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def add(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        next_obs: np.ndarray,
        active: np.ndarray | None = None,
    ) -> tuple[Transitions, None]:
        """Return the transitions of one step, in the order of the environments."""
        discount = np.float32(self.gamma) * (1.0 - terminated.astype(np.float32))
        ended = (terminated | truncated).astype(np.float32) * np.float32(ENDED)
        if active is not None and not active.all():
            reward, next_obs = reward.copy(), next_obs.copy()
            reward[~active], next_obs[~active] = 0.0, obs[~active]
            ended[~active] = LOST
        return Transitions(obs, action, reward, discount, next_obs, ended=ended), None

    def drop(self, lost: np.ndarray) -> None:
        """Do nothing: no steps wait for later ones."""

    def state_dict(self, chosen: slice = slice(None)) -> dict[str, np.ndarray]:
        return {}

    def load_state_dict(self, state: Mapping[str, np.ndarray], chosen: slice = slice(None)) -> None:
        """Do nothing: the rows are in the buffer."""
