"""Options that several commands share, and functions that process their values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from rl_training import cli_completion as completion


class ReadableCommand(TyperCommand):
    """A command whose help shows the names of its arguments without their Python types."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                vars(parameter)["display_type_rich"] = lambda ctx: None


ConfigOption = Annotated[
    str,
    typer.Option(
        "--config",
        "-c",
        metavar="CONFIG",
        help="YAML file or packaged name such as sac/pendulum.",
        autocompletion=completion.configs,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a config key, e.g. algo_kwargs.tau=0.01. Can be repeated.",
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
        help="Python module that registers environments. Can be repeated.",
    ),
]


def count(text: str) -> int:
    """Parse an integer, also in scientific notation: `10000` or `1e4`."""
    try:
        return int(text) if text.lstrip("+-").isdigit() else _as_integer(float(text))
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a valid integer") from None


def _as_integer(value: float) -> int:
    if not value.is_integer():
        raise ValueError
    return int(value)


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


def import_environment(env: str | None, modules: list[str] | None) -> str | None:
    """Import the given modules, and MODULE if `env` is `MODULE:ID`. Return the environment's id.

    Only the command line accepts `MODULE:ID`. In a config file it could import untrusted code.
    """
    if env is None or ":" not in env:
        import_modules(modules)
        return env
    module, _, environment_id = env.partition(":")
    if not module or not environment_id:
        user_error(f"--env {env!r}: must be MODULE:ID or the ID of a registered environment")
    import_modules([*(modules or ()), module])
    return environment_id


def import_modules(modules: list[str] | None) -> None:
    """Import the modules given by `--import`, also from the current folder."""
    import importlib

    if modules:
        sys.path.append(str(Path.cwd()))
    for name in modules or ():
        try:
            importlib.import_module(name)
        except (ImportError, TypeError, ValueError) as error:
            user_error(f"--import {name}: {error}")


def user_error(message: str) -> NoReturn:
    """Raise a `UserError` about the command-line arguments."""
    from rl_training.errors import UserError

    raise UserError(message)
