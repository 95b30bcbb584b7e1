"""The commands `run`, which starts or continues a job, and `sweep`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rl_training.cli import completion
from rl_training.cli.options import (
    ConfigOption,
    DeviceOption,
    EnvOption,
    ImportOption,
    SetOption,
    StepsOption,
    announce,
    import_environment,
    import_modules,
    outlive_output,
    user_error,
)

if TYPE_CHECKING:
    from rl_training.sweeps.results import SweepResults
    from rl_training.sweeps.run import Place

PLACES = ("local", "ray", "slurm")
PlaceOption = Annotated[
    str,
    typer.Option(
        metavar="local|ray|slurm",
        help="Where trials run.",
        autocompletion=completion.choices(*PLACES),
    ),
]
REFRESH_SECONDS = 1.0
GO_ON = "stopped; all trials have checkpoints; start the same command again to go on"


def run(
    config: ConfigOption,
    folder: Annotated[
        Path, typer.Option(metavar="PATH", help="Folder of the job, one per config and seeds.")
    ],
    seeds: Annotated[
        str, typer.Option(metavar="N,N-N,...", help="Seeds of the job, e.g. 0-4 or 0,2,5-7.")
    ] = "0",
    env: EnvOption = None,
    total_timesteps: StepsOption = None,
    device: DeviceOption = None,
    overrides: SetOption = None,
    modules: ImportOption = None,
) -> None:
    """Start a job, continue it where it stopped, or find that it is finished.

    A scheduler can call this command again and again. Exit codes: 0 finished, 75 stopped by SIGTERM
    or SIGUSR1 with a checkpoint (start it again), 130 by Ctrl-C, 2 wrong input, 1 failed. The
    file status.json in the folder says the same.
    """
    outlive_output()
    from rl_training.validation import parse_seeds

    chosen = parse_seeds(seeds)
    announce(f"running {config} in {folder}")
    environment = import_environment(env, modules)
    from rl_training.config_files import load_config
    from rl_training.runtime import workflows

    values = {"env_id": environment, "total_timesteps": total_timesteps, "device": device}
    given = {key: value for key, value in values.items() if value is not None}
    resolved = load_config(config, overrides or (), **given)
    with _preempted_by_scheduler("stopped before training began; start it again"):
        job = workflows.run_or_resume(resolved, chosen, folder, progress=True)
    status = job.status
    best = "" if status.best is None else f", best {status.best:.2f}"
    print(f"{status.state} at step {status.step:,} of {status.total_timesteps:,}{best}: {folder}")
    if status.exit_code:
        raise typer.Exit(status.exit_code)


@contextlib.contextmanager
def _preempted_by_scheduler(message: str) -> Iterator[None]:
    """Exit with 75 and a message if SIGTERM or SIGUSR1 arrives; leave Ctrl-C alone."""
    from rl_training.errors import stop_signals
    from rl_training.runtime.workflows import EXIT_PREEMPTED

    try:
        yield
    except KeyboardInterrupt as interruption:
        received = stop_signals(interruption)
        if not received or signal.SIGINT in received:
            raise
        notes = getattr(interruption, "__notes__", None)
        print("\n".join(notes or [message]), file=sys.stderr)
        raise typer.Exit(EXIT_PREEMPTED) from None


def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Sweep file, or the folder of a sweep.")
    ],
    on: PlaceOption = "local",
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=10_000, help="Trials at once. Default: what fits."),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Folder of the sweep. Default: sweeps/NAME of the file."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster, as auto or HOST:PORT.")
    ] = None,
    join: Annotated[
        bool, typer.Option("--join", help="Help a sweep that another machine has started.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Also train the winner with fresh seeds, and write a page."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Page to write. Default: report.html in the folder."),
    ] = None,
    modules: ImportOption = None,
) -> None:
    """Try many settings of a config, on this machine, a Ray cluster or Slurm.

    Stop it at any time and start the same command again: it goes on where it stopped. Ctrl-C or
    SIGTERM stops all trials with checkpoints; jobs on Slurm go on.
    """
    outlive_output()
    if on not in PLACES:
        user_error(f"--on {on!r}: must be one of {', '.join(PLACES)}")
    if out is not None and not report:
        user_error("--out: needs --report")
    if address is not None and on != "ray":
        user_error("--address: needs --on ray")
    announce(f"preparing the sweep {file}")
    import_modules(modules)
    from rl_training.sweeps.run import run_sweep
    from rl_training.sweeps.table import failures, summary, table_text

    with _preempted_by_scheduler(GO_ON), _live_table() as look:
        results = run_sweep(
            file,
            output_dir,
            on=cast("Place", on),
            workers=workers,
            address=address,
            join=join,
            modules=modules or (),
            look=look,
        )
    print(table_text(results))
    for line in failures(results.trials):
        print(line, file=sys.stderr)
    print(summary(results))
    kind = (
        "exact: stops and kills do not change it"
        if results.sweep.is_exact
        else ("statistical: it depends on which trial ends first")
    )
    print(f"this table is {kind}")
    print(f"sweep          {results.folder.path}")
    if results.best is not None:
        print(f"best config    {results.folder.path / 'best.yaml'}")
    if report:
        _report(results, out)
    if results.best is None:
        raise typer.Exit(1)


def _report(results: SweepResults, out: Path | None) -> None:
    """Train the winner, if there is one, and write the page."""
    from rl_training.sweeps.report.page import write_sweep_report
    from rl_training.sweeps.run import run_winner

    if results.best is not None:
        announce(f"training the winner with fresh seeds {results.sweep.fresh_seeds}")
        with _preempted_by_scheduler(GO_ON):
            winner = run_winner(results)
        if winner.status.exit_code:
            print(GO_ON, file=sys.stderr)
            raise typer.Exit(winner.status.exit_code)
    page = write_sweep_report(
        results.folder, out or results.folder.path / "report.html", results.sweep.settings.study
    )
    print(f"report         {page}")


@contextlib.contextmanager
def _live_table() -> Iterator[Callable[[SweepResults], None]]:
    """Show the table while a sweep runs: redrawn in a terminal, else a line at each change."""
    from rl_training.sweeps.table import summary, table_rows

    if not sys.stdout.isatty():
        shown = ""

        def print_changes(results: SweepResults) -> None:
            nonlocal shown
            if (line := summary(results)) != shown:
                shown = line
                print(line, flush=True)

        yield print_changes
        return
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    last = 0.0
    with Live(auto_refresh=False, transient=True) as live:

        def redraw(results: SweepResults) -> None:
            nonlocal last
            if time.monotonic() < last + REFRESH_SECONDS:
                return
            last = time.monotonic()
            header, rows = table_rows(results, max(5, live.console.height - 8))
            drawn = Table(title=Text(summary(results)), title_justify="left")
            for name in header:
                drawn.add_column(Text(name))
            for row in rows:
                drawn.add_row(*map(Text, row))
            live.update(drawn, refresh=True)

        yield redraw


def sweep_worker(folder: Path, modules: ImportOption = None) -> None:
    """Run trials of a sweep in this process, for `sweep`."""
    import_modules(modules)
    from rl_training.runtime.workflows import EXIT_PREEMPTED
    from rl_training.sweeps.folder import STUDY_VARIABLE, SweepFolder
    from rl_training.sweeps.local import stop_with_parent
    from rl_training.sweeps.worker import Board, say, work

    stop_with_parent()
    place = SweepFolder(folder)
    file = place.read(os.environ.get(STUDY_VARIABLE))
    with _preempted_by_scheduler("stopped between two trials"):
        if not work(Board(place, file), place, file, say):
            raise typer.Exit(EXIT_PREEMPTED)
