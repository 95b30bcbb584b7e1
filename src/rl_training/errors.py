"""Exceptions of the package. The command line prints their message without a traceback."""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

PACKAGE = __name__.partition(".")[0]


def warn_user(message: str) -> None:
    """Issue a warning that points to the line of the user's code that called this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


class UserError(Exception):
    """The user's input is wrong. The message says what is wrong and how to fix it (exit code 2)."""


class ConfigError(UserError, ValueError):
    """A config has a wrong key, value or name."""


class EnvironmentSetupError(UserError, ValueError):
    """An environment cannot be created, or does not fit the algorithm."""


class EnvironmentRuntimeError(RuntimeError):
    """An environment returned an invalid value, such as NaN or a wrong shape."""


class TrainingError(RuntimeError):
    """Training failed: the policy has parameters or outputs that are not finite."""


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing, damaged, or not compatible with the request."""


class DataError(UserError, ValueError):
    """A dataset is missing, damaged, or not compatible with the request."""


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted by Ctrl-C or a signal, after a checkpoint was saved."""

    def __init__(self, results: Sequence[Any]) -> None:
        super().__init__("training was interrupted; its checkpoint is saved")
        self.results = list(results)
        """The `TrainResult` of each seed"""

    @property
    def result(self) -> Any:
        """The `TrainResult` of the first seed."""
        return self.results[0]


class RunLockedError(UserError):
    """Another process is training in the same run folder."""
