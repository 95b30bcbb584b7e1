"""The application that all commands belong to: entry point, signals and error messages."""

from __future__ import annotations

import contextlib
import gc
import math
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from rl_training.cli.dataset import dataset_app
from rl_training.cli.deployment import export, pull, push
from rl_training.cli.options import (
    ReadableCommand,
    command_with_imports,
    finish_output,
    import_flags,
    prepare_streams,
    user_error,
)
from rl_training.cli.policy import evaluate, predict
from rl_training.cli.report import compare_runs, dashboard, report
from rl_training.cli.results import print_results
from rl_training.cli.show import list_algorithms, show_config, show_runs, show_system
from rl_training.cli.sweep import run, sweep, sweep_worker
from rl_training.cli.training import TRAIN_EXAMPLES, resume, train
from rl_training.cli.video import play, video
from rl_training.errors import CLEANUP_SECONDS, STOP_SIGNALS

EXIT_FAILURE, EXIT_USER_ERROR, EXIT_PREEMPTED, EXIT_INTERRUPTED = 1, 2, 75, 130
"""Codes that tell scripts why a command failed. The help of `train` states the last one."""
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
_ESCAPE_CODE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\].*?(\x07|\x1b\\)|.)", re.DOTALL)
"""Codes that change the color of text or control the terminal"""


class _Commands(TyperGroup):
    """The commands. Ctrl-C and SIGTERM in any of them are reported in one place."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interruption:
            _report_interruption(interruption)


app = typer.Typer(
    name="rl-training",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@dataclass
class Invocation:
    """The options before the command."""

    debug: bool = False


def _show_version(requested: bool) -> None:
    if requested:
        from rl_training.version import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error in your input.")
    ] = False,
) -> None:
    """Train reinforcement learning policies, resume runs, and evaluate the results."""
    context.ensure_object(Invocation).debug = debug
    try:
        Path.cwd()
    except FileNotFoundError:  # PyTorch could not be loaded
        user_error("the current folder does not exist anymore; change to another folder")


app.command(epilog=TRAIN_EXAMPLES)(train)
app.command(cls=ReadableCommand)(resume)
app.command(cls=ReadableCommand)(evaluate)
app.command(cls=ReadableCommand)(predict)
app.command(cls=ReadableCommand)(push)
app.command(cls=ReadableCommand)(pull)
app.command(cls=ReadableCommand)(video)
app.command(cls=ReadableCommand)(play)
app.command(cls=ReadableCommand)(export)
app.command("list")(list_algorithms)
app.command("config", cls=ReadableCommand)(show_config)
app.command("runs", cls=ReadableCommand)(show_runs)
app.command("compare", cls=ReadableCommand)(compare_runs)
app.command("report", cls=ReadableCommand)(report)
app.command("dashboard", cls=ReadableCommand)(dashboard)
app.command("doctor")(show_system)
app.command(cls=ReadableCommand)(run)
app.command(cls=ReadableCommand)(sweep)
app.command("sweep-worker", hidden=True)(sweep_worker)
app.add_typer(dataset_app, name="dataset")


def main() -> NoReturn:
    """Run a command and exit. A user error prints one message and exits with code 2."""
    reduce_garbage_collection()
    prepare_streams()
    warnings.showwarning = _show_warning
    invocation = Invocation()
    with _interrupted_by_signals():
        try:
            result = app(prog_name="rl-training", standalone_mode=False, obj=invocation)
        except KeyboardInterrupt as interruption:
            _report_interruption(interruption)
        except Exception as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # while arguments are parsed
                _report_interruption(error.__cause__)
            _fail(error, debug=invocation.debug)
        finally:
            finish_output()
    raise SystemExit(result if isinstance(result, int) else 0)


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Let `STOP_SIGNALS` raise `KeyboardInterrupt`; training reacts in its own way.

    While modules are imported, the previous reaction remains, because libraries turn exceptions
    there into others. `rl_training.__main__` exits then.
    """
    raised_at = -math.inf

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        before = previous[signal.Signals(number)]
        if callable(before) and _is_importing(frame):
            before(number, frame)
        if time.monotonic() >= raised_at + CLEANUP_SECONDS:
            raised_at = time.monotonic()
            raise KeyboardInterrupt(signal.Signals(number))

    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in previous.items():  # None: one that Python cannot set
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


def reduce_garbage_collection() -> None:
    """Make full garbage collections rarer.

    They would cost time while modules are imported and free nothing. Collections of the younger
    generations are as frequent as before.
    """
    gc.set_threshold(700, 10, 100)


def _fail(error: Exception, *, debug: bool = False) -> NoReturn:
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # click: wrong usage
        error.show()
        raise SystemExit(error.exit_code) from None
    from rl_training.errors import (
        WORKER_TRACEBACK,
        EnvironmentRuntimeError,
        TrainingError,
        UntrustedModuleError,
        UserError,
    )

    if not isinstance(error, UserError | EnvironmentRuntimeError | TrainingError | OSError):
        raise error
    if debug:
        traceback.print_exception(error)
    elif error.__cause__ is not None:
        error.add_note("rl-training --debug COMMAND shows the traceback")
    _print_error(f"error: {error}")
    if isinstance(error, UntrustedModuleError) and error.modules:
        _print_error(f"run: {command_with_imports(error.modules)}")
    for note in getattr(error, "__notes__", ()):
        if debug or not note.startswith(WORKER_TRACEBACK):
            _print_error(note)
    raise SystemExit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILURE) from None


def _print_error(message: str) -> None:
    from rl_training.errors import printable

    print(printable(message), file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _print_error(f"warning: {_ESCAPE_CODE.sub('', str(message))}")


def _report_interruption(interruption: KeyboardInterrupt) -> NoReturn:
    """Report what was saved; after a second signal, the notes name the last checkpoints."""
    from rl_training.errors import TrainingInterrupted

    notes = getattr(interruption, "__notes__", ())
    if isinstance(interruption, TrainingInterrupted) and not notes:
        print_results(interruption.results)
        if interruption.__cause__ is not None:
            _print_error(f"error: {interruption.__cause__}")
        flags = import_flags() if interruption.unfinished else ""
        _print_error(f"{interruption.report()}{flags}")
        raise SystemExit(_exit_code(interruption) if interruption.unfinished else 0) from None
    if interruption.__cause__ is not None:
        _print_error(f"error: {interruption.__cause__}")
    _print_error("interrupted")
    for note in notes:
        _print_error(note)
    raise SystemExit(_exit_code(interruption)) from None


def _exit_code(interruption: KeyboardInterrupt) -> int:
    """75 after SIGUSR1, by which a scheduler says that it will start the command again."""
    from rl_training.errors import stop_signals

    received = stop_signals(interruption)
    if received and set(received) == {getattr(signal, "SIGUSR1", None)}:
        return EXIT_PREEMPTED
    return EXIT_INTERRUPTED
