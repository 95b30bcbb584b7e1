"""The `dataset` commands: `record`, `info` and `convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_training import cli_completion as completion
from rl_training.cli_options import (
    EnvOption,
    ImportOption,
    ReadableCommand,
    WrapperOption,
    count,
    import_environment,
    user_error,
)

if TYPE_CHECKING:
    from rl_training.runtime.workflows import Format

FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="npz|hdf5|minari",
        help="File format. Default: chosen by the file name's extension.",
        autocompletion=completion.choices("npz", "hdf5", "minari"),
    ),
]
IdOption = Annotated[
    str | None,
    typer.Option(
        "--id", metavar="ID", help="Id of the Minari dataset, e.g. my/pendulum/random-v0."
    ),
]

dataset_app = typer.Typer(
    help="Record, inspect and convert datasets.", no_args_is_help=True, rich_markup_mode=None
)


@dataset_app.command()
def record(
    steps: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Number of steps to record.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Output file; with --id, a folder for Minari datasets."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Record this policy: run folder, checkpoint or saved policy.",
            autocompletion=completion.run_folders,
        ),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Record random actions in --env.")
    ] = False,
    env: EnvOption = None,
    num_envs: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Number of parallel environments.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    noise: Annotated[
        float, typer.Option(metavar="SCALE", help="Noise on the policy's actions, 0 to 1.")
    ] = 0.1,
    data_format: FormatOption = None,
    dataset_id: IdOption = None,
    wrappers: WrapperOption = None,
    modules: ImportOption = None,
) -> None:
    """Record steps of a policy or of random actions."""
    from rl_training.runtime import workflows

    if random == (checkpoint is not None):
        user_error("use either --checkpoint PATH, or --random with --env ID")
    if checkpoint is not None and wrappers:
        user_error(
            "--wrapper: cannot be used with --checkpoint, whose policy is recorded in the wrappers "
            "that it was trained with"
        )
    env_id = import_environment(env, modules, wrappers)
    if random and env_id is None:
        user_error("--random: needs an environment; add --env ID")
    with workflows.reading_progress("recording") as progress:
        path = workflows.record_dataset(
            out,
            steps,
            checkpoint=checkpoint,
            env_id=env_id,
            wrappers=wrappers or (),
            num_envs=num_envs,
            seed=seed,
            noise=noise,
            data_format=_format(data_format),
            dataset_id=dataset_id,
            progress=progress,
        )
    print(f"{steps:,} steps in {path}")


@dataset_app.command(cls=ReadableCommand)
def info(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="File, Minari id or run folder.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw histograms to this image, e.g. data.png."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(hidden=True, help="Same as --out.")] = None,
    no_picture: Annotated[
        bool, typer.Option("--no-picture", hidden=True, help="Has no effect.")
    ] = False,
) -> None:
    """Show episodes, returns, lengths and coverage of a dataset."""
    from rl_training.runtime import workflows

    if out is not None and picture is not None:
        user_error(f"--out {out} and --picture {picture}: use only --out")
    target = out or picture
    with workflows.reading_progress("reading") as progress:
        summary = workflows.describe_dataset(source, picture=target, progress=progress)
    for line in workflows.summary_lines(summary):
        print(line)
    if target is not None:
        print(f"picture       {target}")
    elif not no_picture:
        print("picture       add --out FILE.png to draw histograms")


@dataset_app.command(cls=ReadableCommand)
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="File, Minari id or run folder.")],
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", help="Output file; with --id, a folder for Minari datasets."),
    ] = None,
    data_format: FormatOption = None,
    dataset_id: IdOption = None,
    clip_actions: Annotated[
        bool,
        typer.Option("--clip-actions", help="Clip actions to the bounds stored in the dataset."),
    ] = False,
) -> None:
    """Convert a dataset to another format."""
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
    """Return `name` if it is a known format. Raise a `UserError` otherwise."""
    if name is None:
        return None
    from rl_training.runtime.workflows import FORMATS

    for known in FORMATS:
        if name == known:
            return known
    user_error(f"--format {name!r}: must be one of {', '.join(FORMATS)}")
