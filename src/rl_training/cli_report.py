"""Commands that show runs in a browser: `report` and `dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_training.cli_options import RunsArgument, announce


def report(
    paths: RunsArgument,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="HTML file to write.")
    ] = Path("report.html"),
    published: Annotated[
        bool,
        typer.Option(
            "--published/--no-published", help="Draw published results of the same tasks."
        ),
    ] = True,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the page.")] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.")
    ] = False,
) -> None:
    """Write an HTML page about runs.

    It shows scores with intervals, learning curves, comparisons, health, settings and provenance.
    The page is a single file that needs no network. Runs that differ only in seed form a group.
    Videos stay in the run folders, and the page links to them.
    """
    announce(f"reading {' '.join(map(str, paths))}")
    from rl_training.report.page import write_report

    page = write_report(paths, out, published=published, title=title)
    print(f"report {page} ({page.stat().st_size / 1000:,.0f} kB)")
    if open_page and not _open(page):
        print("no browser could be opened; open the file yourself")


def _open(page: Path) -> bool:
    import webbrowser

    return webbrowser.open(page.resolve().as_uri())


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
            metavar="ADDRESS",
            help="Address to listen on. With 0.0.0.0, other computers can connect.",
        ),
    ] = "127.0.0.1",
    allow_control: Annotated[
        bool, typer.Option("--allow-control", help="Let the page stop and resume runs.")
    ] = False,
) -> None:
    """Show runs in the browser while they train.

    Open the address that is printed. It contains a token, because other users of this computer can
    reach the port too; without the token, nothing is shown. Ctrl-C ends the dashboard; runs go on.
    """
    from rl_training.report.dashboard import serve

    serve(folder, port, host, allow_control=allow_control)
