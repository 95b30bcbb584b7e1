"""Options that several commands share, functions that process their values, and their output."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperCommand

from rl_training.cli import completion


class ReadableCommand(TyperCommand):
    """A command whose help shows the names of its arguments without their Python types."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                vars(parameter)["display_type_rich"] = lambda ctx: None


_CONFIG = typer.Option(
    "--config",
    "-c",
    metavar="CONFIG",
    help="YAML file or packaged name such as sac/pendulum.",
    autocompletion=completion.configs,
)
ConfigOption = Annotated[str, _CONFIG]
OptionalConfigOption = Annotated[str | None, _CONFIG]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a config key or hyper-parameter, e.g. seed=1 or tau=0.01. Can be repeated.",
    ),
]
MoveOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Run the environments elsewhere, e.g. vectorization=async or ray_address=host:6379. "
        "Can be repeated.",
    ),
]
EnvOption = Annotated[
    str | None,
    typer.Option(
        "--env",
        metavar="ID",
        help="Gymnasium id of the environment.",
        autocompletion=completion.environments,
    ),
]
ImportOption = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Python module that defines environments, wrappers or algorithms. Can be repeated.",
    ),
]
WrapperOption = Annotated[
    list[str] | None,
    typer.Option(
        "--wrapper",
        metavar="MODULE:CLASS",
        help="Wrapper to put around every environment. Can be repeated; the last is outermost.",
    ),
]


def count(text: str) -> int:
    """Parse an integer such as `10000`, `10_000`, `10,000`, `1e4`, `10k` or `1.5M`."""
    from rl_training.validation import parse_count

    number = parse_count(text)
    if number is None:
        raise typer.BadParameter(f"{text!r} is not an integer such as 10000, 10k, 1.5M or 1e6")
    return number


StepsOption = Annotated[
    int | None,
    typer.Option(
        "--total-timesteps",
        parser=count,
        metavar="N",
        help="Total number of steps. To extend a finished run, resume it with a larger total.",
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        metavar="extend|keep",
        help="With a larger --total-timesteps: stretch schedules to it, or keep them as they are.",
        autocompletion=completion.choices("extend", "keep"),
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Device: auto, cpu, cuda or cuda:N.",
        autocompletion=completion.choices("auto", "cpu", "cuda"),
    ),
]
RunsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH",
        help="Run folders, or folders that contain runs.",
        autocompletion=completion.run_folders,
    ),
]
PolicyArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH",
        help="Run folder, checkpoint or saved policy.",
        autocompletion=completion.run_folders,
    ),
]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="PATH",
        help="Same as the argument PATH.",
        autocompletion=completion.run_folders,
    ),
]


def prepare_streams() -> None:
    """Open standard streams that are closed, and escape characters that they cannot print.

    Without this, a file of a run could get the number of a closed stream, and what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (stays open)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def finish_output() -> None:
    """Print what is still in memory, unless it cannot be printed: its reader may be gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream)


def outlive_output() -> None:
    """Let the command go on if its output cannot be printed, as in `train | head`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _OptionalOutput):
            setattr(sys, name, _OptionalOutput(stream))


class _OptionalOutput:
    """A stream that drops what cannot be printed: its reader is gone, or its disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._errors_dropped():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._errors_dropped():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _errors_dropped(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            _discard(self._stream)
        except OSError:
            pass  # a full disk may have space again later


def _discard(stream: TextIO) -> None:
    """Discard everything that is printed from now on."""
    with contextlib.suppress(OSError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


def announce(activity: str, *, keep_output_clean: bool = False) -> None:
    """Print a first line, so that the screen is not empty during slow imports.

    With `keep_output_clean`, standard output is left to the results: the line is printed to
    standard error, and only if that is a terminal.
    """
    from rl_training.version import __version__

    stream = sys.stderr if keep_output_clean else sys.stdout
    if not keep_output_clean or stream.isatty():
        print(f"rl-training {__version__}: {activity} ...", file=stream, flush=True)


def single_path(argument: Path | None, option: Path | None) -> Path:
    """Return the path of the policy, given either by position or as `--checkpoint`."""
    path = argument or option
    if path is None:
        user_error("missing policy; pass the path of a run folder, a checkpoint or a saved policy")
    if argument is not None and option is not None:
        user_error(f"{argument} and --checkpoint {option}: use only one of them")
    return path


def import_environment(
    env: str | None, modules: list[str] | None, wrappers: list[str] | None = None
) -> str | None:
    """Import the given modules, and those of `env` and `wrappers`. Return the environment's id.

    Only the command line accepts an `env` of the form `MODULE:ID`. In a config file it could import
    untrusted code.
    """
    module, separator, environment_id = (env or "").rpartition(":")
    if env is not None and (not environment_id or (separator and not module)):
        user_error(f"--env {env!r}: must be MODULE:ID or the ID of a registered environment")
    import_modules(
        [*(modules or ()), *([module] if module else ()), *map(_wrapper_module, wrappers or ())]
    )
    return environment_id or None


def import_modules(modules: list[str] | None) -> None:
    """Import the modules that the command names, also from the current folder.

    Configs and run folders may then use their wrappers.
    """
    if not modules:
        return
    from rl_training.envs import trust_modules

    sys.path.append(str(Path.cwd()))
    trust_modules(*modules)


def command_with_imports(modules: Sequence[str]) -> str:
    """Return the current command with `--import` for each of these modules."""
    return shlex.join(["rl-training", *sys.argv[1:]]) + import_flags(modules)


def import_flags(modules: Sequence[str] | None = None) -> str:
    """Return the flags that import these modules, by default those of this command."""
    if modules is None:
        from rl_training.envs import TRUSTED_MODULES

        modules = list(TRUSTED_MODULES)
    return "".join(f" --import {name}" for name in modules)


def _wrapper_module(wrapper: str) -> str:
    module, _, class_name = wrapper.partition(":")
    if not (module and class_name):
        user_error(f"--wrapper {wrapper!r}: must be MODULE:CLASS, e.g. my_wrappers:MyWrapper")
    return module


def user_error(message: str) -> NoReturn:
    """Raise a `UserError` about the command-line arguments."""
    from rl_training.errors import UserError

    raise UserError(message)
