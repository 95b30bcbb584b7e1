"""Exceptions of the package. The command line prints their message without a traceback."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_training.types import TrainResult

PACKAGE = __name__.partition(".")[0]

INTERRUPTED = "interrupted"
"""Stop reason after a signal, which skips the final evaluation"""


def warn_user(message: str) -> None:
    """Issue a warning that points to the line of the user's code that called this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def printable(text: str) -> str:
    """Escape characters that would control a terminal; line breaks are kept."""
    return "".join(
        each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text
    )


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


class UserError(Exception):
    """The user's input is wrong. The message says what is wrong and how to fix it (exit code 2)."""


class ConfigError(UserError, ValueError):
    """A config has a wrong key, value or name."""


class EnvironmentSetupError(UserError, ValueError):
    """An environment cannot be created, or does not fit the algorithm."""


class UntrustedModuleError(EnvironmentSetupError):
    """A file needs modules that were not named by the user; files never import modules."""

    def __init__(self, problem: str, modules: Sequence[str] = ()) -> None:
        self.modules = tuple(modules)
        """The modules to trust"""
        flags = " ".join(f"--import {name}" for name in self.modules)
        call = f"rl_training.envs.trust_modules({', '.join(map(repr, self.modules))})"
        hint = f"; if you trust this code, add {flags} (in Python: {call})" if flags else ""
        super().__init__(problem + hint)


class EnvironmentRuntimeError(RuntimeError):
    """An environment returned an invalid value, such as NaN or a wrong shape."""


class TrainingError(RuntimeError):
    """Training failed: the policy has parameters or outputs that are not finite."""


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing, damaged, or not compatible with the request."""


class DataError(UserError, ValueError):
    """A dataset is missing, damaged, or not compatible with the request."""


class RunLockedError(UserError):
    """Another process is training in the same run folder."""


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped training. Every run was saved first and can be resumed.

    Like any `KeyboardInterrupt`, it ends a program that does not catch it.
    """

    def __init__(self, results: Sequence[TrainResult]) -> None:
        super().__init__(results)
        self.results = list(results)
        """The results of all runs. Those that did not finish have `stop_reason` "interrupted"."""

    @property
    def result(self) -> TrainResult:
        """The result of the first run."""
        return self.results[0]

    @property
    def unfinished(self) -> list[TrainResult]:
        """The results of the runs that did not finish."""
        return [result for result in self.results if result.stop_reason == INTERRUPTED]

    def __str__(self) -> str:
        if len(self.unfinished) != 1:
            return self.report()
        (result,) = self.unfinished
        return (
            f"{self._saved()} in {result.run_dir}; continue with agent.learn(), "
            f"or in a shell: {self._command()}"
        )

    def report(self) -> str:
        """Return the message that the command line prints: where training stopped, what to run."""
        if not self.unfinished:
            return "interrupted after training finished"
        return f"{self._saved()}; continue with: {self._command()}"

    def _saved(self) -> str:
        steps = sorted({int(result.metrics["global_step"]) for result in self.unfinished})
        where = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
        saved = "a checkpoint" if len(self.unfinished) == 1 else "a checkpoint of each run"
        return f"stopped at {where} with {saved}"

    def _command(self) -> str:
        return " ".join(["rl-training resume", *(str(each.run_dir) for each in self.unfinished)])
