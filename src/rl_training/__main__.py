"""`rl-training` and `python -m rl_training`.

Imports nothing but the standard library, so that a signal in the first moment is handled too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    *((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()),
)
STARTED_AGAIN = ("run", "sweep", "sweep-worker")
"""Commands whose exit code 75 asks a scheduler to start them again"""


def main() -> NoReturn:
    """Run a command; while modules are imported, signals exit at once."""
    atexit.register(_ignore_signals)  # the first that is registered is the last that runs
    for number in SIGNALS:
        signal.signal(number, exit_at_once)
    from rl_training.cli import main as run_command

    try:
        run_command()
    finally:
        _exit_on_second_signal()


def _exit_on_second_signal() -> None:
    """Ignore one signal, so that the exit code stays; exit handlers may hang, so a second exits."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            exit_at_once(number, frame)

    for number in SIGNALS:
        signal.signal(number, handle)


def _ignore_signals() -> None:
    """Python restores the default reaction at exit, which would change the exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Exit with one line, and without cleanup: nothing was created yet, or everything is closed."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(_exit_code(number))


def _exit_code(number: int) -> int:
    if number == signal.SIGTERM:
        return 75 if sys.argv[1:2] and sys.argv[1] in STARTED_AGAIN else 130
    return 130 if number == signal.SIGINT else 75


if __name__ == "__main__":
    main()
