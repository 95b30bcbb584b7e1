"""Commands about several runs: `compare`, and `report` and `dashboard` for a browser."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from rl_training.cli.options import RunsArgument, announce

WIDTH = 80
"""Columns of a table that is not printed in a terminal"""


def compare_runs(
    paths: RunsArgument,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw learning curves to a PNG, PDF or SVG file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    resamples: Annotated[
        int, typer.Option(metavar="N", min=1, max=1_000_000, help="Resamples of the bootstrap.")
    ] = 2000,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the bootstrap.")] = 0,
) -> None:
    """Compare the final scores of runs, with intervals over seeds.

    Runs that differ only in seed form a group. The final score of a run is the mean return of its
    last evaluation. Scores over several tasks are normalized.
    """
    from rl_training.experiment.comparison import compare

    comparison = compare(paths, resamples=resamples, seed=seed)
    if plot is not None:
        comparison.plot(plot)
    if as_json:
        print(json.dumps(comparison.to_json(), indent=2, allow_nan=False))
        return
    terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    print(comparison.table(max(WIDTH, terminal)))
    if plot is not None:
        print(f"\nlearning curves: {plot}")


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
