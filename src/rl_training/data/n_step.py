"""Combine single environment steps into n-step transitions, or into windows of action chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Transitions(NamedTuple):
    """Rows for a replay buffer: the fields of a `Batch` as NumPy arrays."""

    obs: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    next_obs: np.ndarray
    returns: np.ndarray | None = None
    ended: np.ndarray | None = None
    memory: np.ndarray | None = None

    def select(self, chosen: slice | np.ndarray) -> Transitions:
        """Return the chosen rows."""
        return Transitions(*(None if field is None else field[chosen] for field in self))  # type: ignore[arg-type]

    @staticmethod
    def joined(several: Sequence[Transitions]) -> Transitions:
        """Return the rows of several, which have the same fields, one after another."""
        columns = zip(*several, strict=True)
        return Transitions(*(None if c[0] is None else np.concatenate(c) for c in columns))  # type: ignore[arg-type]


class NStepAccumulator:
    """Turns steps of parallel environments into transitions over at most `n_step` steps.

    A transition that starts at t and spans m steps has reward `sum_k gamma^k r_{t+k}` and discount
    `gamma^m`, or 0 if the episode terminated within the m steps. Transitions never cross the end of
    an episode: steps that are still waiting then become shorter transitions that bootstrap from the
    final observation.

    With `chunks`, the action of a transition is the actions of its `n_step` steps side by side. If
    the episode was terminated within them, the last action fills the rest, which has no effect. If
    it was truncated, the rest would have had one: such a transition is left out.
    """

    def __init__(self, n_step: int, gamma: float, num_envs: int, *, chunks: bool = False) -> None:
        self.n_step, self.gamma, self.num_envs = n_step, gamma, num_envs
        self._chunks = chunks and n_step > 1
        self._obs: list[np.ndarray] = []
        self._action: list[np.ndarray] = []
        self._reward: list[np.ndarray] = []
        # Number of the newest steps of each environment that wait for their n-th reward.
        self._waiting = np.zeros(num_envs, dtype=np.int64)

    def add(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        next_obs: np.ndarray,
        active: np.ndarray | None = None,
    ) -> tuple[Transitions, np.ndarray | None]:
        """Add one step of every environment, or of the active ones.

        Returns the completed transitions and their environment indices. The indices are None if
        there is exactly one transition for each environment, in order.
        """
        ended = terminated | truncated
        alive = 1.0 - terminated.astype(np.float32)
        if self.n_step == 1:
            rows = Transitions(obs, action, reward, np.float32(self.gamma) * alive, next_obs)
            if active is None:
                return rows, None
            return rows.select(active), np.flatnonzero(active)
        self._remember(obs, action, reward, active)
        closed = terminated if self._chunks else ended
        completed: list[Transitions] = []
        environments: list[np.ndarray] = []
        # Oldest first, so that the rows of an episode enter the buffer in time order.
        for age in range(len(self._reward), 0, -1):
            due = (self._waiting >= age) & (closed | (age == self.n_step))
            if due.any():
                completed.append(self._close(due, age, alive, next_obs))
                environments.append(np.flatnonzero(due))
        self._waiting = np.where(ended, 0, np.minimum(self._waiting, self.n_step - 1))
        if not completed:
            none = np.repeat(action[:0], self.n_step if self._chunks else 1, axis=-1)
            empty = Transitions(obs[:0], none, reward[:0], alive[:0], next_obs[:0])
            return empty, np.arange(0)
        if len(completed) == 1 and len(environments[0]) == self.num_envs:
            return completed[0], None
        return Transitions.joined(completed), np.concatenate(environments)

    def drop(self, lost: np.ndarray) -> None:
        """Forget the waiting steps of environments whose episode was lost, `(num_envs,)` bool."""
        self._waiting[lost] = 0

    def state_dict(self, chosen: slice = slice(None)) -> dict[str, np.ndarray]:
        """Waiting steps of the chosen environments, as arrays `(steps, num_envs, ...)`."""
        if not self._reward:
            return {"waiting": self._waiting[chosen]}
        return {
            "obs": np.stack(self._obs)[:, chosen],
            "action": np.stack(self._action)[:, chosen],
            "reward": np.stack(self._reward)[:, chosen],
            "waiting": self._waiting[chosen],
        }

    def load_state_dict(self, state: dict[str, np.ndarray], chosen: slice = slice(None)) -> None:
        """Restore the waiting steps of the chosen environments from `state_dict`."""
        self._waiting[chosen] = state["waiting"]
        if "reward" not in state:
            return
        for history, name in (
            (self._obs, "obs"),
            (self._action, "action"),
            (self._reward, "reward"),
        ):
            saved = state[name]
            while len(history) < len(saved):
                shape = (self.num_envs, *saved.shape[2:])
                history.insert(0, np.zeros(shape, dtype=saved.dtype))
            for step, values in zip(history[-len(saved) :], saved, strict=True):
                step[chosen] = values

    def _remember(
        self, obs: np.ndarray, action: np.ndarray, reward: np.ndarray, active: np.ndarray | None
    ) -> None:
        for history, step in ((self._obs, obs), (self._action, action), (self._reward, reward)):
            history.append(step if active is None else step.copy())
            if active is not None:  # the newest steps of the others stay the newest
                for newer, older in itertools.pairwise(reversed(history)):
                    newer[~active] = older[~active]
            del history[: -self.n_step]
        self._waiting += 1 if active is None else active

    def _close(
        self, due: np.ndarray, age: int, alive: np.ndarray, next_obs: np.ndarray
    ) -> Transitions:
        """Complete the transitions of the `due` environments that started `age` steps ago."""
        total = np.zeros(int(due.sum()), dtype=np.float32)
        # As a slice, all environments are not copied: their images may be megabytes.
        chosen = slice(None) if due.all() else due
        for step, reward in enumerate(self._reward[-age:]):
            total += np.float32(self.gamma**step) * reward[chosen]
        discount = np.float32(self.gamma**age) * alive[chosen]
        action = self._chunk_of(chosen, age) if self._chunks else self._action[-age][chosen]
        return Transitions(self._obs[-age][chosen], action, total, discount, next_obs[chosen])

    def _chunk_of(self, due: np.ndarray | slice, age: int) -> np.ndarray:
        """Return the actions of the `due` environments from `age` steps ago, side by side."""
        taken = [action[due] for action in self._action[-age:]]
        return np.concatenate(taken + taken[-1:] * (self.n_step - age), axis=-1)
