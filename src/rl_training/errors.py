"""Exceptions of the package. The command line prints their message without a traceback."""

import sys
import warnings
from collections.abc import Sequence

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
