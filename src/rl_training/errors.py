"""Errors that speak to the user: one clear message, no traceback on the command line."""

import sys
import warnings

PACKAGE = __name__.partition(".")[0]


def warn_user(message: str) -> None:
    """Issue a warning that points to the line of the user's code that called this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level - 1)


class UserError(Exception):
    """Something the user gave is wrong; the message says what and what to do (exit code 2)."""


class ConfigError(UserError, ValueError):
    """A config key, value or name is wrong."""


class EnvironmentSetupError(UserError, ValueError):
    """An environment cannot be made, or does not fit the algorithm."""


class EnvironmentRuntimeError(RuntimeError):
    """An environment returned something unusable (NaN, wrong shape) while running."""


class TrainingError(RuntimeError):
    """Training itself went wrong: the policy holds or gives values that are not finite."""


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing, damaged, or does not fit what is asked of it."""


class DataError(UserError, ValueError):
    """Recorded data is missing, damaged, or does not fit what is asked of it."""


class RunLockedError(UserError):
    """Another process is training in the same run folder."""
