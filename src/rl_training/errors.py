"""Exceptions of the package. The command line prints their message without a traceback."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_training.types import TrainResult

PACKAGE = __name__.partition(".")[0]

BRIEF = 500
"""Longest text that a message quotes from a file, in characters"""
WORKER_TRACEBACK = "In an environment's worker process:"
"""First line of a note with a traceback, which the command line shows with `--debug` only"""
INTERRUPTED = "interrupted"
"""Stop reason after a signal, which skips the final evaluation"""
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    # Sent by a scheduler that is about to take the machine away; Windows has none.
    *((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()),
)
"""Signals that stop a run with a checkpoint; processes that only serve the run ignore them"""
CLEANUP_SECONDS = 1.0
"""Time after a `KeyboardInterrupt` in which further signals do not interrupt the cleanup"""


def warn_user(message: str) -> None:
    """Issue a warning that points to the line of the user's code that called this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def brief(error: BaseException) -> str:
    """Return the message of an error about a file: in one line, short and without control codes."""
    return one_line(str(error) or type(error).__name__, BRIEF)


def one_line(text: str, limit: int) -> str:
    """Return text from a file in one line of limited length, without control codes."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= limit else f"{shown[:limit]}..."


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


class UnboundedActionsError(EnvironmentSetupError):
    """The actions of an environment are a Box without finite bounds, and no range is stated."""


class UntrustedModuleError(EnvironmentSetupError):
    """A file needs modules that were not named by the user; files never import modules."""

    def __init__(self, problem: str, modules: Sequence[str] = ()) -> None:
        self.modules = tuple(modules)
        """The modules to trust"""
        flags = " ".join(f"--import {name}" for name in self.modules)
        call = f"rl_training.envs.trust_modules({', '.join(map(repr, self.modules))})"
        hint = f"; if you trust this code, add {flags} (in Python: {call})" if flags else ""
        super().__init__(problem + hint)


class MissingNetworksError(UserError):
    """A policy was trained with a user's networks, which files never contain."""

    def __init__(self, what: object, name: str) -> None:
        super().__init__(
            f"{what}: was trained with networks of the class {name}; pass it again from Python, "
            f"with networks={name.rpartition('.')[2]}"
        )


class OtherNetworksError(UserError):
    """The networks that a user gives again are not those that a policy was trained with."""

    def __init__(self, saved: str, given: str, problem: str) -> None:
        super().__init__(
            f"networks = {given}: do not fit this policy, which was trained with networks of the "
            f"class {saved} ({problem}); pass networks={saved.rpartition('.')[2]}, with the layers "
            "that it had in training"
        )


class EnvironmentRuntimeError(RuntimeError):
    """An environment returned an invalid value, such as NaN or a wrong shape."""


class TrainingError(RuntimeError):
    """Training failed: a loss, the learned state or an action is not finite."""

    @classmethod
    def diverged(
        cls,
        problem: str,
        last_good: Path | None,
        advice: str = "smaller rewards, a smaller learning_rate or max_grad_norm may help",
    ) -> TrainingError:
        """Return the error for a value that is not finite; `last_good` is a checkpoint."""
        good = "there is no good checkpoint"
        if last_good is not None:
            good = f"the last good checkpoint is {last_good.name}"
        return cls(f"{problem}; {good}; {advice}")


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing, damaged, or not compatible with the request."""


class DataError(UserError, ValueError):
    """A dataset is missing, damaged, or not compatible with the request."""


class RunLockedError(UserError):
    """Another process is training in the same run folder."""


ERRORS_OF_ONE_RUN = (CheckpointError, EnvironmentRuntimeError, TrainingError, OSError)
"""Errors that stop the run in which they occur; the other runs of the process continue"""


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGUSR1 stopped training. Every run has a checkpoint and can be resumed.

    After the first signal the runs are saved. After a second one, the results are those of their
    latest checkpoints.

    Like any `KeyboardInterrupt`, it ends a program that does not catch it.
    """

    def __init__(self, results: Sequence[TrainResult], signals: Sequence[object] = ()) -> None:
        super().__init__(results)
        self.signals = [number for number in signals if isinstance(number, int)]
        """The signals that were received"""
        self.results = list(results)
        """The results of all runs. Those that did not finish have `stop_reason` "interrupted"."""

    @property
    def result(self) -> TrainResult:
        """The result of the first run."""
        return self.results[0]

    @property
    def unfinished(self) -> list[TrainResult]:
        """The results of the runs that did not finish, or whose last evaluation is due."""
        return [
            each for each in self.results if each.stop_reason == INTERRUPTED or each.evaluation_due
        ]

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
        unfinished = self.unfinished
        steps = sorted({int(result.metrics["global_step"]) for result in unfinished})
        where = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
        saved = "a checkpoint" if len(unfinished) == 1 else "a checkpoint of each run"
        if all(result.evaluation_due for result in unfinished):
            return f"training ended at {where} with {saved}, but its last evaluation is missing"
        return f"stopped at {where} with {saved}"

    def _command(self) -> str:
        return " ".join(["rl-training resume", *(str(each.run_dir) for each in self.unfinished)])


def stop_signals(interruption: KeyboardInterrupt) -> list[int]:
    """Return the signals that caused an interruption; empty if they are not known."""
    if isinstance(interruption, TrainingInterrupted):
        return interruption.signals
    return [number for number in interruption.args if isinstance(number, int)]


def as_exception(error: BaseException) -> Exception:
    """Return the error, or an `EnvironmentRuntimeError` for one that would end the program."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, SystemExit):
        return EnvironmentRuntimeError(f"it called sys.exit({error.code!r})")
    return EnvironmentRuntimeError(f"it raised {last_line(error)}")


def last_line(error: BaseException) -> str:
    """Return the last line that Python prints for an error, with the name of its type."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
