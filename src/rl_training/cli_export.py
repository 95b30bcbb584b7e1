"""The command `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_training import cli_completion as completion
from rl_training.cli_options import (
    CheckpointOption,
    ImportOption,
    PolicyArgument,
    announce,
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
