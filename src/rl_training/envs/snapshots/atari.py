"""Save and restore Atari games by replaying them, which is exact and safe.

The Arcade Learning Environment can save its own state, but not all of it: the action that a sticky
action repeats, some registers of the video chip and, in some games, the progress of the current
frame are missing. A damaged state would also let the emulator write outside of its memory. So a
snapshot has no state of the emulator, but the seed with which the game was loaded and the inputs
since then. Restoring plays these inputs again, about 10,000 frames per second, and compares the
result with a fingerprint.

ale-py is an optional dependency, so it is never imported here.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.errors import CheckpointError

EMULATOR_ATTRIBUTES = frozenset({"ale", "_action_set"})
"""Attributes of an Atari game that `read_emulator` or the constructor accounts for"""

RELOAD_AFTER = 100_000
"""After this many inputs, the next episode loads the game again, so that replays stay short.

Loading takes as long as about 2,000 frames, and the environments of all seeds wait for it."""

_RESET = 255
"""Stands for a reset among the inputs; the actions are 0 to 17"""

_NUMBER_OF_ACTIONS = 18
_MAX_INPUTS = 10_000_000
"""Longest replay of a game whose episodes have no limit"""

_UNRECORDED = frozenset(
    {"restoreState", "restoreSystemState", "setRAM", "setBool", "setFloat", "setString"}
)
"""Methods of the emulator that change the game in a way that a replay would not repeat"""


class NotRepeatable(Exception):
    """The game cannot be replayed; the message says why."""


class RecordedEmulator:
    """An emulator (`ale_py.ALEInterface`) that remembers its seed and inputs.

    An episode without a seed continues the random numbers of the one before it, as usual, except
    that one after `RELOAD_AFTER` inputs gets a new seed from a random stream of its own.
    """

    def __init__(self, game: Any) -> None:
        self._game = game
        self._emulator = game.ale
        self._seed: int | None = None
        self._stream = np.random.default_rng()
        self._inputs = bytearray()
        self._strengths = array("f")
        self._problem: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name in _UNRECORDED:
            self._problem = f"{name} of its emulator was used"
        return getattr(self._emulator, name)

    def setInt(self, key: str, value: int) -> None:  # noqa: N802 - the emulator's names
        if key == "random_seed":
            self._seed = int(value)
            self._stream = np.random.default_rng(self._seed % 2**32)
        else:
            self._problem = f"its setting {key} was changed"
        self._emulator.setInt(key, value)

    def loadROM(self, rom: Any) -> None:  # noqa: N802
        self._emulator.loadROM(rom)
        self._inputs.clear()
        del self._strengths[:]

    def reset_game(self) -> None:
        if self._seed is None or len(self._inputs) >= RELOAD_AFTER:
            self._seed = int(self._stream.integers(2**31))
            self._emulator.setInt("random_seed", self._seed)
            self._game.load_game()
        self._inputs.append(_RESET)
        self._emulator.reset_game()

    def act(self, action: Any, paddle_strength: float = 1.0) -> int:
        self._inputs.append(action if type(action) is int else action.value)
        if self._game.continuous:
            self._strengths.append(paddle_strength)
        reward: int = self._emulator.act(action, paddle_strength)
        return reward

    def read(self) -> dict[str, Any]:
        """Return what `replay` needs; raises `NotRepeatable`."""
        if self._problem is not None:
            raise NotRepeatable(self._problem)
        if not self._inputs:
            raise NotRepeatable("it was never reset")
        return {
            "seed": self._seed,
            "stream": self._stream,
            "inputs": np.frombuffer(bytes(self._inputs), np.uint8),
            "strengths": np.array(self._strengths, np.float32),
            "fingerprint": self._fingerprint(),
        }

    def check(self, state: object) -> None:
        """Raise ValueError unless `replay` can play `state`."""
        names = {"seed", "stream", "inputs", "strengths", "fingerprint"}
        if not isinstance(state, dict) or state.keys() != names:
            raise ValueError("the record of the Atari game is incomplete")
        if type(state["seed"]) is not int or not -(2**31) <= state["seed"] < 2**31:
            raise ValueError("the seed of the Atari game is out of range")
        if not isinstance(state["stream"], np.random.Generator):
            raise ValueError("the random stream of the Atari game is not a NumPy generator")
        self._check_inputs(state["inputs"], state["strengths"])

    def _check_inputs(self, inputs: object, strengths: object) -> None:
        if not isinstance(inputs, np.ndarray) or inputs.dtype != np.uint8 or inputs.ndim != 1:
            raise ValueError("the inputs of the Atari game are not a vector of bytes")
        is_action = inputs < _NUMBER_OF_ACTIONS
        if not (is_action | (inputs == _RESET)).all() or not len(inputs) or inputs[0] != _RESET:
            raise ValueError("the inputs of the Atari game are not actions and resets")
        frames = self._emulator.getInt("max_num_frames_per_episode")
        if len(inputs) > (2 * (RELOAD_AFTER + frames) if frames > 0 else _MAX_INPUTS):
            raise ValueError(f"{len(inputs):,} inputs are more than an Atari game can have")
        expected = int(is_action.sum()) if self._game.continuous else 0
        if not isinstance(strengths, np.ndarray) or strengths.dtype != np.float32:
            raise ValueError("the paddle strengths of the Atari game are not float32")
        if strengths.shape != (expected,) or not np.isfinite(strengths).all():
            raise ValueError(f"the Atari game does not have {expected} finite paddle strengths")

    def replay(self, state: dict[str, Any]) -> None:
        """Play a game that `check` accepted; `CheckpointError` if it takes another course."""
        self.setInt("random_seed", state["seed"])
        self._game.load_game()
        self._stream = state["stream"]
        strengths = iter(state["strengths"].tolist())
        for recorded in state["inputs"].tolist():
            if recorded == _RESET:
                self._inputs.append(_RESET)
                self._emulator.reset_game()
            else:
                self.act(recorded, next(strengths, 1.0))
        if self._fingerprint() != state["fingerprint"]:
            raise CheckpointError(
                "The Atari game took another course when it was replayed; use the version of "
                "ale-py and the settings of the game with which the run was trained."
            )

    def _fingerprint(self) -> str:
        state: bytes = self._emulator.cloneState(include_rng=True).serialize()
        return hashlib.sha256(state).hexdigest()


def record_emulator(env: gym.Env[Any, Any]) -> None:
    """Let an Atari game remember its inputs from now on; other environments are not changed."""
    game = env.unwrapped
    module = type(game).__module__.partition(".")[0]
    if module == "ale_py" and hasattr(game, "ale") and not has_emulator(game):
        game.ale = RecordedEmulator(game)


def has_emulator(layer: object) -> bool:
    """Whether a layer is an Atari game that remembers its inputs."""
    return isinstance(vars(layer).get("ale"), RecordedEmulator)
