"""The commands for data sets: record, look at, convert."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_training.cli_options import (
    EnvOption,
    ImportOption,
    count,
    import_environment,
    user_error,
)

if TYPE_CHECKING:
    from rl_training.data.formats.writing import Format

FormatOption = Annotated[
    str | None,
    typer.Option("--format", help="npz, hdf5 or minari; by default what the name ends in."),
]
IdOption = Annotated[
    str | None, typer.Option("--id", help="Id of a Minari data set, such as my/pendulum/random-v0.")
]

dataset_app = typer.Typer(
    help="Record data, look at it, convert it.", no_args_is_help=True, rich_markup_mode=None
)


@dataset_app.command()
def record(
    steps: Annotated[int, typer.Option(parser=count, metavar="N", help="Steps to record.")],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; with --id a folder of Minari data sets."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Act by the policy of this run, checkpoint or policy.")
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Act at random in --env.")] = False,
    env: EnvOption = None,
    num_envs: Annotated[int | None, typer.Option(help="Environments to play in at once.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    noise: Annotated[float, typer.Option(help="Noise on a policy's actions, from 0 to 1.")] = 0.1,
    data_format: FormatOption = None,
    dataset_id: IdOption = None,
    modules: ImportOption = None,
) -> None:
    """Record steps of a policy, or of random actions."""
    from rl_training.runtime import workflows

    if random == (checkpoint is not None):
        user_error("give either --checkpoint PATH, or --random with --env ID")
    env_id = import_environment(env, modules)
    if random and env_id is None:
        user_error("--random: needs an environment to act in: --env ID")
    with workflows.reading_progress("recording") as progress:
        path = workflows.record_dataset(
            out,
            steps,
            checkpoint=checkpoint,
            env_id=env_id,
            num_envs=num_envs,
            seed=seed,
            noise=noise,
            data_format=_format(data_format),
            dataset_id=dataset_id,
            progress=progress,
        )
    print(f"{steps:,} steps in {path}")


@dataset_app.command()
def info(
    source: Annotated[str, typer.Argument(help="A file, a Minari id, or a run folder.")],
    picture: Annotated[
        Path | None, typer.Option(help="Where the picture goes; by default the current folder.")
    ] = None,
    no_picture: Annotated[bool, typer.Option("--no-picture", help="Only the numbers.")] = False,
) -> None:
    """Show episodes, returns, lengths and what the data covers."""
    from rl_training.runtime import workflows

    name = Path(source).name or "dataset"
    target = None if no_picture else picture or Path(f"{Path(name).stem}_info.png")
    with workflows.reading_progress("reading") as progress:
        summary = workflows.describe_dataset(source, picture=target, progress=progress)
    for line in workflows.summary_lines(summary):
        print(line)
    if target is not None:
        print(f"picture       {target}")


@dataset_app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A file, a Minari id, or a run folder.")],
    out: Annotated[
        Path | None, typer.Argument(help="File to write; with --id a folder of Minari data sets.")
    ] = None,
    data_format: FormatOption = None,
    dataset_id: IdOption = None,
    clip_actions: Annotated[
        bool, typer.Option("--clip-actions", help="Clip actions beyond the data's own bounds.")
    ] = False,
) -> None:
    """Write a data set in another format."""
    from rl_training.runtime import workflows

    with workflows.reading_progress("converting") as progress:
        path = workflows.convert_dataset(
            source,
            out,
            data_format=_format(data_format),
            dataset_id=dataset_id,
            clip_actions=clip_actions,
            progress=progress,
        )
    print(f"written to {path}")


def _format(name: str | None) -> Format | None:
    """One of the formats; imported late, since the words come with heavy modules."""
    if name is None:
        return None
    from rl_training.data.formats.writing import FORMATS

    for known in FORMATS:
        if name == known:
            return known
    user_error(f"--format {name!r}: must be one of {', '.join(FORMATS)}")
