"""Commands that show runs in a browser: `dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that contains run folders.")
    ] = Path("runs"),
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65_535, help="Port; 0 takes any free one.")
    ] = 7860,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on. Others can reach all but 127.0.0.1."
        ),
    ] = "127.0.0.1",
    allow_control: Annotated[
        bool, typer.Option("--allow-control", help="Let the page stop and resume runs.")
    ] = False,
) -> None:
    """Show runs in the browser while they train.

    Open the address that is printed. It has a token, because a computer can have several users;
    without it, nothing is shown. Ctrl-C ends the dashboard, and runs go on.
    """
    from rl_training.report.dashboard import serve

    serve(folder, port, host, allow_control=allow_control)
