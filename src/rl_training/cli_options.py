"""Options that several commands take, and what is done with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

ConfigOption = Annotated[
    str,
    typer.Option("--config", "-c", help="A YAML file, or a packaged name such as sac/pendulum."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change one key: algo_kwargs.tau=0.01. Can be repeated."),
]
EnvOption = Annotated[str | None, typer.Option("--env", help="Environment id (env_id).")]
ImportOption = Annotated[
    list[str] | None,
    typer.Option("--import", help="Import a Python module first, which registers environments."),
]


def count(text: str) -> int:
    """`10000`, and `1e4` as people write it."""
    try:
        return int(text) if text.lstrip("+-").isdigit() else _whole(float(text))
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a valid integer") from None


def _whole(value: float) -> int:
    if not value.is_integer():
        raise ValueError
    return int(value)


StepsOption = Annotated[
    int | None,
    typer.Option(
        "--total-timesteps",
        parser=count,
        metavar="N",
        help="Steps in all; a run that is resumed goes on to this larger total.",
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        metavar="extend|keep",
        help="With a larger total: plan schedules anew up to it, or go on as planned.",
    ),
]
PolicyArgument = Annotated[
    Path | None,
    typer.Argument(metavar="PATH", help="A run folder, a checkpoint or a saved policy."),
]
CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", help="The same path, as an option.")
]


def one_path(argument: Path | None, option: Path | None) -> Path:
    """The policy to use, given by position or as `--checkpoint`."""
    path = argument or option
    if path is None:
        user_error("which policy? give the path of a run folder, a checkpoint or a saved policy")
    if argument is not None and option is not None:
        user_error(f"{argument} and --checkpoint {option}: give one of them")
    return path


def import_environment(env: str | None, modules: list[str] | None) -> str | None:
    """`MODULE:ID` imports MODULE: on the command line, unlike in a file, that is the user's own."""
    if env is None or ":" not in env:
        import_modules(modules)
        return env
    module, _, environment_id = env.partition(":")
    if not module or not environment_id:
        user_error(f"--env {env!r}: write it as MODULE:ID, or as an ID that is registered already")
    import_modules([*(modules or ()), module])
    return environment_id


def import_modules(modules: list[str] | None) -> None:
    """What `--import` names."""
    import importlib

    if modules:
        sys.path.append(str(Path.cwd()))  # where people keep their own modules
    for name in modules or ():
        try:
            importlib.import_module(name)
        except (ImportError, TypeError, ValueError) as error:
            user_error(f"--import {name}: {error}")


def user_error(message: str) -> NoReturn:
    """End with a message about what was given on the command line."""
    from rl_training.errors import UserError

    raise UserError(message)
