"""Combine single steps of worlds into n-step transitions, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.types import State


class StepWindows:
    """Turns the steps of worlds into transitions over at most `n_step` steps.

    They are those of `NStepAccumulator`, in another order: each step of a world completes the one
    that started `n_step - 1` steps ago, also if its episode has ended since. The number of rows
    does not depend on data then.
    """

    def __init__(
        self,
        n_step: int,
        gamma: float,
        num_envs: int,
        widths: Sequence[int],
        device: torch.device,
    ) -> None:
        """`widths` are the columns of observation, action, reward, discount, next observation."""
        self.n_step, self._widths = n_step, list(widths)
        self._powers = gamma ** torch.arange(n_step, dtype=torch.float32, device=device)
        shape = num_envs, n_step
        self.state: State = {
            "rows": torch.zeros(*shape, sum(widths), device=device),
            "ended": torch.ones(shape, dtype=torch.bool, device=device),
            "unknown": torch.ones(shape, dtype=torch.bool, device=device),
        }
        """The last steps of each world, the oldest first"""

    def add(self, rows: Tensor, ended: Tensor, unknown: Tensor) -> tuple[Tensor, Tensor]:
        """Add one step of all worlds, as rows of a replay buffer.

        Returns the rows of the completed transitions, and which of them cannot be learned from.
        """
        for name, newest in (("rows", rows), ("ended", ended), ("unknown", unknown)):
            moved = torch.cat([self.state[name][:, 1:], newest[:, None]], dim=1)
            self.state[name].copy_(moved)
        steps = self.state["rows"]
        # A step belongs to the transition unless an earlier one ended the episode.
        belongs = torch.cumsum(self.state["ended"].int(), 1) - self.state["ended"].int() == 0
        last = belongs.sum(1) - 1
        obs, action, *_ = torch.split(steps[:, 0], self._widths, dim=-1)
        final = steps.gather(1, last[:, None, None].expand(-1, 1, steps.shape[-1])).squeeze(1)
        *_, discount, next_obs = torch.split(final, self._widths, dim=-1)
        rewards = torch.split(steps, self._widths, dim=-1)[2].squeeze(-1)
        # Not multiplied by a mask: the reward of a broken world may be infinite.
        reward = torch.where(belongs, rewards * self._powers, 0.0).sum(1, keepdim=True)
        discount = discount * self._powers[last][:, None]
        combined = torch.cat([obs, action, reward, discount, next_obs], dim=-1)
        return combined, (self.state["unknown"] & belongs).any(1)

    def forget(self) -> None:
        """Forget the steps that wait, because new episodes have begun everywhere."""
        self.state["ended"].fill_(True)
        self.state["unknown"].fill_(True)
