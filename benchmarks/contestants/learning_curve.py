"""The part that the scripts of learning peers share: evaluate, save, print, and continue.

A script prints a line of JSON with its versions, and one for each evaluation. What a new process
needs to continue is in the folder of the task.
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

EVALUATION_SEED = 1_000


class LearningCurve:
    """The evaluations of one seed, with the wall time until each of them."""

    def __init__(
        self,
        task: dict[str, Any],
        packages: Sequence[str],
        act: Callable[[np.ndarray], np.ndarray],
        save: Callable[[Path], None],
        began: float,
    ) -> None:
        """`began` is the `time.perf_counter()` before anything was set up."""
        self._task, self._act, self._save = task, act, save
        self._folder = Path(task["folder"])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._environment = gymnasium.make(task["environment"])
        state = self._read()
        self._rounds: list[dict[str, Any]] = state["rounds"]
        self.saved: Path | None = self._folder / state["saved"] if self._rounds else None
        """What an earlier process has saved, None if there was none"""
        self._began = began - (self._rounds[-1]["seconds"] if self._rounds else 0.0)
        print(
            json.dumps({"versions": {name: importlib.metadata.version(name) for name in packages}})
        )
        for found in self._rounds:
            print(json.dumps(found), flush=True)

    @property
    def step(self) -> int:
        """The last step that was evaluated and saved."""
        return int(self._rounds[-1]["step"]) if self._rounds else 0

    def evaluate(self, step: int) -> None:
        """Play the episodes with the deterministic policy, save everything, and print the mean."""
        episodes = range(self._task["eval_episodes"])
        found = float(np.mean([self._play(EVALUATION_SEED + episode) for episode in episodes]))
        new = self._folder / f"step{step}"
        new.mkdir(exist_ok=True)
        self._save(new)
        seconds = round(time.perf_counter() - self._began, 2)
        self._rounds.append({"step": step, "return": found, "seconds": seconds})
        part = self._folder / "state.json.part"
        part.write_text(json.dumps({"saved": new.name, "rounds": self._rounds}))
        part.replace(self._folder / "state.json")
        if self.saved is not None:
            for file in self.saved.iterdir():
                file.unlink()
            self.saved.rmdir()
        self.saved = new
        print(json.dumps(self._rounds[-1]), flush=True)

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self._folder / "state.json").read_text()))
        except FileNotFoundError:
            return {"rounds": []}

    def _play(self, seed: int) -> float:
        obs, _ = self._environment.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            action = self._act(np.asarray(obs, dtype=np.float32))
            obs, reward, terminated, truncated, _ = self._environment.step(action)
            total, ended = total + float(reward), terminated or truncated
        return total
