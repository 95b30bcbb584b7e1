"""The `dataset` commands: `record`, `info`, `convert`, `split` and `filter`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli import completion
from rl_training.cli.options import (
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
        metavar="npz|hdf5|minari|lerobot",
        help="File format. Default: chosen by the file name's extension.",
        autocompletion=completion.choices("npz", "hdf5", "minari", "lerobot"),
    ),
]
IdOption = Annotated[
    str | None,
    typer.Option(
        "--id", metavar="ID", help="Id of the Minari dataset, e.g. my/pendulum/random-v0."
    ),
]

FpsOption = Annotated[
    int | None,
    typer.Option(
        "--fps",
        metavar="N",
        help="Frames per second of a LeRobot dataset. Default: that of the source, or 30.",
    ),
]
KeysOption = Annotated[
    str | None,
    typer.Option(
        "--observation-keys",
        metavar="KEY,...",
        help="Parts of the observations to use. Default: all.",
    ),
]
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="File, run folder, LeRobot folder or Minari id; or a section, '{kind: ..., ...}'.",
    ),
]


class ListCommand(ReadableCommand):
    """A command that accepts several values after `--out` and `--id`: `--out A B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_repeated(args, ("--out", "--id"))))


dataset_app = typer.Typer(
    help="Record, inspect, convert, split and filter datasets.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataset_app.command()
def record(
    steps: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Number of steps to record.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Output file or LeRobot folder; with --id, a folder for Minari."
        ),
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
    fps: FpsOption = None,
    keys: KeysOption = None,
    action_range: Annotated[
        tuple[float, float] | None,
        typer.Option(
            metavar="LOW HIGH", help="Range of random actions in a space without finite bounds."
        ),
    ] = None,
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
            action_range=action_range,
            num_envs=num_envs,
            seed=seed,
            noise=noise,
            data_format=_format(data_format),
            dataset_id=dataset_id,
            frames_per_second=fps,
            observation_keys=_keys(keys),
            progress=progress,
        )
    print(f"{steps:,} steps in {path}")


@dataset_app.command(cls=ReadableCommand)
def info(
    source: SourceArgument,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw histograms to this image, e.g. data.png."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(hidden=True, help="Same as --out.")] = None,
    no_picture: Annotated[
        bool, typer.Option("--no-picture", hidden=True, help="Has no effect.")
    ] = False,
    keys: KeysOption = None,
) -> None:
    """Show episodes, returns, lengths and coverage of a dataset."""
    from rl_training.runtime import workflows

    if out is not None and picture is not None:
        user_error(f"--out {out} and --picture {picture}: use only --out")
    target = out or picture
    with workflows.reading_progress("reading") as progress:
        summary = workflows.describe_dataset(
            source, picture=target, observation_keys=_keys(keys), progress=progress
        )
    for line in workflows.summary_lines(summary):
        print(line)
    if target is not None:
        print(f"picture       {target}")
    elif not no_picture:
        print("picture       add --out FILE.png to draw histograms")


@dataset_app.command(cls=ReadableCommand)
def convert(
    source: SourceArgument,
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT", help="Output file or LeRobot folder; with --id, a folder for Minari."
        ),
    ] = None,
    out_option: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="Same as the argument OUT.")
    ] = None,
    data_format: FormatOption = None,
    dataset_id: IdOption = None,
    clip_actions: Annotated[
        bool,
        typer.Option("--clip-actions", help="Clip actions to the bounds stored in the dataset."),
    ] = False,
    fps: FpsOption = None,
    keys: KeysOption = None,
) -> None:
    """Convert a dataset to another format."""
    if out is not None and out_option is not None:
        user_error(f"{out} and --out {out_option}: use only one of them")
    from rl_training.runtime import workflows

    with workflows.reading_progress("converting") as progress:
        path = workflows.convert_dataset(
            source,
            out_option if out is None else out,
            data_format=_format(data_format),
            dataset_id=dataset_id,
            frames_per_second=fps,
            clip_actions=clip_actions,
            observation_keys=_keys(keys),
            progress=progress,
        )
    print(f"written to {path}")


@dataset_app.command(cls=ListCommand)
def split(
    source: SourceArgument,
    fractions: Annotated[
        str,
        typer.Option(metavar="F,F,...", help="Fraction of the episodes of each part: 0.9,0.1."),
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH...", help="Output of each part; with --id, one Minari folder."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    data_format: FormatOption = None,
    dataset_ids: Annotated[
        list[str] | None, typer.Option("--id", metavar="ID...", help="Minari id of each part.")
    ] = None,
    fps: FpsOption = None,
    keys: KeysOption = None,
) -> None:
    """Split a dataset at random by episodes: --fractions 0.9,0.1 --out train.npz test.npz."""
    from rl_training.runtime import workflows

    with workflows.reading_progress("splitting") as progress:
        parts = workflows.split_dataset(
            source,
            _fractions(fractions),
            out or [],
            seed=seed,
            data_format=_format(data_format),
            dataset_ids=dataset_ids or None,
            frames_per_second=fps,
            observation_keys=_keys(keys),
            progress=progress,
        )
    for part in parts:
        print(part)


@dataset_app.command("filter", cls=ReadableCommand)
def filter_episodes(
    source: SourceArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Output file or LeRobot folder; with --id, a folder for Minari."
        ),
    ] = None,
    top: Annotated[
        str | None,
        typer.Option(metavar="P%", help="Keep the episodes with the highest returns: 10%."),
    ] = None,
    min_return: Annotated[
        float | None, typer.Option(metavar="R", help="Keep episodes with at least this return.")
    ] = None,
    max_return: Annotated[
        float | None, typer.Option(metavar="R", help="Keep episodes with at most this return.")
    ] = None,
    min_length: Annotated[
        int | None,
        typer.Option(parser=count, metavar="N", help="Keep episodes of at least N steps."),
    ] = None,
    data_format: FormatOption = None,
    dataset_id: IdOption = None,
    fps: FpsOption = None,
    keys: KeysOption = None,
) -> None:
    """Keep the episodes of a dataset with the best returns."""
    if top is None and min_return is None and max_return is None and min_length is None:
        user_error(
            "dataset filter needs a condition: --top 10%, --min-return, --max-return or "
            "--min-length"
        )
    from rl_training.runtime import workflows

    with workflows.reading_progress("filtering") as progress:
        part = workflows.filter_dataset(
            source,
            out,
            top=None if top is None else _fraction(top, "--top"),
            min_return=min_return,
            max_return=max_return,
            min_length=min_length,
            data_format=_format(data_format),
            dataset_id=dataset_id,
            frames_per_second=fps,
            observation_keys=_keys(keys),
            progress=progress,
        )
    print(part)


def _repeated(arguments: list[str], options: tuple[str, ...]) -> Iterator[str]:
    """Repeat an option before each of the values that follow it."""
    option, first = "", False
    for argument in arguments:
        if argument.startswith("-"):
            option, first = (argument, True) if argument in options else ("", False)
        elif option and not first:
            yield option
        else:
            first = False
        yield argument


def _fractions(text: str) -> list[float]:
    return [_fraction(part, "--fractions") for part in text.split(",")]


def _fraction(text: str, option: str) -> float:
    """Read `10%` or `0.1`. A number above 1 without a percent sign is refused, not guessed."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        user_error(f"{option} {text!r}: must be a fraction such as 0.1 or 10%")
    if not 0 < value <= 1:
        hint = f"; did you mean {number}%?" if 1 < value <= 100 else ""
        user_error(f"{option} {text!r}: must be greater than 0 and at most 1 (100%){hint}")
    return value


def _keys(text: str | None) -> list[str] | None:
    return None if text is None else [key.strip() for key in text.split(",")]


def _format(name: str | None) -> Format | None:
    """Return `name` if it is a known format. Raise a `UserError` otherwise."""
    if name is None:
        return None
    from rl_training.runtime.workflows import FORMATS

    for known in FORMATS:
        if name == known:
            return known
    user_error(f"--format {name!r}: must be one of {', '.join(FORMATS)}")
