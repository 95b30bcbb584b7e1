"""Record which files and functions of the package run, in the main process.

All modules are imported before the recording starts, so that code which runs on import is left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from package_imports import PACKAGE, module_name, package_files

PREFIX = f"{PACKAGE}{os.sep}"
TRAIN = ["train", "--config", "sac/pendulum", "--device", "cpu", "--total-timesteps", "1500"]
# One step boundary of the run above where no evaluation, log or checkpoint is due.
STEP_FUNCTION, STEP_NUMBER = "Engine._advance", 750
LOOP_FUNCTIONS = ("Engine.run", STEP_FUNCTION)


@dataclass
class Entry:
    """A file that a step runs through, how often each other file calls it, and which functions."""

    file: str
    callers: Counter[str] = field(default_factory=Counter)
    functions: list[str] = field(default_factory=list)


class Walk:
    """Functions of the package that ran, and the files of one training step in order."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self._phases: dict[str, dict[str, Entry]] = {}
        self._steps_seen = 0

    @property
    def files(self) -> list[str]:
        return sorted({_file_of(code) for code in self.codes})

    @property
    def lines(self) -> int:
        texts = ((PACKAGE / file).read_text(encoding="utf-8") for file in self.files)
        return sum(len(text.splitlines()) for text in texts)

    @property
    def step(self) -> dict[str, list[Entry]]:
        """The files of one step, for each function with which the training loop enters others."""
        phases = {phase: list(entries.values()) for phase, entries in self._phases.items()}
        return {phase: entries for phase, entries in phases.items() if len(entries) > 1}

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PREFIX):
            return
        self.codes.add(code)
        self._steps_seen += code.co_qualname == STEP_FUNCTION
        if self._steps_seen == STEP_NUMBER:
            self._record_step(frame)

    def _record_step(self, frame: FrameType) -> None:
        phase, file = _phase_of(frame), _file_of(frame.f_code)
        if phase is None:
            return
        entry = self._phases.setdefault(phase, {}).setdefault(file, Entry(file))
        entry.callers.update(_calling_file(frame))
        called_from_outside = frame.f_back is None or frame.f_back.f_code.co_filename != _path(file)
        name = frame.f_code.co_qualname
        if called_from_outside and name not in entry.functions and _is_plain_function(file, name):
            entry.functions.append(name)


def _phase_of(frame: FrameType | None) -> str | None:
    """The function on the call stack that the training loop called, if there is one."""
    while frame is not None and frame.f_back is not None:
        name, caller = frame.f_code.co_qualname, frame.f_back.f_code.co_qualname
        if caller in LOOP_FUNCTIONS and name not in LOOP_FUNCTIONS:
            return name
        frame = frame.f_back
    return None


def _is_plain_function(file: str, name: str) -> bool:
    """Whether this is a function or method: not a property, nor a function inside a function."""
    found: Any = sys.modules[module_name(file)]
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    return found is not None and not isinstance(found, property | functools.cached_property)


def _file_of(code: CodeType) -> str:
    return code.co_filename.removeprefix(PREFIX).replace(os.sep, "/")


def _path(file: str) -> str:
    return str(PACKAGE / file)


def _calling_file(frame: FrameType) -> list[str]:
    """The nearest other file of the package on the call stack, if there is one."""
    own, caller = frame.f_code.co_filename, frame.f_back
    while caller is not None:
        name = caller.f_code.co_filename
        if name.startswith(PREFIX) and name != own:
            return [_file_of(caller.f_code)]
        caller = caller.f_back
    return []


def walk(action: Callable[[], object]) -> Walk:
    """Run `action` and record it."""
    recorded = Walk()
    threading.setprofile(recorded.profile)
    sys.setprofile(recorded.profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return recorded


def walk_training() -> Walk:
    """Record `rl-training train --config sac/pendulum`, shortened to 1,500 steps."""
    _import_everything()
    from rl_training.cli import main

    def train() -> None:
        sys.argv = ["rl-training", *TRAIN]
        with contextlib.suppress(SystemExit):
            main()

    with tempfile.TemporaryDirectory() as folder, _quiet(), contextlib.chdir(folder):
        return walk(train)


def walk_update() -> Walk:
    """Record the second SAC update on a given batch; the first one may do work that is cached."""
    _import_everything()
    import torch

    from rl_training.algorithms import SACAlgorithm
    from rl_training.types import Batch

    algorithm = SACAlgorithm(3, 1, {}, seed=0)
    obs, action, reward = torch.zeros(8, 3), torch.zeros(8, 1), torch.zeros(8)
    batch = Batch(obs=obs, action=action, reward=reward, discount=reward, next_obs=obs)
    algorithm.update(batch)
    return walk(lambda: algorithm.update(batch))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _import_everything() -> None:
    sys.path.insert(0, str(PACKAGE.parent))  # an installed copy would be another set of files
    for file in package_files():
        if file != "__main__.py":
            importlib.import_module(module_name(file))
