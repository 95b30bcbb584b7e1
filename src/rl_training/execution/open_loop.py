"""Executes chunks of actions one after another, without looking at observations in between."""

from __future__ import annotations

import numpy as np


class ActionQueue:
    """The actions of their current chunk that parallel environments still have to execute."""

    def __init__(self, chunk: int, num_envs: int, action_dim: int) -> None:
        self._chunks = np.zeros((num_envs, chunk, action_dim), np.float32)
        self._left = np.zeros(num_envs, np.int64)

    @property
    def is_empty(self) -> np.ndarray:
        """`(num_envs,)` bool: the environments that need a new chunk."""
        empty: np.ndarray = self._left == 0
        return empty

    def fill(self, chunks: np.ndarray, first: int = 0, ready: np.ndarray | None = None) -> None:
        """Give new chunks to those environments from number `first` on that need one.

        `chunks` are `(n, chunk * action_dim)`; those of the other environments are not used. An
        environment that is not `ready` still executes the last action of its chunk: it gets the
        next one when its new observation is known.
        """
        rows = slice(first, first + len(chunks))
        empty = self._left[rows] == 0
        if ready is not None:
            empty &= ready[rows]
        self._chunks[rows][empty] = chunks.reshape(-1, *self._chunks.shape[1:])[empty]
        self._left[rows][empty] = self._chunks.shape[1]

    def take(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Return the next action of each environment, and use up those of the chosen ones."""
        length = self._chunks.shape[1]
        # An environment that is not stepped may have none left; any action will do.
        position = np.minimum(length - self._left, length - 1)
        self._left -= (self._left > 0) if chosen is None else (self._left > 0) & chosen
        actions: np.ndarray = self._chunks[np.arange(len(position)), position]
        return actions

    def discard(self, ended: np.ndarray) -> None:
        """Forget the rest of the chunks of environments whose episode is over."""
        self._left[ended] = 0

    def state_dict(self, chosen: slice = slice(None)) -> dict[str, np.ndarray]:
        """The chunks of the chosen environments, and how many of their actions are left."""
        return {"chunks": self._chunks[chosen], "left": self._left[chosen]}

    def load_state_dict(self, state: dict[str, np.ndarray], chosen: slice = slice(None)) -> None:
        """Restore the chosen environments from `state_dict`; raise `ValueError` if they differ."""
        chunks, left = state["chunks"], state["left"]
        fits = chunks.shape == self._chunks[chosen].shape and left.shape == self._left[chosen].shape
        if not fits or left.min(initial=0) < 0 or left.max(initial=0) > self._chunks.shape[1]:
            raise ValueError("the saved action chunks do not fit this run")
        self._chunks[chosen], self._left[chosen] = chunks, left
