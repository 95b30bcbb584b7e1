"""Commands by which a policy leaves this package: `export`, and `push` and `pull` for the Hub."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from rl_training.cli import completion
from rl_training.cli.options import (
    CheckpointOption,
    ImportOption,
    PolicyArgument,
    announce,
    count,
    import_modules,
    single_path,
    user_error,
)

FormatOption = Annotated[
    str,
    typer.Option(
        metavar="onnx|torch",
        help="onnx for ONNX Runtime and others, torch for torch.export.load.",
        autocompletion=completion.choices("onnx", "torch"),
    ),
]
RepositoryArgument = Annotated[
    str,
    typer.Argument(metavar="USER/NAME", help="Repository on the Hub, such as alice/sac-pendulum."),
]
MOST_SHOWN = 20
"""Longest observation in the example that is printed after a pull"""


def export(
    path: PolicyArgument = None,
    checkpoint: CheckpointOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to write, such as policy.onnx or policy.pt2. Required."
        ),
    ] = None,
    format: FormatOption = "onnx",
    stochastic: Annotated[
        bool, typer.Option("--stochastic", help="Sample actions, with noise as a second input.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Use the best checkpoint of the run.")
    ] = False,
    modules: ImportOption = None,
) -> None:
    """Export a policy to a file that runs without this package.

    The file maps observations to actions in the units of the environment: normalization and
    scaling are part of it. It is compared with the policy before it is written.
    """
    source = single_path(path, checkpoint)
    if out is None:
        user_error("missing --out; name the file to write, such as --out policy.onnx")
    announce(f"exporting {source}")
    from rl_training.deployment.export import export_run

    import_modules(modules)
    exported = export_run(source, out, format=format, stochastic=stochastic, best=best)
    for line in exported.lines():
        print(line)


def push(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run folder, checkpoint or saved policy.",
            autocompletion=completion.run_folders,
        ),
    ],
    repository: RepositoryArgument,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Send the files without asking.")
    ] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Create a repository that only you can see.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Push the best checkpoint of the run.")
    ] = False,
    message: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Message of the commit.")
    ] = None,
    video: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="MP4 file to push. Default: a new recording of one episode."
        ),
    ] = None,
    no_video: Annotated[bool, typer.Option("--no-video", help="Push no video.")] = False,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--runs",
            metavar="PATH",
            help="Runs of other seeds, for the results. Default: those beside RUN that differ only "
            "in seed. Can be repeated.",
        ),
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="N",
            help="Report the score of N new episodes. Default: the run's own evaluation.",
        ),
    ] = None,
    modules: ImportOption = None,
) -> None:
    """Publish a policy on the Hugging Face Hub.

    Its settings, results, a video and a model card are published with it. The files are
    listed first, and sent in one commit if you agree. Paths, names of the user and the machine,
    and the command line are not published.
    """
    if video is not None and no_video:
        user_error("--video and --no-video: use only one of them")
    if not yes and not _has_terminal():
        user_error("nothing was sent: there is no terminal to ask in; add --yes to send the files")
    announce(f"preparing {run}")
    _hide_progress_bars()
    from rl_training.deployment.hub import prepared_push

    import_modules(modules)
    chosen: Path | bool = video if video is not None else not no_video
    with prepared_push(
        run,
        repository,
        private=private,
        best=best,
        message=message,
        video=chosen,
        runs=runs,
        episodes=episodes,
    ) as plan:
        for line in plan.lines():
            print(line)
        if not yes and not typer.confirm("Send these files?"):
            print("nothing was sent")
            raise typer.Exit(1)
        sent = plan.send()
    print(f"pushed {sent.repo_id} as commit {sent.commit[:12]}: {sent.url}")


def pull(
    repository: RepositoryArgument,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit. Default: main.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New folder for the policy. Default: NAME."),
    ] = None,
) -> None:
    """Download a policy from the Hugging Face Hub.

    Only the files of a policy are downloaded, and their hashes are compared. No code is executed.
    """
    announce(f"getting {repository}", keep_output_clean=True)
    _hide_progress_bars()
    from rl_training.deployment.hub_pull import described_policy, pull_from_hub

    folder = pull_from_hub(repository, revision=revision, out=out)
    policy = described_policy(folder)
    path = shlex.quote(str(folder))
    print(f"pulled {repository} to {folder}: {policy.algorithm} for {policy.environment}")
    if policy.environment_id is not None:
        print(f"evaluate it:  rl-training evaluate {path}")
    if policy.observation_size is not None and policy.observation_size <= MOST_SHOWN:
        example = [0.0] * policy.observation_size
        print(f"use it:       rl-training predict {path} --obs '{example}'")
    if policy.modules:
        print(
            f"note: it was trained with code of {', '.join(policy.modules)}, which is "
            "imported only if you name it with --import"
        )


def _has_terminal() -> bool:
    return sys.stdin.isatty()


def _hide_progress_bars() -> None:
    """Leave out the client's progress bars where they would fill a log."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
