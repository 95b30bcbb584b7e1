"""Commands that only print information: `list`, `config`, `runs` and `doctor`."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_training.cli import completion
from rl_training.cli.options import EnvOption, OptionalConfigOption, SetOption, user_error
from rl_training.errors import printable

if TYPE_CHECKING:
    from rl_training.experiment.overview import RunOverview

WIDTH = 80


def list_algorithms() -> None:
    """List the algorithms and the packaged configs."""
    from rl_training.config_files import packaged_configs
    from rl_training.experiment.registry import list_algorithm_summaries

    packaged = packaged_configs()
    print(f"{'algorithm':<10} {'actions':<20} {'trained':<24} {'configs'}")
    for summary in list_algorithm_summaries():
        configs = [name for name in packaged if name.startswith(f"{summary.name}/")]
        regimes = ", ".join(summary.regimes)
        start = f"{summary.name:<10} {summary.action_kind:<20} {regimes:<24} "
        print(_wrapped(", ".join(configs), start=start))
        print(_wrapped(f"{summary.title} ({summary.reference})", start=" " * 11))
        if summary.use_when:
            print(_wrapped(f"for: {summary.use_when}", start=" " * 11))


def _wrapped(text: str, *, start: str) -> str:
    """Write `text` after `start`, with further lines below the text."""
    further = " " * len(start)
    filled = textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=further)
    return filled or start.rstrip()


def show_config(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ALGO|KEY",
            help="With --describe: an algorithm, then keys. Without keys, all settings.",
            autocompletion=completion.algorithms,
        ),
    ] = None,
    config: OptionalConfigOption = None,
    overrides: SetOption = None,
    env: EnvOption = None,
    describe: Annotated[
        bool,
        typer.Option(
            "--describe", help="Explain settings: type, default, meaning, symbol in the paper."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --describe: print JSON instead of text.")
    ] = False,
) -> None:
    """Print a complete config, with all defaults and changes; or explain its settings."""
    from rl_training.config_files import dump_yaml, load_config

    changes = {} if env is None else {"env_id": env}
    loaded = None if config is None else load_config(config, overrides or (), **changes)
    if describe:
        from rl_training.cli.describe import describe as describe_settings

        width = shutil.get_terminal_size().columns
        print(describe_settings(names or (), loaded, width=width, as_json=as_json))
        return
    if names or as_json:
        user_error(f"{names[0] if names else '--json'}: needs --describe")
    if loaded is None:
        user_error("missing --config CONFIG to print, or --describe to explain settings")
    print(dump_yaml(loaded.to_mapping()), end="")


def show_runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that contains run folders.")
    ] = Path("runs"),
    sort: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            help="Sort by name, algo, env, seed, state, step, best, last or date. "
            "A minus reverses the order: -best.",
            autocompletion=completion.sort_keys,
        ),
    ] = "date",
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="KEY=VALUE",
            help="Show runs whose name, algo, env, seed, state or date matches, e.g. "
            "env='Hopper*'. Can be repeated; all must match.",
            autocompletion=completion.filter_keys,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List runs with their state and evaluation results."""
    from rl_training.experiment.overview import filter_runs, list_runs, sort_runs
    from rl_training.validation import user_path

    wanted = filters or []
    found = sort_runs(filter_runs(list_runs(user_path(folder)), wanted), sort)
    if as_json:
        print(json.dumps([run.to_json() for run in found], indent=2))
    elif found:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(runs_table(found, width)))
    else:
        print(f"no runs in {folder}" + (f" match {' '.join(wanted)}" if wanted else ""))


def runs_table(runs: Sequence[RunOverview], width: int | None = None) -> list[str]:
    """Format runs as two lines each: their values, and their path to copy into other commands.

    Where `width` is given, long names of environments are shortened to fit it. Paths never are.
    """
    header = ("algo", "environment", "seed", "state", "step", "done", "best", "last")
    rows = [header, *(_row(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    if width is not None:
        too_wide = sum(widths) + 2 * (len(widths) - 1) - width
        widths[1] = max(len(header[1]), widths[1] - max(0, too_wide))
    indent = " " * (widths[0] + 2)
    lines = [_aligned(header, widths)]
    for run, row in zip(runs, rows[1:], strict=True):
        path = printable(str(run.path)).replace("\n", "\\n")
        lines += [_aligned(row, widths), f"{indent}{path}"]
        if run.state != "finished" and run.detail not in ("", "can be resumed"):
            lines.append(f"{indent}{run.detail}")
    if any(run.last_return is not None for run in runs):
        lines.append("best and last: mean returns of the runs' own evaluations")
    if any(run.state == "stopped" for run in runs):
        lines.append("continue a stopped run with: rl-training resume PATH")
    return lines


def _row(run: RunOverview) -> tuple[str, ...]:
    done = None if not run.total_timesteps else (run.step or 0) / run.total_timesteps
    return (
        run.algo or "-",
        run.environment or "-",
        "-" if run.seed is None else str(run.seed),
        run.state,
        "-" if run.step is None else f"{run.step:,}",
        "-" if done is None else f"{done:.0%}",
        "-" if run.best_return is None else f"{run.best_return:.1f}",
        "-" if run.last_return is None else f"{run.last_return:.1f}",
    )


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Align words to the left and numbers to the right."""
    algo, environment, seed, state, *numbers = row
    if len(environment) > widths[1]:
        environment = environment[: widths[1] - 1] + "…"
    cells = [
        algo.ljust(widths[0]),
        environment.ljust(widths[1]),
        seed.rjust(widths[2]),
        state.ljust(widths[3]),
        *(text.rjust(size) for text, size in zip(numbers, widths[4:], strict=True)),
    ]
    return "  ".join(cells).rstrip()


def show_system() -> None:
    """Show installed versions, devices and missing optional packages."""
    from rl_training.experiment.doctor import diagnose

    for line in diagnose():
        print(line)
