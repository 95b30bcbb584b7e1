"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


def _count(text: str) -> int:
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
        parser=_count,
        metavar="N",
        help="Steps in all; a run that is resumed goes on to this larger total.",
    ),
]
CheckpointOption = Annotated[
    Path, typer.Option("--checkpoint", help="A run folder, a checkpoint or a saved policy.")
]
